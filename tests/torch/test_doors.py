"""What a message may say: cells, parts and sizes from elsewhere are data, checked before use."""

from __future__ import annotations

import copy
import json
import socket
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import torchweft as weft
from torchweft.dynamic.tracing import trace
from torchweft.errors import CaptureError
from torchweft.run.workers.cell import ROOM, Cell, operator_of, reading, spec_of
from torchweft.run.workers.channel import WORD, ChannelError, WorkerChannel, head_of, read_head
from torchweft.run.workers.program import DevicePart
from torchweft.run.workers.recorded import RecordedPart, RecordedRows

ROW = [[2], "torch.float32"]
CELL = {
    "name": "x", "reads": [ROW], "makes": [ROW], "weights": ["w"], "kind": "calls",
    "calls": [
        ["aten.mul.Tensor", [{"v": 0}, 2.0], {}, 2],
        ["aten.add.Tensor", [{"v": 1}, {"v": 2}], {"alpha": 1}, 3],
    ],
    "outputs": [3], "num_prepared": 1,
}  # fmt: skip
CODE = "0, __import__('os').getpid()"


def test_a_cell_of_plain_data_runs() -> None:
    cell = Cell.from_data(json.loads(json.dumps(CELL)))
    prepare, run = cell.functions
    (made,) = run("cpu", prepare("cpu", torch.ones(2)), torch.ones(3, 2))
    assert torch.equal(made, torch.full((3, 2), 3.0))
    assert Cell.from_data(json.loads(json.dumps(cell.to_data()))).to_data() == cell.to_data()


def call(number: int, at: int, value: Any) -> Callable[[dict[str, Any]], None]:
    return lambda data: data["calls"][number].__setitem__(at, value)


def field(name: str, value: Any) -> Callable[[dict[str, Any]], None]:
    return lambda data: data.__setitem__(name, value)


DAMAGE = {
    "code as a result": field("outputs", [CODE]),
    "a result that nothing makes": field("outputs", [9]),
    "a result too many": field("outputs", [3, 3]),
    "a negative result": field("outputs", [-1]),
    "a true result": field("outputs", [True]),
    "code as a place": call(1, 3, f"3 = {CODE}; v3"),
    "a place of another call": call(1, 3, 2),
    "code as a name": field("name", "x>\nimport os"),
    "code as a value": call(0, 1, [{"v": CODE}, 2.0]),
    "a value from later": call(0, 1, [{"v": 3}, 2.0]),
    "rows before there are any": call(0, 1, [{"v": 1}, 2.0]),
    "code as an option": call(1, 2, {f"alpha=1, other={CODE}": 1}),
    "an option of another operator": call(1, 2, {"memory_format": 1}),
    "an option that is a keyword": call(1, 2, {"from": 1}),
    "a file": call(0, 0, "aten.from_file.default"),
    "a file to write": call(0, 0, "aten.save.default"),
    "a seed": call(0, 0, "aten.manual_seed.default"),
    "random numbers": call(0, 0, "aten.rand_like.default"),
    "a print": call(0, 0, "aten._print.default"),
    "storage": call(0, 0, "aten.set_.source_Tensor"),
    "another namespace": call(0, 0, "prims.mul.default"),
    "a Python function": call(0, 0, "operator.attrgetter"),
    "a method": call(0, 0, "aten.__class__.__init__"),
    "code as an operator": call(0, 0, CODE),
    "an operator without a name": call(0, 0, None),
    "a weight changed in place": call(0, 0, "aten.mul_.Tensor"),
    "rows changed in place": call(1, 0, "aten.add_.Tensor"),
    "what was prepared changed": call(1, slice(0, 2), ["aten.add_.Tensor", [{"v": 2}, {"v": 1}]]),
    "an endless number": call(0, 1, [{"v": 0}, 1 << 70]),
    "an unknown constant": call(0, 1, [{"v": 0}, {"torch": "torch.os"}]),
    "an unknown item": call(0, 1, [{"v": 0}, {"device": CODE}]),
    "deep arguments": call(0, 1, [json.loads("[" * 50 + "]" * 50)]),
    "an unknown dtype": field("reads", [[[2], "torch.os"]]),
    "a shape beyond all memory": field("makes", [[[1 << 40, 1 << 40], "torch.float32"]]),
    "sizes that together are beyond it": field("makes", [[[1 << 22, 1 << 22], "torch.float32"]]),
    "a shape of a hundred dims": field("makes", [[[1] * 100, "torch.float32"]]),
    "a shape of words": field("makes", [[["2"], "torch.float32"]]),
    "a negative shape": field("makes", [[[-2], "torch.float32"]]),
    "an unknown kind": field("kind", "code"),
    "a pack of calls": field("kind", "pack"),
    "more prepared than there is": field("num_prepared", 7),
    "no calls": field("calls", None),
    "a call too short": field("calls", [["aten.mul.Tensor"]]),
    "weights of numbers": field("weights", [1]),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_a_cell_that_is_none_is_refused_before_anything_is_built(name: str) -> None:
    data = copy.deepcopy(CELL)
    DAMAGE[name](data)
    with pytest.raises(CaptureError):
        Cell.from_data(data)


@pytest.mark.parametrize("found", [None, 3, [], "cell", {}, {"name": "x"}])
def test_what_is_no_cell_at_all_is_refused(found: Any) -> None:
    with pytest.raises(CaptureError):
        Cell.from_data(found)


def test_sizes_are_computed_within_bounds() -> None:
    times = operator_of("operator.mul")
    assert times(3, 4) == 12
    with pytest.raises(CaptureError, match="63 bits"):
        times(1 << 40, 1 << 40)
    with pytest.raises(CaptureError, match="whole number"):
        times([0], 1 << 40)


def test_operators_that_tracing_makes_may_be_called() -> None:
    names = (
        "aten.mm.default", "aten._softmax.default", "aten.index_put_.default", "aten.sym_size.int",
        "aten.__and__.Tensor", "aten.einsum.default", "aten.gelu.default", "weft.linear",
    )  # fmt: skip
    assert all(callable(operator_of(name)) for name in names)


def test_a_function_that_a_cell_may_not_call_is_refused_at_tracing() -> None:
    spec = spec_of((2,), torch.float32)

    @torch.library.custom_op("doors::twice", mutates_args=())
    def twice(x: Tensor) -> Tensor:
        return x * 2

    @twice.register_fake
    def _(x: Tensor) -> Tensor:
        return torch.empty_like(x)

    @twice.register_vmap
    def _(info: Any, dims: Any, x: Tensor) -> Any:
        return twice(x), dims[0]

    with pytest.raises(CaptureError, match=r"doors.twice.default' is no operator of ATen"):
        trace("foreign", lambda weights, rows: [twice(rows[0])], [spec], {})


class Behind(nn.Module):
    """Changes what it was given through a view of it."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        x.view(-1).add_(1.0)
        return x * 2 + y


class Outer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.behind = Behind()

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        x, y = x * 1.0, y * 2.0
        return self.behind(x, y) + x


def test_a_change_through_a_view_is_not_lost() -> None:
    model, inputs = Outer().eval(), [(torch.full((3,), 1.0 * n), torch.ones(3)) for n in range(3)]
    assert [float(model(*given)[0]) for given in inputs] == [5.0, 8.0, 11.0]
    with torch.no_grad(), pytest.raises(CaptureError, match="Make a new value instead"):
        weft.dynamic(model).map(inputs)


STEPS = """\
  one  wait copy v to one
  one  a
  one.to.home  wait a
  one.to.home  copy v to home"""
LANES = f"""\
weft plan 1
graph g 0123456789abcdef
parts 1
lane one on one uses compute
lane one.to.home on one uses io
steps
{STEPS}
end
"""
PART = {
    "plan": LANES,
    "groups": [["a", "x", 2, [2]]],
    "blocks": {"v": [0, 2, 2]},
    "num_rows": [[*ROW, 4]],
    "resident": ["w"],
}


def at(path: str, value: Any) -> Callable[[Any], None]:
    def change(data: Any) -> None:
        *way, last = [int(word) if word.isdigit() else word for word in path.split()]
        for word in way:
            data = data[word]
        data[last] = value

    return change


PARTS = {
    "rows beyond all memory": at("num_rows 0 2", 1 << 60),
    "negative rows": at("num_rows 0 2", -1),
    "rows of words": at("num_rows 0 2", "4"),
    "a block that is not there": at("blocks v 1", 9),
    "a block of another spec": at("blocks v 0", 3),
    "a block before the first": at("blocks v 0", -1),
    "an unknown cell": at("groups 0 1", "y"),
    "a start beyond its rows": at("groups 0 3", [9]),
    "a negative start": at("groups 0 3", [-1]),
    "no starts": at("groups 0 3", []),
    "endless rows of a group": at("groups 0 2", 1 << 60),
    "a group without a step's name": at("groups 0 0", "b"),
    "a wait for what never comes": at("plan", LANES.replace("wait copy v", "wait copy u")),
    "a wait for what is sent elsewhere": at("plan", LANES.replace("v to one", "v to two")),
    "a wait for a later step": at("plan", LANES.replace("wait copy v to one", "wait a")),
    "a copy of nothing": at("plan", LANES.replace("copy v to home", "copy to home")),
    "a copy to nowhere": at("plan", LANES.replace("copy v to home", "copy v")),
    "a copy of a value that is nowhere": at(
        "plan", LANES.replace("copy v to home", "copy w to home")
    ),
    "a step of another device": at(
        "plan", LANES.replace("one.to.home on one", "one.to.home on two")
    ),
    "a step that no worker does": at("plan", LANES.replace("  one  a", "  one  split a")),
    "steps that are cut off": at("plan", LANES[:-5]),
    "a plan of numbers": at("plan", 1),
    "residents of numbers": at("resident", 1),
    "no groups": at("groups", None),
    "no plan": at("plan", None),
}


@pytest.fixture
def cells() -> dict[str, Cell]:
    return {"x": Cell.from_data(copy.deepcopy(CELL))}


def test_a_part_of_plain_data_is_read(cells: dict[str, Cell]) -> None:
    part = DevicePart.from_message(PART, [torch.tensor([0, 1])], cells)
    (task,) = part.tasks
    assert task.group.starts == (2,)
    assert (task.needs, task.sends) == (["v"], [("v", "home")])
    data, tensors = part.message
    again = DevicePart.from_message(json.loads(json.dumps(data)), tensors, cells)
    assert again.message[0] == data


@pytest.mark.parametrize("name", PARTS)
def test_a_part_that_is_none_is_refused_before_rows_are_reserved(
    name: str, cells: dict[str, Cell]
) -> None:
    data = copy.deepcopy(PART)
    PARTS[name](data)
    with pytest.raises(CaptureError):
        DevicePart.from_message(data, [torch.tensor([0, 1])], cells)


@pytest.mark.parametrize("rows", [torch.tensor([0, 9]), torch.tensor([-1, 0]), torch.ones(2)])
def test_rows_that_are_not_there_are_refused(rows: Tensor, cells: dict[str, Cell]) -> None:
    with pytest.raises(CaptureError):
        DevicePart.from_message(PART, [rows], cells)


RECORDED = {
    "num_values": 4, "cells": ["x"], "packs": [], "inputs": [[[0, 2]]], "wanted": [[*ROW, [2, 3]]],
}  # fmt: skip
NUMBERS = torch.tensor([2, 0, 3, 1])
RECORDINGS = {
    "endless values": at("num_values", 1 << 60),
    "negative values": at("num_values", -1),
    "an endless input": at("inputs 0", [[0, 1 << 60]]),
    "a turned input": at("inputs 0", [[2, 0]]),
    "an input beyond the values": at("inputs 0", [[7, 9]]),
    "an unknown cell": at("cells", ["y"]),
    "a value that is not there": at("wanted 0 2", [9]),
    "a value before the first": at("wanted 0 2", [-1]),
    "a wanted spec that nothing has": at("wanted 0 0", [3]),
    "a pack of what is not there": at("packs", [[*ROW, [[3, [9]]]]]),
    "a pack that is no list": at("packs", [[*ROW, [[3, 9]]]]),
    "no cells": at("cells", None),
}


def unfolded(data: Any, cells: dict[str, Cell], numbers: Tensor = NUMBERS) -> list[Tensor]:
    part = RecordedPart.from_message(data, [numbers, torch.ones(2, 2)], cells)
    weights, rows = cells["x"].functions[0]("cpu", torch.ones(2)), RecordedRows()
    with reading("recording"):
        groups = rows.add(part)
    for group in groups:
        rows.store.run(group, lambda cell: weights)
    return part.collect(rows)


def test_a_recording_of_plain_data_is_run(cells: dict[str, Cell]) -> None:
    assert torch.equal(unfolded(RECORDED, cells)[0], torch.full((2, 2), 3.0))


@pytest.mark.parametrize("name", RECORDINGS)
def test_a_recording_that_is_none_is_refused(name: str, cells: dict[str, Cell]) -> None:
    data = copy.deepcopy(RECORDED)
    RECORDINGS[name](data)
    with pytest.raises(CaptureError):
        unfolded(data, cells)


@pytest.mark.parametrize("numbers", [[2, 9, 3, 1], [2, -1, 3, 1], [9, 0, 3, 1], [2, 0, 3]])
def test_numbers_of_values_that_are_not_there_are_refused(
    numbers: list[int], cells: dict[str, Cell]
) -> None:
    with pytest.raises(CaptureError):
        unfolded(RECORDED, cells, torch.tensor(numbers))


def said(data: Any, more: bytes = b"") -> bytes:
    text = json.dumps(data).encode()
    return len(text).to_bytes(WORD, "little") + text + bytes(-len(text) % WORD) + more


HEADS = {
    "nothing": b"",
    "garbage": b"\xff" * 100,
    "an endless text": (1 << 100).to_bytes(WORD, "little") + b"{}",
    "no object": said([]),
    "no kind": said({"message": {}, "tensors": []}),
    "a kind of numbers": said({"message": {"kind": 1}, "tensors": []}),
    "deep nesting": said("x").replace(b'"x"', b"[" * 100_000),
    "surrogates": said({"message": {"kind": "\ud800"}, "tensors": [1]}),
    "no tensors": said({"message": {"kind": "x"}}),
    "a tensor of 2^60 bytes": said({"message": {"kind": "x"}, "tensors": [[[1 << 58], ROW[1]]]}),
    "many tensors": said(
        {"message": {"kind": "x"}, "tensors": [[[ROOM // 8], "torch.float32"]] * 3}
    ),
    "a small tensor cut off": said({"message": {"kind": "x"}, "tensors": [ROW]}, b"\0\0"),
    "an unknown dtype": said({"message": {"kind": "x"}, "tensors": [[[1], "torch.Tensor"]]}),
    "a dim that is true": said({"message": {"kind": "x"}, "tensors": [[[True], ROW[1]]]}),
}  # fmt: skip


@pytest.mark.parametrize("name", HEADS)
def test_bytes_that_are_no_message_are_refused(name: str) -> None:
    with pytest.raises(ChannelError):
        read_head(HEADS[name])


@pytest.fixture
def ends() -> Iterator[tuple[WorkerChannel, socket.socket]]:
    here, there = socket.socketpair()
    channel = WorkerChannel(here.detach())
    with there:
        yield channel, there
    channel.close()


@pytest.mark.parametrize(
    "sent",
    [
        b"",
        b"\0\0\0\x10",
        b"\x7f\xff\xff\xff",
        b"\xff\xff\xff\xff" + (1 << 60).to_bytes(8, "big"),
        b"GET / HTTP/1.1\r\n\r\n",
    ],
)
def test_garbage_on_a_channel_is_one_clean_error(
    sent: bytes, ends: tuple[WorkerChannel, socket.socket]
) -> None:
    channel, stranger = ends
    stranger.sendall(sent)
    stranger.shutdown(socket.SHUT_WR)
    with pytest.raises(ChannelError):
        channel.receive()


@pytest.mark.parametrize("size", [80_000, 8_000])
def test_a_tensor_of_another_size_than_announced_is_refused(
    size: int, ends: tuple[WorkerChannel, socket.socket]
) -> None:
    """Of one that is too short, the rest would be memory of the receiver, which an echo sends."""
    channel, stranger = ends
    head = head_of({"kind": "x"}, [torch.ones(10_000)])
    thread = threading.Thread(
        target=stranger.sendall,
        args=(len(head).to_bytes(4, "big") + head + size.to_bytes(4, "big") + bytes(size),),
    )
    thread.start()
    with pytest.raises(ChannelError):
        channel.receive()
    channel.close()
    stranger.shutdown(socket.SHUT_RDWR)
    thread.join()

"""Dynamic models: recorded, batched, equal to plain PyTorch, whatever the user's code does."""

from __future__ import annotations

import gc
import json
import random
import socket
import threading
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import torchweft as weft
from torchweft.errors import CaptureError
from torchweft.run.workers.cell import Cell
from torchweft.run.workers.channel import WorkerChannel
from torchweft.run.workers.grouping import _rings
from torchweft_tools.bench.dynamic import read_trees
from torchweft_tools.bench.models import dynamic_models as models
from torchweft_tools.bench.models.dynamic_models import Tree
from torchweft_tools.bench.peers.dynpartition_nodes import per_node

TOLERANCE = 1e-5


def a_tree(draw: random.Random, num_leaves: int, arity: int = 2) -> tuple[Tree, Tensor]:
    """A tree with these leaves, and a word for each of them (or each node)."""
    nodes = [Tree(word=number) for number in range(num_leaves)]
    while len(nodes) > 1:
        at = draw.randrange(len(nodes) - 1)
        width = min(len(nodes) - at, draw.randint(2, arity))
        nodes[at : at + width] = [Tree(nodes[at : at + width])]
    words = torch.tensor([draw.randrange(100) for _ in range(num_leaves)])
    return nodes[0], words


def trees(count: int, arity: int = 2) -> list[tuple[Tree, Tensor]]:
    draw = random.Random(0)
    return [a_tree(draw, draw.randint(1, 12), arity) for _ in range(count)]


def worded(items: list[tuple[Tree, Tensor]]) -> list[tuple[Tree, Tensor]]:
    """The same trees with a word at every node."""
    found = []
    for tree, _ in items:
        nodes = tree.nodes()
        for number, node in enumerate(nodes):
            node.word = number
        found.append((tree, torch.arange(len(nodes)) % 100))
    return found


def lattices(count: int) -> list[tuple[Tensor, list[list[int]]]]:
    draw = random.Random(1)
    found = []
    for _ in range(count):
        size = draw.randint(2, 9)
        before = [
            draw.sample(range(n), draw.randint(1, min(n, 3))) if n else [] for n in range(size)
        ]
        found.append((torch.randn(size, 12), before))
    return found


def cases() -> dict[str, tuple[nn.Module, list[Any]]]:
    torch.manual_seed(0)
    return {
        "binary tree": (models.BinaryTreeLSTM(100, 16, 12), trees(8)),
        "child sum": (models.ChildSumTreeLSTM(), worded(trees(6, arity=4))),
        "lattice": (models.LatticeLSTM(), lattices(5)),
        "recursive": (models.RecursiveNet(), trees(6)),
        "early exit": (models.EarlyExit(), [torch.randn(5, 16) for _ in range(6)]),
        "routed": (models.RoutedExperts(), [torch.randn(4, 12) for _ in range(5)]),
        "lora": (models.LoraPerRequest(), [(torch.randn(16), n % 8) for n in range(12)]),
        "condconv": (models.CondConv(), [torch.randn(4, 6, 6) for _ in range(5)]),
    }


def args_of(given: Any) -> tuple[Any, ...]:
    return given if isinstance(given, tuple) else (given,)


def close(found: Any, wanted: Any) -> bool:
    pairs = zip(
        torch.utils._pytree.tree_leaves(found), torch.utils._pytree.tree_leaves(wanted), strict=True
    )
    return all(
        bool(torch.allclose(a, b, atol=TOLERANCE)) if isinstance(a, Tensor) else a == b
        for a, b in pairs
    )


@pytest.fixture(autouse=True)
def no_grad() -> Iterator[None]:
    with torch.no_grad():
        yield


@pytest.mark.parametrize("name", sorted(cases()))
def test_one_input_and_many_equal_plain_pytorch(name: str) -> None:
    model, inputs = cases()[name]
    wanted = [model(*args_of(given)) for given in inputs]
    dynamic = weft.dynamic(model)
    assert close([dynamic(*args_of(given)) for given in inputs], wanted)
    assert close(dynamic.map(inputs), wanted)
    assert close(dynamic.map(inputs), wanted), "the second time, everything is known"


def test_equal_ops_of_many_trees_run_together() -> None:
    model, inputs = cases()["binary tree"]
    dynamic = weft.dynamic(model)
    dynamic.map(inputs)
    num_nodes = sum(len(tree.nodes()) for tree, _ in inputs)
    assert dynamic.num_ops > num_nodes
    assert dynamic.num_groups < num_nodes / 2


def test_inputs_that_need_numbers_still_run_together() -> None:
    model, inputs = cases()["routed"]
    dynamic = weft.dynamic(model)
    one_by_one = [dynamic(each) for each in inputs]
    alone, dynamic.num_groups = dynamic.num_groups, 0
    assert close(dynamic.map(inputs), one_by_one)
    assert dynamic.num_groups < alone / 2


def test_sentences_of_any_length_are_looked_up_by_one_cell_and_equal_words_once() -> None:
    model, inputs = cases()["binary tree"]
    dynamic = weft.dynamic(model)
    dynamic.map(inputs)
    cells = {e.cell.name.partition(".")[0] for e in dynamic.state.book.entries.values()}
    assert cells == {"embedding", "leaf", "composer", "output"}
    assert len(dynamic.state.book.entries) == 4
    dynamic.num_ops = 0
    dynamic.map([inputs[0], inputs[0]])
    leaves, nodes = len(inputs[0][1]), len(inputs[0][0].nodes())
    words = len(inputs[0][1].unique())
    # lookups, leaves and their outputs once a word; inner nodes in both trees
    assert dynamic.num_ops == 3 * words + 2 * 2 * (nodes - leaves)


class Rows(nn.Module):
    """Takes its input apart, and uses it as a whole as well, before or after numbers are needed."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.all = nn.Linear(4, 4), nn.Linear(4, 3)

    def forward(self, x: Tensor, when: str) -> Any:
        if when == "before":
            return self.all(x), [self.one(x[n]) for n in range(len(x))]
        made = [self.one(x[n]) for n in range(len(x))]
        if when == "numbers between" and made[0].sum() > 1e9:
            return made
        return self.all(x), torch.stack([x, x]), x[0], made


@pytest.mark.parametrize("when", ["before", "after", "numbers between"])
def test_input_is_used_by_rows_and_as_a_whole(when: str) -> None:
    torch.manual_seed(0)
    model, inputs = Rows(), [(torch.randn(n, 4), when) for n in (3, 5, 3)]
    wanted = [model(*each) for each in inputs]
    dynamic = weft.dynamic(model)
    assert close([dynamic(*each) for each in inputs], wanted)
    assert close(dynamic.map(inputs), wanted)


def test_equal_values_are_changed_one_by_one() -> None:
    model = nn.Sequential(nn.Embedding(5, 4), nn.Linear(4, 4))

    class Words(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = model

        def forward(self, words: Tensor) -> list[Tensor]:
            return [self.inner[1](each) for each in self.inner[0](words)]

    first, second = weft.dynamic(Words())(torch.tensor([2, 2]))
    before = second.clone()
    first.add_(1.0)
    assert torch.equal(second, before)


def test_modules_have_their_own_class_outside_of_calls() -> None:
    model, inputs = cases()["binary tree"]
    dynamic = weft.dynamic(model)
    for _ in range(3):
        dynamic.map(inputs)
    assert type(model.leaf) is models.Leaf
    with pytest.raises(TypeError) as error:
        dynamic(inputs[0][0], None)
    assert error.value.__context__ is None, "what is the user's has nothing of ours in it"
    assert type(model.leaf) is models.Leaf


def test_messages_keep_small_and_large_tensors() -> None:
    sent = [torch.arange(5), torch.empty(0, 3), torch.randn(100, 100), torch.tensor(True)]
    here, there = socket.socketpair()
    channel = WorkerChannel(here.detach())
    thread = threading.Thread(target=channel.send, args=({"kind": "x", "n": 1}, sent))
    thread.start()
    message, found = WorkerChannel(there.detach()).receive()
    thread.join()
    assert message == {"kind": "x", "n": 1}
    assert all(torch.equal(a, b) and a.dtype == b.dtype for a, b in zip(found, sent, strict=True))


def test_gradients_equal_those_of_plain_pytorch() -> None:
    model, inputs = cases()["binary tree"]
    with torch.enable_grad():
        sum(model(*given).sum() for given in inputs).backward()
        wanted = {name: p.grad.clone() for name, p in model.named_parameters()}
        model.zero_grad()
        sum(made.sum() for made in weft.dynamic(model).map(inputs)).backward()
    for name, parameter in model.named_parameters():
        assert torch.allclose(parameter.grad, wanted[name], atol=1e-4), name


def test_execution_by_nodes_as_dynpartition_does_gives_the_same() -> None:
    model, inputs = cases()["binary tree"]
    for tree, words in inputs:
        assert close(per_node(model, tree, words.tolist()), model(tree, words))


def test_trees_of_a_file_have_their_words(tmp_path: Path) -> None:
    path = tmp_path / "trees.txt"
    path.write_text("(3 (2 a) (2 (1 b) (0 a)))\n(2 alone)\n", encoding="utf-8")
    (first, words), (second, _) = read_trees(path, 5)[0]
    assert [len(node.children) for node in first.nodes()] == [0, 0, 0, 2, 2]
    assert words.tolist() == [0, 1, 0]
    assert second.children == []


def test_changed_weights_are_seen() -> None:
    model, inputs = cases()["binary tree"]
    dynamic = weft.dynamic(model)
    dynamic.map(inputs)
    model.composer.ilh.weight.mul_(2.0)
    assert close(dynamic.map(inputs), [model(*given) for given in inputs])


def test_replaced_weights_and_modules_are_seen() -> None:
    model, inputs = cases()["binary tree"]
    dynamic = weft.dynamic(model)
    dynamic.map(inputs)
    model.composer.ilh.weight = nn.Parameter(torch.randn(12, 12))
    assert close(dynamic.map(inputs), [model(*given) for given in inputs])
    model.output = models.Output(12, 7)
    assert close(dynamic.map(inputs), [model(*given) for given in inputs])


def test_hook_that_comes_later_is_called() -> None:
    model, inputs = cases()["binary tree"]
    dynamic, seen = weft.dynamic(model), []
    dynamic(*inputs[0])
    model.composer.ilh.register_forward_hook(lambda module, args, made: seen.append(1))
    dynamic(*inputs[0])
    inner = [node for node in inputs[0][0].nodes() if node.children]
    assert len(seen) == len(inner)


def test_other_thread_uses_the_model_as_it_is() -> None:
    found: list[Any] = []

    def function(x: Tensor) -> Tensor:
        thread = threading.Thread(target=lambda: found.append(linear(torch.ones(3))))
        thread.start()
        thread.join()
        return linear(x)

    model = Code(function)
    model.linear = linear = nn.Linear(3, 3)
    weft.dynamic(model)(torch.ones(3))
    assert type(found[0]) is Tensor


class Forgetful(nn.Module):
    """Sets an attribute, then looks at numbers: cannot be traced, must not leave traces."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.last = nn.Linear(3, 3), None

    def forward(self, x: Tensor) -> Tensor:
        self.last = x
        return self.linear(x) if x.sum() > 0 else x


def test_failed_trace_leaves_the_module_as_it_was() -> None:
    model = Wrapper(Forgetful())
    dynamic = weft.dynamic(model)
    made = dynamic(torch.ones(3))
    assert close(model.inner.last + 0, model.inner.linear(torch.ones(3)))
    assert close(made, model(torch.ones(3)))


class Counted(nn.Module):
    """A module with a side effect: its calls are not cells."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.count = nn.Linear(3, 3), 0

    def forward(self, x: Tensor) -> Tensor:
        self.count += 1
        return self.linear(x) * self.count


class Wrapper(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Any:
        return self.inner(self.inner(x))


def same_twice(model: nn.Module, x: Tensor) -> bool:
    import copy

    plain = copy.deepcopy(model)
    torch.manual_seed(0)
    wanted = [plain(x), plain(x)]
    dynamic = weft.dynamic(model)
    torch.manual_seed(0)
    return close([dynamic(x), dynamic(x)], wanted)


def test_side_effects_happen_at_every_call() -> None:
    model = Wrapper(Counted())
    assert same_twice(model, torch.randn(3))
    assert model.inner.count == 4


def test_random_numbers_are_drawn_in_the_order_of_the_code() -> None:
    assert same_twice(Wrapper(nn.Sequential(nn.Linear(3, 3), nn.Dropout(0.5))), torch.ones(3))


def test_running_statistics_are_updated() -> None:
    model = Wrapper(nn.BatchNorm1d(3))
    assert same_twice(model, torch.randn(4, 3))
    assert int(model.inner.num_batches_tracked) == 4


def test_hooks_are_called() -> None:
    seen: list[Any] = []
    model = Wrapper(nn.Linear(3, 3))
    model.inner.register_forward_hook(lambda module, args, made: seen.append(made))
    dynamic = weft.dynamic(model)
    dynamic(torch.randn(3))
    assert len(seen) == 2


class Code(nn.Module):
    """Any code over one tensor."""

    def __init__(self, function: Any) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))
        self.function = function

    def forward(self, x: Tensor) -> Any:
        return self.function(x * self.scale)


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x.sum() if x.max() > 0 else -x,
        lambda x: x[x > 0],
        lambda x: [float(each) for each in x],
        lambda x: x.view(2, 2).T.reshape(-1)[1:],
        lambda x: {"shape": x.shape, "y": torch.cat([x, x.new_zeros(2)])},
        lambda x: torch.sort(x).values,
        lambda x: (x.unsqueeze(0) @ x.unsqueeze(1)).squeeze(),
        lambda x: functional.one_hot(x.argmax(), 4) + x,
        lambda x: (x + 1).add_(2),
        lambda x: x.clone().fill_(3.0),
        lambda x: sum(x),
        lambda x: 2 - x / torch.arange(1.0, 5.0),
        lambda x: isinstance(x, Tensor) and x.dim() == 1 and len(x) == 4,
        lambda x: x.nonzero(),
        lambda x: [2.0 in x, 7.0 in x, x.numpy().tolist()],
        lambda x: torch.where(x > 0, x, torch.zeros_like(x)),
        lambda x: f"{x.sum().item():.3f}",
        lambda x: x.to(torch.float64),
        lambda x: x.split(2)[1].softmax(-1),
        lambda x: torch.stack([torch.stack([x, -x]), torch.stack([x + 1, x])]),
        lambda x: torch.stack([torch.stack([x[0], x[1]]), torch.stack([x[2], x[3]])]).sum(),
    ],
)
def test_any_code_gives_what_plain_pytorch_gives(function: Any) -> None:
    model, x = Code(function), torch.tensor([0.5, -1.0, 2.0, 0.25])
    wanted = model(x)
    dynamic = weft.dynamic(model)
    assert close(dynamic(x), wanted)
    assert close(dynamic.map([x, x]), [wanted, wanted])


def test_recording_is_gone_with_its_call_and_waits_for_no_garbage_collection() -> None:
    seen = []

    def look(x: Tensor) -> Tensor:
        seen.append(weakref.ref(x.home))
        return torch.stack([x[0] + x[1], x[2]])

    dynamic = weft.dynamic(Code(look))
    gc.disable()
    try:
        for _ in range(3):
            dynamic(torch.ones(4))
        assert len(seen) == 3
        assert [each() for each in seen] == [None] * 3
    finally:
        gc.enable()


def test_change_of_a_view_is_refused_with_the_cure() -> None:
    def change(x: Tensor) -> Tensor:
        row = x.view(2, 2)
        x.add_(1)
        return row

    with pytest.raises(CaptureError, match=r"clone\(\)"):
        weft.dynamic(Code(change))(torch.ones(4))


def test_input_changed_behind_the_call_is_refused() -> None:
    given = torch.ones(4)

    def change(x: Tensor) -> Tensor:
        made = x + given
        given.add_(1)
        return made

    with pytest.raises(CaptureError, match="changed in place"):
        weft.dynamic(Code(change))(torch.ones(4))


def test_change_of_an_input_is_the_callers_too() -> None:
    class Change(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            x.mul_(2)
            return x + 1

    given = torch.ones(3)
    assert close(weft.dynamic(Change())(given), torch.full((3,), 3.0))
    assert torch.equal(given, torch.full((3,), 2.0))


def test_error_in_user_code_is_the_users_own() -> None:
    with pytest.raises(RuntimeError, match=r"size|shape"):
        weft.dynamic(Code(lambda x: x @ torch.ones(7, 7)))(torch.ones(4))
    with pytest.raises(ZeroDivisionError):
        weft.dynamic(Code(lambda x: 1 // 0))(torch.ones(4))


def test_error_of_one_input_among_turns_comes_out_and_the_model_works_on() -> None:
    def function(x: Tensor) -> Tensor:
        if x.max() > 5:
            raise KeyError("too large")
        return x + 1

    dynamic = weft.dynamic(Code(function))
    dynamic(torch.ones(2))
    with pytest.raises(KeyError):
        dynamic.map([torch.ones(2), 9 * torch.ones(2), torch.ones(2)])
    assert close(dynamic(torch.ones(2)), torch.full((2,), 2.0))


def test_turns_have_the_modes_of_the_caller() -> None:
    seen = []

    def function(x: Tensor) -> Tensor:
        seen.append((threading.current_thread().name, torch.is_autocast_enabled("cpu")))
        return x + 1 if x.max() > 5 else x

    dynamic = weft.dynamic(Code(function))
    dynamic(torch.ones(2))  # it needs numbers: a map takes turns
    seen.clear()
    with torch.autocast("cpu", torch.bfloat16):
        dynamic.map([torch.ones(2)] * 3)
    assert seen == [("weft turn", True)] * 3


def test_turns_end_when_what_they_wait_for_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    model, inputs = cases()["routed"]
    dynamic = weft.dynamic(model)
    dynamic(inputs[0])

    def fail(*facts: Any) -> None:
        raise CaptureError("run: no worker is left.")

    monkeypatch.setattr(dynamic.state, "flush", fail)
    monkeypatch.setattr(dynamic, "_flush", fail)
    with pytest.raises(CaptureError, match="no worker"):
        dynamic.map(inputs)
    assert not [t for t in threading.enumerate() if t.name == "weft turn" and t.is_alive()]


class Wrapped(nn.Module):
    """Calls one module."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, *args: Tensor) -> Any:
        return self.inner(*args)


class Sides(nn.Module):
    """A sum of two products, and their arguments one behind the other."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(4, 3), nn.Linear(4, 3)

    def forward(self, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        return self.left(a) + self.right(b), torch.cat([a, b])


def test_joined_products_take_no_cat_over_another_dim() -> None:
    model, a, b = Wrapped(Sides()), torch.randn(5, 4), torch.randn(5, 4)
    assert close(weft.dynamic(model)(a, b), model(a, b))


def test_value_kept_from_one_call_is_a_tensor_in_the_next() -> None:
    kept: list[Any] = []

    def function(x: Tensor) -> Tensor:
        kept.append(x * 2)
        return x + kept[0]

    dynamic = weft.dynamic(Code(function))
    dynamic(torch.ones(2))
    assert close(dynamic(torch.ones(2)), torch.full((2,), 3.0))
    assert close(kept[0] + 1, torch.full((2,), 3.0))


def test_cell_is_plain_data() -> None:
    model, inputs = cases()["binary tree"]
    dynamic = weft.dynamic(model)
    dynamic.map(inputs)
    entries = [each for each in dynamic.state.book.entries.values() if not isinstance(each, str)]
    composer = next(each.cell for each in entries if each.cell.name.startswith("composer"))
    again = Cell.from_data(json.loads(json.dumps(composer.to_data())))
    weights = [model.get_parameter(name) for name in composer.weights]
    rows = [torch.randn(3, 12) for _ in range(4)]
    made = [
        cell.functions[1]("cpu", cell.functions[0]("cpu", *weights), *rows)
        for cell in (composer, again)
    ]
    assert close(made[0], made[1])
    assert close(
        torch.stack([each[1] for each in [model.composer(*r) for r in zip(*rows, strict=True)]]),
        made[0][1],
    )


def test_closed_model_is_as_before() -> None:
    model, inputs = cases()["binary tree"]
    wanted, keys = model(*inputs[0]), set(vars(model))
    dynamic = weft.dynamic(model)
    dynamic(*inputs[0])
    dynamic.close()
    assert set(vars(model)) == keys
    assert all(module._compiled_call_impl is None for module in model.modules())
    assert torch.equal(model(*inputs[0]), wanted)


def test_the_package_is_the_function_of_its_name() -> None:
    import torchweft.dynamic.model as room

    assert callable(weft.dynamic) and weft.dynamic.model is room
    assert isinstance(weft.dynamic(nn.Linear(2, 2)), room.Dynamic)
    with pytest.raises(CaptureError, match=r"must be an nn\.Module"):
        weft.dynamic("model")


def test_rings_of_cells_stand_behind_what_they_read_however_long_the_chain():
    assert _rings([{3}, {0, 2}, {1}, set()]) == [[3], [0], [1, 2]]
    chain = [set(), *({number} for number in range(1999))]
    assert _rings(chain) == [[number] for number in range(2000)]

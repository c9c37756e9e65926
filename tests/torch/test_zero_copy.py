"""Parts write their rows of whole values where they belong: nothing is copied, bits stay."""

from __future__ import annotations

import pytest
import torch
from contract import ROWS, inputs, planned, value
from torch import nn
from torch.nn import functional as F

import torchweft as weft
from torchweft.api import session_of
from torchweft.capture.bodies.bodies import Into, ResultBytes
from torchweft.plan.graph import Graph, Op
from torchweft.plan.machine import cpu
from torchweft.run.cpu import Lanes, run
from torchweft.run.writer import compile_program
from torchweft_tools.bench import memory
from torchweft_tools.bench.measure.meter import Meter

WIDE = 8


class Many(nn.Module):
    """Hands out results of many makers, plain, viewed, transposed, shared by two views."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(WIDE, 2 * WIDE), nn.Linear(2 * WIDE, WIDE, bias=False)
        self.qkv, self.words = nn.Linear(WIDE, 3 * WIDE), nn.Embedding(11, WIDE)

    def forward(self, x):
        h = x + self.down(F.gelu(self.up(x)))
        q, k, v = self.qkv(h).view(*x.shape[:2], 3, 2, WIDE // 2).unbind(2)
        best, where = h.topk(2, -1)
        marked = torch.zeros_like(h)
        marked[..., 0] = h[..., 1]
        return {
            "linear without bias": self.down(F.relu(self.up(h))),
            "linear in heads": self.up(h).view(*x.shape[:2], 2, WIDE).transpose(1, 2),
            "one of three": k.transpose(1, 2),
            "elementwise": h * q.flatten(2).sigmoid(),
            "on permuted dims": v.transpose(1, 2) * 2,
            "softmax": F.softmax(h, -1),
            "cat": torch.cat((h, h * 2), -1),
            "mean": h.mean(1),
            "topk": best,
            "which": where,
            "embedding": self.words(where),
            "cast": h.double(),
            "filled, then written": marked,
            "matmul": h @ h.transpose(1, 2),
        }


def split(model, x, parts, *, copies=False):
    """Outputs in parts, bytes copied in one call, and the model's session."""
    torch._dynamo.reset()
    weft.compile(model, weft.overlap(parts=parts), zero_copy=not copies)
    session = session_of(model)
    for _ in range(3):
        model(x)
    with Meter() as meter:
        found = model(x)
    model._compiled_call_impl = None
    return found, meter.copied_bytes, session


@torch.no_grad()
@pytest.mark.parametrize("parts", [2, 3])
def test_every_kind_of_maker_writes_its_part_of_the_whole(parts):
    torch.manual_seed(0)
    model, x = Many().eval(), torch.randn(7, 5, WIDE)
    with Meter() as meter:
        wanted = model(x)
    found, copied, session = split(model, x, parts)
    assert copied == meter.copied_bytes
    for piece in session.pieces:
        assert piece.captured.unplaced == {}
        for entry in piece.plans.entries:
            assert entry.plan.num_parts == parts
            assert not [step for step in entry.plan.steps if step.kind == "copy"]
    by_copies, more, _ = split(model, x, parts, copies=True)
    assert more > copied
    for name, tensor in wanted.items():
        assert torch.equal(found[name], by_copies[name]), name
        assert found[name].stride() == tensor.stride(), name
        assert torch.allclose(found[name], tensor, atol=1e-6), name


@torch.no_grad()
def test_what_was_handed_out_is_not_written_again():
    model, x = Many().eval(), torch.randn(8, 5, WIDE)
    weft.compile(model, weft.overlap(parts=2))
    first = model(x)
    kept = {name: tensor.clone() for name, tensor in first.items()}
    model(torch.randn(8, 5, WIDE))
    assert all(torch.equal(first[name], kept[name]) for name in kept)


def test_with_gradients_there_is_a_visible_copy():
    model, x = nn.Sequential(nn.Linear(WIDE, WIDE), nn.ReLU()), torch.randn(8, WIDE)
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    weft.compile(model, weft.overlap(parts=2))
    assert torch.is_grad_enabled()
    model(x)
    (plan,) = [plan for plan in weft.plans(model) if plan.num_parts == 2]
    assert [step for step in plan.steps if step.kind == "copy"]


@torch.no_grad()
def test_gradients_are_not_asked_for_behind_a_switch():
    class Switches(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Linear(WIDE, WIDE)

        def forward(self, x):
            with torch.enable_grad():
                return self.inner(x)

    model, x = Switches(), torch.randn(8, WIDE)
    wanted = model(x)
    weft.compile(model, weft.overlap(parts=2))
    assert torch.allclose(model(x), wanted, atol=1e-6)


class Normed(nn.Module):
    """Ends in a call that has no `out=`."""

    def __init__(self):
        super().__init__()
        self.inner, self.norm = nn.Linear(WIDE, WIDE), nn.LayerNorm(WIDE)

    def forward(self, x):
        return self.norm(x + self.inner(x))


@torch.no_grad()
def test_a_last_call_that_cannot_write_in_place_runs_once():
    model, x = Normed().eval(), torch.randn(8, WIDE)
    with Meter() as meter:
        wanted = model(x)
    found, copied, session = split(model, x, 2)
    assert torch.allclose(found, wanted, atol=1e-6) and copied == meter.copied_bytes
    (piece,) = session.pieces
    assert [op.rows for op in piece.graph.ops] == ["row-wise", "mixing"]
    assert "native_layer_norm has no form" in piece.captured.reasons["norm.layer_norm"]


@torch.no_grad()
def test_a_copy_that_is_left_has_its_reason():
    class Both(nn.Module):
        """A convolution behind a convolution: only the last is peeled off."""

        def __init__(self):
            super().__init__()
            self.first, self.last = nn.Conv1d(WIDE, WIDE, 1), nn.Conv1d(WIDE, WIDE, 1)

        def forward(self, x):
            return self.last(self.first(x.relu()))

    model, x = Both().eval(), torch.randn(8, WIDE, 5)
    wanted = model(x)
    found, _, session = split(model, x, 2)
    assert torch.allclose(found, wanted, atol=1e-6)
    reasons = session.pieces[0].captured.unplaced
    assert list(reasons.values()) == ["convolution has no form that writes where it is told"]


@torch.no_grad()
def test_a_kernel_that_replaces_ops_has_visible_copies():
    def doubled(x):
        return (x * 2,)

    def by_kernel(s):
        s.split(2)
        while ready := s.ready():
            for op, part in ready:
                s.run((op,), part, replace=doubled)
        s.merge()

    class Twice(nn.Module):
        def forward(self, x):
            return x * 2

    model, x = Twice(), torch.randn(8, WIDE)
    weft.compile(model, by_kernel)
    assert torch.equal(model(x), x * 2)
    copies = [step for step in weft.plans(model)[0].steps if step.kind == "copy"]
    assert len(copies) == 2
    assert "a kernel of the strategy makes it" in str(weft.report(model))


@torch.no_grad()
def test_a_value_that_only_a_merged_run_needs_whole_is_told_as_that():
    def merged_end(s):
        s.split(2)
        *ops, last = s.graph.ops
        for op in ops:
            for part in range(2):
                s.run(op, part)
        s.run(last)
        s.merge()

    def run(x):
        with weft.mark("first"):
            y = x.sin() * 2
        with weft.mark("last"):
            return y.cos() + 1

    compiled, x = weft.compile(run, merged_end), torch.randn(8, WIDE)
    assert torch.equal(compiled(x), run(x))
    ((_, reason),) = weft.report(compiled).pieces[0].copied
    assert reason == "only the strategy needs it whole"
    assert "kernel" not in str(weft.report(compiled))


@torch.no_grad()
def test_with_jitter_no_part_reads_before_it_is_written():
    model, x = Many().eval(), torch.randn(8, 5, WIDE)
    weft.compile(model, weft.overlap(parts=2))
    wanted = model(x)
    model._compiled_call_impl = None
    torch._dynamo.reset()
    weft.compile(model, weft.overlap(parts=2), jitter=True)
    found = model(x)
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)


class Doubled:
    """A body that writes where it is told."""

    def __init__(self, value):
        room = ResultBytes(
            value.shape, torch.float32, torch.device("cpu"), value.batch, (0, 1), {0: None}
        )
        self.into = Into(lambda x, out: (torch.mul(x, 2, out=out),), (), (room,))

    def __call__(self, x):
        return (x * 2,)


@pytest.mark.parametrize("late", [0, 1])
def test_parts_on_lanes_of_their_own_share_a_room_whoever_comes_first(late):
    values = value("x"), value("y", placeable=True)
    graph = Graph("doubled", values, (Op("double", ("x",), ("y",)),), ("x",), ("y",), "s0")

    def halves(s):
        s.split(2)
        for part, lane in enumerate(("compute", "compute1")):
            s.run("double", part, lane=lane)
        s.merge()

    def delay(step):
        return 0.05 * (step.kind == "run" and step.parts == (late, late + 1))

    plan = planned(halves, 2, graph)
    program = compile_program(plan, {"double": Doubled(values[1])}, jitter=delay)
    x, bounds, lanes = inputs()[0], plan.cut.bounds(ROWS), Lanes()
    (found,) = run(program, (x,), bounds, lanes, numbers=program.numbers({"s0": ROWS}, bounds))
    lanes.close()
    assert torch.equal(found, x * 2)


@torch.no_grad()
def test_the_meter_counts_what_lives_at_once():
    x = torch.randn(100)
    with Meter() as meter:
        y = x + 1  # 400 bytes
        z = y * 2  # 800 bytes at once
        del y
        z = z + 1  # 800 again
        z.clone()
    assert (meter.peak_bytes, meter.copied_bytes) == (800, 400)
    assert meter.live_bytes == 400


@torch.no_grad()
@pytest.mark.parametrize("seed", range(3))
def test_parts_on_several_lanes_write_into_one_room(seed):
    """Whichever lane comes first makes the room, and none makes a second one."""

    def spread(s):
        s.split(4)
        while ready := s.ready():
            for op, part in ready:
                s.run(op, part, lane=("compute", "compute1", "compute2")[(part + seed) % 3])
        s.merge()

    torch.manual_seed(seed)
    model, x = Many().eval(), torch.randn(12, 5, WIDE)
    wanted = model(x)
    weft.compile(model, spread, machine=cpu(3), jitter=True)
    for _ in range(3):
        found = model(x)
        assert all(torch.allclose(found[n], wanted[n], atol=1e-6) for n in wanted)
    (plan,) = weft.plans(model)
    assert len({step.lane for step in plan.steps if step.kind == "run"}) == 3
    assert not [step for step in plan.steps if step.kind == "copy"]


def test_bench_memory_meters_a_model_of_the_zoo():
    pytest.importorskip("transformers")
    rows, summary = memory.run(models="vit")
    assert [(row["parts"], row["split"], row["error"]) for row in rows] == [
        (2, True, ""), (4, True, ""),
    ]  # fmt: skip
    assert summary["models"] == 1 and summary["share_zero_copy"] == 1.0
    assert 0 < summary["worst_peak_ratio"] <= 1.05
    with pytest.raises(weft.WeftError, match="Did you mean 'vit'"):
        memory.run(models="vitt")

"""Rewrites on two gloo ranks: pieces pass each other on the wire, and ranks rewrite alike."""

from __future__ import annotations

import functools

import pytest
import torch
import torch.distributed as dist
from ranks import check_clean, check_phases, run_once
from torch.distributed import _functional_collectives as funcol
from torch.nn import functional as F

import torchweft as weft
from torchweft.api import session_of
from torchweft.errors import CaptureError, PlanError

WIDE, WATCHDOG_S = 18, 20
scatter = getattr(funcol, "reduce_scatter_single", funcol.reduce_scatter_tensor)
gather = getattr(funcol, "all_gather_single", funcol.all_gather_tensor)
X = torch.arange(4 * 6 * WIDE).reshape(4, 6, WIDE).sin()


class Feed(torch.nn.Module):
    """A tensor-parallel layer; each rank has weights of its own."""

    def __init__(self, kind):
        super().__init__()
        self.kind = kind
        self.up = torch.nn.Linear(WIDE, 22)
        self.down = torch.nn.Linear(22, WIDE, bias=kind == "functional")

    def forward(self, x):
        y = self.down(F.silu(self.up(x)))
        if self.kind == "in place":
            dist.all_reduce(y)
        elif self.kind == "functional":
            y = funcol.all_reduce(y, "sum", dist.group.WORLD)
        elif self.kind == "tokens":
            y = F.linear(x.transpose(0, 1).contiguous(), self.up.weight)
            y = scatter(y, "sum", 0, dist.group.WORLD)
            y = F.linear(y, self.down.weight)
            y = gather(y, 0, dist.group.WORLD).transpose(0, 1)
        return x + y


class Model(torch.nn.Module):
    def __init__(self, kind="in place", layers=2):
        super().__init__()
        self.layers = torch.nn.ModuleList(Feed(kind) for _ in range(layers))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


def woven(model, strategy="sequential", **options):
    wanted = model.eval()(X)
    weft.compile(model, strategy, fallback="error", watchdog_s=WATCHDOG_S, **options)
    for _ in range(3):
        torch.testing.assert_close(model(X), wanted)
    check_clean(model)
    (piece,) = session_of(model).pieces
    assert [each.proof.verdict for each in piece.variants.pieces if each.proof.verdict]
    plan = weft.plans(model)[0]
    check_phases(plan)
    return plan


def talks_of(plan):
    return [op.collective.kind for op in plan.graph.ops if op.collective is not None]


def columns(rank, *, kind, strategy="sequential", **options):
    plan = woven(Model(kind), strategy, rewrites=[weft.chunk("down", 4)], **options)
    assert talks_of(plan) == ["all_reduce"] * 8
    labels = [step.label for step in plan.steps if step.parts in (None, (0, 1))]
    at = f"layers.1.all_reduce.{{}}of4{'' if plan.num_parts == 1 else '[0]'}"
    begun = labels.index("issue " + at.format(1)), labels.index("issue " + at.format(2))
    assert begun[0] < begun[1] < labels.index("complete " + at.format(1)), labels


def rows_of_dealt_tokens(rank):
    """Along dim 0, where ranks' rows lie one behind the other."""
    rewrites = [
        weft.chunk("reduce_scatter_tensor", 3, 0),
        weft.chunk("all_gather_into_tensor", 3, 0),
    ]
    plan = woven(Model("tokens"), rewrites=rewrites)
    kinds = ["reduce_scatter_tensor"] * 3 + ["all_gather_into_tensor"] * 3
    assert talks_of(plan) == kinds * 2


def columns_of_dealt_tokens(rank):
    rewrites = [weft.chunk("reduce_scatter_tensor", 2), weft.chunk("all_gather_into_tensor", 5)]
    plan = woven(Model("tokens"), rewrites=rewrites)
    kinds = ["reduce_scatter_tensor"] * 2 + ["all_gather_into_tensor"] * 5
    assert talks_of(plan) == kinds * 2


def columns_that_are_dealt_out(rank):
    """A row by itself is dealt out by columns, so a piece of them has those of all ranks."""

    def model(x):
        y = scatter(F.linear(x[0], WEIGHT), "sum", 0, dist.group.WORLD)
        return y.sum() * x

    compiled = weft.compile(model, "sequential", rewrites=[weft.chunk("linear", 2)])
    with pytest.raises(CaptureError, match="its columns are dealt out to the ranks"):
        compiled(X[0])


WEIGHT = torch.eye(WIDE)


def a_strategy_asks(rank):
    def chunked(s):
        s.rewrite(weft.chunk([op for op in s.graph.ops if op.collective], 3))
        s.split(2)
        while ready := s.ready():
            for op, part in ready:
                s.run(op, part)
        s.merge()

    plan = woven(Model(), chunked)
    assert talks_of(plan) == ["all_reduce"] * 6 and plan.num_parts == 2


def comet(rank):
    """At batch 1, too, the next piece is computed while one is on the wire."""
    plan = woven(Model("functional"), weft.comet(chunks=3))
    assert talks_of(plan) == ["all_reduce"] * 6 and plan.num_parts == 1
    model = Model().eval()
    wanted = model(X[:1])
    weft.compile(model, weft.comet(chunks=2), fallback="error", watchdog_s=WATCHDOG_S)
    for _ in range(3):
        torch.testing.assert_close(model(X[:1]), wanted)
    (plan,) = weft.plans(model)
    labels = [step.label for step in plan.steps]
    first, second = [op for op in plan.graph.ops if op.collective is not None][:2]
    piece = labels.index(plan.graph.maker[second.reads[0]].name)
    flight = labels.index(f"issue {first.name}"), labels.index(f"complete {first.name}")
    assert flight[0] < piece < flight[1], labels


def unlike_pieces(rank):
    """Ranks that rewrite otherwise are told so, before a collective of the plan begins."""
    model = Model().eval()
    pieces = 2 + rank
    weft.compile(model, "sequential", rewrites=[weft.chunk("down", pieces)], watchdog_s=WATCHDOG_S)
    with pytest.raises(PlanError, match="ranks"):
        model(X)
    model = Model().eval()
    wanted = model(X)
    weft.compile(model, "sequential", rewrites=[weft.chunk("down", 2)], watchdog_s=WATCHDOG_S)
    torch.testing.assert_close(model(X), wanted)


CALLS = []


@torch.library.custom_op("weft_test::unsteady_rank", mutates_args=())
def unsteady(x: torch.Tensor) -> torch.Tensor:
    """On rank 1 another number in each call."""
    CALLS.append(dist.get_rank())
    return x + sum(CALLS)


@unsteady.register_fake
def _(x):
    return torch.empty_like(x)


def one_rank_sees_a_difference(rank):
    """What only one rank sees has all of them run the model as it is."""
    model = Model().eval()
    last = model.layers[1].forward
    model.layers[1].forward = lambda x: unsteady(last(x))
    weft.compile(model, "sequential", rewrites=[weft.chunk("down", 2)], watchdog_s=WATCHDOG_S)
    for calls in (1, 2):
        model(X)
        ((why, count),) = weft.report(model).fallbacks
        assert "gate" in why and count == calls, why
    assert ("another rank" in why) == (rank == 0), why


CASES = {
    "columns in place": functools.partial(columns, kind="in place"),
    "columns functional": functools.partial(columns, kind="functional"),
    "columns in parts": functools.partial(columns, kind="in place", strategy="overlap"),
    "columns with jitter": functools.partial(columns, kind="in place", jitter=True),
    "columns without blocks": functools.partial(columns, kind="functional", blocks=False),
    **{
        case.__name__.replace("_", " "): case
        for case in (
            columns_that_are_dealt_out, rows_of_dealt_tokens, columns_of_dealt_tokens,
            a_strategy_asks, comet, one_rank_sees_a_difference, unlike_pieces,
        )
    },
}  # fmt: skip


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    return run_once(tmp_path_factory, __name__, lambda folder: CASES)


@pytest.mark.parametrize("name", CASES)
def test_case(results, name):
    assert results[name] == "", results[name]

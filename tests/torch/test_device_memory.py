"""A compiled model keeps to the memory of its machine: what needs more is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import torchweft as weft
from torchweft.api import session_of
from torchweft.errors import MemoryPlanError
from torchweft.plan.context import Context
from torchweft.plan.improve.predict import candidates
from torchweft.plan.machine import Costs, cpu
from torchweft.plan.simulator import simulate
from torchweft.serve import memory_limit

ROWS = 64


class Wide(nn.Module):
    """Eight times as wide inside: fewer rows at once hold less."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.mid, self.down = nn.Linear(8, 64), nn.Linear(64, 64), nn.Linear(64, 8)

    def forward(self, x: Tensor) -> Tensor:
        y = self.up(x)
        with weft.mark("first", uses="memory"):
            y = torch.relu(y)
        y = self.mid(y)
        with weft.mark("second", uses="memory"):
            y = torch.relu(y)
        return self.down(y) + x


class Broad(nn.Module):
    """Wide branches, each narrow at its end, that do not need each other."""

    def __init__(self) -> None:
        super().__init__()
        self.ups = nn.ModuleList(nn.Linear(8, 128) for _ in range(3))

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        narrow = []
        for up in self.ups:
            with weft.mark("up"):
                y = up(x)
            with weft.mark("narrow", uses="memory"):
                narrow.append(y.sum(1))
        return tuple(narrow)


def breadth_first(s: Any) -> None:
    """All that is ready before what it makes ready."""
    while ready := s.ready():
        for op, _ in ready:
            s.run(op)


@pytest.fixture(autouse=True)
def fresh() -> Any:
    torch._dynamo.reset()
    torch.manual_seed(0)
    with torch.no_grad():
        yield


def peak_of(make: Any, strategy: Any, rows: int = ROWS) -> int:
    """The bytes that the plan of a strategy holds at once, if nothing limits them."""
    model = weft.compile(make().eval(), strategy, fallback="error")
    model(torch.randn(rows, 8))
    (plan,) = weft.plans(model)
    return simulate(plan, Context(rows), cpu()).peak_bytes


def test_what_fits_runs_and_what_does_not_is_refused_with_its_step() -> None:
    model, x = Wide().eval(), torch.randn(ROWS, 8)
    wanted, most = model(x).clone(), peak_of(Wide, weft.overlap(parts=8))
    assert most < peak_of(Wide, weft.overlap(parts=2)) < peak_of(Wide, "sequential")
    machine = cpu(memory_bytes=most)
    weft.compile(model, weft.overlap(parts=8), machine=machine, fallback="error")
    for _ in range(3):
        torch.testing.assert_close(model(x), wanted)
    for strategy in ("sequential", weft.overlap(parts=2)):
        other = weft.compile(Wide().eval(), strategy, machine=machine, fallback="error")
        for _ in range(2):  # the second call is refused like the first
            with pytest.raises(MemoryPlanError, match=r"on device 'cpu'.*memory_bytes") as caught:
                other(x)
            assert caught.value.rule == "memory" and caught.value.lane == "compute"
            assert caught.value.step is not None and "<-- here" in str(caught.value)
        assert other(x[: ROWS // 4]).shape == (ROWS // 4, 8), "a smaller call fits"


def test_a_plan_that_is_too_large_falls_back_to_one_that_fits_counted() -> None:
    model, x = Broad().eval(), torch.randn(ROWS, 8)
    wanted = [each.clone() for each in model(x)]
    most = peak_of(Broad, "sequential")
    assert most < peak_of(Broad, breadth_first)
    weft.compile(model, breadth_first, machine=cpu(memory_bytes=most))
    for _ in range(3):
        torch.testing.assert_close(list(model(x)), wanted)
    ((reason, count),) = weft.report(model).fallbacks
    assert count == 3 and reason.startswith("memory: the plan holds") and "at step" in reason
    used = {plan.history[0] for plan in weft.plans(model)}
    assert "write sequential()" in used


def test_where_no_plan_fits_the_model_runs_as_it_is_counted() -> None:
    model, x = Wide().eval(), torch.randn(ROWS, 8)
    wanted = model(x).clone()
    weft.compile(model, weft.overlap(parts=2), machine=cpu(memory_bytes=1000))
    for _ in range(3):
        torch.testing.assert_close(model(x), wanted)
    report = weft.report(model)
    assert sum(piece.num_calls for piece in report.pieces) == 0
    assert all(reason.startswith("memory: ") for reason, _ in report.fallbacks)


def test_one_plan_serves_the_batches_of_its_bucket_that_fit() -> None:
    """A plan is written for a power of two of rows, and asked at each of them."""
    most = peak_of(Wide, weft.overlap(parts=2), rows=80)
    model = weft.compile(Wide().eval(), weft.overlap(parts=2), machine=cpu(memory_bytes=most))
    session = session_of(model)
    for rows in (64, 80, 96, 72):
        before = sum(session.fallbacks.values())
        model(torch.randn(rows, 8))
        assert (sum(session.fallbacks.values()) > before) == (rows > 80)
    assert weft.report(model).pieces[0].strategy_runs == 1


@pytest.mark.parametrize("most", [None, 10**9])
def test_a_steady_call_pays_nothing(most: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def counting(*given: Any) -> Any:
        asked.append(given)
        return within_memory(*given)

    within_memory = memory_limit.within_memory
    monkeypatch.setattr(memory_limit, "within_memory", counting)
    machine = cpu() if most is None else cpu(memory_bytes=most)
    model = weft.compile(Wide().eval(), weft.overlap(parts=2), machine=machine)
    for _ in range(5):
        model(torch.randn(ROWS, 8))
        model(torch.randn(ROWS + 6, 8))
    assert len(asked) == (0 if most is None else 2), "once for each size, with a limit"
    assert not weft.report(model).fallbacks


@pytest.mark.filterwarnings("ignore:.*torch.jit.script_method.*:DeprecationWarning")
def test_auto_looks_only_at_plans_that_fit_and_says_which_do_not() -> None:
    most = peak_of(Wide, weft.overlap(parts=4))
    assert most < peak_of(Wide, weft.overlap(parts=2))
    model, x = Wide().eval(), torch.randn(ROWS, 8)
    wanted = model(x).clone()
    weft.compile(model, "auto", machine=cpu(memory_bytes=most), remember=False)
    for _ in range(2):
        weft.warmup(model, [(x,)])
        torch.testing.assert_close(model(x), wanted)
    session = session_of(model)
    (piece,) = session.pieces
    costs, fitting = Costs(cpu(memory_bytes=most)), []
    for way in candidates(piece.graph):
        seconds = piece.plans.predict(way, Context(ROWS), costs)
        try:
            plan = piece.plans.plan(way, Context(ROWS))
        except weft.WeftError:
            continue
        fits = simulate(plan, Context(ROWS), costs.machine).peak_bytes <= most
        assert (seconds < float("inf")) == fits
        fitting += [way] if fits else []
    assert weft.overlap(parts=4) in fitting and weft.overlap(parts=2) not in fitting
    for entry in piece.plans.all_entries():
        if entry.num_calls:
            assert simulate(entry.plan, Context(ROWS), cpu()).peak_bytes <= most
    assert "memory: overlap(parts=2" in str(weft.report(model))
    assert "was not tried at 1 size(s) of the batch" in str(weft.report(model))

"""Strategies that ask what ops cost, on two ranks: equal numbers, equal plans, whoever measures."""

from __future__ import annotations

import functools
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from ranks import run_once
from torch import Tensor, nn

import torchweft as weft
from torchweft.api import session_of
from torchweft.errors import PlanError
from torchweft.plan.machine import Costs, CostTable, cpu
from torchweft_tools.profile import Profile, save_profile

LIMIT_S = 0.05
FIRST = 4  # the call after which costs are agreed on for the first time
SLEEPS = {"s": 0.0}


@torch.library.custom_op("cost_ranks::work", mutates_args=())
def work(x: Tensor) -> Tensor:
    time.sleep(SLEEPS["s"])
    return x * 2


work.register_fake(torch.empty_like)
RULES = [weft.mark_op("work", "work", uses="compute", rows="row-wise")]


class Works(nn.Module):
    """What is worked on is summed over the ranks."""

    def forward(self, x):
        y = torch.ops.cost_ranks.work(x)
        dist.all_reduce(y)
        return x + y


def by_cost(s, *, limit_s=LIMIT_S):
    """In parts if the work takes long, else the batch whole."""
    if s.cost("work") < limit_s:
        s.sequential("it is quick")
    else:
        weft.overlap(s, parts=2)


def by_side(s):
    """Asks on one rank only: there is nothing to agree on."""
    if dist.get_rank() == 1:
        s.cost("work")
    weft.overlap(s, parts=2)


def told(mine):
    """What all ranks have to say."""
    theirs = [None] * dist.get_world_size()
    dist.all_gather_object(theirs, mine)
    return theirs


def parts_of(model, num_calls, x):
    """The number of parts of each call's plan, the same on both ranks; answers are right."""
    wanted, numbers = Works()(x), []
    for _ in range(num_calls):
        torch.testing.assert_close(model(x), wanted)
        numbers.append(weft.plans(model)[-1].num_parts)
    first, second = told((numbers, [plan.steps for plan in weft.plans(model)]))
    assert first == second
    return numbers


def check_agreed(rank):
    """Only rank 1 is slow: both cut, from one call on; and both go back when it is quick again."""
    model = weft.compile(Works(), by_cost, rules=RULES, fallback="error")
    x = torch.randn(8, 4, generator=torch.Generator().manual_seed(0))
    SLEEPS["s"] = 0.1 * rank
    assert parts_of(model, 12, x) == [1] * FIRST + [2] * 8
    (plan,) = weft.plans(model)
    assert "costs: measured, agreed at call " in "\n".join(plan.history)
    own = session_of(model).pieces[0].plans.costs.table
    first, second = told(own.entries)
    assert first == second and max(s for *_, points in own.entries for _, s in points) > 0.09
    SLEEPS["s"] = 0.0
    numbers = parts_of(model, 60, x)
    assert numbers[:4] == [2] * 4 and numbers[-1] == 1, numbers
    changes = [12 + at for at in range(1, 60) if numbers[at] != numbers[at - 1]]
    assert set(changes) <= {16, 32, 64}, "plans change behind the calls in which ranks agree"


def check_graph_breaks(rank):
    """Two graphs, of which one asks for costs: both talk, and agree on one call."""

    def model(x):
        y = torch.ops.cost_ranks.work(x)
        dist.all_reduce(y)
        torch._dynamo.graph_break()
        z = y + 1
        dist.all_reduce(z)
        return z

    def strategy(s):
        if "work" in s.graph.op:
            by_cost(s)
        else:
            s.sequential()

    SLEEPS["s"] = 0.1 * rank
    woven, x = weft.compile(model, strategy, rules=RULES, fallback="error"), torch.ones(8, 4)
    for _ in range(9):
        torch.testing.assert_close(woven(x), model(x))
    mine = [plan.num_parts for plan in weft.plans(woven)]
    assert told(mine) == [[2, 1]] * 2


def check_one_asks(rank):
    """A rank that asks alone hears nothing: formulas stand, and nobody waits."""
    model = weft.compile(Works(), by_side, rules=RULES, fallback="error")
    x = torch.ones(8, 4)
    SLEEPS["s"] = 0.002
    for _ in range(10):
        torch.testing.assert_close(model(x), Works()(x))
    assert not session_of(model).pieces[0].plans.costs.table.entries


def check_auto(rank):
    """The races of auto agree on what strategies may ask for."""
    model = weft.compile(Works(), rules=RULES, remember=False)
    x = torch.ones(8, 4)
    SLEEPS["s"] = 0.003 * (1 + rank)
    while not session_of(model).auto.is_settled((x,), {}):
        torch.testing.assert_close(model(x), Works()(x))
    costs = session_of(model).pieces[0].plans.costs
    first, second = told(costs)
    assert first == second and costs.about == "measured by auto" and costs.table.entries


def costs_of(seconds):
    """A profile that knows the work of eight rows and of four."""
    session = weft.compile(Works(), "sequential", rules=RULES)
    session(torch.ones(8, 4))
    (piece,) = session_of(session).pieces
    from torchweft.plan.machine import cost_key

    entries = []
    for op in piece.graph.ops:
        key = cost_key(piece.graph, op, {piece.graph.batch: 8})
        entries.append((key, "cpu", ((4, seconds / 2), (8, seconds))))
    return Costs(cpu(), CostTable(tuple(sorted(entries))))


def check_file(rank, folder):
    """A file decides from the first call on; what is measured does not change it."""
    x, path = torch.ones(8, 4), folder / f"costs{rank}.json"
    SLEEPS["s"] = 0.0
    for seconds, num_parts in ((1e-3, 1), (0.5, 2)):
        save_profile(Profile(costs_of(seconds), "a test"), path)
        model = weft.compile(Works(), by_cost, rules=RULES, costs=str(path), fallback="error")
        assert parts_of(model, 10, x) == [num_parts] * 10
        assert f"costs: of costs{rank}.json" in weft.plans(model)[0].history


def check_unequal_files(rank, folder):
    """Files that differ are told on both ranks, before anything is said; equal ones go on."""
    x, costs = torch.ones(8, 4), costs_of(1e-3)
    other = replace(costs, call_s=1e-3 * rank)
    for each in (other, costs_of(1e-3 + 1e-4 * rank)):
        model = weft.compile(Works(), by_cost, rules=RULES, costs=each, watchdog_s=10)
        with pytest.raises(
            PlanError, match=r"(?s)rank 0: .*, costs [0-9a-f]{16} .*rank 1: .*costs"
        ):
            model(x)
    model = weft.compile(Works(), by_cost, rules=RULES, costs=costs if rank else None)
    with pytest.raises(PlanError, match="with equal costs="):
        model(x)
    torch.testing.assert_close(weft.compile(Works(), by_cost, costs=costs, rules=RULES)(x), x * 5)


def cases(folder: Path):
    return {
        "agreed": check_agreed, "graph breaks": check_graph_breaks, "one asks": check_one_asks,
        "auto": check_auto, "file": functools.partial(check_file, folder=folder),
        "unequal files": functools.partial(check_unequal_files, folder=folder),
    }  # fmt: skip


NAMES = [*cases(Path())]


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    return run_once(tmp_path_factory, __name__, cases)


@pytest.mark.parametrize("name", NAMES)
def test_case(results, name):
    assert results[name] == "", results[name]

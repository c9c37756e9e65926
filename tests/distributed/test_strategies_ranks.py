"""Each published strategy on two real ranks: equal to eager, nothing falls back, and the plan has
what the strategy promises; where it cannot be of use, the call is whole and the plan says why."""

from __future__ import annotations

import functools
import tempfile

import pytest
import torch
from ranks import check_clean, check_overlap, check_phases, run_once

import torchweft as weft
from torchweft.plan.machine import cpu
from torchweft_tools.bench.peers.models import Dense, MoE, Sizes, inputs
from torchweft_tools.bench.strategies.models import Sharded, SharedMoE, Tailed, hands
from torchweft_tools.bench.strategies.split_models import Pipelined, Ulysses

SIZES = Sizes(num_layers=2, hidden=64, wide=48, head=16)


def checked(rank, make, strategy, shapes, *, facts=None, machine=None, prepare=None, atol=1e-5):
    """The compiled model's plans, the newest first, after calls that are equal to eager's."""
    model = make(SIZES, rank=rank, num_ranks=2).eval()
    given = [inputs(model, rows, positions, SIZES.hidden, rank=rank) for rows, positions in shapes]
    wants = [model(x) for x in given]
    if prepare is not None:
        prepare(model)
    compiled = weft.compile(
        model, strategy, machine=machine, watchdog_s=20, fallback="error", num_threads=1
    )
    for x, want in zip(given, wants, strict=True):
        with weft.context(**(facts or {})):
            for _ in range(2):
                torch.testing.assert_close(compiled(x), want, rtol=1e-5, atol=atol)
    check_clean(compiled)
    return weft.plans(compiled)


def parts_of(plan, uses):
    """In how many runs each op of a kind is run."""
    runs = {}
    for step in plan.steps:
        if step.kind in ("run", "issue") and plan.graph.op[step.names[0]].uses == uses:
            runs[step.names[0]] = runs.get(step.names[0], 0) + 1
    return set(runs.values())


def lanes_of(plan, part):
    return {
        step.lane for step in plan.steps if step.kind == "run" and step.parts == (part, part + 1)
    }


def whole(plan, why):
    assert plan.cut.num_parts == 1, str(plan)
    assert why in str(plan), str(plan)


def nanoflow(rank):
    given = weft.nanoflow(shares=(1, 2, 2, 3), compute=2, memory=4, network=2)
    plan, *_ = checked(rank, Dense, given, [(8, 5), (11, 3)])
    check_phases(plan)
    assert plan.cut.num_parts == 4
    assert parts_of(plan, "network") == {2}, str(plan)


def nanoflow_of_experts(rank):
    plan, *_ = checked(rank, MoE, weft.nanoflow(compute=4, network=4), [(9, 4)])
    check_overlap(plan)
    assert parts_of(plan, "network") == {4}, str(plan)


def nanoflow_of_few_rows(rank):
    whole(checked(rank, Dense, weft.nanoflow(), [(3, 5)])[0], "fewer than 4 rows")


def single_batch(rank):
    plan, *_ = checked(rank, SharedMoE, weft.single_batch(), [(1, 7), (4, 3)])
    check_phases(plan)
    assert plan.cut.num_parts == 1
    steps, beside = list(plan.steps), 0
    for at, step in enumerate(steps):
        if step.kind == "issue":
            end = next(
                n for n, other in enumerate(steps)
                if other.kind == "complete" and other.names == step.names
            )  # fmt: skip
            beside += any(
                "shared" in plan.graph.op[name].path
                for each in steps[at:end]
                if each.kind == "run"
                for name in each.names
            )
    assert beside == SIZES.num_layers, str(plan)


def dual_batch(rank, make, facts):
    plan, *_ = checked(rank, make, weft.dual_batch(), [(4, 6), (7, 3)], facts=facts)
    check_overlap(plan)
    assert plan.cut.num_parts == 2
    assert parts_of(plan, "network") == {2}, str(plan)


def dual_batch_lanes(rank):
    plan, *_ = checked(rank, SharedMoE, weft.dual_batch(), [(4, 6)], machine=cpu(2))
    aside = {
        step.lane
        for step in plan.steps
        if step.kind == "run" and "shared" in plan.graph.op[step.names[0]].path
    }
    assert len(aside) == 1 and len(lanes_of(plan, 0)) == 2, str(plan)


def dual_batch_of_one_row(rank):
    whole(checked(rank, MoE, weft.dual_batch(), [(1, 6)])[0], "too few for halves")


def multiplex(rank, make, requests):
    """Rows are tokens of requests, of one position each."""
    facts = {"tokens_per_request": requests}
    plan, *_ = checked(
        rank, make, weft.multiplex(), [(sum(requests), 1)], facts=facts, machine=cpu(2)
    )
    decode = 0 if requests[0] == 1 else 1
    assert str(plan.cut).endswith("at phases")
    assert plan.bounds(sum(requests), requests)[1] in (requests.count(1), requests[0])
    assert lanes_of(plan, decode).isdisjoint(lanes_of(plan, 1 - decode)), str(plan)


def multiplex_of_one_phase(rank):
    facts = {"tokens_per_request": [1, 1, 1, 1]}
    plan, *_ = checked(rank, Dense, weft.multiplex(), [(4, 1)], facts=facts, machine=cpu(2))
    whole(plan, "phases")


def prefetch(rank, make):
    with tempfile.TemporaryDirectory() as folder:
        plan, *_ = checked(
            rank, make, weft.prefetch(), [(3, 5)], prepare=lambda model: weft.offload(model, folder)
        )
        names = [step.names[0] for step in plan.steps if step.kind in ("run", "issue")]
        loads = [op.name for op in plan.graph.ops if op.uses == "io"]
        assert len(loads) == SIZES.num_layers, str(plan)
        first = next(op.name for op in plan.graph.ops if op.uses == "compute")
        last = [op.name for op in plan.graph.ops if op.uses == "compute"][-1]
        assert names.index(loads[1]) < names.index(last), str(plan)
        assert names.index(loads[0]) < names.index(first), str(plan)


def tokenweave(rank, make):
    plan, *_ = checked(rank, make, weft.tokenweave(), [(8, 3), (12, 5)])
    check_overlap(plan)
    assert parts_of(plan, "network") == {2}, str(plan)


def tokenweave_of_few_tokens(rank):
    whole(checked(rank, Sharded, weft.tokenweave(min_tokens=999), [(4, 3)])[0], "fewer than")


def compose(rank):
    given = weft.compose(layers={"tail*": "sequential"}, otherwise="overlap")
    plan, *_ = checked(rank, Tailed, given, [(6, 4)])
    check_overlap(plan)
    at = {
        step.parts
        for step in plan.steps
        if step.kind == "run" and plan.graph.op[step.names[0]].path.startswith("tail")
    }
    assert at == {None}, str(plan)


def compose_by_phase(rank):
    given = weft.compose(phases={"decode": "sequential"}, otherwise="dual_batch")
    plan, *_ = checked(rank, MoE, given, [(4, 1)], facts={"phase": "decode"})
    assert plan.cut.num_parts == 1
    plan, *_ = checked(rank, MoE, given, [(4, 5)], facts={"phase": "prefill"})
    check_overlap(plan)


def hand_written(rank):
    """The peers of the bench compute what the models do."""
    for make in (Dense, MoE, SharedMoE, Tailed, Ulysses, Pipelined):
        model = make(SIZES, rank=rank, num_ranks=2).eval()
        x = inputs(model, 4, 3, SIZES.hidden, rank=rank)
        assert hands(model)
        for call in hands(model).values():
            torch.testing.assert_close(call(x.clone()), model(x), rtol=1e-5, atol=1e-5)


CASES = {
    "nanoflow": nanoflow,
    "nanoflow experts": nanoflow_of_experts,
    "nanoflow few rows": nanoflow_of_few_rows,
    "single_batch": single_batch,
    "dual_batch": functools.partial(dual_batch, make=MoE, facts={"phase": "prefill"}),
    "dual_batch decode": functools.partial(dual_batch, make=SharedMoE, facts={"phase": "decode"}),
    "dual_batch lanes": dual_batch_lanes,
    "dual_batch one row": dual_batch_of_one_row,
    "multiplex": functools.partial(multiplex, make=Dense, requests=[1, 1, 1, 5, 4]),
    "multiplex experts": functools.partial(multiplex, make=MoE, requests=[7, 1, 1]),
    "multiplex one phase": multiplex_of_one_phase,
    "prefetch": functools.partial(prefetch, make=Dense),
    "prefetch experts": functools.partial(prefetch, make=SharedMoE),
    "tokenweave": functools.partial(tokenweave, make=Sharded),
    "tokenweave all_reduce": functools.partial(tokenweave, make=Dense),
    "tokenweave few tokens": tokenweave_of_few_tokens,
    "compose": compose,
    "compose by phase": compose_by_phase,
    "hand written": hand_written,
}


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    return run_once(tmp_path_factory, __name__, lambda folder: CASES)


@pytest.mark.parametrize("name", CASES)
def test_two_ranks(results, name):
    assert results[name] == "", results[name]

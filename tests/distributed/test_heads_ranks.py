"""Ulysses on two and on four gloo ranks: in groups of heads, in parts, and by the strategy."""

from __future__ import annotations

import functools

import pytest
import torch
import torch.distributed as dist
from ranks import check_clean, check_overlap, check_phases, run_once
from ulysses import Model, by_einsum, by_hand, flash, given, repeated

import torchweft as weft
from torchweft.api import session_of
from torchweft.errors import PlanError
from torchweft_tools.bench.peers.models import MoE, Sizes, inputs

WATCHDOG_S = 20
TALK = "all_to_all_single"


def woven(model, strategy="sequential", rows=(1,), **options):
    """The newest plan of a compiled model, after calls that are equal to eager's."""
    model = model.eval()
    shares = [given(count, positions=4) for count in rows]
    wants = [model(x) for x in shares]
    weft.compile(model, strategy, fallback="error", watchdog_s=WATCHDOG_S, **options)
    for x, want in zip(shares, wants, strict=True):
        for _ in range(2):
            torch.testing.assert_close(model(x), want)
    check_clean(model)
    for piece in session_of(model).pieces:
        proofs = [each.proof for each in piece.variants.pieces if each.proof.verdict]
        assert [proof.refused for proof in proofs] in ([], [None])
    return weft.plans(model)[0]


def sent(plan):
    return [op.name for op in plan.graph.ops if op.collective is not None]


def in_groups(
    rank, *how, pieces=2, rows=1, strategy="sequential", jitter=False, count=None, **more
):
    rewrites = [weft.chunk(TALK, pieces, dim="heads")]
    plan = woven(Model(*how, **more), strategy, (rows,), rewrites=rewrites, jitter=jitter)
    check_phases(plan)
    assert len(sent(plan)) == (count or 2 * pieces * 4), str(plan)
    return plan


def strategy_by_heads(rank, *how, groups=2, **more):
    """At batch 1 a group is attended to while the next one is on its way, and goes back then."""
    plan = woven(Model(*how, **more), weft.ulysses(groups=groups))
    check_phases(plan)
    assert "rewrite chunk(" in str(plan) and "pieces by heads" in str(plan), str(plan)
    labels = [step.label for step in plan.steps]
    for layer in range(2):
        talk = f"layers.{layer}.{TALK}.{{}}of{groups}{{}}"
        back = labels.index("issue " + talk.format(1, ".3"))
        attended = max(at for at in range(back) if not labels[at].startswith("free"))
        assert labels.index("issue " + talk.format(2, ".2")) < attended, labels
        assert attended < labels.index("complete " + talk.format(2, "")), labels
        assert back < labels.index("complete " + talk.format(2, "")), labels


def strategy_in_parts(rank, *how, parts=2, **more):
    """What one part exchanges is on the wire while another computes."""
    plan = woven(Model(*how, **more), weft.ulysses(parts=parts), (2 * parts + 1, parts))
    check_overlap(plan)
    assert plan.num_parts == parts and "by heads" not in str(plan)
    assert len(sent(plan)) == 8


def strategy_by_rows(rank):
    """One row by heads, more in parts, by one compiled model."""
    model = Model("deepspeed").eval()
    shares = [given(rows, positions=4) for rows in (1, 4)]
    wants = [model(x) for x in shares]
    weft.compile(model, "ulysses", fallback="error", watchdog_s=WATCHDOG_S)
    for _ in range(2):
        for x, want in zip(shares, wants, strict=True):
            torch.testing.assert_close(model(x), want)
    check_clean(model)
    assert sorted(plan.num_parts for plan in weft.plans(model)) == [1, 2]


def experts(rank):
    """Their all_to_all in parts; of one row they are left whole, with the reason."""
    sizes = Sizes(num_layers=2, hidden=64, wide=48, head=16)
    for rows, parts in ((4, 2), (1, 1)):
        torch._dynamo.reset()
        model = MoE(sizes, rank=rank, num_ranks=2).eval()
        x = inputs(model, rows, 3, 64, rank=rank)
        wanted = model(x)
        weft.compile(model, "ulysses", fallback="error", watchdog_s=WATCHDOG_S)
        for _ in range(2):
            torch.testing.assert_close(model(x), wanted, rtol=1e-5, atol=1e-5)
        check_clean(model)
        (plan,) = weft.plans(model)
        assert plan.num_parts == parts, str(plan)


def unlike_groups(rank):
    """Ranks that cut otherwise are told so, before anything is sent."""
    model = Model("xdit").eval()
    rewrites = [weft.chunk(TALK, 2 + rank, dim="heads")]
    weft.compile(model, "sequential", rewrites=rewrites, watchdog_s=WATCHDOG_S)
    with pytest.raises(PlanError, match="ranks"):
        model(given(1))


def equal_digests(rank):
    plan = in_groups(rank, "xdit")
    digests = [None] * dist.get_world_size()
    dist.all_gather_object(digests, plan.digest)
    assert len(set(digests)) == 1


def of(check, *how, **more):
    """A case: what is checked, and the model that it is checked on."""
    return functools.partial(run, check=check, how=how, more=more)


def run(rank, check, how, more):
    check(rank, *how, **more)


TWO = {
    "xdit": of(in_groups, "xdit"),
    "xdit rows by hand": of(in_groups, "xdit", by_hand, rows=3),
    "deepspeed uneven": of(in_groups, "deepspeed", pieces=3),
    "deepspeed in parts": of(in_groups, "deepspeed", rows=4, strategy="overlap"),
    "diffusers einsum": of(in_groups, "diffusers", by_einsum, rows=2),
    "unflat": of(in_groups, "unflat", jitter=True),
    "stacked": of(in_groups, "deepspeed", stacked=True, count=8),
    "grouped queries": of(in_groups, "diffusers", flash, keys=4),
    "repeated keys": of(in_groups, "xdit", repeated, keys=4),
    "key for all": of(in_groups, "deepspeed", keys=2, count=12),
    "bias and positions": of(in_groups, "deepspeed", by_hand, bias=True, turned=True),
    "strategy xdit": of(strategy_by_heads, "xdit"),
    "strategy deepspeed": of(strategy_by_heads, "deepspeed", groups=3),
    "strategy parts": of(strategy_in_parts, "deepspeed"),
    "strategy parts of xdit": of(strategy_in_parts, "xdit", by_hand, parts=3),
    "strategy by rows": strategy_by_rows,
    "experts": experts,
    "equal digests": equal_digests,
    "unlike groups": unlike_groups,
}
FOUR = {
    "xdit": of(in_groups, "xdit", rows=2),
    "deepspeed by hand": of(in_groups, "deepspeed", by_hand),
    "grouped queries": of(in_groups, "diffusers", flash, heads=16, head=3, keys=8),
    "strategy": of(strategy_by_heads, "deepspeed"),
    "strategy parts": of(strategy_in_parts, "diffusers"),
}


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    return run_once(tmp_path_factory, __name__, lambda folder: TWO)


@pytest.fixture(scope="module")
def results_of_four(tmp_path_factory):
    return run_once(tmp_path_factory, f"{__name__} four", lambda folder: FOUR, size=4)


@pytest.mark.parametrize("name", TWO)
def test_two_ranks(results, name):
    assert results[name] == "", results[name]


@pytest.mark.parametrize("name", FOUR)
def test_four_ranks(results_of_four, name):
    assert results_of_four[name] == "", results_of_four[name]

"""Declared kernels on two gloo ranks: two phases in flight, errors on every rank, no hang."""

from __future__ import annotations

import functools

import pytest
import torch
import torch.distributed as dist
from ranks import check_clean, check_overlap, run_once
from torch.distributed import _functional_collectives as funcol
from torch.nn import functional as F

import torchweft as weft
from torchweft.errors import PlanError, RunError

WIDE, WATCHDOG_S = 16, 8
reduce_scatter = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)
all_gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
X = torch.arange(8 * 3.0 * WIDE).reshape(8, 3, WIDE).sin()


class Block(torch.nn.Module):
    """A tensor-parallel layer, its residual and its norm."""

    def __init__(self, in_place):
        super().__init__()
        self.linear = torch.nn.Linear(WIDE, WIDE, bias=False)
        self.scale = torch.nn.Parameter(torch.randn(WIDE))
        self.in_place = in_place

    def forward(self, x, h):
        y = self.linear(x).tanh()
        if self.in_place:
            dist.all_reduce(y)
        else:
            y = funcol.all_reduce(y, "sum", dist.group.WORLD)
        with weft.mark("norm"):
            h = h + y
            x = F.rms_norm(h, (WIDE,), self.scale)
        return x, h


class Model(torch.nn.Module):
    def __init__(self, in_place=True):
        super().__init__()
        self.blocks = torch.nn.ModuleList(Block(in_place) for _ in range(2))

    def forward(self, x):
        x, h = x * 1, x
        for block in self.blocks:
            x, h = block(x, h)
        return x + h


def start(y, h, scale, *, group):
    """Everybody's sum of the tokens of this rank."""
    tokens = y.flatten(0, 1)
    mine = tokens.new_empty(tokens.shape[0] // group.size(), WIDE)
    work = reduce_scatter(mine, tokens, group=group, async_op=True)
    return work, mine, tokens, h, scale


def finish(flight, *, group):
    """The norm of these tokens, and those of all ranks."""
    work, mine, _, h, scale = flight
    work.wait()
    mine = mine + h.flatten(0, 1).chunk(group.size())[group.rank()]
    both = torch.cat([mine, F.rms_norm(mine, (WIDE,), scale)], -1)
    whole = both.new_empty(both.shape[0] * group.size(), 2 * WIDE)
    all_gather(whole, both, group=group)
    added, normed = whole.split(WIDE, -1)
    return added.reshape(h.shape), normed.reshape(h.shape)


TALKS = [("reduce_scatter", "issue"), ("all_gather", "complete")]


def fused(begin=start, end=finish, talks=TALKS):
    return weft.kernel(issue=begin, complete=end, talks=talks, name="fused")


def replacing(kernel, parts=2):
    def by_kernel(s):
        if parts > 1:
            s.split(parts)
        while ready := s.ready():
            for op, part in ready:
                if op.collective is None:
                    s.run(op, part)
                else:
                    norm = s.graph.ops[s.graph.ops.index(op) + 1]
                    s.run((op, norm), part, replace=kernel)
        if parts > 1:
            s.merge()

    return by_kernel


def woven(kernel, in_place=True, **options):
    torch.manual_seed(3)
    model = Model(in_place).eval()
    strategy = replacing(kernel, options.pop("parts", 2))
    options = {"fallback": "error", "watchdog_s": WATCHDOG_S, **options}
    return weft.compile(model, strategy, **options)


def equals_eager(rank, *, in_place, parts, jitter=False):
    model = woven(fused(), in_place, parts=parts, jitter=jitter)
    wanted = Model(in_place)
    wanted.load_state_dict(model.state_dict())
    wanted = wanted.eval()(X)
    for rows in (8, 4 if parts < 4 else 8, 8, 8):
        torch.testing.assert_close(model(X[:rows]), wanted[:rows])
    plan = weft.plans(model)[0]
    assert "kernel fused phases 2 talks reduce_scatter@issue,all_gather@complete" in str(plan)
    if parts > 1:
        check_overlap(plan)
    check_clean(model)


def by_tokenweave(rank, *, in_place):
    """The strategy puts the kernel in the place of each all_reduce and its norm."""
    torch.manual_seed(3)
    model = Model(in_place).eval()
    wanted = model(X)
    options = {"fallback": "error", "watchdog_s": WATCHDOG_S, "kernels": {"fused": fused()}}
    weft.compile(model, weft.tokenweave(kernel="fused"), **options)
    for _ in range(2):
        torch.testing.assert_close(model(X), wanted)
    plan = weft.plans(model)[0]
    assert sum(step.by == "fused" for step in plan.steps) == 2 * 2 * 2, str(plan)
    check_overlap(plan)
    check_clean(model)


def is_in_flight_beside_compute(rank):
    """What was seen of a call: the kernel's flight of part 0 spans a run of part 1."""
    model = woven(fused())
    trace = weft.trace(model, X)
    flights = [s for s in trace.spans if s.kind == "transfer" and s.parts == (0, 1)]
    runs = [s for s in trace.spans if s.kind == "run" and s.parts == (1, 2)]
    assert len(flights) == 2 and runs
    assert any(f.start_s <= r.start_s and r.end_s <= f.end_s for f in flights for r in runs)


def is_compared_with_its_ops(rank):
    def wrong(flight, *, group):
        h, x = finish(flight, group=group)
        return h, x + 1

    torch.manual_seed(3)
    model = Model().eval()
    assert weft.check(model, X, strategy=replacing(fused()), tolerance=1e-4)
    verdict = weft.check(model, X, strategy=replacing(fused(end=wrong)), tolerance=1e-4)
    assert not verdict and "kernel 'fused' in place of" in str(verdict), verdict


def unlike_kernels(rank):
    """Refused before the first collective; the group stays, and the next call is right."""

    def other(flight, *, group):
        return finish(flight, group=group)

    pairs = [
        (fused(), fused(end=other)),
        (fused(), weft.kernel(lambda *r, group: r, talks=["all_reduce"])),
    ]
    for pair in pairs:
        with pytest.raises(PlanError, match="do not plan the same collectives"):
            woven(pair[rank])(X)
    equals_eager(rank, in_place=True, parts=2)


def broken(*_, **__):
    raise ValueError("no such tile")


def raises_on_one(rank, *, where):
    """An error of ours on both ranks; no other model has to make a new group."""
    other = woven(fused())
    wanted = other(X)
    mine = {"begin": broken} if where == "issue" else {"end": broken}
    bad = fused(**mine) if rank == 1 else fused()
    torch.manual_seed(3)
    with unchecked_names():
        model = woven(bad)
        with pytest.raises(RunError) as told:
            model(X)
    text = str(told.value)
    assert "no such tile" in text and "kernel 'fused'" in text, text
    assert ("rank 1 raised" in text) == (rank == 0), text
    assert told.value.rule == "kernel" and "lane 'compute' stood at" in text, text
    for _ in range(3):
        assert torch.equal(other(X), wanted)


class unchecked_names:
    """Ranks take all kernels for equal: what is left of a kernel that differs by its input."""

    def __enter__(self):
        self.patch = pytest.MonkeyPatch()
        self.patch.setattr("torchweft.ranks.talk.stable_name", lambda thing: "same")

    def __exit__(self, *_):
        self.patch.undo()


def raises_on_both(rank):
    model = woven(fused(end=broken))
    for _ in range(2):
        with pytest.raises(RunError, match="raised ValueError: no such tile"):
            model(X)
    equals_eager(rank, in_place=False, parts=2)


def gives_what_is_wrong(rank):
    def thin(flight, *, group):
        h, x = finish(flight, group=group)
        return h[..., :1], x

    with pytest.raises(RunError, match=r"gave float32\[4, 3, 1\] for 'h'; expected float32"):
        woven(fused(end=thin))(X)
    equals_eager(rank, in_place=True, parts=2)


def says_what_it_did_not_declare(rank):
    """It is stopped before it is said, on every rank."""
    cases = {
        "says all_gather; it does not declare that": (finish, TALKS[:1], {"group": None}),
        "says all_gather; the next that it declares is all_reduce": (
            finish, [TALKS[0], ("all_reduce", "complete")], {},
        ),
    }  # fmt: skip
    for why, (end, talks, options) in cases.items():
        given = functools.partial(end, group=dist.group.WORLD) if options else end
        with pytest.raises(RunError, match=why):
            woven(fused(end=given, talks=talks))(X)
    said = [*TALKS, ("barrier", "complete")]
    with pytest.raises(RunError, match="declares barrier at complete, and did not say it"):
        woven(fused(talks=said))(X)
    equals_eager(rank, in_place=True, parts=2)


def says_it_to_others(rank):
    def elsewhere(*reads, group):
        return start(*reads, group=dist.group.WORLD)

    with pytest.raises(RunError, match="says reduce_scatter on another group"):
        woven(fused(begin=elsewhere))(X)
    equals_eager(rank, in_place=True, parts=2)


def plain_function_that_talks(rank):
    """It stands for no collective, so nobody has declared anything; it is noticed all the same."""

    def norm(h, y, scale):
        h = h + y
        dist.all_reduce(h)
        return h, F.rms_norm(h, (WIDE,), scale)

    def by_kernel(s):
        while ready := s.ready():
            for op, part in ready:
                s.run(op, part, replace=norm if op.mark == "norm" else None)

    model = weft.compile(Model().eval(), by_kernel, fallback="error", watchdog_s=WATCHDOG_S)
    with pytest.raises(RunError, match=r"kernel 'norm'.*says all_reduce; it does not declare"):
        model(X)
    equals_eager(rank, in_place=True, parts=2)


def one_phase(rank):
    @weft.kernel(talks=["all_reduce"])
    def summed(y, h, scale, *, group):
        y = y.clone()
        dist.all_reduce(y, group=group)
        return h + y, F.rms_norm(h + y, (WIDE,), scale)

    model = woven(summed)
    wanted = Model()
    wanted.load_state_dict(model.state_dict())
    torch.testing.assert_close(model(X), wanted.eval()(X))


CASES = {
    "equals eager": functools.partial(equals_eager, in_place=True, parts=2),
    "functional": functools.partial(equals_eager, in_place=False, parts=4),
    "tokenweave": functools.partial(by_tokenweave, in_place=True),
    "tokenweave functional": functools.partial(by_tokenweave, in_place=False),
    "whole": functools.partial(equals_eager, in_place=True, parts=1),
    "jitter": functools.partial(equals_eager, in_place=True, parts=2, jitter=True),
    "raises in its issue": functools.partial(raises_on_one, where="issue"),
    "raises in its complete": functools.partial(raises_on_one, where="complete"),
    **{
        case.__name__.replace("_", " "): case
        for case in (
            is_in_flight_beside_compute, is_compared_with_its_ops, unlike_kernels, raises_on_both,
            gives_what_is_wrong, says_what_it_did_not_declare, says_it_to_others,
            plain_function_that_talks, one_phase,
        )
    },
}  # fmt: skip


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    return run_once(tmp_path_factory, __name__, lambda folder: CASES)


@pytest.mark.parametrize("name", CASES)
def test_case(results, name):
    assert results[name] == "", results[name]

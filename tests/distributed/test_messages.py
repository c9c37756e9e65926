"""Messages between two gloo ranks: captured, in two phases, in parts, verified and simulated."""

from __future__ import annotations

import functools
import warnings

import pytest
import torch
import torch.distributed as dist
from ranks import check_clean, check_phases, run_once, talks

import torchweft as weft
from torchweft.plan.context import Context
from torchweft.plan.machine import cpu
from torchweft.plan.simulator import simulate_ranks
from torchweft.plan.verify import verify_ranks


def halves(x):
    """A model cut in two: rank 0 sends what rank 1 goes on with."""
    weight = torch.linspace(-1, 1, 16).view(4, 4)
    if dist.get_rank() == 0:
        y = torch.relu(x @ weight)
        dist.isend(y, 1).wait()
        return y * 1
    buffer = torch.empty_like(x)
    dist.irecv(buffer, 0).wait()
    return torch.tanh(buffer @ weight.T) + x


def halves_of_a_new_buffer(x):
    """The receiver is given nothing but a number of rows."""
    if dist.get_rank() == 0:
        dist.isend(x * 3, 1).wait()
        return x + 1
    buffer = torch.empty(x.shape[0], 4)
    dist.irecv(buffer, 0).wait()
    return buffer * 2


def exchange(x):
    """Both send, then both receive; the waits come late."""
    peer = 1 - dist.get_rank()
    y, buffer = x * 2, torch.empty_like(x)
    sent = dist.isend(y, peer)
    received = dist.irecv(buffer, peer)
    z = torch.sin(x) * 3
    received.wait()
    sent.wait()
    return buffer + z


def batch(x):
    peer = 1 - dist.get_rank()
    y, buffer = x * 2, torch.empty_like(x)
    messages = [dist.P2POp(dist.isend, y, peer), dist.P2POp(dist.irecv, buffer, peer)]
    for request in dist.batch_isend_irecv(messages):
        request.wait()
    return buffer - x


def two_in_order(x):
    """Two messages one way, one back: what comes first is the first."""
    one, two = torch.empty_like(x), torch.empty_like(x)
    if dist.get_rank() == 0:
        dist.isend(x * 2, 1).wait()
        dist.isend(x * 5, 1).wait()
        dist.irecv(one, 1).wait()
        return one + x
    dist.irecv(one, 0).wait()
    dist.irecv(two, 0).wait()
    dist.isend(one - two, 0).wait()
    return one + two * 10


def into_a_filled_buffer(x):
    """The buffer was filled before, and is read before and behind."""
    peer = 1 - dist.get_rank()
    buffer = x * 7
    before = buffer * 1
    sent = dist.isend(x * 2, peer)  # gloo ends it when the other rank receives
    dist.irecv(buffer, peer).wait()
    sent.wait()
    return before + buffer


def wide_rows(x):
    """What is sent has gaps, and other rows than what it is made of."""
    peer = 1 - dist.get_rank()
    y = torch.cat([x, x * 2], 1).view(-1, 2, 4).transpose(1, 2)
    buffer = torch.empty(y.shape)
    sent = dist.isend(y.contiguous(), peer)
    dist.irecv(buffer, peer).wait()
    sent.wait()
    return buffer.flatten(1)


FORMS = {
    each.__name__: each
    for each in (
        halves, halves_of_a_new_buffer, exchange, batch, two_in_order, into_a_filled_buffer,
        wide_rows,
    )
}  # fmt: skip


def check_form(rank, *, name, parts):
    """Each part is a message of its own; the ranks' plans are safe together; equal to eager."""
    function = FORMS[name]
    x = torch.arange(28.0).view(7, 4) / 8 + rank
    want = function(x.clone())
    model = weft.compile(function, weft.overlap(parts=parts), fallback="error", watchdog_s=20)
    for _ in range(2):
        mine = x.clone()
        assert torch.equal(model(mine), want)
        assert torch.equal(mine, x), "the input was changed"
    check_clean(model)
    assert weft.report(model).breaks == ()
    assert {rows for _, rows in talks(model)} == {"row-wise"}, weft.report(model)
    plan = weft.plans(model)[0]
    assert plan.num_parts == parts
    check_phases(plan)
    num_talks = len(talks(model))
    assert sum(step.kind == "issue" for step in plan.steps) == num_talks * parts
    told = [None, None]
    dist.all_gather_object(told, (str(plan), plan.graph))
    plans = verify_ranks([type(plan).parse(text).bind(graph) for text, graph in told])
    traces = simulate_ranks(plans, Context(7), cpu())
    if name == "halves" and parts > 1:  # rank 1 computes part 0 while rank 0 computes part 1
        starts = [
            min(
                s.start_s
                for s in trace.spans
                if s.kind == "transfer" and s.parts == (part, part + 1)
            )
            for trace in traces
            for part in range(2)
        ]
        assert starts[:2] == pytest.approx(starts[2:])
        assert starts[0] < starts[1]


def check_callers_buffer(rank):
    """What comes in is in the caller's own tensor."""

    def take(x, buffer):
        peer = 1 - dist.get_rank()
        sent = dist.isend(x * 2, peer)
        dist.irecv(buffer, peer).wait()
        sent.wait()
        return buffer + x

    x, buffer = torch.arange(24.0).view(6, 4) + rank, torch.zeros(6, 4)
    want = take(x, buffer)
    model, mine = weft.compile(take, weft.overlap(parts=2), watchdog_s=20), torch.zeros(6, 4)
    assert torch.equal(model(x, mine), want)
    assert torch.equal(mine, buffer)
    check_clean(model)


def check_group(rank):
    """A peer is told by its number in the world, also where the group counts otherwise."""
    group = dist.new_group([0, 1])

    def exchange_in_group(x):
        peer, buffer = 1 - dist.get_rank(), torch.empty_like(x)
        sent = dist.isend(x * 2, peer, group=group)
        dist.irecv(buffer, peer, group=group).wait()
        sent.wait()
        return buffer + 1

    x = torch.arange(24.0).view(6, 4) + rank
    want = exchange_in_group(x)
    model = weft.compile(exchange_in_group, weft.overlap(parts=2), watchdog_s=20)
    assert torch.equal(model(x), want)
    check_clean(model)


def check_unlike_cuts(rank):
    """Ranks that cut a message unlike are told before the first one is sent, and can go on."""
    x = torch.arange(24.0).view(6, 4) + rank
    model = weft.compile(halves, weft.overlap(parts=2 + rank), fallback="error", watchdog_s=20)
    with pytest.raises(weft.WeftError, match="do not plan the same"):
        model(x)
    want = halves(x)
    model = weft.compile(halves, weft.overlap(parts=2), fallback="error", watchdog_s=20)
    assert torch.equal(model(x), want)


def check_breaks(rank):
    """`dist.send` and `dist.recv`, and messages under gradients, are breaks and counted."""

    def blocking(x):
        y = x * 2
        if dist.get_rank() == 0:
            dist.send(y, 1)
            return y + 1
        buffer = torch.empty_like(x)
        dist.recv(buffer, 0)
        return buffer + 1

    x = torch.arange(24.0).view(6, 4) + rank
    warnings.filterwarnings("ignore", "Dynamo does not know how to trace")
    for function, live, code in ((blocking, False, "dist."), (exchange, True, "dist.isend")):
        with torch.set_grad_enabled(live):
            want = function(x)
            torch._dynamo.reset()
            model = weft.compile(function, weft.overlap(parts=2), watchdog_s=20)
            assert torch.equal(model(x), want)
            assert any(code in text for text in weft.report(model).breaks), weft.report(model)


CASES = {
    f"{name} {parts}": functools.partial(check_form, name=name, parts=parts)
    for name in FORMS
    for parts in (1, 2, 3)
} | {
    "the caller's buffer": check_callers_buffer,
    "another group": check_group,
    "breaks": check_breaks,
    "unlike cuts": check_unlike_cuts,
}


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    return run_once(tmp_path_factory, __name__, lambda folder: CASES)


@pytest.mark.parametrize("name", CASES)
def test_messages(results, name):
    assert results[name] == ""

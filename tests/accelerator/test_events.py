"""The law of events: every wait of a stream program is there for a reason that shows."""

from __future__ import annotations

import random

import pytest
import torch
from device import TestDevice
from double import torch_like
from drawn import ROWS, drawn_call, drawn_graph, drawn_inputs, drawn_plan, without

from torchweft.errors import RunError
from torchweft.plan.context import Context
from torchweft.plan.lower.lower import lower
from torchweft.plan.machine import accelerator
from torchweft.plan.plan import pairs_of
from torchweft.plan.verify import verify
from torchweft.plan.write.strategy import write
from torchweft.run.accelerator.accelerator import Accelerator, Runtime
from torchweft.run.accelerator.dispatch import dispatch
from torchweft.run.accelerator.streams import write_streams

SEEDS = range(16)


class Player:
    """Runs programs on the test device and tells what came out."""

    def __init__(self):
        self.device = TestDevice(judge=True)
        self.runtime = Runtime(Accelerator(self.device.device, torch_like(self.device)))

    def play(self, program, late):
        """Outputs and changed inputs of one call, with one stream as late as is legal."""
        device = self.device
        device.late = None
        device.synchronize()
        device.late, device.races = late, []
        with device, torch.no_grad():
            given = [device.put(tensor) for tensor in drawn_inputs()]
            try:
                found = drawn_call(self.runtime, program, given)
                return [tensor.cpu() for tensor in (*found, *given)]
            except (RunError, IndexError):
                return []

    def is_wrong(self, program, wanted, late):
        found = self.play(program, late)
        return not found or not all(map(torch.equal, found, wanted))

    def runtime_streams(self):
        """The streams of the one loan that all calls have taken in turn."""
        ((loan,),) = self.runtime.device.idle.values()
        return loan.streams

    def streams(self):
        """Those whose being late could matter: all that programs have used so far."""
        return list(self.device.streams)


def by_hand(graph, bodies):
    held = dict(zip(graph.inputs, drawn_inputs(), strict=True))
    for op in graph.ops:
        made = bodies[op.name](*(held[name] for name in op.reads))
        held.update(zip(op.makes, made, strict=True))
    return [held[name] for name in (*graph.outputs, *graph.inputs)]


def check_plan(seed):
    """How many waits a plan's dispatch has, and how many of them are missed when taken out."""
    graph, bodies = drawn_graph(seed)
    plan = drawn_plan(graph, seed)
    whole, player = dispatch(plan), Player()
    try:
        program = write_streams(whole, bodies)
        wanted = player.play(program, None)
        torch.testing.assert_close(wanted, by_hand(graph, bodies), rtol=1e-5, atol=1e-5)
        for late in player.streams():
            assert not player.is_wrong(program, wanted, late), f"wrong with {late.name} late"
            assert not player.device.races
        waits = [(at, wait) for at, item in enumerate(whole.items) for wait in item.waits]
        missed = 0
        for at, wait in waits:
            broken = write_streams(without(whole, at, wait), bodies)
            # The worst legal order is one in which some stream is as late as the rest allows:
            # that of the item waited for, or one whose use of bytes outlives them.
            owner = [player.device.default, *player.runtime_streams()][whole.items[wait].stream]
            wrong = player.is_wrong(broken, wanted, owner)
            races = bool(player.device.races)
            wrong = wrong or any(player.is_wrong(broken, wanted, s) for s in player.streams())
            missed += wrong
            assert wrong == races, (
                f"seed {seed}: without the wait of item {at} for item {wait}, results are "
                f"{'wrong' if wrong else 'right'}, but clocks say {races}\n{plan}"
            )
        return len(waits), missed
    finally:
        player.device.close()


def test_without_any_one_event_that_is_not_implied_the_result_is_wrong():
    counts = [check_plan(seed) for seed in SEEDS]
    num_waits, num_missed = map(sum, zip(*counts, strict=True))
    assert num_waits >= 5 * len(SEEDS), "the plans have many events"
    assert num_missed >= 0.9 * num_waits, "hardly any event is implied by others"


@pytest.mark.parametrize("seed", range(12))
def test_streams_keep_the_edges_of_a_plan(seed):
    """By the clocks of its dispatch every step is behind the ends of all that it comes after."""
    graph, _ = drawn_graph(seed)

    def edged(s):
        rng, done = random.Random(seed), []
        s.split(2)
        while ready := s.ready():
            op, part = rng.choice(ready)
            after = rng.sample(done, min(2, len(done)))
            s.run(op, part, lane=rng.choice(s.lanes(op)), after=after)
            done.append((op, part))
        s.merge()

    machine = accelerator(3, network_priority=-1)
    plan = verify(lower(write(edged, graph, Context(batch=ROWS), machine)))
    given = dispatch(plan)
    ended = {}  # by op and part: the item at whose end it is over
    for number, item in enumerate(given.items):
        step = plan.steps[item.step] if item.step is not None else None
        if step is None or item.opens or step.kind not in ("run", "issue", "complete"):
            continue
        for name, parts in step.after:
            for pair in pairs_of(graph, plan.num_parts, (name,), parts):
                stream = given.items[ended[pair]].stream
                assert given.clocks[number].get(stream, -1) >= ended[pair], f"{step}\n{plan}"
        if step.kind != "issue":
            own = pairs_of(graph, plan.num_parts, step.names, step.parts)
            ended |= dict.fromkeys(own, number)

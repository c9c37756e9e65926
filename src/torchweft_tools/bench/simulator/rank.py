"""One rank of the simulator bench: a spec comes in on the command line, lines of JSON go out.

    python -m torchweft_tools.bench.simulator.rank '{"model": "dense", "shapes": {...}, ...}'

A profile of some shapes; then, for these and for others, what each strategy is
simulated to take, and a race of all of them.
"""

from __future__ import annotations

import copy
import math
import sys
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from random import Random
from typing import Any

import torch.distributed as dist

from torchweft import lab
from torchweft.api import compile, session_of
from torchweft.plan.context import Cut
from torchweft.plan.machine import Costs
from torchweft.plan.strategies import overlap, sequential
from torchweft.plan.write.scheduler import Scheduler
from torchweft.plan.write.strategy import Strategy
from torchweft.serve.session import Session, context
from torchweft_tools.bench.measure.messages import say
from torchweft_tools.bench.peers import models
from torchweft_tools.bench.players.auto_rank import SIZES, play
from torchweft_tools.bench.players.overlap_race import sound_race
from torchweft_tools.bench.players.overlap_rank import all_max
from torchweft_tools.profile import measure

NUM_WARM = 3


def _uneven(s: Scheduler) -> None:
    """A small first part, so that the network has something to do soon."""
    s.split(Cut.sizes([1, 3]))
    while ready := s.ready():
        for op, part in ready:
            s.run(op, part)
    s.merge()


WAYS = {
    "sequential": sequential,
    **{f"overlap_{parts}": overlap(parts=parts) for parts in (2, 3, 4, 8)},
    "uneven": Strategy("uneven", _uneven),
}
"""Not profiled: overlap_3 and uneven."""


def contexts(spec: Mapping[str, Any], side: dist.ProcessGroup) -> Iterator[dict[str, Any]]:
    """The result of each context."""
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    sizes = SIZES[spec["size"]]
    make = {"dense": models.Dense, "experts": models.MoE}[spec["model"]]
    plain = make(sizes, rank=rank, num_ranks=num_ranks, seed=spec["seed"]).eval()
    calls = {name: compile(copy.copy(plain), way) for name, way in WAYS.items()}
    subject, order = compile(copy.copy(plain), sequential), Random(spec["seed"])
    shapes = [(kind, shape) for kind, some in spec["shapes"].items() for shape in some]
    link = (
        spec["link"] if lab.is_limited() else lab.LabLink().label
    )  # the one that they really have

    def inputs(shape: list[int]) -> Any:
        rows, positions = shape
        return models.inputs(plain, rows, positions, sizes.hidden, rank=rank)

    profile = measure(subject, [inputs(shape) for shape in spec["shapes"]["profiled"]])
    factors = {
        f"{s.uses} beside {s.beside}": s.factor for s in profile.machine.devices[0].slowdowns
    }
    for done, (kind, shape) in enumerate(shapes, 1):
        if rank == 0:
            say("progress", [done, 1 + len(shapes)])
        x = inputs(shape)
        with context(strategy=sequential):
            predicted_s = {
                name: all_max(predict(session_of(subject), subject, x, way, profile.costs), side)
                for name, way in WAYS.items()
            }
        predicted_s = {name: s for name, s in predicted_s.items() if s < math.inf}  # can be cut
        runs = {name: partial(calls[name], x.clone()) for name in predicted_s}
        runs["sequential_again"] = partial(calls["sequential"], x.clone())
        for run in runs.values():
            for _ in range(NUM_WARM):
                run()
        control = ("sequential", "sequential_again")
        times = sound_race(runs, control, order=order, num_rounds=spec["num_pairs"], group=side)
        facts = {"link": link, "shape": shape, "held_out": kind == "held_out"}
        yield {**facts, "predicted_s": predicted_s, "times": times, "slowdowns": factors}


def predict(session: Session, model: Any, x: Any, way: Strategy, costs: Costs) -> float:
    """Seconds that a call with this input would take by a strategy, as simulated."""
    for piece in session.pieces:
        piece.traced = None  # of another call, perhaps by another graph
    with session.service.collect():  # which graphs run, and with which sizes
        model(x)
    lone = replace(costs, call_s=0.0)
    pieces = [piece for piece in session.pieces if piece.traced is not None]
    return costs.call_s + sum(
        piece.plans.predict(way, piece.traced.context, lone) for piece in pieces if piece.traced
    )


if __name__ == "__main__":
    play(sys.argv[1], contexts)

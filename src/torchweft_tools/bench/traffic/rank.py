"""One rank of the traffic bench: a spec comes in on the command line, lines of JSON go out.

    python -m torchweft_tools.bench.traffic.rank '{"model": "dense", "start": "cold", ...}'

Eager, `weft.compile(model)` and eager again play the stream in chunks, in a random order that is
the same on all ranks. A call's seconds are those of the slower rank; outputs are compared with
eager's after each chunk.
"""

from __future__ import annotations

import copy
import json
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from random import Random
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from torchweft import lab
from torchweft.api import compile, report, session_of, warmup
from torchweft.serve.auto import kind_of
from torchweft.serve.trials import name_of
from torchweft_tools.bench.measure.messages import leaving, say
from torchweft_tools.bench.peers import models
from torchweft_tools.bench.players.auto_rank import MAX_DIFF, SIZES
from torchweft_tools.bench.players.overlap_rank import TIMEOUT, all_max, pin, quiet
from torchweft_tools.bench.traffic import MAX_POSITIONS, MAX_ROWS, TrafficCall, stream

PROGRAMS = ("eager", "auto", "eager_again")
Program = Callable[[Tensor], Tensor]


def main(text: str) -> None:
    """Play one stream and print what came out."""
    spec = json.loads(text)
    quiet()
    pin(int(os.environ["RANK"]))
    torch.set_num_threads(1)
    with leaving():
        dist.init_process_group("gloo", timeout=TIMEOUT)
        side = dist.new_group(backend="gloo", timeout=TIMEOUT)
        with torch.no_grad():
            result = measure(spec, side)
        if dist.get_rank() == 0:
            say("result", result)
        dist.barrier(group=side)


def measure(spec: Mapping[str, Any], side: dist.ProcessGroup) -> dict[str, Any]:
    """The seconds of all calls by each program, and what was chosen for them in the end."""
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    sizes = SIZES[spec["size"]]
    make = {"dense": models.Dense, "experts": models.MoE}[spec["model"]]
    plain = make(sizes, rank=rank, num_ranks=num_ranks, seed=spec["seed"]).eval()
    auto = compile(copy.copy(plain))
    programs: dict[str, Program] = {"eager": plain, "auto": auto, "eager_again": plain}
    source = models.inputs(plain, MAX_ROWS, MAX_POSITIONS, sizes.hidden, rank=rank)
    calls = stream(spec["num_calls"], spec["seed"])
    plain(tensor_of(source, calls[0]))  # the ranks connect, whoever calls first
    kinds = [kind_of((tensor_of(source, call),), {}) for call in calls]
    warmup_s = 0.0
    if spec["start"] == "warmed":
        start = time.perf_counter()
        one_each = list(dict(zip(kinds, calls, strict=True)).values())[: spec["num_warmed"]]
        warmup(auto, [tensor_of(source, call) for call in one_each])
        warmup_s = time.perf_counter() - start
    times, diff = _play(spec, programs, calls, source, side)
    trials = session_of(auto).auto.trials
    ways = {kind: name_of(way) for kind, way in trials.chosen.items()}
    racing = dict.fromkeys(trials.races, "racing")
    return {
        "link": spec["link"] if lab.is_limited() else lab.LabLink().label,
        "calls": calls,
        "times": times,
        "chosen": [ways.get(kind, racing.get(kind, "untried")) for kind in kinds],
        "warmup_s": all_max(warmup_s, side),
        "max_abs_diff": diff,
        "fallbacks": [str(each) for each in report(auto).fallbacks],
    }


def tensor_of(source: Tensor, call: TrafficCall) -> Tensor:
    """The input of a call; a new tensor each time, as an engine would make."""
    return source[: call.rows, : call.positions].clone()


def _play(
    spec: Mapping[str, Any],
    programs: Mapping[str, Program],
    calls: Sequence[TrafficCall],
    source: Tensor,
    side: dist.ProcessGroup,
) -> tuple[dict[str, list[float]], float]:
    """Seconds of each call by each program, and the largest difference from eager."""
    order = Random(spec["seed"])
    times: dict[str, list[float]] = {name: [] for name in PROGRAMS}
    worst = 0.0
    for first in range(0, len(calls), spec["chunk"]):
        chunk = calls[first : first + spec["chunk"]]
        made: dict[str, list[Tensor]] = {}
        for name in order.sample(PROGRAMS, len(PROGRAMS)):
            inputs = [tensor_of(source, call) for call in chunk]
            dist.barrier(group=side)
            made[name] = [_timed(programs[name], x, times[name]) for x in inputs]
        for mine, wanted in zip(made["auto"], made["eager"], strict=True):
            worst = max(worst, ((mine - wanted).abs().max() / wanted.abs().max()).item())
        if dist.get_rank() == 0:
            say("progress", [first + len(chunk), len(calls)])
    worst = all_max(worst, side)
    if not worst <= MAX_DIFF:
        raise AssertionError(f"auto differs by {worst:.3g} of the largest number from eager")
    for own in times.values():
        slower = torch.tensor(own, dtype=torch.float64)
        dist.all_reduce(slower, op=dist.ReduceOp.MAX, group=side)
        own[:] = slower.tolist()
    return times, worst


def _timed(program: Program, x: Tensor, seconds: list[float]) -> Tensor:
    start = time.perf_counter()
    made = program(x)
    seconds.append(time.perf_counter() - start)
    return made


if __name__ == "__main__":
    main(sys.argv[1])

"""One rank of the overlap bench: a spec comes in on the command line, lines of JSON go out.

    python -m torchweft_tools.bench.players.overlap_rank '{"model": "dense", ...}'

1. Every candidate is built, warmed and compared with the sequential output.
2. For each link, a short race of all chooses the finalists; a long race of these gives the times.
3. Copies are counted from outside, by torch's profiler, in one call of each finalist of weft.

Rank 0 reports the progress, and the result of each link.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from math import prod
from random import Random
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._dynamo.utils import calculate_time_spent, counters

from torchweft import lab
from torchweft.api import plans, report, trace
from torchweft_tools.bench.measure.messages import brief, leaving, say
from torchweft_tools.bench.peers import llama, models
from torchweft_tools.bench.players.overlap_candidates import TABLES, Absent, Arena, Candidate
from torchweft_tools.bench.players.overlap_race import Call, Run, calls_of_a_run, race
from torchweft_tools.bench.players.overlap_rows import MAX_DIFF, finalists

NUM_WARM = 3
TIMEOUT = timedelta(minutes=5)
SHAPES = {"prefill": (16, 64), "decode": (32, 1)}
"""Sequences and positions of a batch."""
SIZES: dict[str, dict[str, dict[str, int]]] = {
    "full": {"dense": {"wide": 2048}, "experts": {"wide": 128}, "transformers": {"wide": 2048}},
    "demo": {"dense": {"num_layers": 2, "wide": 2048}},
    "tiny": {
        "dense": {"num_layers": 2, "hidden": 64, "wide": 96, "head": 16},
        "experts": {"num_layers": 2, "hidden": 64, "wide": 16, "head": 16},
        "transformers": {"num_layers": 2, "hidden": 64, "wide": 48, "head": 16},
    },
}


@dataclass
class Field:
    """Who takes part: calls by name, each with an input of its own, and what is known of each."""

    calls: dict[str, Call] = field(default_factory=dict)
    runs: dict[str, Run] = field(default_factory=dict)
    absent: dict[str, str] = field(default_factory=dict)
    diffs: dict[str, float] = field(default_factory=dict)
    set_up_s: dict[str, float] = field(default_factory=dict)
    capture_s: dict[str, float] = field(default_factory=dict)


def main(text: str) -> None:
    """Run one case and print its result."""
    spec = json.loads(text)
    quiet()
    pin(int(os.environ["RANK"]))
    torch.set_num_threads(1)
    torch._dynamo.config.recompile_limit = 64  # one code object serves all layers and candidates
    with leaving():
        dist.init_process_group("gloo", timeout=TIMEOUT)
        side = dist.new_group(backend="gloo", timeout=TIMEOUT)
        with torch.inference_mode():
            for result in measure(spec, side):
                _say("result", result)
        dist.barrier(group=side)


def measure(spec: Mapping[str, Any], side: dist.ProcessGroup) -> Iterator[dict[str, Any]]:
    """The results of the races of one case, link by link."""
    arena = make_arena(spec)
    table = TABLES[spec.get("table", "race")]
    chosen = [each for each in table if spec["names"] is None or each.name in spec["names"]]
    links = spec["links"] if lab.is_limited() else [lab.LabLink().label]
    total = len(chosen) + len(links) * (spec["num_rounds"] + spec["num_pairs"])
    done = 0

    def step() -> None:
        nonlocal done
        done += 1
        _say("progress", [done, total])

    scale, entered = enter(chosen, arena, side, step)
    known: dict[str, Any] = {
        "parts": {each.name: parts_of(each, entered.calls.get(each.name)) for each in table},
        "kinds": {each.name: each.kind for each in table},
        "set_up_s": entered.set_up_s,
        "capture_s": entered.capture_s,
        "diffs": entered.diffs,
        "absent": entered.absent,
        "scale": scale,
    }
    order = Random(spec["seed"])
    for link in links:
        if lab.is_limited():
            lab.set_rate(link)
        yield {
            **known,
            "link": link,
            **_over_link(spec, arena, entered, known["kinds"], side, order, step),
        }


def _over_link(
    spec: Mapping[str, Any],
    arena: Arena,
    entered: Field,
    kinds: Mapping[str, str],
    side: dist.ProcessGroup,
    order: Random,
    step: Callable[[], None],
) -> dict[str, Any]:
    """The races over the link as it is now."""
    num_calls = calls_of_a_run(entered.runs["sequential"], side)
    options: dict[str, Any] = {"num_calls": num_calls, "group": side, "on_round": step}
    compiled = num_graphs()
    first, runs = {}, entered.runs
    if spec["num_rounds"]:
        first = race(runs, order=order, num_rounds=spec["num_rounds"], **options)
        runs = {name: runs[name] for name in finalists(first, kinds)}
    times = race(runs, order=order, num_rounds=spec["num_pairs"], **options)
    late = num_graphs() - compiled
    usual = copied_bytes(runs["sequential"])
    copied = {
        name: copied_bytes(run) - usual
        for name, run in runs.items()
        if kinds[name] in ("peer", "weft")
    }
    timeline = ""
    if spec.get("timeline"):  # every rank takes part in the call that is traced
        best = min((n for n in times if kinds[n] == "weft"), key=lambda n: sum(times[n]))
        timeline = trace(entered.calls[best], arena.x).to_text()
    return {
        "timeline": timeline,
        "times": times,
        "first": first,
        "fallbacks": {
            name: reasons for name, call in entered.calls.items() if (reasons := fallbacks_of(call))
        },
        "copied_bytes": copied,
        "num_calls": num_calls,
        "late_compiles": late,
    }


def make_arena(spec: Mapping[str, Any]) -> Arena:
    """The model of a case on this rank, and its input."""
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    sizes = models.Sizes(**SIZES[spec["size"]][spec["model"]])
    if spec["model"] == "transformers":
        ids = llama.ids(*SHAPES[spec["phase"]])
        model = llama.llama(sizes, seed=spec["seed"])
        return Arena(spec["model"], spec["phase"], model, ids, sizes)
    make = {"dense": models.Dense, "experts": models.MoE}[spec["model"]]
    raced = make(sizes, rank=rank, num_ranks=num_ranks, seed=spec["seed"]).eval()
    x = models.inputs(raced, *SHAPES[spec["phase"]], sizes.hidden, rank=rank)
    return Arena(spec["model"], spec["phase"], raced, x, sizes)


def enter(
    chosen: list[Candidate], arena: Arena, side: dist.ProcessGroup, step: Callable[[], None]
) -> tuple[float, Field]:
    """Build, warm and compare every candidate; the scale of the output, and the field."""
    entered = Field()
    wanted = arena.model(arena.x)
    torch.compile(torch.sin, backend="eager")(
        arena.x
    )  # so that no candidate pays for loading Dynamo
    scale = wanted.abs().max().item()
    for candidate in chosen:
        own = arena.x.clone()
        try:
            start, captured = time.perf_counter(), capture_seconds()
            call, reason = _warm(candidate, arena, own, side)
            entered.set_up_s[candidate.name] = time.perf_counter() - start
            entered.capture_s[candidate.name] = capture_seconds() - captured
            if call is not None and candidate.comparable:
                diff = all_max((call(own) - wanted).abs().max().item(), side)
                entered.diffs[candidate.name] = diff
                if not diff <= MAX_DIFF * scale:
                    reason = f"its output differs by {diff:.3g} from the sequential one"
        finally:
            step()
        if reason:
            entered.absent[candidate.name] = reason
        elif call is not None:
            entered.calls[candidate.name] = call
            entered.runs[candidate.name] = partial(call, own)
    return scale, entered


def _warm(
    candidate: Candidate, arena: Arena, own: Tensor, side: dist.ProcessGroup
) -> tuple[Call | None, str]:
    """The call after its first calls, or why there is none; the same on all ranks."""
    call, reason = None, ""
    try:
        call = candidate.build(arena)
    except Absent as absent:
        reason = str(absent)
    except Exception as error:
        reason = brief(error)
    if all_max(float(bool(reason)), side):
        return None, reason or "it could not be built on another rank"
    assert call is not None, "a candidate without a call has a reason"
    try:
        for _ in range(NUM_WARM):
            call(own)
    except Exception as error:  # compilers fail in the first call, and on every rank alike
        reason = brief(error)
    if all_max(float(bool(reason)), side):
        return None, reason or "it failed on another rank"
    return call, ""


def num_graphs() -> int:
    """How many graphs Dynamo has compiled; none may be added during a race."""
    return int(counters["stats"]["unique_graphs"])


def capture_seconds() -> float:
    """Seconds that Dynamo and its backends took so far; bodies are compiled in a call."""
    return calculate_time_spent().get("entire_frame_compile", 0.0)


def parts_of(candidate: Candidate, call: Call | None) -> int:
    """How many parts a call really runs in: as its plans say, or one if it fell back from them."""
    if call is None or candidate.kind not in ("weft", "control"):
        return candidate.parts
    if fallbacks_of(call):
        return 1
    return max((plan.num_parts for plan in plans(getattr(call, "model", call))), default=1)


def fallbacks_of(call: Call) -> list[str]:
    """Why calls of weft did not run as their strategy says; empty for all others."""
    call = getattr(call, "model", call)
    if getattr(getattr(call, "_compiled_call_impl", None), "session", None) is None:
        return []
    return [str(each) for each in report(call).fallbacks]


def copied_bytes(run: Run) -> int:
    """Bytes that one call copies, on all threads.

    Every copy ends in copy_ (clone, contiguous, to, reshape) or in cat (stack).
    """
    everywhere = torch._C._profiler._ExperimentalConfig(profile_all_threads=True)
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU],
        record_shapes=True,
        experimental_config=everywhere,
    ) as profile:
        size = run().element_size()
    num_bytes = 0
    for event in profile.events() or ():
        if event.name == "aten::copy_":
            num_bytes += size * prod(event.input_shapes[0])
        elif event.name == "aten::cat":
            num_bytes += size * sum(map(prod, event.input_shapes[0]))
    return num_bytes


def all_max(value: float, side: dist.ProcessGroup) -> float:
    """The largest of all ranks' values; NaN counts as infinite."""
    largest = torch.tensor(value if value == value else float("inf"), dtype=torch.float64)
    dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=side)
    return largest.item()


def pin(rank: int) -> None:
    """One core a rank, gloo's threads with it: where the sequential baseline is healthiest.

    Only Linux can; elsewhere ranks run where the system puts them.
    """
    if sys.platform != "linux":
        return
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[rank % len(cores)]})


def quiet() -> None:
    """Silence the libraries of the peers; what matters is in `absent`."""
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)


def _say(kind: str, value: Any) -> None:
    if dist.get_rank() == 0:
        say(kind, value)


if __name__ == "__main__":
    main(sys.argv[1])

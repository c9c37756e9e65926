"""One rank of the auto bench: a spec comes in on the command line, lines of JSON go out.

    python -m torchweft_tools.bench.players.auto_rank '{"model": "dense", "shapes": [[4, 64]], ...}'

For each shape: `weft.compile(model)` warms up, that is, makes its choice; then it races
eager, eager again, stock torch.compile, and every strategy that it could have been given.
"""

from __future__ import annotations

import copy
import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from random import Random
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from torchweft import lab
from torchweft.api import compile, session_of, trace, warmup
from torchweft.capture.marks import mark_op
from torchweft.plan.strategies import branches, overlap, sequential
from torchweft.serve.auto import kind_of
from torchweft.serve.trials import COMPILED, Choice, name_of
from torchweft_tools.bench.measure.messages import leaving, say
from torchweft_tools.bench.peers import models, ranker, stock
from torchweft_tools.bench.players.overlap_race import sound_race
from torchweft_tools.bench.players.overlap_rank import TIMEOUT, all_max, pin, quiet

NUM_WARM, NUM_TRACED = 3, 9
SIZES = {
    "full": models.Sizes(num_layers=4, hidden=512, wide=1024),
    "tiny": models.Sizes(num_layers=2, hidden=64, wide=96, head=16),
}
MAKERS = {"dense": models.Dense, "experts": models.MoE, "ranker": ranker.StoreRanker}
RULES = {"ranker": [mark_op("read_rows", "read_rows", uses="io", rows="row-wise")]}
FIXED = {
    "sequential": (sequential, "eager"),
    "branches": (branches, "eager"),
    **{f"overlap_{parts}": (overlap(parts=parts), "eager") for parts in (2, 4, 8)},
    **{f"overlap_{parts}_onednn": (overlap(parts=parts), "onednn") for parts in (2, 4)},
}
MAX_DIFF = 1e-3
Contexts = Callable[[Mapping[str, Any], dist.ProcessGroup], Iterator[dict[str, Any]]]
"""The results of all contexts of a spec."""


def main(text: str) -> None:
    """Run the contexts of one model and print their results."""
    play(text, measure)


def play(text: str, contexts: Contexts) -> None:
    """Run the contexts of a spec on this rank; rank 0 prints what comes out."""
    spec = json.loads(text)
    quiet()
    if os.environ["WORLD_SIZE"] == "1":  # all cores are its own
        torch.set_num_threads(os.cpu_count() or 1)
    else:
        pin(int(os.environ["RANK"]))
        torch.set_num_threads(1)
    torch._dynamo.config.recompile_limit = 64
    with leaving():
        dist.init_process_group("gloo", timeout=TIMEOUT)
        side = dist.new_group(backend="gloo", timeout=TIMEOUT)
        with torch.no_grad():
            for result in contexts(spec, side):
                if dist.get_rank() == 0:
                    say("result", result)
        dist.barrier(group=side)


def measure(spec: Mapping[str, Any], side: dist.ProcessGroup) -> Iterator[dict[str, Any]]:
    """The result of each context."""
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    sizes = SIZES[spec["size"]]
    make, rules = MAKERS[spec["model"]], RULES.get(spec["model"], [])
    plain = make(sizes, rank=rank, num_ranks=num_ranks, seed=spec["seed"]).eval()
    calls: dict[str, Any] = {"eager": plain, "eager_again": plain, "inductor": stock.stock(plain)}
    for name, (strategy, inner) in FIXED.items():
        calls[name] = compile(copy.copy(plain), strategy, inner=inner, rules=rules)
    calls["auto"] = compile(copy.copy(plain), remember=False, rules=rules)
    order = Random(spec["seed"])
    link = (
        spec["link"] if lab.is_limited() else lab.LabLink().label
    )  # the one that they really have
    for done, shape in enumerate(spec["shapes"], 1):
        rows, positions = shape
        x = models.inputs(plain, rows, positions, sizes.hidden, rank=rank)
        yield {"link": link, "shape": shape, **_context(spec, calls, x, side, order)}
        if rank == 0:
            say("progress", [done, len(spec["shapes"])])


def _context(
    spec: Mapping[str, Any],
    calls: Mapping[str, Any],
    x: Tensor,
    side: dist.ProcessGroup,
    order: Random,
) -> dict[str, Any]:
    """The choice for one context, and the race of all."""
    wanted = calls["eager"](x)
    inputs = {name: x.clone() for name in calls}
    warmup(calls["auto"], [inputs["auto"]])
    chooser = session_of(calls["auto"]).auto
    kind = kind_of((inputs["auto"],), {})
    choice = chooser.trials.choices[kind]
    diffs = {}
    for name, call in calls.items():
        for _ in range(NUM_WARM):
            made = call(inputs[name])
        diffs[name] = all_max((made - wanted).abs().max().item(), side)
        if not diffs[name] <= MAX_DIFF * wanted.abs().max().item():
            raise AssertionError(f"{name} differs by {diffs[name]:.3g} from eager")
    runs = {name: partial(call, inputs[name]) for name, call in calls.items()}
    control = ("eager", "eager_again")
    times = sound_race(runs, control, order=order, num_rounds=spec["num_pairs"], group=side)
    seen, inner = chooser.traced.get(kind, ()), choice.way.inner if choice.way else None
    for piece, _ in seen:
        chooser.book.read(piece)
    call_s = _outside_s(calls["auto"], inputs["auto"], choice)
    return {
        "times": times,
        "chosen": name_of(choice.way),
        "speeds": {name_of(way): speed for way, speed in choice.speeds.items()},
        "bound_s": all_max(chooser.book.bound(seen, inner).seconds + call_s, side),
        "call_s": all_max(call_s, side),
        "max_abs_diff": diffs["auto"],
    }


def _outside_s(model: Any, x: Tensor, choice: Choice) -> float:
    """What a call takes before its plan begins and after it has ended: no plan changes that."""
    if choice.way in (None, COMPILED):
        return 0.0
    outside_s = []
    for _ in range(NUM_TRACED):
        within_s = trace(model, x).makespan_s
        start = time.perf_counter()
        model(x)
        outside_s.append(time.perf_counter() - start - within_s)
    return max(0.0, median(outside_s))


if __name__ == "__main__":
    main(sys.argv[1])

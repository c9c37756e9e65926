"""One rank of the strategies bench: a spec comes in on the command line, lines of JSON go out.

    python -m torchweft_tools.bench.strategies.rank '{"strategy": "nanoflow", "link": "1gbit", ...}'

For each workload of a strategy every program is warmed, compared with eager, and raced in turn:
eager, weft's sequential plan (twice: the control), overlap in 2 and in 4 parts, the strategy, and
what outside programs there are. With weights on disk all read them there, at every call: plans by
loads of their own, accelerate's disk offload by its hooks, whose files leave the system's cache.
"""

from __future__ import annotations

import copy
import os
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from random import Random
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from torchweft import context, lab, offload
from torchweft.api import compile, report
from torchweft.plan.machine import cpu
from torchweft.plan.strategies import overlap, sequential
from torchweft_tools.bench.measure.messages import say
from torchweft_tools.bench.peers import models
from torchweft_tools.bench.players.auto_rank import MAX_DIFF, NUM_WARM, play
from torchweft_tools.bench.players.overlap_race import sound_race
from torchweft_tools.bench.players.overlap_rank import all_max
from torchweft_tools.bench.strategies.models import hands
from torchweft_tools.bench.strategies.workloads import MODELS, SIZES, WORKLOADS, RacedWorkload

CONTROL = ("sequential", "sequential_again")
Call = Callable[[Tensor], Tensor]


def main(text: str) -> None:
    """Run the workloads of one strategy over one link, and print their results."""
    play(text, measure)


def measure(spec: Mapping[str, Any], side: dist.ProcessGroup) -> Iterator[dict[str, Any]]:
    """The result of each workload."""
    order = Random(spec["seed"])
    link = spec["link"] if lab.is_limited() else lab.LabLink().label
    each_one = WORKLOADS[spec["strategy"]]
    for done, workload in enumerate(each_one, 1):
        with tempfile.TemporaryDirectory() as folder:
            result = _contest(spec, workload, Path(folder), side, order)
        yield {"link": link, "workload": workload.name, "home": workload.home, **result}
        if dist.get_rank() == 0:
            say("progress", [done, len(each_one)])


def _contest(
    spec: Mapping[str, Any],
    workload: RacedWorkload,
    folder: Path,
    side: dist.ProcessGroup,
    order: Random,
) -> dict[str, Any]:
    """The race on one workload."""
    rank, sizes = dist.get_rank(), SIZES[spec["size"]]
    make = partial(MODELS[workload.model], sizes, rank=rank, num_ranks=2, seed=spec["seed"])
    plain = make().eval()
    x = models.inputs(plain, *workload.shape, sizes.hidden, rank=rank)
    wanted = plain(x)
    calls, peers, why = _outside(make, workload, folder)
    ours = _ours(plain, workload, folder)
    calls |= ours
    diffs, inputs = {}, {name: x.clone() for name in calls}
    with context(**workload.facts):
        for name, call in calls.items():
            for _ in range(NUM_WARM):
                made = call(inputs[name])
            diffs[name] = all_max((made - wanted).abs().max().item(), side)
            if not diffs[name] <= MAX_DIFF * wanted.abs().max().item():
                raise AssertionError(f"{name} differs by {diffs[name]:.3g} from eager")
        runs = {name: partial(call, inputs[name]) for name, call in calls.items()}
        times = sound_race(runs, CONTROL, order=order, num_rounds=spec["num_pairs"], group=side)
    fallbacks = {
        name: [str(each) for each in report(call).fallbacks] for name, call in ours.items()
    }
    return {
        "times": times,
        "peers": peers,
        "why": why,
        "max_abs_diff": diffs["weft"],
        "fallbacks": {name: found for name, found in fallbacks.items() if found},
    }


def _ours(plain: nn.Module, workload: RacedWorkload, folder: Path) -> dict[str, Any]:
    """The plans of weft. The strategy has the machine that it is for; the others have one lane."""
    if workload.on_disk:
        offload(plain, folder)
    options: dict[str, Any] = {"inner": "eager", "num_threads": 1}
    if workload.on_disk:
        options["loads"] = True
    calls = {
        "sequential": compile(copy.copy(plain), sequential, **options),
        **{
            f"overlap_{parts}": compile(copy.copy(plain), overlap(parts=parts), **options)
            for parts in (2, 4)
        },
        "weft": compile(
            copy.copy(plain), workload.strategy, machine=cpu(workload.lanes), **options
        ),
    }
    return {**calls, "sequential_again": calls["sequential"]}


def _outside(
    make: Callable[[], nn.Module], workload: RacedWorkload, folder: Path
) -> tuple[dict[str, Call], list[str], str]:
    """Programs without weft, the names of those that are peers, and why there are none."""
    plain = make().eval()
    if not workload.on_disk:
        written = hands(plain)
        why = "" if written else f"nobody has written {workload.model} by hand here"
        return {"eager": plain, **written}, list(written), why
    if find_spec("accelerate") is None:
        return {}, [], "accelerate is not installed"
    from accelerate import disk_offload

    folder = folder / "accelerate"
    disk_offload(plain, folder, execution_device=torch.device("cpu"))
    files = sorted(folder.glob("*.dat"))

    def call(x: Tensor) -> Tensor:
        for path in files:
            _forget(path)
        made: Tensor = plain(x)
        return made

    return {"accelerate": call}, ["accelerate"], ""


def _forget(path: Path) -> None:
    """Have the system forget what it keeps of a file, as weft's loads do, where it can."""
    if hasattr(os, "posix_fadvise"):
        with path.open("rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


if __name__ == "__main__":
    main(sys.argv[1])

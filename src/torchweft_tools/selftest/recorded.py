"""Plans of Weft for a dry run: steady calls stand between marks.

    python -m torchweft_tools.selftest.recorded overlap,overlap-graphs,... [FOLDER]

Numbers mean nothing in a dry run; what is asked of the device does. See `dry`. With a folder each
rank leaves there what torch told of its steady calls. See `calls`.
"""

from __future__ import annotations

import json
import os
import sys
from contextlib import ExitStack, nullcontext
from pathlib import Path

import torch
import torch.distributed as dist

import torchweft as weft
from torchweft_tools.dryrun import mark
from torchweft_tools.selftest.calls import CallTracer
from torchweft_tools.selftest.rig import Branches, Parallel

STRATEGIES = {
    "sequential": weft.sequential(),
    "overlap": weft.overlap(parts=2, min_tokens=1),
    "branches": weft.branches(),
}
NUM_STEADY = 3


def main(kinds: str, folder: str = "") -> None:
    """Run each kind of program: some calls to warm up, then the steady ones."""
    num_ranks = int(os.environ.get("WORLD_SIZE", "1"))
    if num_ranks > 1:
        place = torch.device("cuda", int(os.environ["RANK"]) % torch.cuda.device_count())
        torch.cuda.set_device(place)
        dist.init_process_group("nccl", device_id=place)
    told = {}
    for kind in kinds.split(","):
        tracer = CallTracer() if folder else None
        weave(kind, Parallel() if num_ranks > 1 else Branches(), tracer)
        told[kind] = tracer.lines if tracer is not None else []
    if folder:
        Path(folder, f"{os.environ.get('RANK', '0')}.json").write_text(json.dumps(told))
    if num_ranks > 1:
        dist.destroy_process_group()


def weave(kind: str, model: torch.nn.Module, tracer: CallTracer | None) -> None:
    """`NAME`, `NAME-graphs`: calls by that strategy; `train`: steps of training."""
    name, _, graphs = kind.partition("-")
    train = name == "train"
    woven = weft.compile(
        model.cuda(),
        STRATEGIES["branches" if train else name],
        machine=weft.accelerator(2),
        graphs=bool(graphs),
        fallback="error",
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x = torch.ones(32, 64, device="cuda")
    with torch.set_grad_enabled(train), ExitStack() as traced:
        for number in range(4 + NUM_STEADY):
            if number == 4:
                mark(f"steady {kind}")
                traced.enter_context(tracer or nullcontext())
            result = woven(x)
            if train:
                result.sum().backward()
                optimizer.step()
                optimizer.zero_grad()
    mark(f"end {kind}")


if __name__ == "__main__":
    main(*sys.argv[1:])

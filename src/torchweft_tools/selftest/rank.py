"""One rank of the self-test: a spec comes in on the command line, outcomes go out as lines of JSON.

    python -m torchweft_tools.selftest.rank '{"device": "cpu", "checks": ["lanes", ...], ...}'

Ranks tell each other how each check went; rank 0 tells the parent.
"""

from __future__ import annotations

import json
import os
import sys
import time
import traceback
import warnings
from typing import Any

import torch
import torch.distributed as dist

from torchweft.errors import clip
from torchweft_tools.bench.measure.messages import say
from torchweft_tools.selftest.checks import APART, TOGETHER
from torchweft_tools.selftest.rig import CheckError, Rig, Skip, open_rig


def main(text: str) -> None:
    """Run the checks of a spec, in order."""
    spec = json.loads(text)
    warnings.simplefilter("ignore")
    rig = open_rig(spec["device"], dtypes=spec["dtypes"], num_pairs=spec["num_pairs"])
    survivors = dist.new_group(range(max(1, rig.num_ranks - 1)), backend="gloo")
    for name in spec["checks"]:
        if rig.rank == 0:
            say("progress", [0, 0])  # the parent's clock for this check starts
        torch._dynamo.reset()
        outcome = attempt(name, rig)
        group = survivors if name == "faults" else rig.side
        outcomes: list[Any] = [None] * dist.get_world_size(group)
        dist.all_gather_object(outcomes, outcome, group=group)
        if rig.rank == 0:
            say("result", together(outcomes))
    sys.stdout.flush()
    os._exit(0)  # threads of gloo and NCCL must not hold the process up


def attempt(name: str, rig: Rig) -> dict[str, Any]:
    """The outcome of one check on this rank."""
    start = time.perf_counter()
    outcome: dict[str, Any] = {"check": name, "state": "passed", "reason": "", "figures": {}}
    try:
        with torch.no_grad():
            outcome["figures"] = {**TOGETHER, **APART}[name](rig)
    except Skip as skip:
        outcome |= {"state": "skipped", "reason": str(skip)}
    except CheckError as error:
        outcome |= {"state": "failed", "reason": str(error)}
    except Exception as error:
        traceback.print_exc()
        lines = str(error).strip().splitlines() or [""]
        reason = f"{type(error).__name__}: {clip(lines[0], 300)}"
        outcome |= {"state": "failed", "reason": reason}
    outcome["seconds"] = round(time.perf_counter() - start, 3)
    return outcome


def together(outcomes: list[dict[str, Any]]) -> dict[str, Any]:
    """One outcome for all ranks: rank 0's, unless a rank failed."""
    failed = {
        rank: outcome for rank, outcome in enumerate(outcomes) if outcome["state"] == "failed"
    }
    if not failed:
        return outcomes[0]
    rank, first = next(iter(failed.items()))
    return {**first, "reason": f"rank {rank}: {first['reason']}", "failed_ranks": list(failed)}


if __name__ == "__main__":
    main(sys.argv[1])

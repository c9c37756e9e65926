"""The recorded check: Weft's plans under the dry run, judged by the calls that they make.

`judge` takes the calls of all ranks; it needs no device and no torch.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Sequence
from typing import Any

from torchweft_tools.dryrun.calls import RankCalls, read_calls
from torchweft_tools.dryrun.check import check
from torchweft_tools.dryrun.run import run

TIMEOUT_S = 900.0
ALONE = ("sequential", "overlap", "branches", "overlap-graphs", "branches-graphs", "train")
SEVERAL = ("sequential", "overlap", "overlap-graphs")
"""Programs of `recorded`, for one rank and for several."""


def recorded(num_ranks: int) -> dict[str, Any]:
    """Run the plans of `recorded` on so many ranks, and judge what they asked of the device."""
    start = time.perf_counter()
    kinds = ALONE if num_ranks == 1 else SEVERAL
    outcome = run(
        program(kinds, num_ranks),
        devices=num_ranks,
        timeout_s=TIMEOUT_S,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stderr=subprocess.DEVNULL,
    )
    ranks = read_calls(outcome.ranks)
    reasons = judge(ranks, kinds)
    if outcome.code:
        reasons.insert(0, f"the program ended with code {outcome.code}")
    return {
        "check": "recorded",
        "state": "failed" if reasons else "passed",
        "reason": "; ".join(reasons[:3]),
        "figures": {kind: _counts(ranks[0], kind) for kind in kinds} if ranks else {},
        "seconds": round(time.perf_counter() - start, 3),
    }


def program(kinds: Sequence[str], num_ranks: int) -> list[str]:
    """The command that runs these kinds of `recorded` on so many ranks."""
    command = [sys.executable]
    if num_ranks > 1:
        command += ["-m", "torch.distributed.run", "--nproc-per-node", str(num_ranks)]
    return [*command, "-m", "torchweft_tools.selftest.recorded", ",".join(kinds)]


def judge(ranks: Sequence[RankCalls], kinds: Sequence[str]) -> list[str]:
    """What is wrong with recorded calls: findings, waits of the host, programs that are missing."""
    reasons = [str(fault) for fault in check(ranks) if not fault.is_advice]
    for number, rank in enumerate(ranks):
        for kind in kinds:
            counts = _counts(rank, kind)
            if not counts:
                reasons.append(f"rank {number} never came to the steady calls of {kind}")
            elif waits := counts.get("sync"):
                reasons.append(f"rank {number} waits {waits} times in steady calls of {kind}")
    return reasons or ([] if ranks else ["nothing was recorded"])


def _counts(rank: RankCalls, kind: str) -> dict[str, int]:
    """How many calls of each kind the steady calls made; empty if they were not reached."""
    names = [call.name if call.kind == "mark" else "" for call in rank.calls]
    if f"steady {kind}" not in names or f"end {kind}" not in names:
        return {}
    steady = rank.calls[names.index(f"steady {kind}") : names.index(f"end {kind}")]
    return dict(Counter(call.kind for call in steady))

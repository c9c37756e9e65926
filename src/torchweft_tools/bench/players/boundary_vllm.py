"""The boundary bench for vLLM: one engine by graphs, one in boundary mode; results go out.

    python -m torchweft_tools.bench.players.boundary_vllm '{"links": ["1gbit half duplex"], ...}'

Both have two ranks on gloo and the prefill workload of the hosts bench. Each run begins when all
workers sleep: those of the other engine would otherwise poll for work on the same cores.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from collections.abc import Mapping
from random import Random
from typing import Any

from vllm import LLM

from torchweft import lab
from torchweft.plan.strategies import overlap
from torchweft.serve.trials import Trials
from torchweft_tools.bench.measure.messages import leaving, say
from torchweft_tools.bench.players.host_vllm import (
    ENVIRONMENT,
    REST_S,
    engine,
    requests,
    save,
    timed,
)

RUNS = {
    "sequential": ("graph", 0), "sequential_again": ("graph", 0),
    "graph_2": ("graph", 2), "boundary_2": ("boundary", 2),
    "graph_4": ("graph", 4), "boundary_4": ("boundary", 4),
}  # fmt: skip
"""Which engine runs in how many parts; 0: vLLM's own way."""


def main(text: str) -> None:
    """Race both engines and print the result."""
    spec = json.loads(text)
    with leaving(), tempfile.TemporaryDirectory() as folder:
        save(spec, folder)
        engines = {
            "graph": engine(folder, additional_config={"weft": {}}),
            "boundary": engine(
                folder, worker_cls="auto", additional_config={"weft": {"capture": "boundary"}}
            ),
        }
        say("result", measure(spec, engines))


def measure(spec: Mapping[str, Any], engines: Mapping[str, LLM]) -> dict[str, Any]:
    """The result of the race over one link; `diffs` counts requests with other tokens."""
    asked = requests({**spec, "workload": "prefill"})
    link = spec["links"][0] if lab.is_limited() else lab.LabLink().label
    wanted: list[list[int]] = []
    diffs: dict[str, int] = dict.fromkeys(RUNS, 0)
    times: dict[str, list[float]] = {name: [] for name in RUNS}
    order = Random(spec["seed"])
    for number in range(spec["num_pairs"] + 2):  # of two rounds only the tokens count
        for name in order.sample(list(RUNS), len(RUNS)) if number else RUNS:
            where, parts = RUNS[name]
            engines[where].collective_rpc(take, args=(parts,))
            time.sleep(REST_S)
            taken_s, tokens = timed(engines[where], asked)
            wanted = wanted or tokens
            diffs[name] += sum(a != b for a, b in zip(wanted, tokens, strict=True))
            if number > 1:
                times[name].append(taken_s)
        say("progress", [number + 1, spec["num_pairs"] + 2])
    reports = [each.collective_rpc("weft_report")[0] for each in engines.values()]
    reasons = {reason for report in reports for reason in report["fallbacks"]}
    return {
        "link": link,
        "times": times,
        "parts": {name: parts for name, (_, parts) in RUNS.items()},
        "diffs": diffs,
        "absent": {},
        "fallbacks": sorted(each for each in reasons if not each.startswith("warm-up")),
    }


def take(worker: Any, parts: int) -> None:
    """In a worker: from now on run all steps in this many parts, or vLLM's own way if 0."""
    phases = worker.vllm_config.weft.phases
    wanted = overlap(parts=parts) if parts else None
    phases.trials = {
        phase: Trials(phases.session, (wanted,), num_rounds=1) for phase in phases.trials
    }


if __name__ == "__main__":
    os.environ |= ENVIRONMENT
    main(sys.argv[1])

"""The boundary bench: overlap in boundary mode and in graph mode, on two ranks.

    torchweft bench boundary --link 1gbit [--models dense,transformers,vllm] --json

The dense model of the overlap bench, a Llama of Transformers with `tp_plan="auto"`, and, after
`make hosts`, a Llama in vLLM. `speedup` is the sequential model's time over that of graph mode,
`boundary_speedup` the same for boundary mode; `vs_graph` is the time of graph mode over that of
boundary mode, both with the same number of parts, each the median of pairs from one race. `aa` is
the sequential model against itself. `max_abs_diff` compares outputs; for vLLM, whose outputs are
tokens, it counts the requests with other tokens.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from torchweft import lab
from torchweft.errors import WeftError
from torchweft_tools.bench import hosts, overlap
from torchweft_tools.bench.measure.messages import Progress, part_of
from torchweft_tools.bench.measure.options import chosen, require_pairs
from torchweft_tools.bench.measure.pairs import MIN_PAIRS, ratio_columns

MODELS = ("dense", "transformers", "vllm")
PLAYER = "torchweft_tools.bench.players.boundary_vllm"
VLLM = dataclasses.replace(hosts.HOSTS["vllm"], player=PLAYER)
COLUMNS = (
    *("model", "link", "parts", "speedup", "boundary_speedup"),
    *("vs_graph", "vs_graph_low", "vs_graph_high", "aa", "max_abs_diff"),
)
Row = dict[str, Any]


def run(
    *,
    link: str = "1gbit",
    models: str = "dense,transformers",
    num_pairs: int = MIN_PAIRS,
    seed: int = 0,
    quick: bool = False,
    progress: Progress | None = None,
) -> tuple[list[Row], Row]:
    """A row for each model and number of parts, and the summary.

    link: the rate of the link between the ranks, such as 500mbit, or none.
    models: names of models, separated by commas: dense, transformers, vllm.
    num_pairs: timed pairs; the programs run in turn.
    seed: the random seed.
    quick: tiny models and three pairs, to see that everything runs; its figures mean nothing.
    """
    require_pairs("boundary", num_pairs, quick=quick)
    label = lab.LabLink.parse(link).label
    names = chosen("boundary", "model", models, MODELS)
    rows: list[Row] = []
    for number, model in enumerate(names):
        on_progress = part_of(progress, number, len(names))
        spec = {
            "model": model, "phase": "prefill", "links": [label], "table": "boundary",
            "num_pairs": 3 if quick else num_pairs, "num_rounds": 0, "seed": seed, "names": None,
            "size": "tiny" if quick else "full",
        }  # fmt: skip
        if model == "vllm":
            results = hosts.compete(VLLM, spec, on_progress)
        else:
            results = (result for _, result in overlap.compete(spec, on_progress))
        for result in results:
            rows += rows_of(model, result["link"], result)
    worst = min(row["vs_graph"] for row in rows)
    return rows, {"worst_vs_graph": worst, "quick": quick}


def rows_of(model: str, link: str, result: dict[str, Any]) -> list[Row]:
    """A row for each number of parts. Raises `WeftError` if a program did not run as it should."""
    if result["absent"] or result["fallbacks"]:
        raise WeftError(f"bench boundary: {model}: {result['absent'] or result['fallbacks']}.")
    times, rows = result["times"], []
    for name in (each for each in times if each.startswith("boundary_")):
        graph = name.replace("boundary", "graph")
        rows.append(
            {
                "model": model, "link": link, "parts": result["parts"][name],
                **ratio_columns("speedup", times["sequential"], times[graph]),
                **ratio_columns("boundary_speedup", times["sequential"], times[name]),
                **ratio_columns("vs_graph", times[graph], times[name]),
                **ratio_columns("aa", times["sequential"], times["sequential_again"]),
                "max_abs_diff": result["diffs"][name],
            }
        )  # fmt: skip
    return rows

"""The ablation bench: what each idea contributes, left out one by one, on the two-rank Llama.

    torchweft bench ablation --json

`full` is weft with everything: parts for prefill and none for decode, Inductor inside ops, parts
written where they belong, plans kept, repeated blocks captured once. Each variant leaves one out:

    no_zero_copy        parts are joined by copies
    no_plan_cache       every call writes, lowers, verifies and compiles its plan
    no_block_sharing    every layer is captured on its own
    fixed_strategy      parts for every call, small ones too
    no_inductor         torch's own kernels, call by call

`speedup` is the sequential model's time over the variant's, the median of pairs. `set_up_s` is the
time until the first calls had ended; the first variant fills Inductor's cache for the others.
`capture_s` is the part of it that Dynamo and capture take, which is what blocks save: their ops are
those of the model without blocks, so both run equally fast.
"""

from __future__ import annotations

from typing import Any

from torchweft import lab
from torchweft.errors import WeftError
from torchweft_tools.bench.measure.messages import Progress, part_of
from torchweft_tools.bench.measure.options import require_pairs
from torchweft_tools.bench.measure.pairs import MIN_PAIRS, ratio_columns
from torchweft_tools.bench.overlap import compete

VARIANTS = (
    *("full", "no_zero_copy", "no_plan_cache", "no_block_sharing", "fixed_strategy"),
    "no_inductor",
)
PHASES = ("prefill", "decode")
COLUMNS = (
    *("phase", "link", "variant", "speedup", "speedup_low", "speedup_high", "capture_s"),
    "set_up_s",
)
Row = dict[str, Any]


def run(
    *,
    link: str = "1gbit",
    num_pairs: int = MIN_PAIRS,
    seed: int = 0,
    quick: bool = False,
    progress: Progress | None = None,
) -> tuple[list[Row], Row]:
    """A row for each phase and variant, and the summary.

    link: the rate of the link between the ranks, such as 500mbit, or none.
    num_pairs: timed pairs; the programs run in turn.
    seed: the random seed.
    quick: a tiny model and three pairs, to see that everything runs; its figures mean nothing.
    """
    require_pairs("ablation", num_pairs, quick=quick)
    label = lab.LabLink.parse(link).label
    rows: list[Row] = []
    for number, phase in enumerate(PHASES):
        spec = {
            "model": "dense", "phase": phase, "links": [label], "table": "ablation", "names": None,
            "num_pairs": 3 if quick else num_pairs, "num_rounds": 0, "seed": seed,
            "size": "tiny" if quick else "full",
        }  # fmt: skip
        for real_link, result in compete(spec, part_of(progress, number, len(PHASES))):
            rows += rows_of(phase, real_link, result)
    return rows, {**summary(rows), "quick": quick}


def rows_of(phase: str, link: str, result: dict[str, Any]) -> list[Row]:
    """A row for each variant of one phase. Raises `WeftError` for a variant that did not run."""
    times, rows = result["times"], []
    for variant in (*VARIANTS, "sequential_again"):
        if variant not in times:
            why = result["absent"].get(variant, "it did not run")
            raise WeftError(f"bench ablation: {variant}: {why}.")
        rows.append(
            {
                "phase": phase, "link": link, "variant": variant,
                **ratio_columns("speedup", times["sequential"], times[variant]),
                "capture_s": result["capture_s"][variant],
                "set_up_s": result["set_up_s"][variant],
                "copied_bytes": result["copied_bytes"].get(variant),
                "parts": result["parts"][variant],
                "max_abs_diff": result["diffs"].get(variant),
            }
        )  # fmt: skip
    return rows


def summary(rows: list[Row]) -> Row:
    """The speed-up of each variant by phase, and what blocks save of the capture.

    A/A is the sequential model against itself.
    """
    figures = {f"{row['variant']}_{row['phase']}": row["speedup"] for row in rows}
    for name in ("full", "no_block_sharing"):
        seconds = [row["capture_s"] for row in rows if row["variant"] == name]
        figures[f"capture_s_{name}"] = round(max(seconds), 3)
    return figures

"""The last part of the demo: two ranks over a limited link, raced against code written by hand.

for text in story(): ...      texts to print, in order; takes about two minutes
"""

from __future__ import annotations

from collections.abc import Iterator

from torchweft import lab
from torchweft_tools.bench.measure.pairs import MIN_PAIRS
from torchweft_tools.bench.overlap import compete
from torchweft_tools.bench.players.overlap_rows import row

LINK = "1gbit"
NAMES = (
    *("sequential", "sequential_again", "compute", "comm", "by_hand_2", "by_hand_4"),
    *("weft_2", "weft_4", "weft_onednn_4", "by_hand_onednn_4", "control"),
)
WHAT = {
    "sequential": "the model as it is written",
    "compute": "its compute alone, no rank waits for another",
    "comm": "its all_reduces alone",
    "by_hand": "overlap as an expert writes it",
    "by_hand_onednn": "the same with oneDNN's matrix products",
    "weft": "weft.compile(model, weft.overlap(parts=...))",
    "weft_onednn": "the same with inner='onednn'",
    "control": "weft in 4 parts that overlap nothing",
}


def story() -> Iterator[str]:
    """The texts: a table, the speed-up, the timeline."""
    why = lab.check(LINK)
    limit = f"a {LINK} link, both directions together" if not why else f"plain loopback ({why})"
    yield (
        f"9. Two gloo ranks over {limit}, a tensor-parallel Llama-like model, {MIN_PAIRS} pairs; "
        "about two minutes:\n"
    )
    spec = {
        "model": "dense", "phase": "prefill", "links": [lab.LabLink.parse(LINK).label],
        "size": "demo",
        "num_pairs": MIN_PAIRS, "num_rounds": 3, "seed": 0, "names": NAMES, "timeline": True,
    }  # fmt: skip
    [(label, result)] = compete(spec)
    facts = row({"model": "dense", "phase": "prefill", "link": label}, result)
    times = facts["first_race_s"] | facts["second_race_s"]
    lines = [f"   {name:18} {times[name] * 1e3:7.0f} ms  {_what(name)}" for name in times]
    yield "\n".join(lines) + "\n"
    yield (
        f"   Measured over {label}, median of pairs: {_range(facts, 'speedup')} as fast as the "
        f"model as written, {_range(facts, 'vs_peer')} as fast as the best code by hand "
        f"({facts['best_peer']}). At equal kernels: {_range(facts, 'eager_vs_peer')} with torch's "
        f"own, {_range(facts, 'onednn_vs_peer')} with oneDNN's.\n"
        f"   The model against itself: {_range(facts, 'aa')}; without overlap: "
        f"{_range(facts, 'control')}. Baseline's health {facts['health']:.2f}; outputs differ by "
        f"{facts['max_abs_diff']:.2g} at most, of {facts['output_scale']:.3g}.\n"
    )
    if facts["explanation"]:
        yield f"   Not to be trusted: {facts['explanation']}.\n"
    yield f"   One call of {facts['weft']} on rank 0:\n"
    yield str(result["timeline"])


def _what(name: str) -> str:
    stem = name.removesuffix("_again").rstrip("0123456789").removesuffix("_")
    return WHAT[stem] + (", again" if name.endswith("_again") else "")


def _range(figures: dict[str, float], name: str) -> str:
    return f"{figures[name]:.2f}x [{figures[f'{name}_low']:.2f}, {figures[f'{name}_high']:.2f}]"

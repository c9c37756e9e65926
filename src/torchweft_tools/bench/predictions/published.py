"""A `Figure`: one published figure, read as the call that it was measured on; or why it is not.

    row of calibration.csv --read_figure--> Figure | the reason why it is left out

The same reading serves any file with these columns. What a method is comes from its words, and so
does what runs it (`METHODS`); engine, collectives and machine come from the row, never from the
figure.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from torchweft_tools.predict.hardware import machine_files
from torchweft_tools.predict.shape import known_configs
from torchweft_tools.predict.work import ModelLayout, Workload

Row = Mapping[str, str]
UNITS = {"latency_ms": 1e-3, "time_ms": 1e-3, "time_us": 1e-6, "scaled_ms_per_layer": 1e-3}
REMOVED = r"removed|no communication"
METHODS = (
    (REMOVED, "sequential"),
    (r"^(no |torch|baseline|sequential|vanilla|without )|non-overlap", "sequential"),
    (r"tokenweave", "tokenweave"),
    (r"nanoflow", "nanoflow"),
    (r"\b(tbo|dbo)\b|two-batch|dual-batch", "dual_batch"),
    (r"flux|comet", "comet"),
    (r"\bsbo\b|single-batch", "single_batch"),
)
BREAKDOWN = {
    "overall": (),
    "dispatch core": ("dispatch",),
    "dispatch": ("dispatch",),
    "combine core": ("combine",),
    "combine": ("combine",),
    "moe gemm": ("experts",),
    "moe": ("experts",),
    "attention core": ("attention",),
    "dense gemm": ("product",),
    "gemm": ("product",),
}
"""Bars of a published breakdown, by the marks of the ops in them."""
ALIASES = (
    (r"llama-?3(\.\d)?-(\d+b)", r"llama-3-\2"),
    (r"llama-?2-(\d+b)", r"llama-2-\1"),
    (r"deepseek-(v3|r1).*", "deepseek-v3"),
    (r"qwen-?(\d.*)", r"qwen\1"),
    (r"mixtral-(8x\d+b).*", r"mixtral-\1"),
    (r"phi-?3\.5-?moe.*", "phi-3.5-moe"),
    (r"gpt-?3(-175b)?", "gpt-3-175b"),
)
MARKS = {"A": "exact", "F": "read off bars"}


@dataclass(frozen=True)
class Figure:
    """A published figure and the call behind it.

    model: a known config, or "" for one product with its collective. product: its M, K, N, and
    whether the collective comes before or behind it. part: bars of a breakdown, if it is one.
    scale: what a simulated second is multiplied by to be compared; layer: of one layer.
    """

    id: str
    published_s: float
    model: str
    machine: str
    parallel: ModelLayout
    load: Workload
    method: str
    strategy: str
    is_baseline: bool
    engine: str
    collectives: str
    dtype: str | None = None
    without: tuple[str, ...] = ()
    product: tuple[int, int, int, str] | None = None
    part: tuple[str, ...] | None = ()
    scale: float = 1.0
    layer: bool = False

    @property
    def group(self) -> tuple[object, ...]:
        """What figures share that have one baseline; not the tokens of a scaled bar."""
        load = self.load.phase if self.layer else self.load
        return self.model, self.machine, self.parallel, load, self.product, self.part, self.layer


def read_figure(row: Row) -> Figure | str:
    """The call of a row, or in a few words why there is none to predict."""
    kind = row["notes"][1:2] if row["notes"].startswith("[") else ""
    if kind not in MARKS:
        return {"H": "a headline without its workload", "D": "derived, not measured"}.get(
            kind, "no mark says how it was read"
        )
    if row["metric"] not in UNITS:
        return f"not a time of one call: {row['metric']}"
    if not row["gpu"] or (gpu := _gpu(row["gpu"], row["link"])) is None:
        return f"no machine file for GPU {row['gpu'] or 'not stated'!r}"
    if not row["num_gpus"].isdecimal():
        return "the number of GPUs is not stated"
    parallel = _parallel(row["parallelism"], int(row["num_gpus"]))
    if parallel is None:
        return f"a layout that is not read: {row['parallelism']!r}"
    strategy = _strategy(row["method"])
    if strategy is None:
        return f"no strategy for the method {row['method']!r}"
    if row["phase"].startswith("layer "):
        return _product_figure(row, gpu, parallel, strategy)
    return _model_figure(row, gpu, parallel, strategy)


def _model_figure(row: Row, gpu: str, parallel: ModelLayout, strategy: str) -> Figure | str:
    model = known_model(row["model"])
    if model is None:
        return f"no config of model {row['model'] or 'not stated'!r}"
    phase, _, bar = row["phase"].partition(" per-layer breakdown: ")
    if phase not in ("prefill", "decode"):
        return f"a phase that is not one call: {row['phase']!r}"
    if bar and bar.lower() not in BREAKDOWN:
        return f"a bar that is no op: {bar!r}"
    if (
        phase == "decode"
        and strategy != "sequential"
        and BREAKDOWN.get(bar.lower(), ())[:1] in (("dispatch",), ("combine",))
    ):
        return "counts what starts and ends a transfer, not the transfer"
    load = _load(row, phase)
    if load is None:
        return "tokens and batch are not stated"
    words = f"{row['baseline']} {row['method']}".lower()
    engine = "eager" if "eager" in words or phase == "prefill" else "graphs"
    scale = _scale(row, load) if bar else 1.0
    without = ("all_reduce", "all_to_all") if re.search(REMOVED, row["method"]) else ()
    return Figure(
        row["id"],
        _published_s(row),
        model,
        gpu,
        parallel,
        load,
        row["method"],
        strategy,
        _is_baseline(row),
        engine,
        "ring" if "nccl" in words else "auto",
        dtype="fp8" if "fp8" in row["params_note"].lower() else None,
        without=without,
        part=BREAKDOWN.get(bar.lower(), ()),
        scale=scale,
        layer=bool(bar),
    )


def _product_figure(row: Row, gpu: str, parallel: ModelLayout, strategy: str) -> Figure | str:
    """One product with an all_gather before it, or a reduce_scatter behind it."""
    sizes = dict(re.findall(r"\b([MNK])=(\d+)", row["params_note"]))
    order = {"layer AG+GEMM": "all_gather", "layer GEMM+RS": "reduce_scatter"}.get(row["phase"])
    if len(sizes) < 3 or order is None:
        return f"a layer that is not read: {row['phase']!r}"
    if "part" in row["method"] or "exposed" in row["method"]:
        return "a part of a fused kernel, which is predicted whole"
    rows, inner, outer = (int(sizes[name]) for name in "MKN")
    if row["model"] == "MLP layer" and order == "reduce_scatter":  # K and N are the layer's
        inner, outer = outer, inner
    part = ("product",) if "GEMM only" in row["method"] else ()
    part = ("collective",) if "comm only" in row["method"] else part
    return Figure(
        row["id"],
        _published_s(row),
        "",
        gpu,
        parallel,
        Workload(1, rows),
        row["method"],
        strategy,
        not part and strategy == "sequential",
        "bare",
        "ring",
        product=(rows, inner, outer, order),
        part=part,
    )


def _published_s(row: Row) -> float:
    return float(row["value"]) * UNITS[row["metric"]]


def _is_baseline(row: Row) -> bool:
    return bool(row["baseline"]) and row["method"].startswith(row["baseline"])


def _strategy(method: str) -> str | None:
    return next((name for words, name in METHODS if re.search(words, method.lower())), None)


def known_model(name: str) -> str | None:
    """The config that a published name means, if there is one."""
    short = name.lower().partition("/")[2] if name.count("/") == 1 and " " not in name else ""
    for each in (name.lower(), short):
        each = re.sub(r"-(instruct|chat|hf|base|it|fp8|bf16)\b", "", each.strip())
        for pattern, known in ALIASES:
            if re.fullmatch(pattern, each):
                each = re.sub(pattern, known, each)
                break
        if each in known_configs():
            return each
    return None


def _gpu(name: str, link: str) -> str | None:
    """The machine file of a published name: the longest that its words begin with."""
    words = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")
    kinds = sorted(machine_files(), key=len, reverse=True)
    found = next((kind for kind in kinds if words == kind or words.startswith(f"{kind}-")), None)
    on_pcie = "pcie" in f"{words} {link.lower()}" and "nvlink" not in link.lower()
    return f"{found}-pcie" if on_pcie and f"{found}-pcie" in kinds else found


def _parallel(text: str, num_gpus: int) -> ModelLayout | None:
    sizes = {kind.lower(): int(count) for kind, count in re.findall(r"\b(TP|EP|DP)(\d+)", text)}
    tp, ep = sizes.get("tp", 1), sizes.get("ep", 1)
    dp = sizes.get("dp", max(1, ep // tp))
    good = sizes and ep in (1, tp * dp) and tp * dp <= num_gpus and " vs " not in text
    return ModelLayout(tp, dp, ep) if good else None


def _number(text: str) -> int | None:
    match = re.match(r"(\d+)(k?)\b", text)
    return int(match[1]) * (1024 if match[2] else 1) if match else None


def _load(row: Row, phase: str) -> Workload | None:
    tokens, batch, seq = _number(row["tokens"]), _number(row["batch"]), _number(row["seq"])
    if phase == "decode":
        rows = batch or tokens
        return Workload(rows, 1, seq or 0, phase) if rows else None
    total = tokens or (batch * seq if batch and seq else None)
    if total is None:
        return None
    each = min(total, seq or total)
    return Workload(total // each, each, 0, phase)


def _scale(row: Row, load: Workload) -> float:
    """Bars of several sizes are drawn for the work of the largest, so that they compare: the
    published prefill bars for 16k tokens, the decode bars for the batch in the baseline's name."""
    if load.phase == "prefill":
        return 16384 / load.num_tokens
    largest = re.search(r"bs(\d+)", row["baseline"])
    return int(largest[1]) / load.num_tokens if largest else 1.0

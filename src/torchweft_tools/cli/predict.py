"""`torchweft predict`: what a model would take on a machine that is not here, by a strategy's plan.

    torchweft predict --config config.json --machine 8xh100 --parallel tp=8 --tokens 4096 \\
        --strategy tokenweave --json
    torchweft predict --machines

It needs no weights, no GPU and no torch. What it prints is simulated; docs/predictions.md says how
far that is from what others have measured.
"""

from __future__ import annotations

from typing import Annotated, Any

import typer

from torchweft.errors import WeftError, unknown
from torchweft.plan.strategies import get_strategy
from torchweft_tools.cli.text import Json, answer, read_pairs
from torchweft_tools.predict.hardware import Hardware, load_hardware, machine_files
from torchweft_tools.predict.prediction import (
    ENGINES,
    FUSING,
    GRAINS,
    Call,
    Prediction,
    get_engine,
    predict,
)
from torchweft_tools.predict.prices import ALGORITHMS
from torchweft_tools.predict.shape import DTYPES, known_configs, load_shape
from torchweft_tools.predict.tables import MeasuredTimes, load_times, published
from torchweft_tools.predict.work import read_parallel, workload

OUT = ("all_reduce", "all_to_all")


Config = Annotated[
    str | None, typer.Option("--config", help="config.json of a checkpoint, or a known model")
]
MachineName = Annotated[str, typer.Option("--machine", help="8xh100, 2x8xh100, 4xl20-pcie")]
LayoutWords = Annotated[str, typer.Option("--parallel", metavar="tp=N,dp=N,ep=N")]
NumTokens = Annotated[int | None, typer.Option(help="of one rank's call")]
Requests = Annotated[int | None, typer.Option(help="requests of one rank's call")]
Seq = Annotated[int | None, typer.Option(help="tokens of each request; in decode, its context")]
PhaseName = Annotated[str, typer.Option(help="prefill or decode")]
StrategyName = Annotated[str, typer.Option("--strategy", help="see: torchweft strategies")]
Options = Annotated[
    list[str] | None, typer.Option("--option", metavar="K=V", help="an option of the strategy")
]
EngineName = Annotated[str, typer.Option(help="eager, graphs or bare; by default eager in prefill")]
Collectives = Annotated[str, typer.Option(help=", ".join(ALGORITHMS))]
Without = Annotated[
    list[str] | None, typer.Option("--without", help="leave out: all_reduce or all_to_all")
]
Dtype = Annotated[str | None, typer.Option(help="of the weights, instead of the config's")]
Data = Annotated[str | None, typer.Option("--data", help="folder with published/components.csv")]
Fused = Annotated[
    bool | None, typer.Option(help="all_reduce and norm as one kernel; tokenweave's default")
]
Grain = Annotated[str, typer.Option(help="ops are kernels, blocks, or (auto) what is quicker")]
Measured = Annotated[bool, typer.Option(help="use measured times, from --data or WEFT_DATA")]
Machines = Annotated[bool, typer.Option("--machines", help="list the machines")]


def predict_command(
    config: Config = None,
    machine: MachineName = "",
    parallel: LayoutWords = "",
    tokens: NumTokens = None,
    batch: Requests = None,
    seq: Seq = None,
    phase: PhaseName = "prefill",
    strategy: StrategyName = "sequential",
    option: Options = None,
    engine: EngineName = "",
    collectives: Collectives = "auto",
    without: Without = None,
    dtype: Dtype = None,
    fused: Fused = None,
    grain: Grain = "auto",
    data: Data = None,
    measured: Measured = True,
    machines: Machines = False,
    as_json: Json = False,
) -> None:
    """Predict how long a model's call takes on GPUs that are not here, by a strategy's plan."""
    if machines:
        answer(*_list_machines(), as_json=as_json)
        return
    if config is None or not machine:
        missing = "config" if config is None else "machine"
        known = f" Known: {', '.join(known_configs())}." if config is None else ""
        raise WeftError(f"{missing}: give --{missing}.{known}", rule=missing)
    if collectives not in ALGORITHMS:
        raise WeftError(f"collectives: {unknown('algorithm', collectives, ALGORITHMS)}")
    if grain not in GRAINS:
        raise WeftError(f"grain: {unknown('grain', grain, GRAINS)}")
    if wrong := [kind for kind in without or () if kind not in OUT]:
        raise WeftError(f"without: {unknown('collective', wrong[0], OUT)}")
    chosen = get_strategy(strategy)(**read_pairs(option or (), "option"))
    times, told = _times(data, wanted=measured)
    load = workload(phase, tokens, batch, seq)
    default = "graphs" if phase == "decode" else "eager"
    call = Call(
        load_shape(config, dtype),
        load,
        read_parallel(parallel),
        load_hardware(machine),
        get_engine(engine or default),
        times,
        collectives,
        tuple(without or ()),
        chosen.name in FUSING if fused is None else fused,
    )
    found = predict(call, chosen)
    facts = {
        "model": call.shape.name,
        "machine": machine,
        "engine": call.engine.name,
        "strategy": str(chosen),
        "num_parts": found.num_parts,
        "measured": bool(told),
    }
    answer(_text(call, found, str(chosen), told), {**found.data(), **facts}, as_json=as_json)


def _times(data: str | None, *, wanted: bool) -> tuple[MeasuredTimes, str]:
    """Measured times if they are wanted and there; a folder that was named has to have them."""
    if not wanted:
        return MeasuredTimes(), ""
    try:
        return load_times(published(data, "components.csv")), "measured times where there are any"
    except WeftError:
        if data is not None:
            raise
        return MeasuredTimes(), ""


def _text(call: Call, found: Prediction, strategy: str, told: str) -> str:
    """The prediction for people."""
    load, ms = call.load, 1e3
    what = (
        f"{load.batch} x {load.seq} tokens"
        if load.phase == "prefill"
        else (f"{load.batch} requests, {load.context} tokens each in the cache")
    )
    room = call.hardware.device.memory_bytes or 0
    full = "" if found.peak_bytes <= room else f": more than the {room / 1e9:.0f} GB of the GPU"
    marks = sorted(found.marks.items(), key=lambda item: -item[1])
    lines = [
        f"{call.shape.name} on {call.hardware.name}, {load.phase} of {what}, "
        f"{call.engine.name}: simulated{', with ' + told if told else ''}",
        f"  {strategy}: {found.makespan_s * ms:.2f} ms in {found.num_parts} "
        f"part{'s' if found.num_parts != 1 else ''}; sequential {found.sequential_s * ms:.2f} ms, "
        f"speed-up {found.speedup:.3f}",
        f"  network: {found.network_s * ms:.2f} ms, {found.exposed_s * ms:.2f} ms of it exposed "
        f"({100 * found.hidden_share:.0f} % hidden)",
        f"  bound: {found.bound_s * ms:.2f} ms; peak memory {found.peak_bytes / 1e9:.1f} GB{full}",
        f"  a layer: {found.layer_s * 1e6:.0f} us; products at {100 * found.clock:.0f} % of clock",
        *(f"    {mark:<24}{seconds * 1e6:>9.1f} us" for mark, seconds in marks if seconds > 0),
    ]
    return "\n".join(lines)


def _list_machines() -> tuple[str, dict[str, Any]]:
    """All kinds of GPUs, for people and as data."""
    every: list[Hardware] = [load_hardware(name) for name in machine_files()]
    lines = ["GPU             TFLOPS  GB/s    GB  SMs  link           to other nodes"]
    for each in every:
        device, prices = each.device, each.prices
        lines.append(
            f"{each.gpu:<15} {device.flops_per_s / 1e12:>6.0f} {device.bytes_per_s / 1e9:>5.0f} "
            f"{(device.memory_bytes or 0) / 1e9:>5.0f} {device.num_sms or 0:>4}  "
            f"{prices.link:<7}{prices.link_bytes_per_s / 1e9:>4.0f} GB/s "
            f"{prices.nic_bytes_per_s / 1e9:>5.0f} GB/s"
        )
    lines += [
        "",
        "NUMBERxGPU is a node, NODESxNUMBERxGPU are several: 8xh100, 2x8xh100, 4xl20-pcie.",
        "-ethernet behind it: nodes that share 100 Gbit/s.",
    ]
    data = {
        each.gpu: {
            "flops_per_s": each.device.flops_per_s,
            "bytes_per_s": each.device.bytes_per_s,
            "memory_bytes": each.device.memory_bytes,
            "num_sms": each.device.num_sms,
            "link": each.prices.link,
            "link_bytes_per_s": each.prices.link_bytes_per_s,
            "sources": list(each.sources),
        }
        for each in every
    }
    return "\n".join(lines), {"machines": data, "engines": list(ENGINES), "dtypes": list(DTYPES)}

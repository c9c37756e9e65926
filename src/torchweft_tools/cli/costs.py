"""What costs say and how good they are: `torchweft profile`, `torchweft simulate --against`.

    torchweft profile my_model.py:build -o costs.json
    torchweft simulate run.plan --graph graph.json --batch 64 --costs costs.json --against run.json

`profile` loads torch and runs the model; under torchrun all ranks do, and the first one writes.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import TYPE_CHECKING, Annotated, Any

import typer

from torchweft.errors import WeftError
from torchweft.plan.trace import Span, Trace
from torchweft_tools.cli.text import Json, Output, answer, bar, read_literal

if TYPE_CHECKING:
    from torchweft_tools.profile import Profile

KINDS = ("run", "copy", "transfer")
MAX_LINES = 60
ModelName = Annotated[
    str, typer.Argument(metavar="MODEL", help="FILE.py:FUNCTION or MODULE:FUNCTION")
]


def profile_command(
    model: ModelName,
    output: Output = None,
    parts: Annotated[str, typer.Option(help="numbers of parts, with commas between")] = "1,2,4,8",
    calls: Annotated[int, typer.Option(min=1, max=1000, help="traced calls of each kind")] = 8,
    as_json: Json = False,
) -> None:
    """Measure what the ops of a model take, by size, alone and beside each other."""
    from torchweft_tools.cli.subject import load_subject
    from torchweft_tools.profile import measure, save_profile

    numbers = [read_literal(word) for word in parts.split(",")]
    if wrong := [each for each in numbers if type(each) is not int or not 1 <= each <= 1024]:
        raise WeftError(f"parts: {wrong[0]!r} is not a number of parts from 1 to 1024.")
    subject = load_subject(model).compiled("sequential")
    with bar("profile") as progress:
        profile = measure(
            subject.model, [subject.inputs], parts=numbers, num_calls=calls, progress=progress
        )
    if os.environ.get("RANK", "0") != "0":
        return
    if output is not None:
        save_profile(profile, output)
    answer(_text(profile), _data(profile), as_json=as_json)


def _text(profile: Profile) -> str:
    lines = [profile.about, f"{'op':<34} {'device':<8} {'rows':>6} {'seconds':>12}"]
    for key, where, points in profile.costs.table.entries:
        lines += [f"{key[-34:]:<34} {where:<8} {rows:>6} {s:>12.6f}" for rows, s in points]
    for device in profile.machine.devices:
        rates = f"{device.flops_per_s:.3g} flops/s, {device.bytes_per_s:.3g} bytes/s"
        network = f"{device.network_latency_s:.3g} s + {device.network_bytes_per_s:.3g} bytes/s"
        lines.append(f"{device.name}: {rates}, network {network}")
        lines.append(f"{device.name}: {device.overhead_s:.3g} s to start an op of two phases")
        for each in device.slowdowns:
            told = f"{each.uses} takes {each.factor:.2f} times as long beside {each.beside}"
            lines.append(f"{device.name}: {told}")
    lines.append(f"a call takes {profile.costs.call_s:.3g} s on top of its ops")
    return "\n".join(lines)


def _data(profile: Profile) -> dict[str, object]:
    from torchweft.plan.machine import to_data

    facts = {"about": profile.about, "samples": profile.num_samples}
    table = profile.costs.table.entries
    return {
        **facts,
        "call_s": profile.costs.call_s,
        "machine": to_data(profile.machine),
        "entries": table,
    }


def against(simulated: Trace, measured: Trace) -> tuple[str, list[dict[str, Any]]]:
    """The error of a simulation, step by step: as text, and as rows. Raises `WeftError` if the two
    have no step in common."""
    own, seen = (_by_step(trace.spans) for trace in (simulated, measured))
    pairs = [
        (f"{kind} {label}", span.end_s - span.start_s, there.end_s - there.start_s)
        for (kind, label), span in own.items()
        if (there := seen.get((kind, label))) is not None
    ]
    if not pairs:
        raise WeftError(
            "against: the trace has no step of this plan. Trace a call by this plan: "
            "weft.trace(model, x).save('run.json').",
            rule="against",
        )
    pairs.append(("makespan", simulated.makespan_s, measured.makespan_s))
    rows: list[dict[str, Any]] = []
    lines = [f"{'step':<40} {'simulated':>11} {'measured':>11} {'error':>7}"]
    for step, simulated_s, measured_s in pairs:
        error = simulated_s / measured_s - 1 if measured_s else None
        facts = {"step": step, "simulated_s": simulated_s, "measured_s": measured_s}
        rows.append({**facts, "error": error})
        told = "" if error is None else f"{100 * error:+.0f} %"
        times = f"{1e3 * simulated_s:>8.3f} ms {1e3 * measured_s:>8.3f} ms"
        lines.append(f"{step[:40]:<40} {times} {told:>7}")
    if (num_more := len(lines) - MAX_LINES) > 0:
        lines[MAX_LINES - 1 : -1] = [f"... and {num_more + 1} more steps; --json gives all"]
    return "\n".join(lines), rows


def _by_step(spans: Iterable[Span]) -> dict[tuple[str, str], Span]:
    return {(span.kind, span.label): span for span in spans if span.kind in KINDS}

"""The command `torchweft`: graph and plan files come in; plans, findings and timelines go out.

    torchweft blueprint transformer -o graph.json      a graph to play with
    torchweft plan graph.json --strategy overlap --option parts=2 --batch 512 -o overlap.plan
    torchweft verify overlap.plan --graph graph.json
    torchweft simulate overlap.plan --graph graph.json --batch 512

Exit code 0: done. 1: a mistake in what was given (or an unsafe plan), with our own error.
2: a command line that cannot be read. WEFT_DEBUG=1 shows where an error was raised.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from importlib.metadata import version
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

import torchweft as weft
from torchweft.errors import WeftError, unknown
from torchweft.files import read_text, write_text
from torchweft.plan.context import Context
from torchweft.plan.graph import graph_data
from torchweft.plan.lower.lower import lower
from torchweft.plan.machine import Machine
from torchweft.plan.plan import Plan
from torchweft.plan.simulator import simulate, within_memory
from torchweft.plan.strategies import get_strategy, strategy_names
from torchweft.plan.verify import Finding, findings_ranks, verify
from torchweft.plan.write.strategy import Strategy, option_defaults, write
from torchweft_tools.buffers import lower_into_buffers
from torchweft_tools.cli import bench, tools
from torchweft_tools.cli.costs import against as compare
from torchweft_tools.cli.costs import profile_command
from torchweft_tools.cli.doctor import examine
from torchweft_tools.cli.explaining import explain_command
from torchweft_tools.cli.picture import picture
from torchweft_tools.cli.predict import predict_command
from torchweft_tools.cli.schedules import SUFFIX, simulate_schedule, verify_schedule
from torchweft_tools.cli.text import (
    Json,
    MachineFile,
    Output,
    Sizes,
    UsageError,
    Width,
    answer,
    bar,
    error_data,
    read_context,
    read_machine,
    read_pairs,
    say,
    say_json,
)
from torchweft_tools.demo import blueprint as blueprints
from torchweft_tools.formats.weft_files import (
    load_graph,
    load_machine,
    load_measured,
    load_trace,
    save_graph,
)
from torchweft_tools.selftest.gpu_doctor import examine_gpus
from torchweft_tools.train.command import place

if TYPE_CHECKING:
    from torchweft_tools.cli.subject import Subject

app = typer.Typer(add_completion=False, no_args_is_help=True, pretty_exceptions_enable=False)
app.add_typer(place, name="place")
app.add_typer(bench.app, name="bench")
app.add_typer(tools.lab_app, name="lab")
app.command("dryrun", context_settings=tools.AS_IS)(tools.dryrun_command)
app.command("selftest")(tools.selftest_command)
app.command("demo")(tools.demo_command)
app.command("explain")(explain_command)
app.command("profile")(profile_command)
app.command("predict")(predict_command)

GraphFile = Annotated[Path, typer.Argument(metavar="GRAPH", help="graph file (JSON)")]
PlanFile = Annotated[Path, typer.Argument(metavar="PLAN", help="plan file")]
PlanFiles = Annotated[
    list[Path], typer.Argument(metavar="PLAN...", help="a plan file for each rank")
]
Graphs = Annotated[
    list[Path] | None, typer.Option("--graph", help="graph file; several: one a rank")
]
OneGraph = Annotated[Path | None, typer.Option("--graph", help="graph file (JSON)")]
Batch = Annotated[int, typer.Option(min=0, help="rows of the call")]
MaybeBatch = Annotated[int | None, typer.Option("--batch", min=0, help="rows of the call")]
Tokens = Annotated[str, typer.Option("--tokens-per-request", metavar="N,N,...")]
Phase = Annotated[str | None, typer.Option(help="prefill or decode, where the host knows")]
Lanes = Annotated[int, typer.Option("--lanes", help="compute lanes of a CPU, if no --machine")]
Model = Annotated[str, typer.Argument(metavar="MODEL", help="FILE.py:FUNCTION or MODULE:FUNCTION")]
StrategyName = Annotated[str, typer.Option("--strategy", help="see: torchweft strategies")]
Options = Annotated[
    list[str] | None, typer.Option("--option", metavar="K=V", help="an option of the strategy")
]


def main() -> None:
    """The command: runs it and leaves with its exit code."""
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")
    sys.exit(run(sys.argv[1:]))


def run(words: Sequence[str]) -> int:
    """Run one command line; its exit code. Our errors are shown and not raised."""
    try:
        code = app(list(words), prog_name="torchweft", standalone_mode=False)
        return code if isinstance(code, int) else 0
    except UsageError as wrong:
        if "--json" in words:
            say_json(error_data(WeftError(wrong.format_message(), rule="usage")))
        else:
            wrong.show()
        return 2
    except (WeftError, OSError) as error:
        if os.environ.get("WEFT_DEBUG", "0") != "0":
            raise
        if isinstance(error, OSError) and not isinstance(error, WeftError):
            error = WeftError(f"file: {error.filename or 'output'}: {error.strerror}.")
        if "--json" in words:
            say_json(error_data(error))
        else:
            say(f"{type(error).__name__}: {error}", to=sys.stderr)
        return 1


def _show_version(wanted: bool) -> None:
    if wanted:
        say(f"torchweft {version('torchweft')}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True)
    ] = False,
) -> None:
    """Plan, verify and simulate how the operators of a model run."""


@app.command("plan")
def plan_command(
    graph: GraphFile,
    batch: Batch,
    strategy: StrategyName = "sequential",
    option: Options = None,
    size: Sizes = None,
    tokens: Tokens = "",
    phase: Phase = None,
    machine: MachineFile = None,
    lanes: Lanes = 1,
    bare: Annotated[
        bool, typer.Option("--bare", help="as the strategy wrote it: not lowered")
    ] = False,
    buffers: Annotated[
        bool, typer.Option("--buffers", help="let values share planned buffers")
    ] = False,
    svg: Annotated[
        Path | None, typer.Option("--svg", help="draw it, simulated, into this file")
    ] = None,
    output: Output = None,
    as_json: Json = False,
) -> None:
    """Write a plan for a graph by a strategy; lower, verify and print it."""
    context = read_context(batch, size or (), tokens, phase)
    machine_read = read_machine(machine, lanes)
    plan = write(_chosen(strategy, option), load_graph(graph), context, machine_read)
    if not bare:
        plan = verify((lower_into_buffers if buffers else lower)(plan))
        _check_memory(plan, context, machine_read)
    if bare and svg is not None:
        raise WeftError("svg: a bare plan cannot be simulated; leave out --bare.", rule="svg")
    if svg is not None:
        write_text(svg, picture(simulate(plan, context, machine_read)))
    if output is not None:
        plan.save(output)
    if as_json:
        say_json({"plan": str(plan), "verified": not bare, **_plan_facts(plan)})
    elif output is not None:
        state = "bare" if bare else "verified"
        say(f"{output}: {state} plan of {len(plan.steps)} steps", to=sys.stderr)
    else:
        say(str(plan).rstrip())


def _check_memory(plan: Plan, context: Context, machine: Machine) -> None:
    """Raise `MemoryPlanError` for a plan that holds more than a device of the machine."""
    if machine.is_limited:
        within_memory(plan, context, machine)


def _plan_facts(plan: Plan) -> dict[str, object]:
    facts = {"graph": plan.graph_name, "digest": plan.digest, "history": plan.history}
    return {**facts, "num_parts": plan.num_parts, "num_steps": len(plan.steps)}


@app.command("verify")
def verify_command(
    plans: PlanFiles,
    graph: Graphs = None,
    batch: MaybeBatch = None,
    size: Sizes = None,
    tokens: Tokens = "",
    machine: MachineFile = None,
    as_json: Json = False,
) -> None:
    """Say whether plans are safe, each alone or together as the plans of all ranks. With --machine
    and --batch also whether each keeps to the memory of its devices in such a call.

    A schedule file of torch.distributed.pipelining (FILE.csv) is the plans of all ranks.
    """
    if plans[0].suffix == SUFFIX and len(plans) == 1:
        verify_schedule(plans[0], as_json=as_json)
    if not graph:
        raise UsageError("Missing option '--graph'.")
    graphs = [load_graph(path) for path in graph]
    by_digest = {item.digest: item for item in graphs}
    bare = [Plan.load(path) for path in plans]
    loaded = [plan.bind(by_digest.get(plan.digest, graphs[0])) for plan in bare]
    findings = findings_ranks(loaded)
    if (machine is None) != (batch is None):
        missing = "machine" if machine is None else "batch"
        raise UsageError(f"Missing option '--{missing}': --machine and --batch go together.")
    if machine is not None and batch is not None and not findings:
        context, machine_read = read_context(batch, size or (), tokens, None), load_machine(machine)
        for plan in loaded:
            _check_memory(plan, context, machine_read)
    shown = [f"{item.error(loaded[item.rank], num_ranks=len(loaded))}\n" for item in findings]
    what = f"{len(loaded)} plans of {len(loaded)} ranks" if len(loaded) > 1 else "plan"
    steps = sum(len(plan.steps) for plan in loaded)
    verdict = f"unsafe: {len(findings)} found" if findings else f"safe: {steps} steps"
    data = {
        "safe": not findings,
        "plans": [_plan_facts(plan) for plan in loaded],
        "findings": [_finding_data(item, loaded[item.rank]) for item in findings],
    }
    answer("\n".join([*shown, f"{what} {verdict}"]), data, as_json=as_json)
    raise typer.Exit(1 if findings else 0)


def _finding_data(item: Finding, plan: Plan) -> dict[str, object]:
    step = None if item.step is None else plan.steps[item.step]
    where = {"lane": step.lane, "label": step.label} if step else {"lane": None, "label": None}
    return {**asdict(item), **where}


@app.command("simulate")
def simulate_command(
    plan: PlanFile,
    graph: OneGraph = None,
    batch: MaybeBatch = None,
    size: Sizes = None,
    tokens: Tokens = "",
    machine: MachineFile = None,
    lanes: Lanes = 1,
    no_contention: Annotated[
        bool, typer.Option("--no-contention", help="no step slows another down")
    ] = False,
    trace: Annotated[
        Path | None, typer.Option("--trace", help="save it: .json (Perfetto) or .txt")
    ] = None,
    costs: Annotated[
        Path | None, typer.Option("--costs", help="what torchweft profile has written")
    ] = None,
    against: Annotated[
        Path | None, typer.Option("--against", help="a trace: the error, step by step")
    ] = None,
    stage_cost: Annotated[
        list[str] | None,
        typer.Option(metavar="F=S", help="seconds of an action of a schedule file, or 2F=S"),
    ] = None,
    width: Width = 100,
    as_json: Json = False,
) -> None:
    """Run a plan on a virtual clock: a timeline and a summary. Plans that are unsafe, or hold more
    than the memory of a device, are refused.

    A schedule file of torch.distributed.pipelining (FILE.csv) is the plans of all ranks.
    """
    if plan.suffix == SUFFIX:
        words, full = stage_cost or (), not no_contention
        simulate_schedule(plan, words, contention=full, trace=trace, width=width, as_json=as_json)
        return
    if graph is None or batch is None:
        raise UsageError(f"Missing option '--{'graph' if graph is None else 'batch'}'.")
    if costs is not None and (machine is not None or lanes != 1):
        raise WeftError("costs: the file has the machine; leave out --machine and --lanes.")
    safe = verify(Plan.load(plan, load_graph(graph)))
    context = read_context(batch, size or (), tokens, None)
    measured = load_measured(costs) if costs is not None else None
    machine_read = measured.machine if measured is not None else read_machine(machine, lanes)
    simulated = within_memory(safe, context, machine_read, measured, contention=not no_contention)
    if trace is not None:
        simulated.save(trace)
    times = ("makespan_s", "critical_path_s", "network_s", "exposed_network_s", "overlap_share")
    facts = {name: getattr(simulated, name) for name in (*times, "peak_bytes")}
    busy = {lane: simulated.busy_s(lane) for lane, _ in simulated.lanes}
    data = {"simulated": True, "name": simulated.name, **facts, "busy_s": busy}
    text = simulated.to_text(width).rstrip()
    if against is not None:
        told, data["steps"] = compare(simulated, load_trace(against))
        text = f"{text}\n{told}"
    answer(text, data, as_json=as_json)


@app.command("show")
def show_command(
    name: Annotated[str, typer.Argument(metavar="FILE | MODEL", help="graph, plan or model")],
) -> None:
    """Print a graph or a plan as numbered text, or the graphs that a model is captured as."""
    if ":" in name:
        subject = _subject(name).compiled("sequential")
        subject.call()
        for piece in subject.session.pieces:
            say(str(piece.graph))
            for op, reason in piece.captured.reasons.items():
                say(f"  {op} runs whole: {reason}")
        return
    path = Path(name)
    if read_text(path, WeftError, "graph or plan").lstrip().startswith(("{", "[")):
        say(str(load_graph(path)))
        return
    head, _, steps = str(Plan.load(path)).partition("\nsteps\n")
    lines = steps.splitlines()[:-1]
    say("\n".join([head, "steps", *(f"{number:>5}{line}" for number, line in enumerate(lines))]))


@app.command("diff")
def diff_command(before: PlanFile, after: PlanFile) -> None:
    """Print what turns one plan into another; exit code 1 if they differ, as diff does."""
    difference = Plan.load(before).diff(Plan.load(after))
    if difference:
        say(difference)
    raise typer.Exit(1 if difference else 0)


@app.command("blueprint")
def blueprint_command(
    name: Annotated[str, typer.Argument(help="transformer, experts, on_disk or sequence")],
    layers: Annotated[int, typer.Option(min=1, max=1000)] = 2,
    hidden: Annotated[int, typer.Option(min=1, max=10**6)] = 1024,
    kv_cache: Annotated[bool, typer.Option("--kv-cache", help="attention writes a cache")] = False,
    output: Output = None,
) -> None:
    """Write the graph of a well-known model, drawn from its dimensions."""
    others = (blueprints.experts, blueprints.on_disk, blueprints.sequence)
    drawn = {each.__name__: each for each in others}
    if name not in (known := ("transformer", *drawn)):
        raise WeftError(f"blueprint: {unknown('blueprint', name, known)}")
    if name in drawn and kv_cache:
        raise WeftError("blueprint: --kv-cache goes with transformer.")
    graph = (
        drawn[name](layers, hidden)
        if name in drawn
        else blueprints.transformer(layers, hidden, kv_cache=kv_cache)
    )
    if output is None:
        say_json(graph_data(graph))
        return
    save_graph(graph, output)
    say(f"{output}: graph {graph.name} of {len(graph.ops)} ops", to=sys.stderr)


@app.command("strategies")
def strategies_command(as_json: Json = False) -> None:
    """List the strategies, with their options and what they do."""
    known = [get_strategy(name) for name in strategy_names()]
    docs = [(item.function.__doc__ or "").partition("\n")[0] for item in known]
    wide = max(len(str(item)) for item in known)
    lines, rows = [], []
    for item, doc in zip(known, docs, strict=True):
        lines.append(f"{item!s:<{wide}}  {doc}")
        rows.append({"name": item.name, "options": option_defaults(item.function), "doc": doc})
    answer("\n".join(lines), {"strategies": rows}, as_json=as_json)


@app.command("run")
def run_command(
    model: Model,
    strategy: StrategyName = "sequential",
    option: Options = None,
    calls: Annotated[int, typer.Option(min=1, help="how often it is called")] = 3,
    as_json: Json = False,
) -> None:
    """Call a model under a strategy and tell what became of it."""
    subject = _subject(model).compiled(_chosen(strategy, option))
    times_s = []
    for _ in range(calls):
        start = time.perf_counter()
        subject.call()
        times_s.append(time.perf_counter() - start)
    report, first_s, last_s = weft.report(subject.model), times_s[0], times_s[-1]
    data = {
        "strategy": report.strategy,
        "pieces": len(report.pieces),
        "split_share": report.split_share,
        "copies": report.num_copies,
        "fallbacks": dict(report.fallbacks),
        "first_s": first_s,
        "last_s": last_s,
    }
    times = f"first call {first_s:.3f} s, last of {calls} calls {last_s:.6f} s"
    answer(f"{report}\n{times}", data, as_json=as_json)


@app.command("check")
def check_command(
    model: Model,
    strategy: StrategyName = "overlap",
    option: Options = None,
    tolerance: Annotated[float | None, typer.Option(help="relative; default by dtype")] = None,
    as_json: Json = False,
) -> None:
    """Compare a model under a strategy with plain PyTorch; exit code 1 if they differ."""
    verdict = _subject(model).check(_chosen(strategy, option), tolerance)
    answer(str(verdict), asdict(verdict), as_json=as_json)
    raise typer.Exit(0 if verdict else 1)


@app.command("trace")
def trace_command(
    model: Model,
    strategy: StrategyName = "overlap",
    option: Options = None,
    output: Output = None,
) -> None:
    """Run a model and draw what really happened on its lanes."""
    traced = _subject(model).compiled(_chosen(strategy, option)).trace()
    say(traced.to_text())
    if output is not None:
        traced.save(output)


@app.command("tune")
def tune_command(model: Model, as_json: Json = False) -> None:
    """Race all ways that a model may run, torch.compile among them; the fastest is kept on disk."""
    with bar("races") as progress:
        lines = _subject(model).tune(progress)
    if as_json:
        say_json({"choices": lines})
    else:
        say("\n".join(lines))


@app.command("doctor")
def doctor_command(as_json: Json = False) -> None:
    """Say what this machine can do for Weft, with cures; exit code 1 if something is broken."""
    diagnoses = []
    for item in chain(examine(), examine_gpus()):
        diagnoses.append(item)
        if not as_json:
            say(f"{item.state:<8} {item.what:<19} {item.found}  {item.cure}".rstrip())
    if as_json:
        say_json({"diagnoses": [asdict(item) for item in diagnoses]})
    raise typer.Exit(1 if any(item.state == "broken" for item in diagnoses) else 0)


def _subject(name: str) -> Subject:
    """The model of a command. It needs torch, which takes seconds to load."""
    from torchweft_tools.cli.subject import load_subject

    return load_subject(name)


def _chosen(strategy: str, options: list[str] | None) -> Strategy:
    return get_strategy(strategy)(**read_pairs(options or (), "option"))

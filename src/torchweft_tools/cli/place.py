"""The commands `torchweft place ...`: a graph and devices come in, a placement goes out.

    torchweft place plan --graph dev.txt --tree 3 --ratio 1 --planner heft
    torchweft place plan --graph net.json --planner portfolio --deadline-ms 500 --json
    torchweft place compare --graph rand0000.stg --devices 4 --deadline-ms 200
    torchweft place explain --graph net.json --planner peft -o net.json

`--graph` takes our graph files (with `--machine`), DNN-partitioning JSON, STG and bracketed trees.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from inspect import Signature, signature
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import typer

from torchweft.errors import PlacementError, WeftError, clip
from torchweft.placement import Placement, Problem, as_plan, check, plan, planner_names
from torchweft.placement.planners.planner import Planner, get_planner
from torchweft.plan.machine import CostTable
from torchweft.plan.trace import format_s
from torchweft.plan.verify import verify
from torchweft_tools.cli.explain import critical_path, trace_of, utilisation, with_twin
from torchweft_tools.cli.text import (
    Json,
    MachineFile,
    Sizes,
    Width,
    answer,
    read_context,
    read_literal,
)
from torchweft_tools.formats.read_any import ProblemOptions, read_problem
from torchweft_tools.formats.stand_in import with_graph
from torchweft_tools.formats.weft_files import (
    load_costs,
    load_machine,
    load_placement,
    placement_data,
    save_placement,
)

LEARNED = ("learned", "guarded", "guided")
NAMES = (*planner_names(), "exhaustive")
MAX_PATH = 40
app = typer.Typer(no_args_is_help=True, help="Place the ops of a graph on unlike devices.")

PlannerName = Annotated[str, typer.Option("--planner", help=f"one of: {', '.join(NAMES)}")]


class _PlaceOptions(NamedTuple):
    """What stands on the command line of every command here."""

    problem: Problem
    policy: Path | None
    deadline_s: float | None
    seed: int
    as_json: bool

    def plan(self, problem: Problem, planner: str | Planner) -> Placement:
        """What a planner finds for a problem with these options."""
        return plan(problem, planner, deadline_s=self.deadline_s, seed=self.seed)


def _asked(
    *,
    graph: Annotated[
        Path, typer.Option("--graph", help="graph file: ours, DNN-partitioning, STG, trees")
    ],
    machine: MachineFile = None,
    policy: Annotated[
        Path | None, typer.Option("--policy", help=f"of your own, for {', '.join(LEARNED)}")
    ] = None,
    deadline_ms: Annotated[
        float | None,
        typer.Option("--deadline-ms", min=0, help="for planners that search; compare: 1000"),
    ] = None,
    devices: Annotated[
        str,
        typer.Option("--devices", metavar="N | S,S,...", help="STG, trees: how many, or how slow"),
    ] = "",
    ratio: Annotated[
        float | None, typer.Option("--ratio", help="mean transfer over mean op, if no file says it")
    ] = None,
    tree: Annotated[int, typer.Option("--tree", min=0, help="which tree of the file, from 0")] = 0,
    batch: Annotated[int, typer.Option("--batch", min=0, help="our graphs: rows of the call")] = 1,
    size: Sizes = None,
    costs: Annotated[
        Path | None, typer.Option("--costs", help="our graphs: measured costs (JSON)")
    ] = None,
    weights_resident: Annotated[
        bool,
        typer.Option("--weights-resident", help="inputs without a batch are where they are read"),
    ] = False,
    objective: Annotated[
        str, typer.Option("--objective", help="latency or throughput")
    ] = "latency",
    seed: Annotated[int, typer.Option("--seed")] = 0,
    as_json: Json = False,
) -> _PlaceOptions:
    options = ProblemOptions(
        machine=load_machine(machine) if machine else None,
        slowness=_slowness(devices),
        ratio=ratio,
        tree=tree,
        context=read_context(batch, size or (), "", None),
        table=load_costs(costs) if costs else CostTable(),
        weights_resident=weights_resident,
        objective=objective,
    )
    deadline_s = None if deadline_ms is None else deadline_ms / 1e3
    return _PlaceOptions(read_problem(graph, options), policy, deadline_s, seed, as_json)


def _command(command: Callable[..., None]) -> Callable[..., None]:
    """Make a function a command of the app: it has the options of `_asked` before its own, and is
    called with what they say."""
    shared = signature(_asked, eval_str=True).parameters
    own = dict(signature(command, eval_str=True).parameters)
    del own["asked"]

    @wraps(command)
    def run(**given: Any) -> None:
        asked = _asked(**{name: given[name] for name in shared})
        command(asked, **{name: given[name] for name in own})

    options = [*shared.values(), *own.values()]
    run.__signature__ = Signature(options)  # type: ignore[attr-defined]
    run.__annotations__ = {option.name: option.annotation for option in options}
    app.command(command.__name__.removeprefix("_"))(run)
    return command


@app.callback()
def _place() -> None:
    """Place the ops of a graph on unlike devices."""


@_command
def _plan(
    asked: _PlaceOptions,
    *,
    planner: PlannerName = "portfolio",
    output: Annotated[
        Path | None, typer.Option("-o", "--output", help="write the placement (JSON)")
    ] = None,
    plan_file: Annotated[
        Path | None, typer.Option("--as-plan", help="write it as a plan, verified")
    ] = None,
) -> None:
    """Plan where each op runs: placement, starts, makespan, bound and planning time."""
    chosen = _with_policy(planner, asked.policy)
    with bar(f"{planner} places {asked.problem.name}"):
        placed = asked.plan(asked.problem, chosen)
    if output is not None:
        save_placement(placed, output)
    if plan_file is not None:
        verify(as_plan(with_graph(asked.problem), placed)).save(plan_file)
    answer(str(placed).rstrip(), placement_data(placed), as_json=asked.as_json)


@_command
def _compare(
    asked: _PlaceOptions,
    *,
    planner: Annotated[
        list[str] | None, typer.Option("--planner", help="several; default: all that take it")
    ] = None,
) -> None:
    """Let several planners place one graph, and compare the placements."""
    if asked.deadline_s is None:
        asked = asked._replace(deadline_s=1.0)
    placements: list[Placement] = []
    refused: dict[str, str] = {}
    names, policy = planner or list(NAMES), asked.policy
    if policy is not None and not set(names) & set(LEARNED):
        _with_policy(names[0], policy)  # which refuses it
    planners = {name: _with_policy(name, policy if name in LEARNED else None) for name in names}
    with bar(f"{len(names)} planners place {asked.problem.name}", len(names)) as step:
        for name, chosen in planners.items():
            try:
                placements.append(asked.plan(asked.problem, chosen))
            except PlacementError as error:
                if planner:
                    raise
                refused[name] = str(error)
            step()
    if not placements:
        raise PlacementError(next(iter(refused.values())))
    _show_compared(asked.problem, placements, refused, as_json=asked.as_json)


def _show_compared(
    problem: Problem, placements: list[Placement], refused: dict[str, str], *, as_json: bool
) -> None:
    best_s = min(item.score_s for item in placements)
    bound_s = max(item.bound_s or 0 for item in placements)
    lines = [f"{problem}: best {format_s(best_s)}, bound {format_s(bound_s)}"]
    head = f"  {'planner':<15}{problem.objective:<12}{'over best':<11}{'over bound':<12}planned in"
    lines.append(head)
    rows: list[dict[str, Any]] = []
    for item in sorted(placements, key=lambda item: item.score_s):
        row = {"planner": item.planner, "score_s": item.score_s}
        over = {
            "over_best": _over(item.score_s, best_s),
            "over_bound": _over(item.score_s, bound_s),
        }
        rows.append({**row, **over, "planning_s": item.planning_s})
        best, bound = ("-" if ratio is None else f"{ratio:.3f}" for ratio in over.values())
        times = f"{best:<11}{bound:<12}{format_s(item.planning_s)}"
        lines.append(f"  {item.planner:<15}{format_s(item.score_s):<12}{times}")
    lines += [f"  {name:<15}{why}" for name, why in refused.items()]
    facts = {"problem": problem.name, "objective": problem.objective, "bound_s": bound_s}
    answer("\n".join(lines), {**facts, "rows": rows, "refused": refused}, as_json=as_json)


def _over(score_s: float, least_s: float) -> float | None:
    """The ratio of two scores; none to a score of 0, but for that of another 0."""
    if least_s:
        return score_s / least_s
    return None if score_s else 1.0


@_command
def _explain(
    asked: _PlaceOptions,
    *,
    planner: PlannerName = "portfolio",
    placement: Annotated[
        Path | None, typer.Option("--placement", help="explain this one; no planner runs")
    ] = None,
    width: Width = 100,
    output: Annotated[
        Path | None, typer.Option("-o", "--output", help="the timeline: .json (Perfetto) or .txt")
    ] = None,
) -> None:
    """Show a placement as a timeline, its critical path, and what another device would bring."""
    problem, chosen = asked.problem, _with_policy(planner, asked.policy)
    kinds = _kinds(problem)
    with bar(f"{planner} places {problem.name}", 1 + len(kinds)) as step:
        given = None if placement is None else check(problem, load_placement(placement))
        placed = given or asked.plan(problem, chosen)
        step()
        brings = {}
        for device in kinds:
            more = asked.plan(with_twin(problem, device), chosen)
            # A twin need not be used.
            brings[problem.devices[device]] = min(more.score_s, placed.score_s)
            step()
    trace = trace_of(problem, placed)
    if output is not None:
        trace.save(output)
    path = critical_path(problem, placed)
    used = dict(zip(problem.devices, utilisation(problem, placed), strict=True))
    lines = [trace.to_text(width).rstrip(), f"critical path, {len(path)} ops:"]
    lines += [_path_line(problem, placed, *each) for each in path[:MAX_PATH]]
    if len(path) > MAX_PATH:
        lines.append(f"  ... and {len(path) - MAX_PATH} more; --json gives all")
    lines.append("used: " + ", ".join(f"{name} {share:.0%}" for name, share in used.items()))
    for name, score_s in brings.items():
        less = 1 - score_s / placed.score_s if placed.score_s else 0.0
        lines.append(f"another {name} would bring {format_s(score_s)} ({less:.1%} less)")
    data = {
        **placement_data(placed),
        "critical_path": [_path_data(problem, placed, *each) for each in path],
        "utilisation": used,
        "another_device_s": brings,
    }
    answer("\n".join(lines), data, as_json=asked.as_json)


def _kinds(problem: Problem) -> list[int]:
    """One device of each kind: the first of those that run everything in equal times."""
    columns: dict[tuple[float, ...], int] = {}
    for device in range(problem.num_devices):
        columns.setdefault(tuple(row[device] for row in problem.seconds), device)
    return list(columns.values())[:8]


def _path_line(problem: Problem, placed: Placement, op: int, why: str, behind: int) -> str:
    waits = {
        "start": "starts at once",
        "input": "waits for inputs",
        "device": f"waits for the device, behind {problem.ops[behind]}",
        "value": f"waits for {problem.ops[behind]} on {problem.devices[placed.device[behind]]}",
    }[why]
    device = problem.devices[placed.device[op]]
    return f"  {format_s(placed.start_s[op]):<11}{device}  {problem.ops[op]}: {waits}"


def _path_data(
    problem: Problem, placed: Placement, op: int, why: str, behind: int
) -> dict[str, Any]:
    before = problem.ops[behind] if behind >= 0 else None
    facts = {"op": problem.ops[op], "device": problem.devices[placed.device[op]]}
    return {**facts, "start_s": placed.start_s[op], "why": why, "behind": before}


def _slowness(text: str) -> tuple[float, ...]:
    """`3`: three equal devices; `1,1.6,4`: how slow each is."""
    if not text:
        return ()
    numbers = [read_literal(word) for word in text.split(",")]
    if not all(type(number) in (int, float) for number in numbers):
        raise WeftError(f"devices: --devices is a count or a list of numbers; got {clip(text)}.")
    if len(numbers) == 1 and type(numbers[0]) is int and 1 <= numbers[0] <= 10_000:
        return (1.0,) * numbers[0]
    return tuple(map(float, numbers))


def _with_policy(planner: str, policy: Path | None) -> str | Planner:
    """The planner, with a policy of the user's own if there is one. Raises for an unknown one."""
    if policy is None:
        get_planner(planner)
        return planner
    if planner not in LEARNED:
        known = ", ".join(LEARNED)
        raise PlacementError(f"policy: {planner!r} has no policy; --policy goes with {known}.")
    from torchweft.placement.learn.policy import Policy, planner_of

    return planner_of(Policy.load(policy), get_planner(planner))


@contextmanager
def bar(text: str, total: int | None = None) -> Iterator[Any]:
    """A progress bar on stderr while something takes its time; yields what moves it on."""
    from rich.console import Console
    from rich.progress import Progress

    console = Console(stderr=True)
    with Progress(console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task(text, total=total)
        yield lambda: bar.advance(task)

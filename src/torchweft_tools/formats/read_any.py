"""A problem from a file of any known format: what the command line reads.

    graph file of Weft        JSON with "weft_graph"; needs a machine, takes a batch and costs
    DNN-partitioning          JSON with nodes and edges; names its own devices
    STG                       numbers; equal devices, as many as the file says, or two
    bracketed trees           ( ... ); by default three devices, 1, 1.6 and 4 times slow

`--machine` replaces the devices of a file, `--devices` those of STG and trees.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from torchweft.errors import PlacementError, clip
from torchweft.files import read_text
from torchweft.placement.graph_problem import graph_problem
from torchweft.placement.problem import INF, Problem
from torchweft.plan.context import Context
from torchweft.plan.machine import Costs, CostTable, Machine
from torchweft_tools.formats.read_dnn import MARKS, read_dnn
from torchweft_tools.formats.read_stg import read_stg
from torchweft_tools.formats.read_trees import read_trees, tree_work
from torchweft_tools.formats.reader import read_json
from torchweft_tools.formats.weft_files import read_graph
from torchweft_tools.formats.work import (
    DevicePool,
    Work,
    as_name,
    machine_pool,
    on_pool,
    slowness_pool,
)

TREE_SLOWNESS = (1.0, 1.6, 4.0)


@dataclass(frozen=True)
class ProblemOptions:
    """What the command line adds to the file. ratio: transfer seconds of a value over the mean
    seconds of an op, where a file has no transfers; tree: which tree of a file with several;
    weights_resident: inputs without a batch of a Weft graph are on every device that reads them."""

    machine: Machine | None = None
    slowness: Sequence[float] = ()
    ratio: float | None = None
    tree: int = 0
    context: Context = field(default_factory=Context)
    table: CostTable = field(default_factory=CostTable)
    weights_resident: bool = False
    objective: str = "latency"


def read_problem(path: str | Path, wanted: ProblemOptions | None = None) -> Problem:
    """The problem of a file. Raises `PlacementError`, `GraphError` or `MachineError`."""
    wanted = wanted or ProblemOptions()
    text = read_text(path, PlacementError, "graph").lstrip()
    if wanted.ratio is not None and not 0 <= wanted.ratio < 1e6:
        text = f"--ratio must be a number from 0 up to a million; got {clip(wanted.ratio)}"
        raise PlacementError(f"ratio: {text}.")
    name = as_name(Path(path).stem)
    if wanted.tree and not text.startswith("("):
        raise PlacementError(f"tree: {path} has no trees; leave out --tree.", rule="tree")
    if text.startswith(("{", "[")):
        return _from_json(path, name, wanted)
    if text.startswith("("):
        return _from_trees(text, name, wanted)
    if text[:1].isdigit() or text.startswith("#"):
        work, processors = read_stg(text, name)
        pool = _pool(wanted, (1.0,) * (processors or 2))
        return on_pool(_with_ratio(work, pool, wanted.ratio), pool, objective=wanted.objective)
    known = "graph files of Weft, DNN-partitioning JSON, STG, bracketed trees"
    raise PlacementError(f"file: the format of {path} is unknown. Known: {known}.", rule="file")


def _from_json(path: str | Path, name: str, wanted: ProblemOptions) -> Problem:
    data = read_json(path, PlacementError, "graph")
    if isinstance(data, dict) and "weft_graph" not in data and MARKS & set(data):
        if wanted.slowness:
            raise PlacementError(
                "devices: a DNN graph names its own devices; leave out --devices, or use --machine."
            )
        work, pool = read_dnn(data, name)
        if wanted.machine is not None:
            rooms = [spot.room_bytes for spot in pool.spots if spot.kind == "accelerator"]
            pool = machine_pool(wanted.machine, tuple(work.seconds), min(rooms, default=INF))
        return on_pool(_with_ratio(work, pool, wanted.ratio), pool, objective=wanted.objective)
    graph = read_graph(data)
    if wanted.machine is None:
        raise PlacementError(
            "machine: a Weft graph names no devices; give --machine FILE.", rule="machine"
        )
    if wanted.slowness or wanted.ratio is not None:
        raise PlacementError(
            "devices: the machine defines the devices and links of a Weft graph; "
            "leave out --devices and --ratio."
        )
    weights = [name for name in graph.inputs if graph.value[name].batch is None]
    return graph_problem(
        graph,
        wanted.machine,
        Costs(wanted.machine, wanted.table),
        wanted.context,
        resident=weights if wanted.weights_resident else (),
        objective=wanted.objective,
    )


def _from_trees(text: str, name: str, wanted: ProblemOptions) -> Problem:
    count, chosen = 0, None
    for tree in read_trees(text):  # all trees are checked, one is kept
        chosen, count = tree if count == wanted.tree else chosen, count + 1
    if chosen is None:
        known = f"it has {count}, counted from 0"
        raise PlacementError(f"tree: the file has no tree number {wanted.tree}: {known}.")
    pool = _pool(wanted, TREE_SLOWNESS)
    work = tree_work(chosen, f"{name}.{wanted.tree}")
    ratio = 0.3 if wanted.ratio is None else wanted.ratio
    return on_pool(_with_ratio(work, pool, ratio), pool, objective=wanted.objective)


def _pool(wanted: ProblemOptions, slowness: Sequence[float]) -> DevicePool:
    if wanted.machine is None:
        return slowness_pool(wanted.slowness or slowness)
    if wanted.slowness:
        raise PlacementError("devices: give --devices or --machine, not both.")
    return machine_pool(wanted.machine, ("cpu",))


def _with_ratio(work: Work, pool: DevicePool, ratio: float | None) -> Work:
    """The work with one transfer time for all its edges: `ratio` times the mean op."""
    if ratio is None:
        return work
    seconds = (
        work.seconds[spot.kind][op] * spot.slowness
        for op in range(len(work.ops))
        for spot in pool.spots
    )
    finite = [item for item in seconds if item < INF]
    transfer_s = ratio * sum(finite) / max(1, len(finite))
    return replace(work, edges=tuple((a, b, transfer_s) for a, b, _ in work.edges))

"""Files and messages to damage: one small valid example of every format, and how it is read.

A `Format` reads a file: that raises our error, or gives a value that is equal once it has been
written and read back.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from torchweft.placement import plan
from torchweft.plan.context import Context
from torchweft.plan.graph import Graph, Op, Value, graph_data
from torchweft.plan.lower.lower import lower
from torchweft.plan.machine import Costs, CostTable, Device, Lane, Link, Machine, cpu
from torchweft.plan.machine import to_data as machine_data
from torchweft.plan.plan import Plan
from torchweft.plan.simulator import simulate
from torchweft.plan.strategies import get_strategy
from torchweft.plan.trace import Trace
from torchweft.plan.trace import to_data as trace_data
from torchweft.plan.verify import findings, verify
from torchweft.plan.write.strategy import write
from torchweft_tools.demo.blueprint import transformer
from torchweft_tools.formats.read_any import ProblemOptions, read_problem
from torchweft_tools.formats.weft_files import (
    load_costs,
    load_graph,
    load_machine,
    load_placement,
    load_served,
    load_trace,
    placement_data,
    read_graph,
    read_machine,
    read_placement,
    read_trace,
    save_costs,
    served_problem,
)

CONTEXT = Context(batch=64)
PAIR = Machine(
    "pair",
    (Device("a"), Device("b", flops_per_s=2e10, memory_bytes=10**9)),
    (Lane("a", "a"), Lane("b", "b")),
    (Link("a", "b"), Link("b", "a")),
)
TREES = "(3 (2 It) (4 (4 (2 's) (2 good)) (2 .)))\n(ROOT\n (S (NP you)))\n"
STG = "4\n0 0 0\n1 9 1 0\n2 4 1 0\n3 3 2 1 2\n4 5 1 0\n5 0 2 3 4\n# Standard Task Graph\n"
NODE = {"supportedOnFpga": 1, "cpuLatency": 4.0, "fpgaLatency": 1.0, "size": 60.0}
DNN = {
    "maxSizePerFPGA": 100.0, "maxFPGAs": 2, "maxCPUs": 1,
    "nodes": [{**NODE, "id": 7}, {**NODE, "id": 3, "colorClass": 5}, {**NODE, "id": 9}],
    "edges": [{"sourceId": 7, "destId": 3, "cost": 0.5}, {"sourceId": 3, "destId": 9, "cost": 0.2}],
}  # fmt: skip
ROW = [[2], "torch.float32"]
CELL = {
    "name": "x", "reads": [ROW], "makes": [ROW], "weights": ["w"], "kind": "calls",
    "calls": [
        ["aten.mul.Tensor", [{"v": 0}, 2.0], {}, 2],
        ["aten.add.Tensor", [{"v": 1}, {"v": 2}], {"alpha": 1}, 3],
    ],
    "outputs": [3], "num_prepared": 1,
}  # fmt: skip
LANES = """weft plan 1
graph g 0123456789abcdef
parts 1
lane one on one uses compute
lane one.to.home on one uses io
steps
  one  wait copy v to one
  one  a
  one.to.home  wait a
  one.to.home  copy v to home
end
"""
PART = {
    "plan": LANES, "groups": [["a", "x", 2, [2]]], "blocks": {"v": [0, 2, 2]},
    "num_rows": [[*ROW, 4]], "resident": ["w"],
}  # fmt: skip
RECORDED = {
    "num_values": 4, "cells": ["x"], "packs": [], "inputs": [[[0, 2]]], "wanted": [[*ROW, [2, 3]]],
}  # fmt: skip


@dataclass(frozen=True)
class Format:
    """A kind of file. data: an example; read: what is done with a file, our errors and all."""

    name: str
    data: bytes
    read: Callable[[Path], object]
    beside: tuple[tuple[str, bytes], ...] = ()  # other files of its folder


@cache
def formats() -> tuple[Format, ...]:
    """Every format, with an example."""
    graph = transformer(2, 64)
    written = verify(lower(write(get_strategy("overlap")(parts=2), graph, CONTEXT, cpu())))
    trace = simulate(written, CONTEXT, cpu())
    local = transformer(1, 64, tensor_parallel=False)
    table = CostTable.of({(op.name, "a"): {8: 1e-3, 64: 2e-3} for op in local.ops})
    problem = read_problem_of(local)
    placement = plan(problem, "heft")
    served = served_data(local, table, trace)
    pure = [
        Format("graph", _json(graph_data(graph)), _graph),
        Format("graph of aliases", _json(graph_data(chain(200))), _graph),
        Format("plan", str(written).encode(), lambda path: _plan(path, graph)),
        Format("costs", _json({"weft_costs": 1, "entries": table.entries}), _costs),
        Format("trace", _json(trace.to_chrome()), _trace),
        Format("machine", _json(machine_data(PAIR)), _machine),
        Format("placement", _json(placement_data(placement)), _placement),
        Format("served", _json(served), _served),
        Format("problem of a graph", _json(graph_data(local)), _problem),
        Format("DNN", _json(DNN), _problem),
        Format("STG", STG.encode(), _problem),
        Format("trees", TREES.encode(), _problem),
    ]
    return (*pure, *_with_torch())


def chain(count: int) -> Graph:
    """A graph of values that are aliases, each of the one before it."""
    values = [Value("v0")] + [Value(f"v{n}", alias_of=f"v{n - 1}") for n in range(1, count)]
    ops = [Op(f"op{n}", (f"v{n - 1}",), (f"v{n}",), rows="batch-free") for n in range(1, count)]
    return Graph("chain", tuple(values), tuple(ops), ("v0",), (f"v{count - 1}",))


def read_problem_of(graph: Graph) -> Any:
    """The problem of a graph on two devices."""
    from torchweft.placement.graph_problem import graph_problem

    return graph_problem(graph, PAIR, Costs(PAIR), CONTEXT)


def served_data(graph: Graph, table: CostTable, trace: Trace) -> dict[str, Any]:
    """A served run as plain data."""
    return {
        "weft_served": 1, "home": "a", "resident": [], "graph": graph_data(graph),
        "machine": machine_data(PAIR), "costs": table.entries, "trace": trace_data(trace),
    }  # fmt: skip


def _json(data: object) -> bytes:
    return json.dumps(data).encode()


def _same(again: object, value: object) -> None:
    assert again == value, "a value changed when it was written and read back"


def _graph(path: Path) -> None:
    graph = load_graph(path)
    _same(read_graph(json.loads(json.dumps(graph_data(graph)))), graph)
    str(graph)
    if len(graph.values) < 1000:
        made = verify(lower(write(get_strategy("sequential"), graph, CONTEXT, cpu())))
        simulate(made, CONTEXT, cpu()).to_text()


def _plan(path: Path, graph: Graph) -> None:
    loaded = Plan.load(path)
    _same(Plan.parse(str(loaded)), loaded)
    bound = loaded.bind(graph)
    if not findings(bound):
        simulate(bound, CONTEXT, cpu()).to_text()


def _costs(path: Path) -> None:
    table = load_costs(path)
    again = path.with_suffix(".again")
    save_costs(table, again)
    _same(load_costs(again), table)
    graph = transformer(1, 64, tensor_parallel=False)
    for op in graph.ops:
        Costs(PAIR, table).run_s(graph, op, CONTEXT.env(graph.batch), "a")


def _trace(path: Path) -> None:
    trace = load_trace(path)
    trace.to_text()
    trace.to_chrome()
    _same(read_trace(json.loads(json.dumps(trace_data(trace)))), trace)


def _machine(path: Path) -> None:
    machine = load_machine(path)
    _same(read_machine(json.loads(json.dumps(machine_data(machine)))), machine)
    graph = transformer(1, 64, tensor_parallel=False)
    made = verify(lower(write(get_strategy("sequential"), graph, CONTEXT, machine)))
    simulate(made, CONTEXT, machine).to_text()


def _placement(path: Path) -> None:
    placement = load_placement(path)
    _same(read_placement(json.loads(json.dumps(placement_data(placement)))), placement)


def _served(path: Path) -> None:
    served = load_served(path)
    again = path.with_suffix(".again")
    served.save(again)
    _same(load_served(again), served)
    served_problem(served)


def _problem(path: Path) -> None:
    problem = read_problem(path, ProblemOptions(machine=PAIR, context=CONTEXT))
    if problem.num_ops < 100:
        placement = plan(problem, "heft")
        _same(read_placement(json.loads(json.dumps(placement_data(placement)))), placement)


# What needs torch: policies, training runs, messages of workers.


def _with_torch() -> Iterable[Format]:
    import tempfile

    from torchweft.placement.learn.policy import Policy
    from torchweft_tools.train.checkpoint import OPTIMIZER, POLICY, RUN, load_run, save_run
    from torchweft_tools.train.training import Settings, Trainer

    with tempfile.TemporaryDirectory() as folder:
        trainer = Trainer(Settings(1, 1, num_problems=4, num_tries=2), Policy((4, 3, 2, 4)))
        trainer.advance()
        save_run(Path(folder), trainer, [])
        files = {name: (Path(folder) / name).read_bytes() for name in (OPTIMIZER, POLICY, RUN)}

    def run(path: Path) -> None:
        load_run(path.parent, ())

    yield Format("policy", files[POLICY], lambda path: _policy(path))
    for name in files:
        beside = tuple((other, data) for other, data in files.items() if other != name)
        yield Format(name, files[name], run, beside)
    yield Format("cell", _json(CELL), _cell)
    yield Format("part", _json(PART), _part)
    yield Format("recording", _json(RECORDED), _recorded)
    yield Format("message", _message(), _head)


def _policy(path: Path) -> None:
    from torchweft.placement.learn.policy import Policy

    again = path.with_suffix(".again")
    Policy.load(path).save(again)
    Policy.load(again)


def _read_json(path: Path) -> Any:
    """JSON as a channel reads it."""
    from torchweft.run.workers.cell import reading

    with reading("message"):
        return json.loads(path.read_bytes())


def _cell(path: Path) -> None:
    import torch

    from torchweft.run.workers.cell import Cell, reading

    cell = Cell.from_data(_read_json(path))
    _same(Cell.from_data(json.loads(json.dumps(cell.to_data()))).to_data(), cell.to_data())
    prepare, run = cell.functions
    with torch.no_grad(), reading("run of a cell"):  # a worker reports the error, and goes on
        run("cpu", prepare("cpu", *[torch.ones(2)] * len(cell.weights)), torch.ones(3, 2))


def _part(path: Path) -> None:
    import torch

    from torchweft.run.workers.cell import Cell
    from torchweft.run.workers.program import DevicePart
    from torchweft.run.workers.recorded import RowStore

    cells = {"x": Cell.from_data(CELL)}
    part = DevicePart.from_message(_read_json(path), [torch.tensor([0, 1])], cells)
    if sum(spec.num_bytes * count for spec, count in part.num_rows.items()) < 2**28:
        RowStore().reserve(part.num_rows)


def _recorded(path: Path) -> None:
    import torch

    from torchweft.run.workers.cell import Cell, reading
    from torchweft.run.workers.recorded import RecordedPart, RecordedRows

    tensors, cells = [torch.tensor([2, 0, 3, 1]), torch.ones(2, 2)], {"x": Cell.from_data(CELL)}
    part, rows = RecordedPart.from_message(_read_json(path), tensors, cells), RecordedRows()
    with reading("recording"):
        groups = rows.add(part)
    for group in groups:
        rows.store.run(group, lambda cell: cell.functions[0]("cpu", torch.ones(2)))
    part.collect(rows)


def _message() -> bytes:
    import torch

    from torchweft.run.workers.channel import head_of

    message = {"kind": "call", "call": 1, "part": PART, "inputs": ["v"]}
    return head_of(message, [torch.tensor([0, 1]), torch.ones(2, 2), torch.ones(100, 100)])


def _head(path: Path) -> None:
    from torchweft.run.workers.channel import read_head

    read_head(path.read_bytes())

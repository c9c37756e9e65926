"""A `ServedRun`: what one call was, on which devices, at which costs, and how long its ops took.

    served --save--> run.json --load--> ServedRun --problem--> what it was, to learn from again

It is data: a graph, a machine, a cost table and a trace, each in its own format, in one JSON file.
An op on the device where it ran takes what its spans took there, and what that device takes to
start one (`overhead_s`); on the others what the table says.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from statistics import mean

from torchweft.errors import PlacementError
from torchweft.files import Reader, read_json, write_json
from torchweft.placement.graph_problem import graph_problem
from torchweft.placement.problem import Problem
from torchweft.plan.cost import Costs, CostTable
from torchweft.plan.graph import Graph, graph_data, read_graph
from torchweft.plan.machine import Machine
from torchweft.plan.machine import from_data as read_machine
from torchweft.plan.machine import to_data as machine_data
from torchweft.plan.trace import Trace
from torchweft.plan.trace import from_data as read_trace
from torchweft.plan.trace import to_data as trace_data

VERSION = 1


@dataclass(frozen=True)
class ServedRun:
    """One served call. home, resident: as in `graph_problem`."""

    graph: Graph
    machine: Machine
    table: CostTable
    trace: Trace
    home: str
    resident: tuple[str, ...] = ()

    def problem(self) -> Problem:
        """The problem of the call, with the costs that were seen in it."""
        costs = Costs(self.machine, self._seen())
        return graph_problem(
            self.graph, self.machine, costs, home=self.home, resident=self.resident
        )

    def _seen(self) -> CostTable:
        """The table, with what the spans of the trace say in the place of what it said."""
        spans: dict[tuple[str, str], list[float]] = {}
        for span in self.trace.spans:
            op, device = self.graph.op.get(span.op), self.machine.device.get(span.device)
            if span.kind == "run" and op is not None and device is not None:
                seconds = device.overhead_s + span.end_s - span.start_s
                spans.setdefault((op.body or op.name, device.name), []).append(seconds)
        known = {key: dict(points) for key, points in self.table.seconds.items()}
        return CostTable.of(known | {key: {0: mean(times_s)} for key, times_s in spans.items()})

    def save(self, path: str | Path) -> None:
        """Write the run as a JSON file."""
        data = {
            "weft_served": VERSION,
            "home": self.home,
            "resident": list(self.resident),
            "graph": graph_data(self.graph),
            "machine": machine_data(self.machine),
            "costs": self.table.entries,
            "trace": trace_data(self.trace),
        }
        write_json(path, data)

    @staticmethod
    def load(path: str | Path) -> ServedRun:
        """Read a served run. Raises `WeftError` for a file that is none, naming what is wrong."""
        read = Reader(read_json(path, PlacementError, "served"), PlacementError, f"served {path}")
        if read.take("weft_served", int, None) != VERSION:
            raise read.fail(f"this is not a served run of version {VERSION}.")
        served = ServedRun(
            read_graph(read.take("graph", dict)),
            read_machine(read.take("machine", dict)),
            CostTable.read(read.take("costs", list), f"served {path}: its cost table"),
            read_trace(read.take("trace", dict)),
            read.take("home", str),
            read.names("resident"),
        )
        read.done()
        return served

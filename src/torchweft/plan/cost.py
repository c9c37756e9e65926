"""`Costs`: how many seconds an op takes on a device.

Measured seconds (a `CostTable`) come first, formulas fill in where nothing was measured:

    between two measured rows   linear
    beyond the measured rows    the nearest entry, scaled as the formula grows
    nothing measured            the formula:

    compute, memory   overhead_s + max(flops / flops_per_s, bytes touched / bytes_per_s)
    network           network_latency_s + bytes moved / network_bytes_per_s
    io                overhead_s + bytes touched / io_bytes_per_s

Bytes touched: each root once, by the largest of its names that the op reads, makes or mutates; an
op that only makes aliases touches none. Bytes moved: what the op makes for all_gather, broadcast
and recv; what it reads for all_reduce, reduce_scatter, all_to_all, send and the rest. So the
network rate is what the caller sees per byte handed over, with the number of ranks in it.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from torchweft.errors import MachineError, clip, unknown
from torchweft.files import read_json, write_json
from torchweft.plan.graph import Graph, Op
from torchweft.plan.machine import Device, Machine

VERSION = 1
MAX_S = 1e9
Env = Mapping[str, int]
Points = tuple[tuple[int, float], ...]
_MAKES = ("all_gather", "broadcast", "recv")


@dataclass(frozen=True)
class CostTable:
    """Measured seconds: entries are (key, device, ((rows, seconds), ...)), rows ascending."""

    entries: tuple[tuple[str, str, Points], ...] = ()

    def __post_init__(self) -> None:
        for key, device, points in self.entries:
            where, last = f"costs: op {clip(key)} on device {clip(device)}", -1
            for rows, seconds in points:
                if type(rows) is not int or rows <= last:
                    raise MachineError(f"{where}: rows must ascend from 0; got {clip(rows)}.")
                good = isinstance(seconds, int | float) and not isinstance(seconds, bool)
                if not good or not 0 <= seconds < MAX_S:  # NaN is not, either
                    raise MachineError(f"{where}: {rows} rows cannot take {clip(seconds)} seconds.")
                last = rows
            if last < 0 or not isinstance(key, str) or not isinstance(device, str):
                raise MachineError(f"{where}: an entry needs two names, and rows.")
        if len(self.seconds) < len(self.entries):
            raise MachineError("costs: two entries for one op on one device; join their rows.")

    @staticmethod
    def of(measured: Mapping[tuple[str, str], Mapping[int, float]]) -> CostTable:
        """A table of {(key, device): {rows: seconds}}."""
        ordered = sorted(measured.items())
        return CostTable(tuple((*key, tuple(sorted(rows.items()))) for key, rows in ordered))

    @cached_property
    def seconds(self) -> Mapping[tuple[str, str], Points]:
        """The measured points by (key, device)."""
        return {(key, device): points for key, device, points in self.entries}

    def save(self, path: str | Path) -> None:
        """Write the table as a JSON file."""
        write_json(path, {"weft_costs": VERSION, "entries": self.entries})

    @staticmethod
    def load(path: str | Path) -> CostTable:
        """Read a cost file. Raises `MachineError` for a file that is not one."""
        data = read_json(path, MachineError, "cost")
        if not isinstance(data, dict) or data.get("weft_costs") != VERSION:
            raise MachineError(f"file: {path} is not a cost file of version {VERSION}.")
        return CostTable.read(data.get("entries"), f"cost file {path}")

    @staticmethod
    def read(entries: object, where: str) -> CostTable:
        """A table from the entries of a file. Raises `MachineError` if they are none."""
        try:
            rows = [(key, device, tuple(map(tuple, points))) for key, device, points in entries]  # type: ignore[attr-defined]
            return CostTable(tuple(rows))
        except (TypeError, ValueError) as cause:
            raise MachineError(f"file: {where} is damaged: {clip(cause)}.") from None


@dataclass(frozen=True)
class Costs:
    """Seconds of ops and copies on the devices of a machine, each alone and at full rate.

    `env` gives every symbol its number, the batch symbol standing for the rows of this run.
    """

    machine: Machine
    table: CostTable = CostTable()

    def run_s(self, graph: Graph, op: Op, env: Env, device: str = "cpu") -> float:
        """Seconds of one run of an op. Of a network op: from its start to its end."""
        rates, key = self._device(device), op.body or op.name
        return self._seconds(key, device, graph, env, lambda env: _formula(graph, op, env, rates))

    def group_s(
        self, graph: Graph, ops: Sequence[Op], by: str, env: Env, device: str = "cpu"
    ) -> float:
        """Seconds of a user's kernel in the place of ops: as measured by its name, or as long as
        the longer of its network ops and its other ops."""

        def formula(env: Env) -> float:
            seconds = [(op.uses == "network", self.run_s(graph, op, env, device)) for op in ops]
            return max(
                sum(s for network, s in seconds if network is kind) for kind in (True, False)
            )

        return self._seconds(by, device, graph, env, formula)

    def copy_s(self, num_bytes: int, source: str, target: str) -> float:
        """Seconds of a copy: over the link, or (on one device) reading and writing its memory."""
        if source != target:
            link = self.machine.link(source, target)
            return link.latency_s + num_bytes / link.bytes_per_s
        rates = self._device(source)
        return rates.overhead_s + 2 * num_bytes / rates.bytes_per_s

    def send_s(self, value: str, num_bytes: int, source: str, target: str) -> float:
        """Seconds of a copy of this value to another device."""
        return self.copy_s(num_bytes, source, target)

    def begin_s(self, device: str) -> float:
        """Seconds from the start of a call until the lanes of a device begin."""
        return 0.0

    def host_s(self, device: str = "cpu") -> float:
        """Seconds that a lane spends to start a two-phase op, and again to end it."""
        return self._device(device).overhead_s

    def _device(self, name: str) -> Device:
        if name not in self.machine.device:
            raise MachineError(f"costs: {unknown('device', name, self.machine.device)}")
        return self.machine.device[name]

    def _seconds(
        self, key: str, device: str, graph: Graph, env: Env, formula: Callable[[Env], float]
    ) -> float:
        points = self.table.seconds.get((key, device))
        if points is None:
            return formula(env)
        rows = env.get(graph.batch, 0) if graph.batch else 0
        at = bisect_left(points, rows, key=lambda point: point[0])
        if at < len(points) and points[at][0] == rows:
            return points[at][1]
        if 0 < at < len(points):
            (low, low_s), (high, high_s) = points[at - 1], points[at]
            return low_s + (high_s - low_s) * (rows - low) / (high - low)
        near, near_s = points[min(at, len(points) - 1)]
        if graph.batch is None or (there := formula({**env, graph.batch: near})) <= 0:
            return near_s
        return near_s * (formula(env) / there)


def _formula(graph: Graph, op: Op, env: Env, rates: Device) -> float:
    if op.uses == "network":
        return rates.network_latency_s + _moved_bytes(graph, op, env) / rates.network_bytes_per_s
    touched = _touched_bytes(graph, op, env)
    if op.uses == "io":
        return rates.overhead_s + touched / rates.io_bytes_per_s
    compute_s = max(0, op.flops.evaluate(env)) / rates.flops_per_s
    return rates.overhead_s + max(compute_s, touched / rates.bytes_per_s)


def _touched_bytes(graph: Graph, op: Op, env: Env) -> int:
    if op.makes and not op.mutates and all(graph.value[name].alias_of for name in op.makes):
        return 0
    roots: dict[str, int] = {}
    for name in op.touched + op.makes:
        root = graph.root[name]
        roots[root] = max(roots.get(root, 0), graph.value[name].bytes.evaluate(env))
    return sum(roots.values())


def _moved_bytes(graph: Graph, op: Op, env: Env) -> int:
    def total(names: Sequence[str]) -> int:
        return sum(max(0, graph.value[name].bytes.evaluate(env)) for name in dict.fromkeys(names))

    read, made = total(op.touched), total(op.makes)
    kind = op.collective.kind if op.collective else ""
    return (made or read) if kind.startswith(_MAKES) else (read or made)

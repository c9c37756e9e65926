"""The `Machine`: the devices that work runs on, their lanes, the links between them; and `Costs`,
how many seconds an op takes there.

    device cpu: lane compute (uses compute, memory, network), lane network (via compute), lane io
    link cpu -> gpu0: 12 GB/s, 10 us

A lane is an ordered queue: its steps run one after another. A lane *via* another has no thread of
its own: the other lane issues its work and waits for it (c10d work on a CPU).

Measured seconds (a `CostTable`) come first, formulas fill in where nothing was measured:

    between two measured rows   linear
    beyond the measured rows    the nearest entry, scaled as the formula grows
    nothing measured            the formula:

    compute, memory   overhead_s + max(flops / flops_per_s, bytes touched / bytes_per_s)
    network           network_latency_s + bytes moved / network_bytes_per_s
    io                overhead_s + bytes touched / io_bytes_per_s

Bytes touched: each root once, by the largest of its names that the op reads, makes or mutates; an
op that only makes aliases touches none. Bytes moved: what the op makes for all_gather, broadcast
and recv; what it reads for the rest. So the network rate is what the caller sees per byte handed
over, with the number of ranks in it.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from functools import cached_property, partial
from hashlib import blake2b

from torchweft.errors import MachineError, clip, unknown
from torchweft.plan.graph import NAME, USES, Graph, Op, check_name

VERSION = 1
MAX_RATE = 1e30
MAX_S = 1e9
MAX_PRIORITY, MAX_SMS, MAX_DEVICES = 100, 100_000, 1000
FORMULAS = "formulas"  # where costs are from that nobody has measured
MAX_FIXED = 4  # times what the formula has for any size
LANE = re.compile(
    rf"({NAME.pattern}) on ({NAME.pattern}) uses ([a-z,]+)(?: to ({NAME.pattern}))?"
    rf"(?: via ({NAME.pattern}))?"
    r"(?: priority (-?[0-9]{1,3}))?(?: sms ([0-9]{1,6}))?"
)


@dataclass(frozen=True, slots=True)
class Lane:
    """An ordered queue of work on a device; `via` names the lane that dispatches it, if any.

    priority: of its stream on an accelerator; lower numbers go first. num_sms: how many of the
    device's multiprocessors its work may use, where a device can hold it to that.
    to: the device that a link's lane copies to; `lower` adds such lanes, a machine has none.
    """

    name: str
    device: str = "cpu"
    uses: tuple[str, ...] = ("compute", "memory")
    via: str | None = None
    priority: int = 0
    num_sms: int | None = None
    to: str | None = None

    def __str__(self) -> str:
        """The lane as it stands in a plan."""
        to = f" to {self.to}" if self.to else ""
        via = f" via {self.via}" if self.via else ""
        priority = f" priority {self.priority}" if self.priority else ""
        sms = f" sms {self.num_sms}" if self.num_sms is not None else ""
        return f"{self.name} on {self.device} uses {','.join(self.uses)}{to}{via}{priority}{sms}"


def make_lane(
    name: str, device: str, uses: str, to: str | None, via: str | None, priority: str, sms: str
) -> Lane:
    """A lane from the groups of `LANE`."""
    num_sms = int(sms) if sms else None
    return Lane(name, device, tuple(uses.split(",")), via, int(priority or 0), num_sms, to)


@dataclass(frozen=True, slots=True)
class Slowdown:
    """Work that uses one resource takes `factor` times as long beside work that uses another."""

    uses: str
    beside: str
    factor: float


@dataclass(frozen=True, slots=True)
class Device:
    """Where work runs. Rates are what one lane gets alone.

    capacity: how many lanes' worth of compute, memory and io run side by side at full rate.
    network_share: the part of one lane's compute that a transfer in flight eats.
    slowdowns: by how much work of two kinds slows down beside each other, as it was measured.
    memory_bytes: the most that a plan may hold on it at once; None: no limit.
    num_sms: how many multiprocessors it has, where work comes in tiles over them.
    num_flights: how many transfers of a lane are under way at once; they share the network.
    """

    name: str
    flops_per_s: float = 5e10
    bytes_per_s: float = 1e10
    capacity: float = 1.0
    network_bytes_per_s: float = 1.25e8
    network_latency_s: float = 1e-4
    network_share: float = 0.0
    io_bytes_per_s: float = 5e8
    overhead_s: float = 5e-6
    memory_bytes: int | None = None
    num_sms: int | None = None
    num_flights: int = 1
    slowdowns: tuple[Slowdown, ...] = ()

    @property
    def eaten(self) -> float:
        """The compute that a second of a transfer costs at the least, by its share or slowdowns."""
        factor = {(each.uses, each.beside): each.factor for each in self.slowdowns}.get
        slowed = factor(("network", "compute"), 1) * (1 - 1 / factor(("compute", "network"), 1))
        return max(self.network_share, min(1.0, self.capacity, slowed))


@dataclass(frozen=True, slots=True)
class Link:
    """What joins two devices, in one direction."""

    source: str
    target: str
    bytes_per_s: float = 1e10
    latency_s: float = 1e-5

    def copy_s(self, num_bytes: int) -> float:
        """Seconds of a copy over it."""
        return self.latency_s + num_bytes / self.bytes_per_s


@dataclass(frozen=True)
class Machine:
    """All devices, lanes and links together."""

    name: str
    devices: tuple[Device, ...]
    lanes: tuple[Lane, ...]
    links: tuple[Link, ...] = ()

    def __post_init__(self) -> None:
        for fault in _faults(self):
            raise MachineError(f"machine: {fault}")

    @cached_property
    def device(self) -> Mapping[str, Device]:
        """Devices by name."""
        return {device.name: device for device in self.devices}

    @cached_property
    def lane(self) -> Mapping[str, Lane]:
        """Lanes by name."""
        return {lane.name: lane for lane in self.lanes}

    @cached_property
    def _links(self) -> Mapping[tuple[str, str], Link]:
        return {(link.source, link.target): link for link in reversed(self.links)}

    @property
    def is_limited(self) -> bool:
        """Whether some device has a limit of memory."""
        return any(device.memory_bytes is not None for device in self.devices)

    def lanes_for(self, op: Op) -> list[Lane]:
        """The lanes that take an op. Those without a thread come first, for ops of two phases."""
        lanes = [lane for lane in self.lanes if op.uses in lane.uses]
        hosted = [lane for lane in lanes if lane.via is not None and op.two_phase]
        return hosted + [lane for lane in lanes if lane.via is None]

    def lane_for(self, op: Op) -> Lane:
        """The lane that an op runs on unless a strategy says otherwise.

        Raises `MachineError` if no lane takes it.
        """
        lanes = self.lanes_for(op)
        if not lanes:
            text = f"no lane of machine {self.name!r} takes op {op.name!r}, which uses {op.uses}."
            raise MachineError(f"lane: {text}", rule="lane")
        return lanes[0]

    def link(self, source: str, target: str) -> Link:
        """The link from one device to another. Raises `MachineError` if nothing joins them."""
        if (source, target) not in self._links:
            raise MachineError(f"link: nothing joins device {source!r} to {target!r}.")
        return self._links[source, target]


def _faults(machine: Machine) -> Iterator[str]:
    """What is wrong with a machine; each rule trusts those before it."""
    check_name(machine.name, "machine", MachineError)
    for items, what in ((machine.devices, "device"), (machine.lanes, "lane")):
        names = [check_name(item.name, what, MachineError) for item in items]
        if not names:
            yield f"{machine.name!r} has no {what}."
        if len(names) > MAX_DEVICES:
            yield f"{len(names)} {what}s; at most {MAX_DEVICES} can be used."
        if len(set(names)) < len(names):
            yield f"{machine.name!r} has two {what}s of one name."
    numbered: list[Device | Link] = [*machine.devices, *machine.links]
    for item in numbered:
        for spec in fields(item):
            number = getattr(item, spec.name)
            if spec.name == "slowdowns":
                for each in number:
                    for uses in {each.uses, each.beside} - {*USES}:
                        yield f"slowdown: {unknown('resource', uses, USES)}"
                    if not isinstance(each.factor, int | float) or not 1 <= each.factor <= 1000:
                        yield f"slowdown: factor must be from 1 to 1000; got {clip(each.factor)}."
                continue
            if "str" in str(spec.type) or (number is None and spec.default is None):
                continue
            # A rate is above zero, a latency or share zero or more; neither is without end.
            is_time = spec.name.endswith("_s") and "per_s" not in spec.name
            least = 0.0 if is_time or spec.name.endswith("_share") else 1e-12
            most = MAX_S if is_time else MAX_RATE
            if not isinstance(number, int | float) or not least <= number <= most:
                limits = f"must be a number from {least:g} to {most:g}; got {clip(number)}"
                yield f"{type(item).__name__.lower()}: {spec.name} {limits}."
    for device in machine.devices:
        if type(device.num_flights) is not int or device.num_flights > MAX_DEVICES:
            limits = f"a whole number, at most {MAX_DEVICES}; got {clip(device.num_flights)}"
            yield f"device {device.name!r}: num_flights must be {limits}."
    for lane in machine.lanes:
        where = f"lane {lane.name!r}"
        if lane.device not in machine.device:
            yield f"{where}: {unknown('device', lane.device, machine.device)}"
        host = machine.lane.get(lane.via) if lane.via is not None else None
        if lane.via is not None and (host is None or host.via or host.device != lane.device):
            yield f"{where} goes via {lane.via!r}, no lane with a thread on {lane.device!r}."
        if lane.to is not None:
            yield f"{where} is a link's; list the link under 'links' instead."
        if not -MAX_PRIORITY <= lane.priority <= MAX_PRIORITY:
            limits = f"from -{MAX_PRIORITY} to {MAX_PRIORITY}; got {clip(lane.priority)}"
            yield f"{where}: the priority must be {limits}."
        if lane.num_sms is not None and not 0 < lane.num_sms <= MAX_SMS:
            yield f"{where}: num_sms must be from 1 to {MAX_SMS}; got {clip(lane.num_sms)}."
        for uses in lane.uses:
            if uses not in USES:
                yield f"{where}: {unknown('resource', uses, USES)}"
    for link in machine.links:
        if not {link.source, link.target} <= set(machine.device):
            yield f"link {link.source!r} -> {link.target!r} joins no two devices."


def cpu(num_compute_lanes: int = 1, **rates: float) -> Machine:
    """A CPU: compute lanes, a network lane that the first of them dispatches, and an io lane.

    `rates` set fields of the device, e.g. `cpu(2, capacity=2.0, network_bytes_per_s=1.25e8)`.
    """
    known = {spec.name for spec in fields(Device)} - {"name", "slowdowns"}
    if extra := set(rates) - known:
        raise MachineError(f"machine: {unknown('rate', min(extra), known)}")
    if num_compute_lanes < 1:
        raise MachineError("machine: a CPU has at least one compute lane.")
    extra_lanes = [Lane(f"compute{number}") for number in range(1, num_compute_lanes)]
    lanes = (
        Lane("compute", uses=("compute", "memory", "network")),
        *extra_lanes,
        Lane("network", uses=("network",), via="compute"),
        Lane("io", uses=("io",)),
    )
    return Machine("cpu", (Device("cpu", **rates),), lanes)  # type: ignore[arg-type]


def accelerator(
    num_compute_lanes: int = 1,
    *,
    network_priority: int = -1,
    compute_sms: int | None = None,
    **rates: float,
) -> Machine:
    """An accelerator: a stream for each compute lane and one for the network, which goes first.

    compute_sms: the SM budget of the compute lanes; the rest is left to the network.
    """
    base = cpu(num_compute_lanes, **rates)
    lanes = []
    for lane in base.lanes:
        budget = compute_sms if "compute" in lane.uses else None
        priority = network_priority if lane.name == "network" else 0
        lanes.append(replace(lane, device="gpu", priority=priority, num_sms=budget))
    return Machine("accelerator", (replace(base.devices[0], name="gpu"),), tuple(lanes))


def to_data(machine: Machine) -> dict[str, object]:
    """The machine as plain data, ready for JSON."""
    data = {"weft_machine": VERSION, **asdict(machine)}
    for lane in data["lanes"]:
        del lane["to"]
    return data


Env = Mapping[str, int]
Formula = Callable[[Env], float]
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


@dataclass(frozen=True)
class Costs:
    """Seconds of ops and copies on the devices of a machine, each alone and at full rate.

    `env` gives every symbol its number, the batch symbol standing for the rows of this run.
    call_s: what a call takes before its plan begins and after it has ended.
    factors: how many times as long ops take beside work of the other kind, by rows, where the
    slowdowns of the device name it; those of an op that is not in it are the device's.
    about: where they come from, for people.
    """

    machine: Machine
    table: CostTable = CostTable()
    call_s: float = 0.0
    factors: CostTable = CostTable()
    about: str = FORMULAS

    def run_s(self, graph: Graph, op: Op, env: Env, device: str = "cpu") -> float:
        """Seconds of one run of an op. Of a network op: from its start to its end."""
        rates, key = self._device(device), op.body or op.name
        shaped = cost_key(graph, op, env) if self.table.entries else key
        if (shaped, device) in self.table.seconds:
            key = shaped
        fixed_s = rates.network_latency_s if op.uses == "network" else rates.overhead_s
        formula = partial(_formula, graph, op, rates=rates)
        return self._seconds(key, device, graph, env, formula, fixed_s)

    def factor(self, graph: Graph, op: Op, env: Env, device: str = "cpu") -> float | None:
        """How many times as long a run of an op takes beside the other kind; None: unknown."""
        if not (known := self.factors.seconds):
            return None
        points = known.get((cost_key(graph, op, env), device))
        if points is None:
            return None
        return between(points, env.get(graph.batch, 0) if graph.batch else 0)

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
            return self.machine.link(source, target).copy_s(num_bytes)
        rates = self._device(source)
        return rates.overhead_s + 2 * num_bytes / rates.bytes_per_s

    def send_s(self, value: str, num_bytes: int, source: str, target: str) -> float:
        """Seconds of a copy of this value to another device."""
        return self.copy_s(num_bytes, source, target)

    def begin_s(self, device: str) -> float:
        """Seconds from the start of a call until the lanes of a device begin."""
        return self.call_s

    def alike(self, graph: Graph, op: Op) -> object:
        """Ops of which this is equal take the same seconds; None: nothing is known of that."""
        return None

    def host_s(self, device: str = "cpu") -> float:
        """Seconds that a lane spends to start a two-phase op, and again to end it."""
        return self._device(device).overhead_s

    def _device(self, name: str) -> Device:
        if name not in self.machine.device:
            raise MachineError(f"costs: {unknown('device', name, self.machine.device)}")
        return self.machine.device[name]

    def _seconds(
        self, key: str, device: str, graph: Graph, env: Env, formula: Formula, fixed_s: float = 0.0
    ) -> float:
        """As measured, or between two measured sizes; beyond them as the formula grows, of which
        fixed_s are for any size. They do not explain what takes far longer than it says."""
        points = self.table.seconds.get((key, device))
        if points is None:
            return formula(env)
        rows = env.get(graph.batch, 0) if graph.batch else 0
        at = bisect_left(points, rows, key=lambda point: point[0])
        if at < len(points) and rows >= points[0][0]:
            return between(points, rows)
        near, near_s = points[min(at, len(points) - 1)]
        if graph.batch is None or (there := formula({**env, graph.batch: near})) <= fixed_s:
            return near_s
        kept_s = min(near_s * fixed_s / there, MAX_FIXED * fixed_s)
        return kept_s + (near_s - kept_s) * (formula(env) - fixed_s) / (there - fixed_s)


def between(points: Points, rows: int) -> float:
    """The number at these rows, linear between two points; outside, that of the nearest."""
    at = bisect_left(points, rows, key=lambda point: point[0])
    if at == len(points) or points[at][0] == rows or at == 0:
        return points[min(at, len(points) - 1)][1]
    (low, low_s), (high, high_s) = points[at - 1], points[at]
    return low_s + (high_s - low_s) * (rows - low) / (high - low)


def cost_key(graph: Graph, op: Op, env: Env) -> str:
    """What an op is called in a table of measured costs: equal ops on equal shapes have one key,
    in every process; the rows of the batch do not count. A table may also have plain names."""
    sizes = [
        [[dim.evaluate({**env, **rows}) for dim in graph.value[name].shape] for name in op.reads]
        for rows in ([{graph.batch: 1}, {graph.batch: 2}] if graph.batch else [{}])
    ]
    text = f"{sizes} {[graph.value[name].dtype for name in op.reads]}"
    return f"{op.body or op.name}:{blake2b(text.encode(), digest_size=6).hexdigest()}"


def _formula(graph: Graph, op: Op, env: Env, rates: Device) -> float:
    if op.uses == "network":
        return rates.network_latency_s + moved_bytes(graph, op, env) / rates.network_bytes_per_s
    touched = touched_bytes(graph, op, env)
    if op.uses == "io":
        return rates.overhead_s + touched / rates.io_bytes_per_s
    compute_s = max(0, op.flops.evaluate(env)) / rates.flops_per_s
    return rates.overhead_s + max(compute_s, touched / rates.bytes_per_s)


def touched_bytes(graph: Graph, op: Op, env: Env) -> int:
    if op.makes and not op.mutates and all(graph.value[name].alias_of for name in op.makes):
        return 0
    roots: dict[str, int] = {}
    for name in op.touched + op.makes:
        root = graph.root[name]
        roots[root] = max(roots.get(root, 0), graph.value[name].bytes.evaluate(env))
    return sum(roots.values())


def moved_bytes(graph: Graph, op: Op, env: Env) -> int:
    def total(names: Sequence[str]) -> int:
        return sum(max(0, graph.value[name].bytes.evaluate(env)) for name in dict.fromkeys(names))

    read, made = total(op.touched), total(op.makes)
    kind = op.collective.kind if op.collective else ""
    return (made or read) if kind.startswith(_MAKES) else (read or made)

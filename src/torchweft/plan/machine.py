"""The `Machine`: the devices that work runs on, their lanes, and the links between them.

    device cpu: lane compute (uses compute, memory, network), lane network (via compute), lane io
    link cpu -> gpu0: 12 GB/s, 10 us

A lane is an ordered queue: its steps run one after another. A lane *via* another has no thread of
its own: the other lane issues its work and waits for it (c10d work on a CPU).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, fields, replace
from functools import cached_property
from pathlib import Path

from torchweft.errors import MachineError, clip, unknown
from torchweft.files import Reader, read_item, read_json
from torchweft.plan.graph import NAME, USES, Op, check_name

VERSION = 1
MAX_RATE = 1e30
MAX_S = 1e9
MAX_PRIORITY, MAX_SMS, MAX_DEVICES = 100, 100_000, 1000
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
class Device:
    """Where work runs. Rates are what one lane gets alone.

    capacity: how many lanes' worth of compute, memory and io run side by side at full rate.
    network_share: the part of one lane's compute that a transfer in flight eats.
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


@dataclass(frozen=True, slots=True)
class Link:
    """What joins two devices, in one direction."""

    source: str
    target: str
    bytes_per_s: float = 1e10
    latency_s: float = 1e-5


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
            if "str" in str(spec.type) or (number is None and spec.default is None):
                continue
            least, most = _limits(spec.name)
            if not isinstance(number, int | float) or not least <= number <= most:
                limits = f"must be a number from {least:g} to {most:g}; got {clip(number)}"
                yield f"{type(item).__name__.lower()}: {spec.name} {limits}."
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


def _limits(name: str) -> tuple[float, float]:
    """A rate is above zero, a latency or share zero or more; neither is without end."""
    is_time = name.endswith("_s") and "per_s" not in name
    least = 0.0 if is_time or name.endswith("_share") else 1e-12
    return least, MAX_S if is_time else MAX_RATE


def cpu(num_compute_lanes: int = 1, **rates: float) -> Machine:
    """A CPU: compute lanes, a network lane that the first of them dispatches, and an io lane.

    `rates` set fields of the device, e.g. `cpu(2, capacity=2.0, network_bytes_per_s=1.25e8)`.
    """
    known = {spec.name for spec in fields(Device)} - {"name"}
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


def load_machine(path: str | Path) -> Machine:
    """Read a machine file. Raises `MachineError` for a file that is not one."""
    return from_data(read_json(path, MachineError, "machine"))


def from_data(data: object) -> Machine:
    """The machine of plain data. Raises `MachineError` for data that is none."""
    read = Reader(data, MachineError, "machine")
    if read.take("weft_machine", int, None) != VERSION:
        raise read.fail(f"this is not a machine file of version {VERSION}.")
    items = {"name": "machine", "devices": [], "lanes": [], **read.data}
    del items["weft_machine"]
    machine: Machine = read_item(Machine, items, MachineError)
    return machine

"""The `Machine`: the devices that work runs on, their lanes, and the links between them.

    device cpu: lane compute (uses compute, memory, network), lane network (via compute), lane io
    link cpu -> gpu0: 12 GB/s, 10 us

A lane is an ordered queue: its steps run one after another. A lane *via* another has no thread of
its own: the other lane issues its work and waits for it (c10d work on a CPU).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from functools import cached_property
from pathlib import Path
from typing import Any

from torchweft.errors import MachineError, clip, unknown
from torchweft.files import read_json
from torchweft.graph import USES, Op, check_name

VERSION = 1


@dataclass(frozen=True, slots=True)
class Lane:
    """An ordered queue of work on a device; `via` names the lane that dispatches it, if any."""

    name: str
    device: str = "cpu"
    uses: tuple[str, ...] = ("compute", "memory")
    via: str | None = None


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
        _check(self)

    @cached_property
    def device(self) -> Mapping[str, Device]:
        """Devices by name."""
        return {device.name: device for device in self.devices}

    @cached_property
    def lane(self) -> Mapping[str, Lane]:
        """Lanes by name."""
        return {lane.name: lane for lane in self.lanes}

    def lanes_for(self, op: Op) -> list[Lane]:
        """The lanes that take an op. Those without a thread come first, for ops of two phases."""
        found = [lane for lane in self.lanes if op.uses in lane.uses]
        hosted = [lane for lane in found if lane.via is not None and op.two_phase]
        return hosted + [lane for lane in found if lane.via is None]

    def lane_for(self, op: Op) -> Lane:
        """The lane that an op runs on unless a strategy says otherwise.

        Raises `MachineError` if no lane takes it.
        """
        found = self.lanes_for(op)
        if not found:
            text = f"no lane of machine {self.name!r} takes op {op.name!r}, which uses {op.uses}."
            raise MachineError(f"lane: {text}", rule="lane")
        return found[0]

    def link(self, source: str, target: str) -> Link:
        """The link from one device to another. Raises `MachineError` if nothing joins them."""
        for link in self.links:
            if (link.source, link.target) == (source, target):
                return link
        raise MachineError(f"link: nothing joins device {source!r} to {target!r}.")


def _check(machine: Machine) -> None:
    check_name(machine.name, "machine")
    for items, what in ((machine.devices, "device"), (machine.lanes, "lane")):
        names = [check_name(item.name, what) for item in items]
        if not names:
            raise MachineError(f"machine: {machine.name!r} has no {what}.")
        if len(set(names)) < len(names):
            raise MachineError(f"machine: {machine.name!r} has two {what}s of one name.")
    for device in machine.devices:
        for spec in fields(device):
            number = getattr(device, spec.name)
            least = (
                0 if spec.name.endswith(("_s", "_share")) and "per_s" not in spec.name else 1e-12
            )
            if isinstance(number, int | float) and not least <= number < float("inf"):
                raise MachineError(
                    f"machine: device {device.name!r}: {spec.name} cannot be {number}."
                )
    for lane in machine.lanes:
        where = f"machine: lane {lane.name!r}"
        if lane.device not in machine.device:
            raise MachineError(f"{where}: {unknown('device', lane.device, machine.device)}")
        if lane.via is not None and (lane.via not in machine.lane or machine.lane[lane.via].via):
            raise MachineError(f"{where} goes via {lane.via!r}, which is no lane with a thread.")
        for uses in lane.uses:
            if uses not in USES:
                raise MachineError(f"{where}: {unknown('resource', uses, USES)}")
    for link in machine.links:
        if not {link.source, link.target} <= set(machine.device) or link.bytes_per_s <= 0:
            raise MachineError(
                f"machine: link {link.source!r} -> {link.target!r} joins no two devices."
            )


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


def to_data(machine: Machine) -> dict[str, object]:
    """The machine as plain data, ready for JSON."""
    return {"weft_machine": VERSION, **asdict(machine)}


def load_machine(path: str | Path) -> Machine:
    """Read a machine file. Raises `MachineError` for a file that is not one."""
    found = read_json(path, MachineError, "machine")
    if not isinstance(found, dict) or found.get("weft_machine") != VERSION:
        raise MachineError(f"file: {path} is not a machine file of version {VERSION}.")
    return Machine(
        str(found.get("name", "machine")),
        tuple(_item(Device, item) for item in found.get("devices", ())),
        tuple(_item(Lane, item) for item in found.get("lanes", ())),
        tuple(_item(Link, item) for item in found.get("links", ())),
    )


def _item(kind: Any, found: object) -> Any:
    specs = {spec.name: spec for spec in fields(kind)}
    if not isinstance(found, dict) or set(found) - set(specs):
        raise MachineError(f"file: {clip(found)} is no {kind.__name__.lower()}.")
    items: dict[str, Any] = {}
    for name, value in found.items():
        wanted = str(specs[name].type)
        good = (
            (isinstance(value, list) and all(isinstance(item, str) for item in value))
            if "tuple" in wanted
            else (isinstance(value, str) or (value is None and "None" in wanted))
            if "str" in wanted
            else (value is None and "None" in wanted)
            or (isinstance(value, int | float) and not isinstance(value, bool))
        )
        if not good:
            raise MachineError(f"file: {kind.__name__.lower()}: {name!r} cannot be {clip(value)}.")
        items[name] = tuple(value) if isinstance(value, list) else value
    try:
        return kind(**items)
    except TypeError:
        raise MachineError(f"file: {clip(found)} is no {kind.__name__.lower()}.") from None

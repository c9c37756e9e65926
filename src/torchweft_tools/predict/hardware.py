"""The `Hardware`: a `Machine` as one of its ranks sees it, and what prices of ops need beyond it.

    8xh100    2x8xh100 (two nodes)    4xl20-pcie    2x8xh100-ethernet    --load_hardware--> Hardware

Each kind of GPU has a file in `machines/`, which says where its figures come from:

    machine   devices and lanes, in the format of any machine file
    prices    what rates alone do not tell: shares of peak, links between GPUs, power
    sources   of both

One set of figures for a kind of GPU; nothing in it depends on a model or on what is predicted.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from importlib.resources import files
from pathlib import Path

from torchweft.errors import MachineError, clip, unknown
from torchweft.plan.machine import Device, Machine
from torchweft_tools.formats.reader import Reader, read_item, read_json
from torchweft_tools.formats.weft_files import read_machine

VERSION = 1
NAME = re.compile(r"(?:(?:([0-9]{1,4})x)?([0-9]{1,4})x)?([a-z][a-z0-9-]*)")
ETHERNET = "-ethernet"
ETHERNET_BYTES_PER_S = 12.5e9  # of a node: 100 Gbit/s, shared by its GPUs


@dataclass(frozen=True)
class GpuFacts:
    """What prices of ops need beyond the rates of a device. Shares are of the device's peak.

    matmul_share, attention_share, memory_share   what large kernels reach, alone and for a moment
    matmul_power   watts of products at full clock, as a share of the power limit
    link_bytes_per_s   between GPUs of a node, in one direction; ring_share, direct_share,
                       multimem_share: what NCCL's rings, plain writes to peers, and in-switch
                       sums reach of it (0: not there)
    nic_bytes_per_s    of each GPU, to other nodes
    network_sms        multiprocessors that a collective occupies
    """

    link: str
    link_bytes_per_s: float
    gpus_per_node: int
    network_sms: int
    matmul_power: float
    matmul_share: float
    fp8_flops_per_s: float = 0.0
    attention_share: float = 0.65
    memory_share: float = 0.9
    ring_share: float = 0.75
    direct_share: float = 0.75
    multimem_share: float = 0.0
    ring_latency_s: float = 2.5e-5
    direct_latency_s: float = 1.0e-5
    nic_bytes_per_s: float = 25e9
    nic_share: float = 0.9
    nic_latency_s: float = 3.0e-5


@dataclass(frozen=True)
class Hardware:
    """A machine of `num_nodes` nodes of `gpus_per_node` equal GPUs, as one rank sees it."""

    name: str
    gpu: str
    num_gpus: int
    machine: Machine
    prices: GpuFacts
    sources: tuple[str, ...] = ()

    @property
    def device(self) -> Device:
        """The GPU."""
        return self.machine.devices[0]

    @property
    def num_nodes(self) -> int:
        """How many nodes there are."""
        return -(-self.num_gpus // self.prices.gpus_per_node)

    def flops_per_s(self, dtype: str) -> float:
        """The peak of products in this dtype."""
        peak = self.device.flops_per_s
        if dtype in ("float8_e4m3fn", "int8"):
            return self.prices.fp8_flops_per_s or peak
        return peak / 2 if dtype == "float32" else peak


def machine_files() -> Mapping[str, Path]:
    """The machine files that come with the package, by the kind of GPU."""
    folder = files("torchweft_tools.predict") / "machines"
    paths = [Path(str(each)) for each in folder.iterdir() if each.name.endswith(".json")]
    return {path.stem: path for path in sorted(paths)}


@cache
def _load(path: Path) -> tuple[Machine, GpuFacts, tuple[str, ...]]:
    where = f"machine file {path.name}"
    read = Reader(read_json(path, MachineError, "machine"), MachineError, where)
    if read.take("weft_hardware", int, None) != VERSION:
        raise read.fail(f"this is not a hardware file of version {VERSION}.")
    machine = read_machine(read.take("machine", dict))
    prices: GpuFacts = read_item(GpuFacts, read.take("prices", dict), MachineError)
    sources = read.names("sources")
    read.done()
    return machine, prices, sources


def load_hardware(name: str) -> Hardware:
    """The hardware of a name such as `8xh100` or `2x8xh100`, or of a hardware file (one node).

    Raises `MachineError` for a name that means nothing, listing the choices.
    """
    if Path(name).suffix == ".json":
        machine, prices, sources = _load(Path(name))
        return Hardware(name, machine.name, prices.gpus_per_node, machine, prices, sources)
    known, match = machine_files(), NAME.fullmatch(name.lower())
    if match is None:
        like = "NUMBERxGPU such as 8xh100, or NODESxNUMBERxGPU such as 2x8xh100"
        raise MachineError(f"machine: {clip(name)} is not {like}.", rule="machine")
    nodes, each = int(match[1] or 1), int(match[2] or 1)
    gpu = match[3].removesuffix(ETHERNET)
    short = gpu.removesuffix("-pcie").removesuffix("-nvlink")
    if gpu not in known and short in known and _load(known[short])[1].link in gpu:
        gpu = short
    if gpu not in known:
        raise MachineError(f"machine: {unknown('GPU', gpu, known)}", rule="machine")
    if not (0 < each <= 1024 and nodes > 0):
        raise MachineError(f"machine: {clip(name)} has no GPU.", rule="machine")
    machine, prices, sources = _load(known[gpu])
    nic = prices.nic_bytes_per_s
    if match[3].endswith(ETHERNET):
        nic = min(nic, ETHERNET_BYTES_PER_S / each)
    own = min(each, prices.gpus_per_node) if nodes == 1 else each
    if nodes == 1 and each > prices.gpus_per_node:
        own = prices.gpus_per_node
    prices = replace(prices, gpus_per_node=own, nic_bytes_per_s=nic)
    return Hardware(name, gpu, nodes * each, machine, prices, sources)

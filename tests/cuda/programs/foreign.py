"""A host with an all_reduce of its own, a kernel on the stream that is current: two ranks.

It hands us its graph as vLLM does, through a backend.
"""

import os

import torch
import torch.distributed as dist
from torch import nn

import torchweft as weft
from torchweft.capture.ops.collectives import reduce_in_phases
from torchweft.options import Options
from torchweft.serve.session import Session
from torchweft_tools.dryrun import mark

LIBRARY = torch.library.Library("host", "DEF")
LIBRARY.define("all_reduce(Tensor x, str group) -> Tensor")
LIBRARY.impl("all_reduce", lambda x, group: torch.lerp(x, x, 0.5), "CUDA")
LIBRARY.impl("all_reduce", lambda x, group: torch.empty_like(x), "Meta")


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + torch.ops.host.all_reduce(layer(x).relu(), "tp")
        return x


rank = int(os.environ["RANK"])
torch.cuda.set_device(rank)
dist.init_process_group("nccl", device_id=torch.device("cuda", rank))
options = Options(
    weft.overlap(parts=2, min_tokens=1), machine=weft.accelerator(2), fallback="error"
)
session = Session(options)


def backend(gm, inputs):
    name = dist.group.WORLD.group_name
    return session.backend(reduce_in_phases(gm, {"host.all_reduce": 0}, name), inputs)


with torch.no_grad():
    model = torch.compile(Layers().cuda(), backend=backend, dynamic=True)
    x = torch.ones(32, 64, device="cuda")
    for number in range(6):
        if number == 4:
            mark("steady foreign")
        model(x)
    mark("end foreign")
(piece,) = session.pieces
assert [entry.plan.num_parts for entry in piece.plans.entries] == [2]
dist.destroy_process_group()

"""Weft beside data-parallel training that is not ours: beside.py ddp|fsdp, on two ranks."""

import os
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import torchweft as weft
from torchweft_tools.dryrun import mark
from torchweft_tools.selftest.rig import Branches

kind, rank = sys.argv[1], int(os.environ["RANK"])
torch.cuda.set_device(rank)
dist.init_process_group("nccl", device_id=torch.device("cuda", rank))
options = {"machine": weft.accelerator(2), "fallback": "error"}
model = nn.Sequential(Branches(), nn.Linear(64, 64), Branches()).cuda()
if kind == "fsdp":
    for layer in model:
        fully_shard(layer)
    fully_shard(model)
for layer in (model[0], model[2]):
    weft.compile(layer, weft.branches(), **options)
whole = DistributedDataParallel(model) if kind == "ddp" else model
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
x = torch.ones(32, 64, device="cuda")
for number in range(6):
    if number == 4:
        mark(f"steady {kind}")
    whole(x).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
mark(f"end {kind}")
dist.destroy_process_group()

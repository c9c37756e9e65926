"""Rank 0 has made its last call, and ends, long before rank 1 makes that call."""

import os
import sys
import time
from collections.abc import Callable

import torch
import torch.distributed as dist

import torchweft as weft
from torchweft_tools.selftest.rig import Parallel


class Late:
    """Dies in the middle of Python's end, which so takes longer than a slice of a wait."""

    def __init__(self, sleep: Callable[[float], None]) -> None:
        self.sleep = sleep

    def __del__(self) -> None:
        self.sleep(3)


rank, behind_s = int(os.environ["RANK"]), float(sys.argv[1])
place = torch.device("cuda", rank)
torch.cuda.set_device(place)
dist.init_process_group("nccl", device_id=place)
late = Late(time.sleep) if rank == 0 else None
overlap = weft.overlap(parts=2, min_tokens=1)
woven = weft.compile(Parallel().cuda(), overlap, machine=weft.accelerator(2), fallback="error")
x = torch.ones(2048, 64, device="cuda")  # too large for the dry run to move: no host waits for it
with torch.no_grad():
    for _ in range(3):
        woven(x)
    torch.cuda.synchronize()
    time.sleep(behind_s * rank)
    try:
        woven(x)
    except weft.RunError as error:  # rank 1 may hear of it before it has put its call on the device
        if rank == 0 or "rank 0 has ended" not in str(error):
            raise
dist.destroy_process_group()

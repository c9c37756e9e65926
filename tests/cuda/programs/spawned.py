"""Two ranks that a program starts itself: spawned.py bug|mended. The line to name says "here"."""

import sys
import tempfile

import torch
import torch.distributed as dist
import torch.multiprocessing as mp


def work(rank: int, place: str, is_bug: bool) -> None:
    torch.cuda.set_device(rank)
    dist.init_process_group("nccl", init_method=f"file://{place}", rank=rank, world_size=2)
    x = torch.ones(1 << 15, device="cuda")
    talk = dist.all_reduce(x, async_op=True)
    if not is_bug:
        talk.wait()
    x.mul_(2)  # here: touches x
    torch.cuda.synchronize()
    dist.destroy_process_group()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(work, (f"{folder}/store", sys.argv[1] == "bug"), 2)

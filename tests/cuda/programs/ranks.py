"""Programs of several ranks over NCCL that know nothing of Weft: ranks.py KIND,... bug|mended.

The line that a finding must name says "here".
"""

import os
import sys

import torch
import torch.distributed as dist
from torch import nn

kinds, is_bug = sys.argv[1].split(","), sys.argv[2] == "bug"
rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
torch.cuda.set_device(rank % torch.cuda.device_count())
dist.init_process_group("nccl", device_id=torch.device("cuda", torch.cuda.current_device()))


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64)).cuda()


def train(net: nn.Module) -> None:
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for _ in range(3):
        net(torch.ones(8, 64, device="cuda")).sum().backward()
        optimizer.step()
        optimizer.zero_grad()


def ddp() -> None:
    train(nn.parallel.DistributedDataParallel(model()))


def fsdp2() -> None:
    from torch.distributed.fsdp import fully_shard

    net = model()
    for layer in net:
        if isinstance(layer, nn.Linear):
            fully_shard(layer)
    fully_shard(net)
    train(net)


class RowLinear(nn.Module):
    """Its rank's share of a linear layer; the sum over ranks is on its way beside other work."""

    def __init__(self) -> None:
        super().__init__()
        self.share = nn.Linear(64 // size, 64, bias=False)
        self.beside = nn.Linear(64, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.share(x[:, : 64 // size])
        work = dist.all_reduce(y, async_op=True)
        other = self.beside(x)
        if not is_bug:
            work.wait()
        return other + y  # here: reads y


def tensor_parallel() -> None:
    net = RowLinear().cuda()
    with torch.no_grad():
        x = torch.ones(8, 64, device="cuda")
        kept = [net(x) for _ in range(3)]
    torch.cuda.synchronize()
    del kept


def swapped() -> None:
    """One rank takes the other branch."""
    x, y = torch.ones(8, device="cuda"), torch.ones(16, device="cuda")
    for tensor in (x, y) if rank or not is_bug else (y, x):
        dist.all_reduce(tensor)  # here: another size


def circle() -> None:
    """Two groups, in another order on one rank, on one stream."""
    groups = [dist.new_group(), dist.new_group()]
    for group in groups if rank or not is_bug else groups[::-1]:
        dist.all_reduce(torch.ones(1 << 16, device="cuda"), group=group)  # here: another group


def compute_stream() -> None:
    """A collective that nothing can run beside."""
    x = torch.ones(8, 8, device="cuda") @ torch.ones(8, 8, device="cuda")
    work = dist.all_reduce(x, async_op=not is_bug)  # here: on the stream that computes
    if work is not None:
        work.wait()
    x.sum()


def objects() -> None:
    """Ranks agree on something through a collective: its data travels."""
    told = [None] * size
    dist.all_gather_object(told, "x" * (rank + 1))  # of unequal sizes
    assert told == ["x" * (r + 1) for r in range(size)], told
    heard = [{"rank": rank}]
    dist.broadcast_object_list(heard, 0)
    assert heard == [{"rank": 0}], heard
    sent = torch.tensor([rank + 1], device="cuda")
    dist.all_reduce(sent)
    assert sent.item() == size * (size + 1) // 2, sent
    if rank < 2:
        if rank == 0:
            dist.send(torch.tensor([7], device="cuda"), 1)
        else:
            heard = torch.zeros(1, dtype=torch.int64, device="cuda")
            dist.recv(heard, 0)
            assert heard.item() == 7, heard


for kind in kinds:
    globals()[kind]()
    torch.cuda.synchronize()
dist.destroy_process_group()

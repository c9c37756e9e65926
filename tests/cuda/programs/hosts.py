"""Two hosts that are not in step: one runs ahead, calls another model (`swapped`), or wants out."""

import os
import sys

import torch
import torch.distributed as dist

import torchweft as weft
from torchweft.api import session_of
from torchweft_tools.dryrun import mark
from torchweft_tools.selftest.rig import Parallel

ROWS = 2048  # so that collectives are larger than those which the dry run waits for


def woven(graphs: bool) -> torch.nn.Module:
    options = {"machine": weft.accelerator(2), "graphs": graphs, "watchdog_s": 10.0}
    return weft.compile(
        Parallel().cuda(), weft.overlap(parts=2, min_tokens=1), fallback="error", **options
    )


def ahead(rank: int, x: torch.Tensor, graphs: bool) -> None:
    """Rank 1 begins a call only when rank 0 has issued it."""
    model, store = woven(graphs), dist.distributed_c10d._get_default_store()
    for _ in range(5):
        model(x)
    mark("steady ahead")
    for number in range(5):
        if rank == 1:
            store.wait([f"issued{number}"])
        model(x)
        store.set(f"issued{number}", "yes") if rank == 0 else None
    mark("end ahead")


def disabled(rank: int, x: torch.Tensor) -> None:
    """Rank 1 asks that the model run as it is, later rank 0 that it run by plans; both follow."""
    model, store = woven(False), dist.distributed_c10d._get_default_store()
    service = session_of(model).service
    for turn, asking in enumerate((1, 0)):
        for _ in range(3):
            model(x)
        if rank == asking:
            weft.enable(model, float(turn))
        stock = []
        for _ in range(40):
            before = service.num_stock
            model(x)
            stock.append(service.num_stock > before)
        store.set(f"stock{turn}{rank}", "".join(map(str, map(int, stock))))
        other = store.get(f"stock{turn}{1 - rank}").decode()
        assert other == "".join(map(str, map(int, stock))), "at one call"
        assert stock[-1] == (turn == 0) and stock[0] != stock[-1]


def swapped(rank: int, x: torch.Tensor) -> None:
    """Each rank calls, in the end, what the other one does not."""
    models = [woven(False), woven(False)]
    for model in models:
        for _ in range(3):
            model(x)
    try:
        for _ in range(20):
            models[rank](x)
    except weft.RunError as error:
        os._exit(0 if "call different models" in str(error) else 3)  # the group is gone
    os._exit(4)


rank = int(os.environ["RANK"])
torch.cuda.set_device(rank)
dist.init_process_group("nccl", device_id=torch.device("cuda", rank))
with torch.no_grad():
    x = torch.ones(ROWS, 64, device="cuda")
    if sys.argv[1] == "swapped":
        swapped(rank, x)
    elif sys.argv[1] == "disabled":
        disabled(rank, x)
    else:
        ahead(rank, x, sys.argv[1] == "ahead-graphs")
dist.destroy_process_group()

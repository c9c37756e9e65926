"""Two gloo ranks: collectives are two-phase ops in flight beside compute; results are right."""

from __future__ import annotations

import datetime
import os

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed import _functional_collectives as funcol

import torchweft as weft

TIMEOUT = datetime.timedelta(seconds=60)


class Shard(torch.nn.Module):
    """Two row-parallel layers; each rank holds half of the columns."""

    def __init__(self, in_place: bool) -> None:
        super().__init__()
        self.in_place = in_place
        self.up = torch.nn.ModuleList(torch.nn.Linear(16, 8) for _ in range(2))
        self.down = torch.nn.ModuleList(torch.nn.Linear(8, 16, bias=False) for _ in range(2))

    def forward(self, x):
        for up, down in zip(self.up, self.down, strict=True):
            part = down(torch.relu(up(x)))
            if self.in_place:
                dist.all_reduce(part)
                x = x + part
            else:
                x = x + funcol.all_reduce(part, "sum", dist.group.WORLD)
        return x


def rank_main(rank: int, folder: str, in_place: bool, parts: int) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    store = f"file://{folder}/store"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=2, timeout=TIMEOUT)
    try:
        torch.manual_seed(rank)
        model, x = Shard(in_place).eval(), torch.arange(7 * 16.0).reshape(7, 16) / 50
        with torch.no_grad():
            wanted = model(x.clone())
            weft.compile(model, weft.overlap(parts=parts))
            for _ in range(3):
                torch.testing.assert_close(model(x.clone()), wanted)
        plan = weft.plans(model)[0]
        kinds = [step.kind for step in plan.steps]
        assert kinds.count("issue") == kinds.count("complete") == 2 * parts, str(plan)
        assert plan.num_parts == parts
        first = kinds.index("complete")
        assert "run" in kinds[kinds.index("issue") : first], (
            "compute stands between issue and complete"
        )
        verdict = weft.report(model).fallbacks
        assert verdict == (), verdict
        dist.barrier()  # a gloo rank that leaves while its peer still talks aborts one of them
    finally:
        dist.destroy_process_group()
    # gloo's own threads now and then abort a process while the interpreter is being taken down.
    os._exit(0)


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("parts", [2, 3])
def test_overlap_on_two_ranks_is_equal_to_eager(tmp_path, in_place, parts):
    context = mp.spawn(rank_main, (str(tmp_path), in_place, parts), nprocs=2, join=False)
    assert context is not None
    try:
        deadline = 120
        while deadline > 0 and not context.join(timeout=5):
            deadline -= 5
        assert deadline > 0, "the ranks did not end"
    finally:
        for process in context.processes:
            if process.is_alive():
                process.kill()

"""`prefetch`: weights that are on disk come in ahead of the block that needs them.

    io       |load 0|load 1  |load 2  |load 3  |
    compute         |block 0 |block 1 |block 2 |block 3 |
    weights   0      0 1      1 2      2 3      3

Prefetching of offloaded weights, as FlexGen (arXiv 2303.06865) and ZeRO-Inference do:
while a block runs, the next ones are read. What has been used is freed, so no more than `window`
blocks are there besides the one that runs, and for a moment the one that has just ended.
`weft.offload(model, folder)` puts weights on disk. With `memory_bytes` a load waits until it fits,
the block that has just ended counted; loads then stay ahead by less than the window.
"""

from __future__ import annotations

from torchweft.errors import StrategyError
from torchweft.plan.graph import Op
from torchweft.plan.write.scheduler import Scheduler
from torchweft.plan.write.strategy import strategy


@strategy
def prefetch(s: Scheduler, *, window: int = 1, memory_bytes: int | None = None) -> None:
    """Read the weights of the next blocks while a block runs, within a limit of memory."""
    # 1. The loads in program order, their bytes, and the last op that uses each.
    env, value = s.context.env(s.graph.batch), s.graph.value
    loads = [op for op in s.graph.ops if op.uses == "io" and not op.touched]
    sizes = [sum(value[name].bytes.evaluate(env) for name in op.makes) for op in loads]
    last = [[op for name in load.makes for op in s.graph.readers[name]] for load in loads]
    least = max((sum(sizes[max(n - 1, 0) : n + 1]) for n in range(len(loads))), default=0)
    if memory_bytes is not None and least > memory_bytes:
        why = f"a load and the one before it take {least} bytes; memory_bytes is {memory_bytes}"
        raise StrategyError(f"memory: {why}. Give it more, or offload smaller blocks.")

    # 2. A load comes after the last use of the newest one that must be gone by then.
    def gone(number: int) -> list[Op]:
        first = max(0, number - max(window, 0))
        while memory_bytes and sum(sizes[max(first - 1, 0) : number + 1]) > memory_bytes:
            first += 1
        return sorted(last[first - 1], key=s.graph.ops.index)[-1:] if first else []

    # 3. Ops in program order; each load as soon as what it comes after has been recorded.
    done: set[str] = set()
    for op in s.graph.ops:
        for number, load in enumerate(loads):
            if load.name not in done:
                ahead = gone(number)
                if op is not load and any(each.name not in done for each in ahead):
                    break
                s.run(load, after=[(each, None) for each in ahead if each.name in done])
                done.add(load.name)
        if op.name not in done:
            s.run(op)
            done.add(op.name)

"""`nanoflow`: parts of unequal size, and a number of runs for each kind of op.

    compute  |qkv[0:2] |qkv[2:4]   |out[0:2] |out[2:4]   |mlp[0:2]  ...
    compute1           |attn[0]|attn[1]|attn[2] |attn[3] |
    network                                  |red[0:2]   |red[2:4]

NanoFlow (arXiv 2408.12757): an op that leans on compute, one that leans on memory and one that
leans on the network run side by side, each on other rows. Products are cut into few runs, as each
run reads all weights again; attention into more, as it reads every row's cache once however it is
cut. A short first part, such as shares=(3, 3, 5, 5), starts the network early. Attention is what a
mark says `uses="memory"`; it has a lane of its own on a machine with two, such as `weft.cpu(2)`.
"""

from __future__ import annotations

from collections.abc import Sequence

from torchweft.plan.context import Cut
from torchweft.plan.graph import Op
from torchweft.plan.write.scheduler import Scheduler
from torchweft.plan.write.strategy import strategy


@strategy
def nanoflow(
    s: Scheduler,
    *,
    shares: Sequence[int] = (1, 1, 1, 1),
    compute: int = 2,
    memory: int = 4,
    network: int = 2,
    at: str | None = None,
) -> None:
    """Unequal parts; products, attention and network each in a number of runs of their own."""
    # 1. Parts in the proportion of `shares`, if there are rows enough for them.
    if s.graph.batch is None or s.context.batch < sum(shares):
        return s.sequential(f"the batch has fewer than {sum(shares)} rows")
    s.split(Cut(Cut.sizes(shares).fractions, at))
    # 2. An op that is cut into so many runs takes adjacent parts together.
    runs = {"compute": compute, "memory": memory, "network": network, "io": network}
    done: set[tuple[str, int | None]] = set()

    def together(op: Op, part: int | None) -> list[int | None]:
        share = s.num_parts / max(1, min(runs[op.uses], s.num_parts))
        group = [p for p in range(s.num_parts) if int(p / share) == int((part or 0) / share)]
        alike = group if part is not None else [None]
        return [p for p in alike if (op.name, p) not in done]

    def run(op: Op, *parts: int | None) -> None:
        s.run(op, *parts, lane=s.lanes(op)[-1] if op.uses == "memory" else None)
        done.update((op.name, part) for part in parts)

    # 3. Op by op, as soon as all parts of a run are ready; attention on the last lane.
    while ready := s.ready():
        now, before = {(op.name, part) for op, part in ready}, len(done)
        for op, part in ready:
            group = together(op, part)
            if group[:1] == [part] and all((op.name, p) in now for p in group):
                run(op, *group)
        if len(done) == before:  # parts that change the same bytes come one by one
            run(*ready[0])
    return s.merge()

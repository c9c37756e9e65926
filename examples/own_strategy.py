"""A strategy of one's own: as many parts as the batch is worth, seen before anything runs.

    python examples/own_strategy.py

Parts hide the network behind compute, but each part reads all weights again: a small call is faster
whole. `by_rows` lets the batch decide. Plans are written, verified and simulated; no model runs.
"""

import torchweft as weft
from torchweft.plan.context import Context
from torchweft.plan.lower.lower import lower
from torchweft.plan.simulator import simulate
from torchweft.plan.trace import Trace
from torchweft.plan.verify import verify
from torchweft.plan.write.strategy import write
from torchweft_tools.demo.blueprint import transformer


@weft.strategy
def by_rows(s, *, rows=8, most=4):
    """Split the batch into parts of at least `rows` rows; run a smaller batch whole."""
    parts = min(most, s.context.batch // rows)
    if parts < 2:
        return s.sequential(f"fewer than {2 * rows} rows")
    s.split(parts)
    while ready := s.ready():  # ops whose inputs are scheduled, by part
        for op, part in ready:
            s.run(op, part)  # the lane follows from what the op uses
    return s.merge()


def simulated(strategy: weft.Strategy, batch: int) -> Trace:
    """A call of a two-layer transformer on two ranks, over a slow network, by a strategy."""
    machine, context = weft.cpu(network_bytes_per_s=5e7), Context(batch=batch)
    plan = lower(write(strategy, transformer(num_layers=2), context, machine))
    return simulate(verify(plan), context, machine)


def main() -> None:
    """Compare three strategies at four sizes, simulated."""
    strategies = (weft.sequential, weft.overlap(parts=4), by_rows)
    print("batch", *(f"{strategy.name:>12}" for strategy in strategies))
    for batch in (8, 32, 128, 512):
        times_s = [simulated(strategy, batch).makespan_s for strategy in strategies]
        print(f"{batch:5}", *(f"{time_s * 1e3:9.1f} ms" for time_s in times_s))
    print(simulated(by_rows, 512).to_text(80))


if __name__ == "__main__":
    main()

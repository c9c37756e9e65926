"""One product with its collective: a graph of two ops, sequential or as one fused kernel.

    all_gather -> product        product -> reduce_scatter

The measure of kernels that overlap the two inside of one launch (Flux, arXiv 2406.06858): a plan
with the kernel in the place of both ops, which writes straight to its peers.
"""

from __future__ import annotations

from torchweft.plan.context import Context
from torchweft.plan.graph import Batch, Collective, Graph, Op, Value
from torchweft.plan.kernels.kernel import kernel
from torchweft.plan.lower.lower import lower
from torchweft.plan.simulator import simulate
from torchweft.plan.sizes import Size
from torchweft.plan.verify import verify
from torchweft.plan.write.scheduler import Scheduler
from torchweft.plan.write.strategy import as_strategy, write
from torchweft_tools.predict.hardware import Hardware
from torchweft_tools.predict.prices import GpuCosts
from torchweft_tools.predict.tables import MeasuredTimes
from torchweft_tools.predict.work import OpWork

BF16 = "bfloat16"


def product_graph(sizes: tuple[int, int, int], order: str, ranks: int) -> Graph:
    """The two ops over `rows` (the batch), of which each rank holds or gets its share."""
    _, inner, outer = sizes
    rows = Size.of("s0")
    gathers = order == "all_gather"
    inner, outer = (inner, outer // ranks) if gathers else (inner // ranks, outer)
    values = [_rows("x", inner), Value("w", (Size.of(inner), Size.of(outer)), BF16)]
    talk = Collective(order, "tp")
    flops = rows * (2 * inner * outer)
    read = "x.all" if gathers else "x"
    product = Op("product", (read, "w"), ("y",), mark="product", body="product", flops=flops)
    read, made = ("x", "x.all") if gathers else ("y", "z")
    speech = Op(
        "talk",
        (read,),
        (made,),
        uses="network",
        two_phase=True,
        collective=talk,
        mark="collective",
        body="talk",
    )
    values += [_rows("y", outer), _rows(made, inner if gathers else outer)]
    ops = (speech, product) if gathers else (product, speech)
    return Graph(
        "product",
        tuple(values),
        ops,
        ("x", "w"),
        (ops[-1].makes[0],),
        "s0",
        communicators=(("tp", tuple(range(ranks))),),
    )


def _rows(name: str, wide: int) -> Value:
    return Value(name, (Size.of("s0"), Size.of(wide)), BF16, Batch(0))


def _one(s: Scheduler) -> None:
    """One kernel in the place of both ops."""
    kind = next(op.collective.kind for op in s.graph.ops if op.collective)
    s.run(tuple(s.graph.ops), replace=kernel(lambda *read: None, talks=[kind], name="fused"))


def product_s(
    hardware: Hardware,
    measured: MeasuredTimes,
    sizes: tuple[int, int, int],
    order: str,
    ranks: int,
    *,
    part: str = "",
    fused: bool = False,
) -> float:
    """Seconds of both, one behind the other or fused; or of one of them (its mark)."""
    graph = product_graph(sizes, order, ranks)
    weight = graph.value["w"].shape
    inner, outer = (dim.constant or 0 for dim in weight)
    costs = GpuCosts(
        hardware.machine,
        hardware=hardware,
        works={"product": OpWork("matmul", inner, outer)},
        measured=measured,
        algorithm="direct" if fused else "ring",
    )
    context = Context(sizes[0])
    plan = write(as_strategy(_one) if fused else "sequential", graph, context, hardware.machine)
    trace = simulate(verify(lower(plan)), context, hardware.machine, costs)
    if not part:
        return trace.makespan_s
    spans = [s for s in trace.spans if s.kind in ("run", "transfer") and s.op]
    return sum(s.end_s - s.start_s for s in spans if graph.op[s.op.split()[0]].mark == part)

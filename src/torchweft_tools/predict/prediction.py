"""The `Prediction`: what a strategy's plan of a model would take, on a machine that is not here.

    shape, load, parallel, hardware, engine, strategy --predict--> Prediction

1. Draw the graph of a few layers, and of a few more; the rest of the layers take what the
   difference took: layers repeat, so a plan's pace does.
2. Let the strategy write its plan; lower, verify and simulate it: nothing here has another path.
3. Power: products draw more than the limit at full clock. So the clock is the one at which the
   call as a whole keeps to the limit; then simulate again.
4. The host: a call takes no less than its launches, and what comes around them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from torchweft.errors import WeftError, unknown
from torchweft.plan.context import Context
from torchweft.plan.graph import Graph
from torchweft.plan.improve.bound import bound
from torchweft.plan.lower.lower import lower
from torchweft.plan.plan import Plan
from torchweft.plan.simulator import simulate
from torchweft.plan.strategies import sequential
from torchweft.plan.trace import Trace
from torchweft.plan.verify import verify
from torchweft.plan.write.strategy import Strategy, write
from torchweft_tools.predict.blocks import in_blocks
from torchweft_tools.predict.hardware import Hardware
from torchweft_tools.predict.model_graph import ModelGraph, model_graph
from torchweft_tools.predict.prices import GpuCosts
from torchweft_tools.predict.shape import ModelShape
from torchweft_tools.predict.tables import MeasuredTimes
from torchweft_tools.predict.work import ModelLayout, Workload

NUM_LAYERS = 2
OTHER_POWER = 0.6
"""Watts of everything but products, as a share of the limit."""
LEAST_CLOCK = 0.4


@dataclass(frozen=True)
class Engine:
    """What starts the kernels of a call: seconds of a launch, and around all of them."""

    name: str
    launch_s: float
    call_s: float


GRAINS = ("auto", "kernels", "blocks")
FUSING = ("tokenweave",)
"""Strategies that come with a kernel of their own for an all_reduce and the norm behind it."""
ENGINES: Mapping[str, Engine] = {
    "eager": Engine("eager", 5e-6, 8e-3),
    "graphs": Engine("graphs", 4e-7, 1e-3),
    "bare": Engine("bare", 0.0, 0.0),
}
"""eager: an engine that launches each kernel, and schedules, copies and samples around them;
graphs: device graphs; bare: the kernels alone, as in a microbenchmark."""


def get_engine(name: str) -> Engine:
    """The engine of this name. Raises `WeftError` listing the choices."""
    if name not in ENGINES:
        raise WeftError(f"engine: {unknown('engine', name, ENGINES)}", rule="engine")
    return ENGINES[name]


@dataclass(frozen=True)
class Call:
    """A call to predict: a model, what it is asked for, how it lies on which machine."""

    shape: ModelShape
    load: Workload
    parallel: ModelLayout
    hardware: Hardware
    engine: Engine
    measured: MeasuredTimes = MeasuredTimes()  # noqa: RUF009
    algorithm: str = "auto"
    without: tuple[str, ...] = ()
    fused: bool = False
    grain: str = "auto"

    def draw(self, num_layers: int) -> ModelGraph:
        """The graph of so many layers."""
        where = self.parallel, self.hardware
        more: dict[str, Any] = {"without": self.without, "fused": self.fused}
        drawn = model_graph(self.shape, self.load, *where, num_layers=num_layers, **more)
        return in_blocks(drawn) if self.grain == "blocks" else drawn


@dataclass(frozen=True)
class Prediction:
    """Seconds and bytes of a call, simulated.

    layer_s, marks: what one more layer takes, and the ops of each mark in it.
    """

    makespan_s: float
    sequential_s: float
    exposed_s: float
    network_s: float
    bound_s: float
    peak_bytes: int
    clock: float
    num_parts: int
    layer_s: float
    marks: Mapping[str, float]

    @property
    def speedup(self) -> float:
        """Over the ops one by one, by the same prices."""
        return self.sequential_s / self.makespan_s

    @property
    def hidden_share(self) -> float:
        """The share of network time beside which something is computed."""
        return max(0.0, 1.0 - self.exposed_s / self.network_s) if self.network_s > 0 else 1.0

    def data(self) -> dict[str, Any]:
        """The prediction as plain data."""
        names = [*("makespan_s", "sequential_s", "speedup", "exposed_s", "hidden_share")]
        names += ["bound_s", "peak_bytes"]
        return {**{name: getattr(self, name) for name in names}, "simulated": True}


def predict(call: Call, strategy: Strategy, *, bounded: bool = True) -> Prediction:
    """What the plan of a strategy takes, and the ops one by one. Raises `WeftError`.

    bounded: with the bound that no plan can beat, which takes a second or two (else it is 0).
    """
    chosen = run(call, strategy, bounded=bounded)
    plain = chosen
    if strategy.name != "sequential" or call.fused:
        plain = run(replace(call, fused=False), sequential, bounded=False)
    return replace(chosen, sequential_s=plain.makespan_s)


def run(call: Call, strategy: Strategy, *, bounded: bool = True) -> Prediction:
    """What the plan of a strategy takes, without another to compare it with.

    A call of grain "auto" is drawn in kernels and in blocks, and the quicker plan is taken: how
    fine a graph is cut is up to the marks of whoever runs it.
    """
    if call.grain == "auto":
        grains = GRAINS[1:2] if strategy.name == "sequential" else GRAINS[1:]
        ways = [replace(call, grain=grain) for grain in grains]
        found = [(_run(way, strategy, bounded=False), way) for way in ways]
        best, call = min(found, key=lambda item: item[0].makespan_s)
        if not bounded:
            return best
    return _run(call, strategy, bounded=bounded)


def _run(call: Call, strategy: Strategy, *, bounded: bool) -> Prediction:
    few, more, weight = _depths(call.shape)
    runs = [_PlannedLayers(call, strategy, depth) for depth in (few, more)]
    bound_s = 0.0
    if bounded:
        first, second = (each.bound_s() for each in runs)
        bound_s = first + weight * (second - first) + call.engine.call_s

    def measured(clock: float) -> tuple[_Totals, _Totals, _Totals]:
        low, high = (each.totals(clock) for each in runs)
        return low, high, low.extended(high, weight)

    clock, (low, high, total) = 1.0, measured(1.0)
    if call.engine.name != "bare":
        clock = _clock(call.hardware.prices.matmul_power, total.products_s, total.makespan_s)
        low, high, total = measured(clock)
    layer = low.more(high, more - few) if more > few else _Totals().more(high, more)
    host_s = total.launches * call.engine.launch_s
    return Prediction(
        makespan_s=max(total.makespan_s, host_s) + call.engine.call_s,
        sequential_s=0.0,
        exposed_s=total.exposed_s,
        network_s=total.network_s,
        bound_s=bound_s,
        peak_bytes=int(total.peak_bytes + total.resident_bytes),
        clock=clock,
        num_parts=runs[0].plan.num_parts,
        layer_s=layer.makespan_s,
        marks=layer.marks,
    )


def _depths(shape: ModelShape) -> tuple[int, int, float]:
    """Two numbers of layers to draw, and how often their difference is added to the first."""
    repeated = shape.num_layers - shape.num_dense if shape.experts else shape.num_layers
    first = shape.num_layers - repeated
    if repeated <= 2 * NUM_LAYERS:
        return shape.num_layers, shape.num_layers, 0.0
    return first + NUM_LAYERS, first + 2 * NUM_LAYERS, (repeated - NUM_LAYERS) / NUM_LAYERS


def _clock(power: float, products_s: float, makespan_s: float) -> float:
    """The clock at which a call keeps to its power limit on average.

    Products draw power x clock^3 for 1/clock as long; all else draws OTHER_POWER.
    """
    low, high = LEAST_CLOCK, 1.0
    rest_s = max(0.0, makespan_s - products_s)

    def over(clock: float) -> bool:
        used = power * clock**2 * products_s + OTHER_POWER * rest_s
        return used > products_s / clock + rest_s

    if not over(1.0):
        return 1.0
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (low, middle) if over(middle) else (middle, high)
    return low


@dataclass(frozen=True)
class _Totals:
    """What a simulated call of some layers comes to."""

    makespan_s: float = 0.0
    exposed_s: float = 0.0
    network_s: float = 0.0
    products_s: float = 0.0
    launches: float = 0.0
    peak_bytes: float = 0.0
    resident_bytes: float = 0.0
    marks: Mapping[str, float] = field(default_factory=dict)

    def extended(self, more: _Totals, weight: float) -> _Totals:
        """With `weight` times what `more` has more; peaks of live bytes do not grow."""

        def grown(name: str) -> float:
            low, high = getattr(self, name), getattr(more, name)
            return float(low + weight * (high - low))

        names = ("makespan_s", "exposed_s", "network_s", "products_s", "launches", "resident_bytes")
        marks = {
            mark: self.marks.get(mark, 0.0) + weight * (high - self.marks.get(mark, 0.0))
            for mark, high in more.marks.items()
        }
        peak = max(self.peak_bytes, more.peak_bytes)
        return _Totals(**{name: grown(name) for name in names}, peak_bytes=peak, marks=marks)

    def more(self, other: _Totals, num_layers: int) -> _Totals:
        """What each of so many layers takes that `other` has more."""
        marks = {m: (s - self.marks.get(m, 0.0)) / num_layers for m, s in other.marks.items()}
        return _Totals((other.makespan_s - self.makespan_s) / num_layers, marks=marks)


class _PlannedLayers:
    """A strategy's plan of some layers, simulated at one clock and another."""

    def __init__(self, call: Call, strategy: Strategy, num_layers: int) -> None:
        self.call, self.drawn = call, call.draw(num_layers)
        load = call.load
        requests = (load.seq,) * load.batch
        self.context = Context(load.num_tokens, tokens_per_request=requests, phase=load.phase)
        machine = call.hardware.machine
        self.plan: Plan = verify(
            lower(write(strategy, self.drawn.graph, self.context, machine, costs=self.costs(1.0)))
        )

    def costs(self, clock: float) -> GpuCosts:
        """GpuFacts at a clock."""
        call = self.call
        return GpuCosts(
            call.hardware.machine,
            hardware=call.hardware,
            works=self.drawn.works,
            measured=call.measured,
            algorithm=call.algorithm,
            clock=clock,
        )

    def totals(self, clock: float) -> _Totals:
        """What the plan comes to at this clock."""
        machine, costs, graph = self.call.hardware.machine, self.costs(clock), self.plan.graph
        trace = simulate(self.plan, self.context, machine, costs)
        launches = 0
        for step in self.plan.steps:
            if step.kind in ("run", "issue"):
                works = [self.drawn.works.get(graph.op[name].body) for name in step.names]
                launches += 1 if step.by else sum(work.launches if work else 1 for work in works)
        rows = self.context.batch // self.plan.num_parts
        marks, products_s = _by_mark(trace, graph, costs, rows)
        return _Totals(
            trace.makespan_s,
            trace.exposed_network_s,
            trace.network_s,
            products_s,
            launches,
            trace.peak_bytes,
            self.drawn.resident_bytes,
            marks,
        )

    def bound_s(self) -> float:
        """Seconds that no plan can beat, at full clock."""
        machine = self.call.hardware.machine
        return bound(self.drawn.graph, self.context, machine, self.costs(1.0)).seconds


def _by_mark(
    trace: Trace, graph: Graph, costs: GpuCosts, rows: int
) -> tuple[dict[str, float], float]:
    """Seconds of spans by the marks of their ops, and of all products and attention together."""
    marks: dict[str, float] = {}
    products_s = 0.0
    for span in trace.spans:
        if span.kind not in ("run", "transfer"):
            continue
        ops = [graph.op[name] for name in span.op.split()]
        mark, spent_s = "+".join(dict.fromkeys(op.mark or op.name for op in ops)), span.busy_s
        marks[mark] = marks.get(mark, 0.0) + span.end_s - span.start_s
        shares = [
            costs.products_share(costs.works[op.body], rows) for op in ops if op.body in costs.works
        ]
        products_s += spent_s * max(shares, default=0.0)
    return marks, products_s

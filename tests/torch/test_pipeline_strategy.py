"""The strategy `pipeline`: in the order of torch's GPipe, in the time of its formula."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
from torch.testing._internal.distributed.fake_pg import FakeStore

from torchweft.errors import StrategyError
from torchweft.plan.context import Context
from torchweft.plan.graph import Batch, Collective, Graph, Op, Value
from torchweft.plan.lower.lower import lower
from torchweft.plan.machine import Costs, CostTable, cpu
from torchweft.plan.simulator import simulate_ranks
from torchweft.plan.sizes import Size
from torchweft.plan.strategies import get_strategy, pipeline
from torchweft.plan.verify import verify_ranks
from torchweft.plan.write.strategy import write

S0, ROWS = Size.of("s0"), Batch(0)
MACHINE = cpu(overhead_s=0.0, network_latency_s=0.0)


def stage(rank: int, num_ranks: int, num_layers: int) -> Graph:
    """Some layers of a model: what the rank before sends, on to the rank behind."""
    values, ops, last = [Value("x", (S0,), batch=ROWS)], [], "x"
    if rank > 0:
        values.append(Value("taken", (S0,), batch=ROWS))
        talk = Collective("recv", "world", rank - 1, "t")
        given = {"reads": ("x",), "makes": ("taken",), "collective": talk}
        ops.append(Op("recv", uses="network", two_phase=True, **given))
        last = "taken"
    for layer in range(num_layers):
        values.append(Value(f"y{layer}", (S0,), batch=ROWS))
        ops.append(Op(f"layer{layer}", (last,), (f"y{layer}",)))
        last = f"y{layer}"
    if rank < num_ranks - 1:
        talk = Collective("send", "world", rank + 1, "t")
        ops.append(Op("send", (last,), uses="network", two_phase=True, collective=talk))
    return Graph(f"rank{rank}", tuple(values), tuple(ops), ("x",), (last,), "s0")


def costs(seconds: float) -> Costs:
    entries = {(f"layer{layer}", "cpu"): {0: seconds, 10**6: seconds} for layer in range(4)}
    messages = {(name, "cpu"): {0: 0.0, 10**6: 0.0} for name in ("send", "recv")}
    return Costs(MACHINE, CostTable.of(entries | messages))


@pytest.mark.parametrize(("num_ranks", "parts", "num_layers"), [(2, 4, 1), (3, 2, 2), (4, 7, 3)])
def test_its_order_is_that_of_torch_and_its_time_that_of_the_formula(
    num_ranks: int, parts: int, num_layers: int
) -> None:
    graphs = [stage(rank, num_ranks, num_layers) for rank in range(num_ranks)]
    chosen, context = pipeline(schedule="gpipe", parts=parts), Context(4 * parts)
    plans = verify_ranks([lower(write(chosen, graph, context, MACHINE)) for graph in graphs])
    traces = simulate_ranks(plans, context, MACHINE, costs(1.0))
    whole_s = max(trace.makespan_s for trace in traces)
    assert whole_s == pytest.approx((parts + num_ranks - 1) * num_layers)
    dist.init_process_group("fake", rank=0, world_size=num_ranks, store=FakeStore())
    try:
        module, device = torch.nn.Identity(), torch.device("cpu")
        theirs = ScheduleGPipe(PipelineStage(module, 0, num_ranks, device), parts)
        rows = theirs._get_pipeline_order()
    finally:
        dist.destroy_process_group()
    for rank, trace in enumerate(traces):
        spans = [span for span in trace.spans if span.op == f"layer{num_layers - 1}"]
        mine = [f"{rank}F{span.parts[0]}" for span in spans]
        assert mine == [str(a) for a in rows[rank] if a is not None and "F" in str(a)]
        turns = [round(span.end_s / num_layers) for span in spans]
        assert turns == [rank + part + 1 for part in range(parts)]


def test_what_it_cannot_pipeline_runs_as_it_is() -> None:
    graph = stage(0, 2, 2)
    few = write(pipeline(parts=4), graph, Context(3), MACHINE)
    assert few.num_parts == 1 and "3 tokens are too few for 4 parts" in str(few)
    alone = write(get_strategy("pipeline"), stage(0, 1, 2), Context(64), MACHINE)
    assert alone.num_parts == 1 and "no message goes to another rank" in str(alone)
    with pytest.raises(StrategyError, match="gpipe"):
        write(pipeline(schedule="gpip"), graph, Context(64), MACHINE)

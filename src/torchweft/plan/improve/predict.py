"""What plans would take: `predict` by simulation, `candidates` to choose from, and `auto`.

    predict(overlap(parts=4), graph, context, costs)      seconds
    candidates(graph)                                     every strategy that may gain on a graph
    auto                                                  the candidate that is predicted to be best

`auto` is a strategy like others: it writes the plan of the best one. It is as good as its costs;
`weft.compile(model)` measures as well.
"""

from __future__ import annotations

from itertools import chain

from torchweft.errors import WeftError
from torchweft.plan.context import Context
from torchweft.plan.graph import Graph
from torchweft.plan.lower.lower import lower
from torchweft.plan.machine import Costs
from torchweft.plan.simulator import within_memory
from torchweft.plan.strategies import get_strategy, sequential, strategy_names
from torchweft.plan.write.scheduler import Scheduler
from torchweft.plan.write.strategy import Strategy, option_defaults, strategy, write

PARTS = (2, 4, 8)
OTHERWISE = ("auto", "compose", "replay", "searched", "sequential")
"""What these do is asked for, and not tried."""
NEVER_S = float("inf")


def predict(way: Strategy, graph: Graph, context: Context, costs: Costs) -> float:
    """Seconds that a call would take by a strategy; without end if it cannot write a plan, or
    if the plan needs more memory than a device has."""
    return _tried(way, graph, context, costs)[0]


def _tried(way: Strategy, graph: Graph, context: Context, costs: Costs) -> tuple[float, str]:
    """The prediction, and the rule that keeps the strategy from having one."""
    try:
        plan = lower(write(way, graph, context, costs.machine, costs=costs))
        return within_memory(plan, context, costs.machine, costs).makespan_s, ""
    except WeftError as error:
        return NEVER_S, error.rule


def candidates(graph: Graph) -> list[Strategy]:
    """Every registered strategy that may gain something on a graph; equal on all ranks.

    Nothing gains where all ops lean on one resource and stand in a row. A strategy with an option
    `parts` is there once for each number of them, if something can be split.
    """
    uses, splits = {op.uses for op in graph.ops}, any(not op.whole for op in graph.ops)
    if len(graph.ops) < 2 or (uses == {"compute"} and not _has_branches(graph)):
        return []
    others = [get_strategy(name) for name in strategy_names() if name not in OTHERWISE]
    return list(chain.from_iterable(_variants(way, splits) for way in others))


def _variants(way: Strategy, splits: bool) -> list[Strategy]:
    if "parts" not in option_defaults(way.function):
        return [way]
    return [way(parts=parts) for parts in PARTS] if splits else []


def _has_branches(graph: Graph) -> bool:
    """Whether some op does not need the one before it."""
    made: set[str] = set(graph.inputs)
    for op in graph.ops:
        if made and not made & set(op.reads) and op is not graph.ops[0]:
            return True
        made = set(op.makes) | set(op.mutates)
    return False


@strategy
def auto(s: Scheduler) -> None:
    """The strategy that the simulator expects to be fastest, at the costs that are known."""
    whole_s = predict(sequential, s.graph, s.context, s.costs)
    ways = [(*_tried(way, s.graph, s.context, s.costs), way) for way in candidates(s.graph)]
    best_s, _, best = min(ways, key=lambda each: each[0], default=(NEVER_S, "", sequential))
    if num_large := sum(rule == "memory" for _, rule, _ in ways):
        s.notes.append(f"auto: {num_large} of {len(ways)} plans need more memory than there is")
    chosen = best if best_s < whole_s else sequential
    chosen.function(s, **chosen.options)

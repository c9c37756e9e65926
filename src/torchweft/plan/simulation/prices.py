"""The `StepPrice`: what a step asks for in the simulator: seconds at full rate, and resources.

step, device --StepPrices.of--> StepPrice(busy_s, demands, uses)
"""

from __future__ import annotations

from typing import NamedTuple

from torchweft.plan.context import Context
from torchweft.plan.machine import Costs, Machine
from torchweft.plan.plan import Plan, Range, Step


class StepPrice(NamedTuple):
    """What a step asks for: seconds at full rate, amounts of resources, what its span uses.

    factor: how many times as long it takes where a slowdown of its device holds; None: as it says.
    """

    busy_s: float = 0.0
    demands: tuple[tuple[str, float], ...] = ()
    uses: str = ""
    factor: float | None = None


NOTHING = StepPrice()


class StepPrices:
    """Seconds and bytes of steps over ranges of parts, each worked out once."""

    def __init__(self, plan: Plan, context: Context, machine: Machine, costs: Costs) -> None:
        self.plan, self.graph, self.context = plan, plan.graph, context
        self.machine, self.costs = machine, costs
        self.bounds: tuple[int, ...] = (0, context.batch)
        if plan.num_parts > 1:
            self.bounds = plan.bounds(context.batch, context.tokens_per_request)
        self.known: dict[object, StepPrice] = {}

    def rows(self, parts: Range | None) -> int:
        first, last = parts or (0, self.plan.num_parts)
        return self.bounds[last] - self.bounds[first]

    def num_bytes(self, name: str, parts: Range | None = None) -> int:
        value = self.graph.value[name]
        env = self.context.env(self.graph.batch, self.rows(parts if value.batch else None))
        return max(0, value.bytes.evaluate(env))

    def of(self, step: Step, device: str, *, flight: bool) -> StepPrice:
        """The price of a step on a device; `flight`: of the op that it issued."""
        if step.kind in ("split", "merge", "free", "wait"):
            return NOTHING
        if step.kind in ("issue", "complete") and not flight:
            return StepPrice(self.costs.host_s(device), uses="network")
        key = step.kind, step.names, self.rows(step.parts), step.on, step.by, device
        if key not in self.known:
            work = self._copy if step.kind == "copy" else self._run
            self.known[key] = work(step, device)
        return self.known[key]

    def _copy(self, step: Step, device: str) -> StepPrice:
        name, target = step.names[0], step.on or device
        num_bytes = self.num_bytes(name, step.parts)
        if target == device:
            seconds = self.costs.copy_s(num_bytes, device, target)
            return StepPrice(seconds, ((f"{device} memory", 1.0),), "memory")
        seconds = self.costs.send_s(name, num_bytes, device, target)
        return StepPrice(seconds, ((f"{device} to {target}", 1.0),), "io")

    def _run(self, step: Step, device: str) -> StepPrice:
        ops = [self.graph.op[name] for name in step.names]
        env = self.context.env(self.graph.batch, self.rows(step.parts))
        factor = None
        if step.by is None:
            seconds = sum(self.costs.run_s(self.graph, op, env, device) for op in ops)
            factor = self.costs.factor(self.graph, ops[0], env, device)
        else:
            seconds = self.costs.group_s(self.graph, ops, step.by, env, device)
        asked = {f"{device} {op.uses}": 1.0 for op in ops}
        share = self.machine.device[device].network_share
        if share > 0 and f"{device} network" in asked:
            asked.setdefault(f"{device} compute", share)
        uses = next((op.uses for op in ops if op.uses != "network"), "network")
        return StepPrice(seconds, tuple(asked.items()), uses, factor)

"""The demo: a two-layer transformer planned two ways, simulated, drawn, and one mistake caught.

for text in story(): ...          texts to print, in order; nothing runs on a real lane
"""

from __future__ import annotations

from collections.abc import Iterator

from torchweft.plan.context import Context
from torchweft.plan.lower.lower import lower
from torchweft.plan.machine import cpu
from torchweft.plan.plan import Plan
from torchweft.plan.simulator import simulate
from torchweft.plan.strategies import overlap, sequential
from torchweft.plan.verify import findings, verify
from torchweft.plan.write.strategy import write
from torchweft_tools.demo.blueprint import transformer

CONTEXT = Context(batch=512)
MACHINE = cpu(network_bytes_per_s=5e7)
EXCERPT = 14


def story() -> Iterator[str]:
    """The texts of the demo."""
    graph = transformer(2)
    yield "1. A graph says what is computed: a two-layer transformer, split over two ranks.\n"
    yield f"{graph}\n"
    yield "2. A strategy writes a plan: what runs when, on which lane. First `sequential`:\n"
    plain = verify(lower(write(sequential, graph, CONTEXT, MACHINE)))
    before = simulate(plain, CONTEXT, MACHINE)
    yield before.to_text()
    yield "3. `overlap(parts=2)`: one part of the batch computes while the other is on the wire.\n"
    plan = verify(lower(write(overlap(parts=2), graph, CONTEXT, MACHINE)))
    after = simulate(plan, CONTEXT, MACHINE)
    yield after.to_text()
    faster = before.makespan_s / after.makespan_s
    yield f"   Simulated speed-up: {faster:.2f}x, on a machine that is described, not measured.\n"
    yield f"4. Its plan is text that reads back; the first of {len(plan.steps)} steps:\n"
    yield _head(plan) + "\n"
    assert Plan.parse(str(plan)) == plan, "a plan reads back as itself"
    yield "5. Edit it so that an op runs before its input is there; the verifier says where:\n"
    broken, moved = _break(plan)
    first = findings(broken)[0]
    yield f"   moved: {moved}\n\nPlanError: {first.error(broken)}\n"


def _head(plan: Plan) -> str:
    lines = str(plan).splitlines()
    start = lines.index("steps")
    return "\n".join(f"  {line}" for line in lines[start : start + EXCERPT]) + "\n    ..."


def _break(plan: Plan) -> tuple[Plan, str]:
    """The plan with the first run that needs a complete put ahead of it."""
    steps = list(plan.steps)
    at = next(number for number, step in enumerate(steps) if step.kind == "complete")
    run = next(number for number in range(at, len(steps)) if steps[number].kind == "run")
    steps.insert(at, steps.pop(run))
    moved = f"{steps[at].label!r} ahead of {steps[at + 1].label!r}"
    return plan.then("moved by hand", steps=tuple(steps)), moved

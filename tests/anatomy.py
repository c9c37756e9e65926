"""What a captured graph is made of, whatever its ops and values are called."""

from __future__ import annotations

from typing import Any

from torchweft.capture.dynamo import Capture


def anatomy(captured: Capture) -> list[object]:
    """The ops in their order: rows, uses, collectives, what they compute and on which values.

    A value is known by when it is first named, for inputs may be given in another order.
    """
    graph = captured.graph
    numbers: dict[str, int] = {}

    def number(name: str) -> int:
        return numbers.setdefault(name, len(numbers))

    found: list[object] = []
    for op in graph.ops:
        named: list[Any] = [tuple(map(number, names)) for names in (op.reads, op.makes, op.mutates)]
        facts = (op.rows, op.uses, op.two_phase, op.collective, op.mark, op.body, str(op.flops))
        found.append((*named, *facts, captured.reasons.get(op.name), captured.num_calls[op.name]))
    for name in numbers:
        value = graph.value[name]
        alias = value.alias_of and number(value.alias_of)
        found.append((value.shape, value.dtype, value.batch, alias, value.placeable))
    return [*found, tuple(map(number, graph.outputs))]


def num_bodies(captured: Capture) -> int:
    """How many different bodies there are to compile."""
    return len({id(body.code) for body in captured.bodies.values()})

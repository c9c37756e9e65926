"""The `TrustedInputs` of a piece: weights whose sizes and layout no kernel of Inductor looks at.

    trusted.check(given)        one call for all of them, instead of one for each in every op

Dynamo guards them too, but a tensor that stays in its dict is not looked at again: what
`weight.data = ...` or `model.to(memory_format=...)` changes goes unseen. So each call compares
types, sizes and strides with those that were compiled for, at the speed of a guard.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torchweft.capture.bodies.inductor import order_of
from torchweft.capture.bodies.inner import InnerBody
from torchweft.capture.dynamo import getter
from torchweft.errors import RunError
from torchweft.plan.graph import Graph
from torchweft.private.dynamo import TensorGuards

Wanted = tuple[tuple[int | None, ...], tuple[int, ...] | None, Any]
"""Shape, order of dims in memory, and type."""


class TrustedInputs:
    """What was taken for granted of some inputs of a graph."""

    def __init__(self, wanted: Mapping[str, Wanted], inputs: Sequence[str]) -> None:
        self.wanted = wanted
        self._pick = getter([inputs.index(name) for name in wanted])
        self._guards: Any = None

    def check(self, given: Sequence[Any]) -> None:
        """Raise `RunError` if an input is not as it was."""
        tensors = self._pick(given)
        guards = self._guards
        if guards is None or not guards.check(*tensors):
            self._look(tensors)

    def _look(self, tensors: Sequence[Any]) -> None:
        """The same, one by one; what is right now is what guards compare with from now on."""
        for tensor, (name, wanted) in zip(tensors, self.wanted.items(), strict=True):
            if (tuple(tensor.shape), order_of(tensor), tensor.dtype) != wanted:
                raise RunError(
                    f"run: {name!r} has changed since it was compiled, where Dynamo does not look: "
                    f"it is {tensor.dtype} {tuple(tensor.shape)} with strides {tensor.stride()}. "
                    "Call torch._dynamo.reset() after such a change, and it is compiled anew."
                )
        self._guards = TensorGuards(*tensors, dynamic_dims_sizes=None, dynamic_dims_strides=None)


def trusted_inputs(graph: Graph, bodies: Mapping[str, Any]) -> TrustedInputs | None:
    """The inputs that bodies of a graph take for granted; None if there are none."""
    wanted: dict[str, Wanted] = {}
    for op in graph.ops:
        body = bodies[op.name]
        for form in body.by if isinstance(body, InnerBody) else ():
            if form.refused or not form.is_vouched:
                continue
            for number, name in enumerate(op.reads):
                if number not in form.told:
                    shape = tuple(size.constant for size in graph.value[name].shape)
                    like = form.body.examples[number]
                    wanted[name] = (shape, form.orders[number], like.dtype)
    return TrustedInputs(wanted, graph.inputs) if wanted else None

"""The `Results` of a user's kernel: held against the graph, once for each shape.

    (v4,) = q0(kernel(v3), (z[0], z[1]), (v3,))         in a program: q0 is a `Results`

A kernel stands in for ops, so it gives what is read of theirs outside: a tuple of tensors, in the
order in which the ops make them, of the shapes and dtypes that the graph says.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from torchweft.errors import RunError, clip
from torchweft.plan.plan import Plan, Step
from torchweft.run.program import makes_of

MAX_SHAPES = 4096


class Results:
    """What one step by a kernel is to give; a shape that was right once is not looked at again."""

    def __init__(self, plan: Plan, step: Step) -> None:
        self.values = [plan.graph.value[name] for name in makes_of(plan.graph, step)]
        self.sizes = [size for value in self.values for size in value.shape]
        written = next((line for line in plan.history if line.startswith("write ")), "")
        strategy = f" of strategy {written.removeprefix('write ')}" if written else ""
        self.where = f"kernel {step.by!r}{strategy} in place of {step.label}"
        self.right: set[tuple[int, ...]] = set()

    def __call__(self, made: Any, sizes: tuple[int, ...], reads: Sequence[Any] = ()) -> Any:
        """What was made. Raises `RunError` if it is not what the graph says."""
        if sizes in self.right:
            return made
        if not isinstance(made, tuple | list):
            raise self._wrong(_shown(made), f"a tuple of {len(self.values)}")
        if len(made) != len(self.values):
            names = ", ".join(value.name for value in self.values)
            raise self._wrong(f"{len(made)} values", f"{len(self.values)}: {names}")
        left, devices = list(sizes), {r.device for r in reads if isinstance(r, Tensor)}
        for value, one in zip(self.values, made, strict=True):
            shape, left = left[: len(value.shape)], left[len(value.shape) :]
            if value.dtype == "opaque":
                continue
            fits = isinstance(one, Tensor) and list(one.shape) == shape
            if not fits or str(one.dtype) != f"torch.{value.dtype}":
                raise self._wrong(_shown(one), f"{value.dtype}{shape}", value.name)
            if devices and one.device not in devices:
                where = f"one on {devices.pop()}"
                raise self._wrong(f"a tensor on {one.device}", where, value.name)
        if len(self.right) >= MAX_SHAPES:
            self.right.clear()
        self.right.add(sizes)
        return made

    def _wrong(self, came: str, expected: str, name: str = "") -> RunError:
        what = f" for {name!r}" if name else ""
        text = f"kernel: {self.where} gave {came}{what}; expected {expected}."
        return RunError(text, rule="kernel")


def _shown(thing: Any) -> str:
    if isinstance(thing, Tensor):
        return f"{str(thing.dtype).removeprefix('torch.')}{list(thing.shape)}"
    return f"{type(thing).__name__} {clip(thing)}"

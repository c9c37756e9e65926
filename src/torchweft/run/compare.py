"""`compare`: are two nests of tensors equal, and if not, by how much and where?

compare(wanted, got)  ->  bit-equal | within tolerance | different
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch

from torchweft.errors import clip
from torchweft.private.core import tree_leaves, tree_map

DEFAULT_TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-4, torch.bfloat16: 2e-2}
DEFAULT_TOLERANCE |= {torch.float16: 5e-3, torch.float8_e4m3fn: 0.2, torch.float8_e5m2: 0.4}


ROUNDING = 16  # units in the last place of one


@dataclass(frozen=True)
class Check:
    """The verdict: `equal` is "bit-equal", "within tolerance" or "different".

    own_diff: by how much the plain model differs from itself in batches of other sizes; None where
    that was not measured. Where it was, it is the tolerance.
    """

    equal: str
    max_abs_diff: float
    tolerance: float
    num_tensors: int
    first_op: str | None = None
    detail: str = ""
    own_diff: float | None = None

    def __bool__(self) -> bool:
        return self.equal != "different"

    def __str__(self) -> str:
        text = f"{self.equal}: {self.num_tensors} tensors, "
        text += f"largest difference {self.max_abs_diff:.3g}"
        if self.own_diff is not None:
            text += f" (in other batches the model differs from itself by {self.own_diff:.3g})"
        if self.first_op:
            text += f"; first op that differs: {self.first_op}"
        return text + (f" ({self.detail})" if self.detail else "")


def leaves_of(nest: Any, depth: int = 4) -> list[Any]:
    """The leaves of a nest; of an object that is no tensor or module, those that it holds."""
    leaves: list[Any] = []
    for leaf in tree_leaves(nest):
        opaque = not depth or isinstance(leaf, torch.Tensor | torch.nn.Module | type)
        inside = None if opaque else getattr(leaf, "__dict__", None)
        leaves += leaves_of([*inside.values()], depth - 1) if inside else [leaf]
    return leaves


def compare(
    wanted: Any,
    got: Any,
    tolerance: float | None = None,
    own: Mapping[int, float] = MappingProxyType({}),
    *,
    least: float = 1.0,
) -> Check:
    """Compare two nests of tensors and floats; other leaves must be equal. NaNs equal NaNs.

    own: what some leaves, by their numbers, may differ by, whatever their type. least: what the
    largest number is taken for if it is smaller; rounding of numbers around one is no difference.
    """
    left, right = (list(map(_numbers, leaves_of(nest))) for nest in (wanted, got))
    if len(left) != len(right):
        return Check("different", float("inf"), 0.0, len(left), detail="not as many outputs")
    worst, limit, same, count, detail = 0.0, 0.0, True, 0, ""
    for number, (a, b) in enumerate(zip(left, right, strict=True)):
        if not isinstance(a, torch.Tensor) or not isinstance(b, torch.Tensor):
            if type(a) is not type(b) or (a is not b and a != b):
                what = f"output {number} is {clip(b)}, not {clip(a)}"
                return Check("different", float("inf"), 0.0, count, detail=what)
            continue
        count += 1
        if a.shape != b.shape or a.dtype != b.dtype:
            what = f"output {number} is {b.dtype}{list(b.shape)}, not {a.dtype}{list(a.shape)}"
            return Check("different", float("inf"), 0.0, count, detail=what)
        diff, scale = difference(a, b, least)
        share = DEFAULT_TOLERANCE.get(a.dtype, 0.0) if tolerance is None else tolerance
        allowed = share * scale
        if scale < 1 and a.is_floating_point():
            allowed = max(allowed, min(share, ROUNDING * torch.finfo(a.dtype).eps))
        if number in own:  # the last bit of the largest number is nobody's fault
            allowed = max(own[number], torch.finfo(a.dtype).eps * scale)
        same = same and diff == 0.0
        if diff > worst:
            worst, limit, detail = diff, allowed, f"output {number}"
        if diff > allowed:
            return Check("different", diff, allowed, count, detail=f"output {number}")
    return Check("bit-equal" if same else "within tolerance", worst, limit, count, detail=detail)


def preserved(inputs: Any) -> Any:
    """A copy of a nest of inputs; tensors that share bytes share them in the copy too."""

    def one(leaf: Any) -> Any:
        return leaf.detach().clone() if isinstance(leaf, torch.Tensor) else copy.deepcopy(leaf)

    try:
        return copy.deepcopy(inputs)
    except RuntimeError:  # a tensor with a gradient history: cloned one by one
        return tree_map(one, inputs)


def _numbers(leaf: Any) -> Any:
    """A leaf; a float or an array of NumPy as a tensor, for they may differ by rounding too."""
    is_number = isinstance(leaf, float) or hasattr(leaf, "__array_interface__")
    return torch.as_tensor(leaf) if is_number else leaf


def difference(a: torch.Tensor, b: torch.Tensor, least: float = 1.0) -> tuple[float, float]:
    """The largest difference of two tensors, and the size of what is compared."""
    a, b = a.detach(), b.detach()
    if a.is_complex():
        a, b = (torch.view_as_real(item.resolve_conj()) for item in (a, b))
    if torch.equal(a, b) or a.numel() == 0:
        return 0.0, 1.0
    a, b = a.double(), b.double()
    both = (a.isnan() & b.isnan()) | (a == b)
    diff = (a - b).abs().masked_fill(both, 0.0)
    if diff.isnan().any() or diff.isinf().any():
        return float("inf"), 1.0
    finite = a[a.isfinite()]
    return float(diff.max()), max(least, float(finite.abs().max()) if finite.numel() else 1.0)


def tells(nest: Any) -> bool:
    """Whether any tensor of a nest has unlike numbers, by which rows could be told apart."""
    tensors = [leaf.detach() for leaf in leaves_of(nest) if isinstance(leaf, torch.Tensor)]
    return any(t.numel() > 1 and bool((t != t.flatten()[0]).any()) for t in tensors)

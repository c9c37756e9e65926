"""Flops of ATen calls, as a size expression: what the cost model starts from."""

from __future__ import annotations

from typing import Any

import sympy
from torch.utils.flop_counter import flop_registry

from torchweft.capture.rows.aten_call import AtenCall
from torchweft.capture.rows.axes import SYMBOLIC


def flops_of(aten: AtenCall) -> Any:
    """Multiplications and additions of one operator (products and attention only), or 0."""
    count = flop_registry.get(aten.func.overloadpacket)
    if count is None:
        return 0
    try:
        result = aten.results[0] if len(aten.results) == 1 else tuple(aten.results)
        found = count(*aten.given[0], **aten.given[1], out_val=result)
    except Exception:  # a count is a help, never a reason to fail
        return 0
    return found.node.expr if isinstance(found, SYMBOLIC) else sympy.Integer(found)

"""Row rules for collectives: what one rank's rows are after a talk with the others.

Every rank cuts its batch alike. Collectives work on dim 0 and put ranks outermost:

    all_reduce            rows stay
    all_gather_into_tensor   [n, ...] -> [ranks * n, ...]    outer * ranks
    reduce_scatter_tensor    [ranks * n, ...] -> [n, ...]    outer / ranks
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from torchweft.capture.aten_call import AtenCall, Found, RowRule
from torchweft.capture.axes import Axis, Mixes, exact

NAMESPACE = "_c10d_functional"


def stay(call: AtenCall) -> Found:
    return call.axis_of(call.tensors[0])


def all_gather(call: AtenCall) -> Found:
    axis = call.axis_of(call.tensors[0])
    if axis is None or axis.dim != 0:
        return axis
    return Axis(0, axis.outer * call.args["group_size"], axis.inner)


def reduce_scatter(call: AtenCall) -> Found:
    axis = call.axis_of(call.tensors[0])
    if axis is None or axis.dim != 0:
        return axis
    outer = exact(axis.outer, call.args["group_size"])
    if outer is None:
        raise Mixes("it deals out the rows of the batch to the ranks")
    return Axis(0, outer, axis.inner)


def all_to_all(call: AtenCall) -> Found:
    axis = call.axis_of(call.tensors[0])
    if axis is not None and axis.dim == 0:
        raise Mixes("it deals out the rows of the batch to the ranks")
    return axis


TABLE: Mapping[str, RowRule] = MappingProxyType(
    {
        "all_reduce": RowRule(stay),
        "all_reduce_": RowRule(stay),
        "broadcast": RowRule(stay),
        "broadcast_": RowRule(stay),
        "wait_tensor": RowRule(stay),
        "all_gather_into_tensor": RowRule(all_gather),
        "reduce_scatter_tensor": RowRule(reduce_scatter),
        "all_to_all_single": RowRule(all_to_all),
    }
)

"""Row rules for collectives: what one rank's rows are after a talk with the others.

Every rank cuts its batch alike. Collectives work on dim 0 and put ranks outermost:

    all_reduce            rows stay
    all_gather_into_tensor   [n, ...] -> [ranks * n, ...]    outer * ranks
    reduce_scatter_tensor    [ranks * n, ...] -> [n, ...]    outer / ranks
    all_to_all_single        [ranks * n, ...], equal pieces  rows stay, if outer / ranks is whole

A batch on another dim stays where it is. Coalesced forms do the same, tensor by tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from torchweft.capture.rows.aten_call import AtenCall, Axes, RowRule
from torchweft.capture.rows.axes import Axis, Mixing, exact, same

NAMESPACES = ("_c10d_functional", "_c10d_functional_autograd")
STAY = """
    all_reduce all_reduce_ all_reduce_coalesced all_reduce_coalesced_ broadcast broadcast_
    wait_tensor
"""
DEALS = "it deals out the rows of the batch to the ranks"
Move = Callable[[Axis, AtenCall], Axis]


def stay(axis: Axis, call: AtenCall) -> Axis:
    return axis


def all_gather(axis: Axis, call: AtenCall) -> Axis:
    return Axis(0, axis.outer * call.args["group_size"], axis.inner) if axis.dim == 0 else axis


def reduce_scatter(axis: Axis, call: AtenCall) -> Axis:
    if axis.dim != 0:
        return axis
    outer = exact(axis.outer, call.args["group_size"])
    if outer is None:
        raise Mixing(DEALS)
    return Axis(0, outer, axis.inner)


def all_to_all(axis: Axis, call: AtenCall) -> Axis:
    given = [call.args["input_split_sizes"], call.args["output_split_sizes"]]
    if axis.dim != 0:
        if call.symbols.inside(given):
            raise Mixing("its result depends on the batch size")
        return axis
    sizes: list[Any] = [call.symbols.expr(size) for split in given for size in split]
    num_ranks = len(given[0])
    outer = exact(axis.outer, num_ranks)
    if outer is None:
        raise Mixing(DEALS)
    piece = outer * call.symbols.batch * axis.inner
    if not all(same(size, piece) for size in sizes):
        raise Mixing("the pieces that it deals out cut through the batch")
    return axis


def talk_to_one(axis: Axis, call: AtenCall) -> Axis:
    raise Mixing("it talks to one rank, which may cut its batch otherwise")


def _rule(move: Move, sizes: str = "") -> RowRule:
    """A rule for one tensor or for a list of them, each by itself."""

    def find(call: AtenCall) -> Axes:
        axes = [call.axis_of(tensor) for tensor in call.tensors]
        moved: list[Axis | None] = [axis and move(axis, call) for axis in axes]
        return moved if len(call.results) == len(moved) else moved[0]

    return RowRule(find, frozenset(sizes.split()))


TABLE: Mapping[str, RowRule] = MappingProxyType(
    {
        **dict.fromkeys(STAY.split(), _rule(stay)),
        "all_gather_into_tensor": _rule(all_gather),
        "all_gather_into_tensor_coalesced": _rule(all_gather),
        "reduce_scatter_tensor": _rule(reduce_scatter),
        "reduce_scatter_tensor_coalesced": _rule(reduce_scatter),
        "all_to_all_single": _rule(all_to_all, "input_split_sizes output_split_sizes"),
        **dict.fromkeys(("isend", "irecv", "batch_p2p_ops"), _rule(talk_to_one)),
    }
)

"""Row rules for look-ups and windows: embedding, index, gather, scatter, pooling.

A table without rows may be read at places that a row names; a row's own entries may be read at
places that all rows share, or that the same row names.
"""

from __future__ import annotations

from typing import Any

import torch

from torchweft.capture.rows.aten_call import AtenCall, Axes
from torchweft.capture.rows.axes import FREE, Axis, Mixing, agreed, wrap

MASKS = (torch.bool, torch.uint8)
TABLES = {"boundaries": "self", "sorted_sequence": "self", "test_elements": "elements"}


def embedding(call: AtenCall) -> Axes:
    if call.axis("weight") is not None:
        raise Mixing("its table has the batch in it")
    return call.axis("indices")


def take(call: AtenCall) -> Axes:
    """A table without rows, read at any places: take, bucketize, searchsorted, isin.

    searchsorted may also have a table for each row.
    """
    table = next((name for name in TABLES if name in call.args), "self")
    places = TABLES.get(table, "index")
    axis = call.axis(places)
    if table == "sorted_sequence" and call.rank(table) > 1:
        beside = [call.axis(n) for n in (table, "sorter") if call.args.get(n) is not None]
        if axis is None or axis.dim == call.rank(table) - 1 or set(beside) != {axis}:
            raise Mixing("it looks for rows among rows")
    elif call.axis(table) is not None:
        raise Mixing("it looks for rows among rows")
    return axis


def embedding_bag(call: AtenCall) -> Axes:
    """Bags of equal size, one a row: `offsets` count them. What it tells beside is not to be read,
    which is so for inference only."""
    axis, offsets = call.axis("indices"), call.axis("offsets")
    weights = call.args.get("per_sample_weights")
    if call.axis("weight") is not None:
        raise Mixing("its table has the batch in it")
    if axis is None or call.level == "aten" or call.args["include_last_offset"]:
        raise Mixing("its bags are not those of the rows")
    if axis.outer != 1 or offsets != Axis(0, step=axis.inner):
        raise Mixing("its bags are not those of the rows")
    if weights is not None and call.axis_of(weights) != axis:
        raise Mixing("its weights have their rows elsewhere")
    return [Axis(0), *[FREE for _ in call.results[1:]]]


def index(call: AtenCall) -> Axes:
    """x[i, :, j]: where the rows are after indexing with tensors."""
    if any(item.dtype in MASKS for _, item in given_places(call)):
        raise Mixing("a mask picks entries of the batch")
    return _indexed(call)


def given_places(call: AtenCall) -> list[tuple[int, torch.Tensor]]:
    """The tensors that index another one, with the dims that they index."""
    indices = enumerate(call.args["indices"])
    return [(dim, item) for dim, item in indices if isinstance(item, torch.Tensor)]


def front(dims: list[int]) -> int:
    """Where the dims of the places stand in the result: first, unless neighbours are indexed."""
    return dims[0] if dims == list(range(dims[0], dims[0] + len(dims))) else 0


def _indexed(call: AtenCall) -> Axis | None:
    """Where the rows are in the piece of a tensor that others pick out."""
    own, given = call.axis("self"), given_places(call)
    places, rank = _places(call, given, own)
    dims = [dim for dim, _ in given]
    if own is not None and places is not None and own.dim not in dims:
        raise Mixing("it pairs rows with places that other rows name")
    if places is not None:
        return places.at(front(dims) + places.dim)
    if own is None:
        return None
    position = own.dim - sum(dim < own.dim for dim in dims)
    return own.at(position + rank if position >= front(dims) else position)


def _places(call: AtenCall, given: Any, own: Axis | None) -> tuple[Axis | None, int]:
    """Where the rows of the places are that are read or written, and how many dims these have.

    Each row may name places among its own entries, if the rows of the tensor are counted beside:
    x[arange(len(x)), i].
    """
    rank = max(item.dim() for _, item in given)
    aligned = [(dim, call.axis_of(item), rank - item.dim()) for dim, item in given]
    axes = {dim: axis and axis.at(axis.dim + shift) for dim, axis, shift in aligned}
    for dim, axis in axes.items():
        if own is not None and own.dim == dim:
            if own.outer * own.inner != 1 or axis is None or axis.step != 1:
                raise Mixing("it picks rows of the batch by index")
        elif axis is not None and axis.step:
            raise Mixing("it reads at the number of the row")
    places = agreed([axis and axis.uncounted() for axis in axes.values()])
    shared = [item for _, item in given if call.axis_of(item) is None]
    if places is not None and not all(call.shares(item, places, rank) for item in shared):
        raise Mixing("its places have an entry for each row, but no rows")
    return places, rank


def index_put(call: AtenCall) -> Axes:
    """x[:, i] = v with the same places for all rows, or with each row's own; x[mask] = 0."""
    own, given = call.axis("self"), given_places(call)
    if own is not None and _is_fill(call) and call.axis_of(given[0][1]) in (own, None):
        return own
    if own is None or any(item.dtype in MASKS for _, item in given):
        raise Mixing("rows write to places that other rows may write to")
    wanted = _indexed(call)
    rank = call.rank("self") - len(given) + max(item.dim() for _, item in given)
    if wanted is None or not call.shares(call.args["values"], wanted, rank):
        raise Mixing("what it writes has its rows elsewhere")
    return own


def _is_fill(call: AtenCall) -> bool:
    """Whether one number goes wherever a mask says so."""
    indices, values = call.args["indices"], call.args["values"]
    single = all(size == 1 for size in values.shape) and call.axis_of(values) is None
    return single and len(indices) == 1 and indices[0].dtype == torch.bool


def gather(call: AtenCall) -> Axes:
    """gather, scatter and their kin: each row names places among its own entries."""
    own, places, source = call.axis("self"), call.axis("index"), call.args.get("src")
    dim = wrap(call.args["dim"], call.rank("self"))
    if call.name == "gather" and own is None and places is not None and places.dim == dim:
        return places
    if own is None or own != places or own.dim == dim:
        raise Mixing(f"{call.name} reaches across rows")
    if isinstance(source, torch.Tensor) and source.dim() and call.axis_of(source) != own:
        raise Mixing("what it writes has its rows elsewhere")
    return own


def index_select(call: AtenCall) -> Axes:
    own, places = call.axis("self"), call.axis("index")
    dim = wrap(call.args["dim"], call.rank("self"))
    if own is None:
        return places and places.at(dim)
    if places is not None or own.dim == dim:
        raise Mixing("it picks rows of the batch by index")
    return own


def index_write(call: AtenCall) -> Axes:
    """index_add, index_copy, index_fill: places that all rows share."""
    own = call.axis("self")
    source = call.args.get("source", call.args.get("value"))
    if own is None or call.axis("index") or wrap(call.args["dim"], call.rank("self")) == own.dim:
        raise Mixing("rows write to places that other rows may write to")
    if isinstance(source, torch.Tensor) and source.dim() and call.axis_of(source) != own:
        raise Mixing("what it writes has its rows elsewhere")
    return own


def slice_scatter(call: AtenCall) -> Axes:
    own, dim = call.axis("self"), wrap(call.args["dim"], call.rank("self"))
    if own is None or own.dim == dim:
        raise Mixing("it writes to a piece of the batch")
    source = call.axis("src")
    if source is not None and call.name == "select_scatter":
        source = source.at(source.dim + (dim <= source.dim))
    if source != own:
        raise Mixing("what it writes has its rows elsewhere")
    return own


def windows(num_dims: int) -> Any:
    """A rule for pooling, resizing and padding of the last dims, and for their gradients."""

    def find(call: AtenCall) -> Axes:
        first, *others = call.tensors
        axis = call.axis_of(first)
        if axis is None or axis.dim >= first.dim() - num_dims:
            raise Mixing(f"{call.name} works across the batch")
        if not all(call.shares(other, axis, first.dim()) for other in others):
            raise Mixing("its operands have their rows in different places")
        return axis

    return find


def grid_sample(call: AtenCall) -> Axes:
    axis = call.axis("input")
    if axis is None or axis.dim != 0 or call.axis("grid") != axis:
        raise Mixing("it samples across rows")
    return axis

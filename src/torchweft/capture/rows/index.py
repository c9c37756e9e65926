"""Row rules for look-ups and windows: embedding, index, gather, scatter, convolution, pooling.

A table without rows may be read at places that a row names; a row's own entries may be read at
places that all rows share, or that the same row names.
"""

from __future__ import annotations

from typing import Any

import torch

from torchweft.capture.rows.aten_call import AtenCall, Found
from torchweft.capture.rows.axes import FREE, Axis, Mixes, agreed, wrap


def embedding(call: AtenCall) -> Found:
    if call.axis("weight") is not None:
        raise Mixes("its table has the batch in it")
    return call.axis("indices")


def take(call: AtenCall) -> Found:
    """A table without rows, read at any places: take, bucketize, searchsorted, isin.

    searchsorted may also have a table for each row.
    """
    table = next(
        (n for n in ("boundaries", "sorted_sequence", "test_elements") if n in call.args), None
    )
    places = {"boundaries": "self", "test_elements": "elements"}.get(table or "", "self")
    if table is None:
        table, places = "self", "index"
    axis = call.axis(places)
    if table == "sorted_sequence" and call.rank(table) > 1:
        beside = [call.axis(n) for n in (table, "sorter") if call.args.get(n) is not None]
        if axis is None or axis.dim == call.rank(table) - 1 or set(beside) != {axis}:
            raise Mixes("it looks for rows among rows")
    elif call.axis(table) is not None:
        raise Mixes("it looks for rows among rows")
    return axis


def embedding_bag(call: AtenCall) -> Found:
    """Bags of equal size, one a row: `offsets` count them. What it tells beside is not to be read,
    which is so for inference only."""
    axis, offsets = call.axis("indices"), call.axis("offsets")
    weights = call.args.get("per_sample_weights")
    if call.axis("weight") is not None:
        raise Mixes("its table has the batch in it")
    if axis is None or call.level == "aten" or call.args["include_last_offset"]:
        raise Mixes("its bags are not those of the rows")
    if axis.outer != 1 or offsets != Axis(0, step=axis.inner):
        raise Mixes("its bags are not those of the rows")
    if weights is not None and call.axis_of(weights) != axis:
        raise Mixes("its weights have their rows elsewhere")
    return [Axis(0), *[FREE for _ in call.results[1:]]]


def index(call: AtenCall) -> Found:
    """x[i, :, j]: where the rows are after indexing with tensors."""
    tensor, indices = call.args["self"], list(call.args["indices"])
    own = call.axis_of(tensor)
    given = [(dim, item) for dim, item in enumerate(indices) if isinstance(item, torch.Tensor)]
    if any(item.dtype in (torch.bool, torch.uint8) for _, item in given):
        raise Mixes("a mask picks entries of the batch")
    places, rank = _places(call, given, own)
    paired = own is not None and own.dim in [dim for dim, _ in given]
    if own is not None and places is not None and not paired:
        raise Mixes("it pairs rows with places that other rows name")
    numbers = [dim for dim, _ in given]
    adjacent = numbers == list(range(numbers[0], numbers[0] + len(numbers)))
    front = numbers[0] if adjacent else 0
    if places is not None:
        return places.at(front + places.dim)
    if own is None:
        return None
    kept = [dim for dim in range(tensor.dim()) if dim not in numbers]
    position = kept.index(own.dim)
    return own.at(position + rank if position >= front else position)


def _places(call: AtenCall, given: Any, own: Axis | None) -> tuple[Axis | None, int]:
    """Where the rows of the places are that are read or written, and how many dims these have.

    Each row may name places among its own entries, if the rows of the tensor are counted beside:
    x[arange(len(x)), i].
    """
    rank = max(item.dim() for _, item in given)
    axes = {dim: _broadcast(call.axis_of(item), item.dim(), rank) for dim, item in given}
    for dim, axis in axes.items():
        if own is not None and own.dim == dim:
            if own.outer * own.inner != 1 or axis is None or axis.step != 1:
                raise Mixes("it picks rows of the batch by index")
        elif axis is not None and axis.step:
            raise Mixes("it reads at the number of the row")
    places = agreed([axis and axis.uncounted() for axis in axes.values()])
    shared = [item for _, item in given if call.axis_of(item) is None]
    if places is not None and not all(call.shares(item, places, rank) for item in shared):
        raise Mixes("its places have an entry for each row, but no rows")
    return places, rank


def _broadcast(axis: Axis | None, rank: int, wanted: int) -> Axis | None:
    return axis and axis.at(axis.dim + wanted - rank)


def index_put(call: AtenCall) -> Found:
    """x[:, i] = v with the same places for all rows, or with each row's own; x[mask] = 0."""
    own = call.axis("self")
    given = [
        (dim, item)
        for dim, item in enumerate(call.args["indices"])
        if isinstance(item, torch.Tensor)
    ]
    if own is not None and _is_fill(call) and call.axis_of(given[0][1]) in (own, None):
        return own
    if own is None or any(item.dtype in (torch.bool, torch.uint8) for _, item in given):
        raise Mixes("rows write to places that other rows may write to")
    named, rank = _places(call, given, own)
    numbers = [dim for dim, _ in given]
    if named is not None and own.dim not in numbers:
        raise Mixes("rows write to places that other rows may write to")
    adjacent = numbers == list(range(numbers[0], numbers[0] + len(numbers)))
    kept = [dim for dim in range(call.rank("self")) if dim not in numbers]
    front = numbers[0] if adjacent else 0
    if named is not None:
        wanted = named.at(front + named.dim)
    else:
        position = kept.index(own.dim)
        wanted = own.at(position + rank if position >= front else position)
    if not call.shares(call.args["values"], wanted, len(kept) + rank):
        raise Mixes("what it writes has its rows elsewhere")
    return own


def _is_fill(call: AtenCall) -> bool:
    """Whether one number goes wherever a mask says so."""
    indices, values = call.args["indices"], call.args["values"]
    single = all(size == 1 for size in values.shape) and call.axis_of(values) is None
    return single and len(indices) == 1 and indices[0].dtype == torch.bool


def gather(call: AtenCall) -> Found:
    """gather, take_along_dim: the index has the shape of the result."""
    own, places = call.axis("self"), call.axis("index")
    dim = wrap(call.args["dim"], call.rank("self"))
    if own is None and places is not None and places.dim == dim:
        return places
    if own is None or own != places or own.dim == dim:
        raise Mixes("it gathers across rows")
    return own


def scatter(call: AtenCall) -> Found:
    """scatter and its kin: self, index and src must have their rows in one place."""
    own, places = call.axis("self"), call.axis("index")
    source = call.args.get("src")
    dim = wrap(call.args["dim"], call.rank("self"))
    if own is None or own != places or own.dim == dim:
        raise Mixes("it scatters across rows")
    if isinstance(source, torch.Tensor) and source.dim() and call.axis_of(source) != own:
        raise Mixes("what it scatters has its rows elsewhere")
    return own


def index_select(call: AtenCall) -> Found:
    own, places = call.axis("self"), call.axis("index")
    dim = wrap(call.args["dim"], call.rank("self"))
    if own is None:
        return places and places.at(dim)
    if places is not None or own.dim == dim:
        raise Mixes("it picks rows of the batch by index")
    return own


def index_write(call: AtenCall) -> Found:
    """index_add, index_copy, index_fill: places that all rows share."""
    own = call.axis("self")
    source = call.args.get("source", call.args.get("value"))
    if own is None or call.axis("index") or wrap(call.args["dim"], call.rank("self")) == own.dim:
        raise Mixes("rows write to places that other rows may write to")
    if isinstance(source, torch.Tensor) and source.dim() and call.axis_of(source) != own:
        raise Mixes("what it writes has its rows elsewhere")
    return own


def slice_scatter(call: AtenCall) -> Found:
    own, dim = call.axis("self"), wrap(call.args["dim"], call.rank("self"))
    if own is None or own.dim == dim:
        raise Mixes("it writes to a piece of the batch")
    source = call.axis("src")
    if source is not None and call.name == "select_scatter":
        source = source.at(source.dim + (dim <= source.dim))
    if source != own:
        raise Mixes("what it writes has its rows elsewhere")
    return own


def convolution(call: AtenCall) -> Found:
    axis = call.axis("input")
    if axis is None or call.axis("weight") or call.axis("bias"):
        raise Mixes("its weight has the batch in it")
    if axis.dim != 0:
        raise Mixes("it convolves across the batch")
    return axis


def windows(num_dims: int) -> Any:
    """A rule for pooling, resizing and padding of the last dims, and for their gradients."""

    def find(call: AtenCall) -> Found:
        first, *others = call.tensors
        axis = call.axis_of(first)
        if axis is None or axis.dim >= first.dim() - num_dims:
            raise Mixes(f"{call.name} works across the batch")
        if not all(call.shares(other, axis, first.dim()) for other in others):
            raise Mixes("its operands have their rows in different places")
        return axis

    return find


def grid_sample(call: AtenCall) -> Found:
    axis = call.axis("input")
    if axis is None or axis.dim != 0 or call.axis("grid") != axis:
        raise Mixes("it samples across rows")
    return axis


def fft(call: AtenCall) -> Found:
    axis = call.axis("self")
    if axis is not None and axis.dim in (call.dims("dim", call.rank("self")) or []):
        raise Mixes("it transforms along the batch")
    return axis

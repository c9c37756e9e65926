"""Row rules for operators that move, repeat, pick or make entries: views, cat, look-ups, windows.

Each rule answers: given where the rows were, where are they now? A view keeps rows whole if the
batch stays one factor of one dim: what stands left of it (outer) and right of it (inner) must be
whole numbers on both sides.

    [s0, S, H] (dim 0)  --view-->  [s0*S, H]   outer 1, inner S
    [S, s0, H] (dim 1)  --view-->  [S*s0, H]   outer S, inner 1

A table without rows may be read at places that a row names; a row's own entries may be read at
places that all rows share, or that the same row names.
"""

from __future__ import annotations

from dataclasses import replace
from math import prod
from typing import Any

import torch

from torchweft.capture.rows.axes import (
    FREE,
    ONE,
    AtenCall,
    Axes,
    Axis,
    Mixing,
    agreed,
    exact,
    refuse,
    same,
    wrap,
)

SPLIT_SIZES = ("split_size", "split_sizes", "chunks", "sections", "indices")
MASKS = (torch.bool, torch.uint8)
TABLES = {"boundaries": "self", "sorted_sequence": "self", "test_elements": "elements"}
COUNTS = "what it makes depends on the number of the row"
CUTS = "where it cuts depends on the batch size"
DROPS = "squeeze would drop the batch of a part with a single row; name the dims"
PIECE = "it takes a piece of the batch"
PICKS = "it picks rows of the batch by index"
JOINS = "it joins tensors along the batch"
ELSEWHERE = "what it writes has its rows elsewhere"
MET = "rows write to places that other rows may write to"
AMONG = "it looks for rows among rows"
BAGS = "its bags are not those of the rows"


def view(call: AtenCall) -> Axes:
    """view, reshape: the batch must stay one factor of one dim."""
    axis = call.rows("self", "it gives the shape of a batch to entries that have no rows")
    old, new = call.symbols.shape(call.args["self"]), call.symbols.shape(call.results[0])
    dims = call.symbols.dims(call.results[0])
    refuse(len(dims) != 1, "the view spreads the batch over several dims")
    dim = dims[0]
    left, right = prod(old[: axis.dim], start=ONE), prod(old[axis.dim + 1 :], start=ONE)
    outer = exact(left * axis.outer, prod(new[:dim], start=ONE))
    inner = exact(right * axis.inner, prod(new[dim + 1 :], start=ONE))
    refuse(outer is None or inner is None, "the view mixes the batch with another dim")
    return replace(axis, dim=dim, outer=outer, inner=inner)


def expand(call: AtenCall) -> Axes:
    """expand, repeat: for every row alike. Whole copies stand outside of what was there."""
    axis, result = call.axis("self"), call.results[0]
    if axis is None:
        return call.symbols.uniform(result)
    dim = axis.dim + result.dim() - call.rank("self")
    times = call.symbols.expr(call.args["repeats"][dim]) if "repeats" in call.args else 1
    return replace(axis, dim=dim, outer=axis.outer * times)


def permute(call: AtenCall) -> Axes:
    axis, rank = call.rows("self"), call.rank("self")
    order = [wrap(dim, rank) for dim in call.args["dims"]]
    return axis.at(order.index(axis.dim))


def transpose(call: AtenCall) -> Axes:
    axis = call.rows("self")
    if "dim0" not in call.args:  # t, t_copy
        first, second = (0, 1) if call.rank("self") == 2 else (0, 0)
    else:
        first, second = call.dim("dim0"), call.dim("dim1")
    return axis.at({first: second, second: first}.get(axis.dim, axis.dim))


def unmoved(call: AtenCall) -> Axes:
    """detach, alias: the same entries under another name."""
    return call.axis("self")


def unsqueeze(call: AtenCall) -> Axes:
    axis = call.rows("self")
    dim = wrap(call.args["dim"], call.rank("self") + 1)
    return axis.at(axis.dim + (dim <= axis.dim))


def squeeze(call: AtenCall) -> Axes:
    axis, rank = call.rows("self"), call.rank("self")
    shape = call.symbols.shape(call.args["self"])
    dims = set(call.dims("dim", rank) or range(rank))
    if axis.dim in dims:
        size = call.args["self"].shape[axis.dim]
        refuse(not call.symbols.several(size), DROPS)
        call.lone.extend([] if call.symbols.several(size, of_one=True) else [DROPS])
    return axis.at(axis.dim - sum(dim < axis.dim and shape[dim] == 1 for dim in dims))


def slice_(call: AtenCall) -> Axes:
    """slice, narrow, diff: a piece of a dim; of the batch all, or some whole copies (outer)."""
    axis, dim = call.rows("self", CUTS), call.dim()
    bounds = [call.args.get(name) for name in ("start", "end", "length")]
    if dim != axis.dim:
        refuse(call.symbols.inside(bounds), CUTS)
        return axis
    old = call.symbols.expr(call.args["self"].shape[dim])
    new = call.symbols.expr(call.results[0].shape[dim])
    refuse(call.args.get("step", 1) != 1, PIECE)
    if same(old, new):
        return axis
    start = exact(call.symbols.expr(bounds[0] or 0), call.symbols.batch * axis.inner)
    refuse(start is None or call.symbols.in_expr(start), PIECE)
    return _copies(call, axis, new, PIECE)


def _copies(call: AtenCall, axis: Axis, size: Any, why: str) -> Axis:
    """As many entries of a dim, if they are whole copies of the batch."""
    outer = exact(size, call.symbols.batch * axis.inner) if axis.outer != 1 else None
    refuse(outer is None or call.symbols.in_expr(outer), why)
    return replace(axis, outer=outer)


def select(call: AtenCall) -> Axes:
    """select, unbind: a dim goes, which is not that of the batch."""
    axis, dim = call.rows("self"), call.dim()
    refuse(dim == axis.dim, "it takes single rows out of the batch")
    return axis.at(axis.dim - (dim < axis.dim))


def split(call: AtenCall) -> Axes:
    """split, chunk: along any dim but the batch, or between whole copies of it (outer)."""
    axis = call.axis("self")
    dim = wrap(call.args.get("dim", 0), call.rank("self"))
    if axis is None or dim != axis.dim:
        refuse(call.symbols.inside([call.args.get(name) for name in SPLIT_SIZES]), CUTS)
        return axis
    sizes = [call.symbols.expr(result.shape[dim]) for result in call.results]
    return [_copies(call, axis, size, "it cuts the batch itself") for size in sizes]


def diagonal(call: AtenCall) -> Axes:
    axis, dims = call.rows("self"), {call.dim("dim1"), call.dim("dim2")}
    refuse(axis.dim in dims, "the diagonal runs across rows")
    return axis.at(axis.dim - sum(dim < axis.dim for dim in dims))


def cat(call: AtenCall) -> Axes:
    """cat: along any dim; along the batch, copies of it stand one after another (outer)."""
    axes = [call.axis_of(tensor) for tensor in call.args["tensors"]]
    dim = wrap(call.args.get("dim", 0), call.results[0].dim())
    given = [axis for axis in axes if axis is not None]
    if given and all(axis.dim == dim for axis in given):
        alike = len({(axis.inner, axis.deal) for axis in given}) == 1
        refuse(len(given) < len(axes) or not alike, JOINS)
        return replace(given[0].uncounted(), outer=sum(axis.outer for axis in given))
    axis = agreed(axes)
    refuse(axis is not None and dim == axis.dim, JOINS)
    return axis


def pad(call: AtenCall) -> Axes:
    """constant_pad_nd and the like: `pad` holds pairs, from the last dim on."""
    axis = call.rows("self")
    pair = call.rank("self") - 1 - axis.dim
    widths = call.args.get("pad", call.args.get("padding"))[2 * pair : 2 * pair + 2]
    refuse(any(width != 0 for width in widths), "it pads the batch")
    return axis


def create(call: AtenCall) -> Axes:
    """zeros, full, empty ...: equal entries everywhere, so any place of the rows will do."""
    return call.symbols.uniform(call.results[0])


def position(call: AtenCall) -> Axes:
    """linspace, eye: entries tell where they stand."""
    raise Mixing(COUNTS)


def arange(call: AtenCall) -> Axes:
    """arange: the numbers of the rows, which are counted anew in every part."""
    axis, step = call.symbols.uniform(call.results[0]), call.symbols.expr(call.args.get("step", 1))
    if axis is None or axis.inner != 1 or call.args.get("start", 0) != 0 or not step.is_Integer:
        raise Mixing(COUNTS)
    return replace(axis, step=step)


def reinterpret(call: AtenCall) -> Axes:
    """view_as_real, view_as_complex, view as another dtype: only the last dim changes."""
    axis = call.axis("self")
    old, new = call.symbols.shape(call.args["self"]), call.symbols.shape(call.results[0])
    if axis is not None and not (axis.dim < len(new) and same(old[axis.dim], new[axis.dim])):
        raise Mixing("it takes rows apart")
    return axis


def strided(call: AtenCall) -> Axes:
    """as_strided: where each row stays within its own bytes, and part of a batch is laid out alike.

    A place in the storage (`storage_offset`) is another one in a part.
    """
    axis, symbols = call.axis("self"), call.symbols
    tensor, result = call.args["self"], call.results[0]
    dims = symbols.dims(result)
    if axis is None or len(dims) != 1 or call.args.get("storage_offset") is not None:
        raise Mixing("as_strided may reach any row")
    steps = [symbols.expr(tensor.stride(axis.dim)), symbols.expr(result.stride(dims[0]))]
    reach, own = _reach(call, result, dims[0]), _reach(call, tensor, axis.dim)
    shape = symbols.shape(tensor)
    dense = prod((size for dim, size in enumerate(shape) if dim != axis.dim), start=ONE)
    known = all(item.is_Integer for item in (*steps, reach, own, dense))
    if not known or steps[0] != steps[1] or not reach <= own < steps[0] or dense != own + 1:
        raise Mixing("as_strided may reach any row")
    return axis.at(dims[0])


def _reach(call: AtenCall, tensor: Any, but: int) -> Any:
    """How many entries behind the first one the last one is, for a single row."""
    shape, strides = call.symbols.shape(tensor), map(call.symbols.expr, tensor.stride())
    pairs = zip(shape, strides, strict=True)
    return sum((s - 1) * step for dim, (s, step) in enumerate(pairs) if dim != but)


# Look-ups: entries at places that are given.


def embedding(call: AtenCall) -> Axes:
    refuse(call.axis("weight"), "its table has the batch in it")
    return call.axis("indices")


def take(call: AtenCall) -> Axes:
    """A table without rows, read at any places: take, bucketize, searchsorted, isin.

    searchsorted may also have a table for each row.
    """
    table = next((name for name in TABLES if name in call.args), "self")
    axis = call.axis(TABLES.get(table, "index"))
    if table == "sorted_sequence" and call.rank(table) > 1:
        beside = [call.axis(n) for n in (table, "sorter") if call.args.get(n) is not None]
        if axis is None or axis.dim == call.rank(table) - 1 or set(beside) != {axis}:
            raise Mixing(AMONG)
    else:
        refuse(call.axis(table), AMONG)
    return axis


def embedding_bag(call: AtenCall) -> Axes:
    """Bags of equal size, one a row: `offsets` count them. What it tells beside is not to be read,
    which is so for inference only."""
    refuse(call.axis("weight"), "its table has the batch in it")
    axis, weights = call.rows("indices", BAGS), call.args.get("per_sample_weights")
    refuse(call.level == "aten" or call.args["include_last_offset"], BAGS)
    refuse(axis.outer != 1 or call.axis("offsets") != Axis(0, step=axis.inner), BAGS)
    if weights is not None and call.axis_of(weights) != axis:
        raise Mixing("its weights have their rows elsewhere")
    return [Axis(0), *[FREE for _ in call.results[1:]]]


def index(call: AtenCall) -> Axes:
    """x[i, :, j]: where the rows are after indexing with tensors."""
    masked = any(item.dtype in MASKS for _, item in given_places(call))
    refuse(masked, "a mask picks entries of the batch")
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
    axes = call.aligned([item for _, item in given], rank)
    for (dim, _), axis in zip(given, axes, strict=True):
        if own is not None and own.dim == dim:
            refuse(own.outer * own.inner != 1 or axis is None or axis.step != 1, PICKS)
        else:
            refuse(axis is not None and axis.step, "it reads at the number of the row")
    places = agreed([axis and axis.uncounted() for axis in axes])
    shared = [item for _, item in given if call.axis_of(item) is None]
    if places is not None and not all(call.shares(item, places, rank) for item in shared):
        raise Mixing("its places have an entry for each row, but no rows")
    return places, rank


def index_put(call: AtenCall) -> Axes:
    """x[:, i] = v with the same places for all rows, or with each row's own; x[mask] = 0."""
    own, given = call.rows("self", MET), given_places(call)
    indices, values = call.args["indices"], call.args["values"]
    single = all(size == 1 for size in values.shape) and call.axis_of(values) is None
    fills = single and len(indices) == 1 and indices[0].dtype == torch.bool
    if fills and call.axis_of(given[0][1]) in (own, None):  # one number, wherever a mask says so
        return own
    refuse(any(item.dtype in MASKS for _, item in given), MET)
    wanted = _indexed(call)
    rank = call.rank("self") - len(given) + max(item.dim() for _, item in given)
    refuse(wanted is None or not call.shares(values, wanted, rank), ELSEWHERE)
    return own


def gather(call: AtenCall) -> Axes:
    """gather, scatter and their kin: each row names places among its own entries."""
    own, places, dim = call.axis("self"), call.axis("index"), call.dim()
    if call.name == "gather" and own is None and places is not None and places.dim == dim:
        return places
    if own is None or own != places or own.dim == dim:
        raise Mixing(f"{call.name} reaches across rows")
    return _written(call, own, call.args.get("src"))


def _written(call: AtenCall, own: Axis, source: Any) -> Axis:
    """The rows that are written, if what is written has the same, or is one number."""
    several = isinstance(source, torch.Tensor) and source.dim()
    refuse(several and call.axis_of(source) != own, ELSEWHERE)
    return own


def index_write(call: AtenCall) -> Axes:
    """index_add, index_copy, index_fill: places that all rows share."""
    own = call.rows("self", MET)
    refuse(call.axis("index") or call.dim() == own.dim, MET)
    return _written(call, own, call.args.get("source", call.args.get("value")))


def slice_scatter(call: AtenCall) -> Axes:
    own, dim = call.rows("self", "it writes to a piece of the batch"), call.dim()
    refuse(own.dim == dim, "it writes to a piece of the batch")
    source = call.axis("src")
    if source is not None and call.name == "select_scatter":
        source = source.at(source.dim + (dim <= source.dim))
    refuse(source != own, ELSEWHERE)
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
    axis = call.rows("input", "it samples across rows")
    refuse(axis.dim != 0 or call.axis("grid") != axis, "it samples across rows")
    return axis

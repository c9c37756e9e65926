"""Row rules for operators that move, repeat or make entries: views, cat, repeat, creation.

Each rule answers: given where the rows were, where are they now? A view keeps rows whole if the
batch stays one factor of one dim: what stands left of it (outer) and right of it (inner) must be
whole numbers on both sides.

    [s0, S, H] (dim 0)  --view-->  [s0*S, H]   outer 1, inner S
    [S, s0, H] (dim 1)  --view-->  [S*s0, H]   outer S, inner 1
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torchweft.capture.rows.aten_call import AtenCall, Axes
from torchweft.capture.rows.axes import Axis, Mixing, agreed, exact, product, same, wrap

SPLIT_SIZES = ("split_size", "split_sizes", "chunks", "sections", "indices")


def view(call: AtenCall) -> Axes:
    """view, reshape: the batch must stay one factor of one dim."""
    axis = call.axis("self")
    result = call.results[0]
    if axis is None:
        raise Mixing("it gives the shape of a batch to entries that have no rows")
    old, new = call.symbols.shape(call.args["self"]), call.symbols.shape(result)
    dims = call.symbols.dims(result)
    if len(dims) != 1:
        raise Mixing("the view spreads the batch over several dims")
    dim = dims[0]
    outer = exact(product(old[: axis.dim]) * axis.outer, product(new[:dim]))
    inner = exact(product(old[axis.dim + 1 :]) * axis.inner, product(new[dim + 1 :]))
    if outer is None or inner is None:
        raise Mixing("the view mixes the batch with another dim")
    return Axis(dim, outer, inner)


def expand(call: AtenCall) -> Axes:
    """expand, repeat: for every row alike. Whole copies stand outside of what was there."""
    axis, result = call.axis("self"), call.results[0]
    if axis is None:
        return call.symbols.uniform(result)
    dim = axis.dim + result.dim() - call.rank("self")
    times = call.symbols.expr(call.args["repeats"][dim]) if "repeats" in call.args else 1
    return Axis(dim, axis.outer * times, axis.inner)


def permute(call: AtenCall) -> Axes:
    axis, rank = call.rows("self"), call.rank("self")
    order = [wrap(dim, rank) for dim in call.args["dims"]]
    return axis.at(order.index(axis.dim))


def transpose(call: AtenCall) -> Axes:
    axis, rank = call.rows("self"), call.rank("self")
    if "dim0" not in call.args:  # t, t_copy
        first, second = (0, 1) if rank == 2 else (0, 0)
    else:
        first, second = wrap(call.args["dim0"], rank), wrap(call.args["dim1"], rank)
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
    if axis.dim in dims and not call.symbols.several(call.args["self"].shape[axis.dim]):
        raise Mixing("squeeze would drop the batch of a part with a single row; name the dims")
    dropped = [dim for dim in dims if dim < axis.dim and shape[dim] == 1]
    return axis.at(axis.dim - len(dropped))


def slice_(call: AtenCall) -> Axes:
    """slice, narrow, diff: a piece of a dim; of the batch only the whole of it."""
    axis = call.axis("self")
    dim = wrap(call.args["dim"], call.rank("self"))
    bounds = [call.args.get(name) for name in ("start", "end", "length")]
    if axis is None or (dim != axis.dim and call.symbols.inside(bounds)):
        raise Mixing("where it cuts depends on the batch size")
    if dim == axis.dim:
        return _slice_rows(call, axis, bounds)
    return axis


def _slice_rows(call: AtenCall, axis: Axis, bounds: list[Any]) -> Axis:
    """A slice along the dim of the batch: all of it, or some whole copies of it (outer)."""
    old = call.symbols.expr(call.args["self"].shape[axis.dim])
    new = call.symbols.expr(call.results[0].shape[axis.dim])
    if call.args.get("step", 1) != 1:
        raise Mixing("it takes a piece of the batch")
    if same(old, new):
        return axis
    rows = call.symbols.batch * axis.inner
    start, outer = exact(call.symbols.expr(bounds[0] or 0), rows), exact(new, rows)
    if axis.outer == 1 or None in (start, outer) or call.symbols.in_expr(start + outer):
        raise Mixing("it takes a piece of the batch")
    return Axis(axis.dim, outer, axis.inner)


def select(call: AtenCall) -> Axes:
    """select, unbind: a dim goes, which is not that of the batch."""
    axis = call.rows("self")
    dim = wrap(call.args["dim"], call.rank("self"))
    if dim == axis.dim:
        raise Mixing("it takes single rows out of the batch")
    return axis.at(axis.dim - (dim < axis.dim))


def split(call: AtenCall) -> Axes:
    """split, chunk: along any dim but the batch, or between whole copies of it (outer)."""
    axis = call.axis("self")
    dim = wrap(call.args.get("dim", 0), call.rank("self"))
    if axis is None or dim != axis.dim:
        if call.symbols.inside([call.args.get(name) for name in SPLIT_SIZES]):
            raise Mixing("where it cuts depends on the batch size")
        return axis
    axes: list[Axis | None] = []
    for result in call.results:
        size = call.symbols.expr(result.shape[dim])
        outer = exact(size, call.symbols.batch * axis.inner) if axis.outer != 1 else None
        if outer is None or call.symbols.in_expr(outer):
            raise Mixing("it cuts the batch itself")
        axes.append(Axis(dim, outer, axis.inner))
    return axes


def diagonal(call: AtenCall) -> Axes:
    axis, rank = call.rows("self"), call.rank("self")
    dims = {wrap(call.args["dim1"], rank), wrap(call.args["dim2"], rank)}
    if axis.dim in dims:
        raise Mixing("the diagonal runs across rows")
    return axis.at(axis.dim - sum(dim < axis.dim for dim in dims))


def cat(call: AtenCall) -> Axes:
    """cat: along any dim; along the batch, copies of it stand one after another (outer)."""
    axes = [call.axis_of(tensor) for tensor in call.args["tensors"]]
    dim = wrap(call.args.get("dim", 0), call.results[0].dim())
    given = [axis for axis in axes if axis is not None]
    if given and all(axis.dim == dim for axis in given):
        if len(given) < len(axes) or len({axis.inner for axis in given}) > 1:
            raise Mixing("it joins tensors along the batch")
        return Axis(dim, sum(axis.outer for axis in given), given[0].inner)
    axis = agreed(axes)
    if axis is not None and dim == axis.dim:
        raise Mixing("it joins tensors along the batch")
    return axis


def pad(call: AtenCall) -> Axes:
    """constant_pad_nd and the like: `pad` holds pairs, from the last dim on."""
    axis = call.rows("self")
    pair = call.rank("self") - 1 - axis.dim
    widths = call.args.get("pad", call.args.get("padding"))[2 * pair : 2 * pair + 2]
    if any(width != 0 for width in widths):
        raise Mixing("it pads the batch")
    return axis


def create(call: AtenCall) -> Axes:
    """zeros, full, empty ...: equal entries everywhere, so any place of the rows will do."""
    return call.symbols.uniform(call.results[0])


COUNTS = "what it makes depends on the number of the row"


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
    dense = product(size for dim, size in enumerate(symbols.shape(tensor)) if dim != axis.dim)
    known = all(item.is_Integer for item in (*steps, reach, own, dense))
    if not known or steps[0] != steps[1] or not reach <= own < steps[0] or dense != own + 1:
        raise Mixing("as_strided may reach any row")
    return axis.at(dims[0])


def _reach(call: AtenCall, tensor: Any, but: int) -> Any:
    """How many entries behind the first one the last one is, for a single row."""
    shape, strides = call.symbols.shape(tensor), map(call.symbols.expr, tensor.stride())
    pairs = zip(shape, strides, strict=True)
    return sum((s - 1) * step for dim, (s, step) in enumerate(pairs) if dim != but)

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

from torchweft.capture.rows.aten_call import AtenCall, Found
from torchweft.capture.rows.axes import Axis, Mixes, agreed, exact, product, same, wrap

SPLIT_SIZES = ("split_size", "split_sizes", "chunks", "sections", "indices")


def view(call: AtenCall) -> Found:
    """view, reshape: the batch must stay one factor of one dim."""
    axis = call.axis("self")
    result = call.results[0]
    if axis is None:
        raise Mixes("it gives the shape of a batch to entries that have no rows")
    old, new = call.symbols.shape(call.args["self"]), call.symbols.shape(result)
    dims = call.symbols.dims(result)
    if len(dims) != 1:
        raise Mixes("the view spreads the batch over several dims")
    dim = dims[0]
    outer = exact(product(old[: axis.dim]) * axis.outer, product(new[:dim]))
    inner = exact(product(old[axis.dim + 1 :]) * axis.inner, product(new[dim + 1 :]))
    if outer is None or inner is None:
        raise Mixes("the view mixes the batch with another dim")
    return Axis(dim, outer, inner)


def expand(call: AtenCall) -> Found:
    """expand: dims of size one are repeated, for every row alike."""
    axis, result = call.axis("self"), call.results[0]
    if axis is None:
        return call.symbols.uniform(result)
    return axis.at(axis.dim + result.dim() - call.rank("self"))


def repeat(call: AtenCall) -> Found:
    """repeat: whole copies stand one after another, outside of what was there."""
    axis, result = call.axis("self"), call.results[0]
    if axis is None:
        return call.symbols.uniform(result)
    dim = axis.dim + result.dim() - call.rank("self")
    times = call.symbols.expr(call.args["repeats"][dim])
    return Axis(dim, axis.outer * times, axis.inner)


def permute(call: AtenCall) -> Found:
    axis, rank = call.rows("self"), call.rank("self")
    order = [wrap(dim, rank) for dim in call.args["dims"]]
    return axis.at(order.index(axis.dim))


def transpose(call: AtenCall) -> Found:
    axis, rank = call.rows("self"), call.rank("self")
    if "dim0" not in call.args:  # t, t_copy
        first, second = (0, 1) if rank == 2 else (0, 0)
    else:
        first, second = wrap(call.args["dim0"], rank), wrap(call.args["dim1"], rank)
    return axis.at({first: second, second: first}.get(axis.dim, axis.dim))


def unmoved(call: AtenCall) -> Found:
    """detach, alias: the same entries under another name."""
    return call.axis("self")


def unsqueeze(call: AtenCall) -> Found:
    axis = call.rows("self")
    dim = wrap(call.args["dim"], call.rank("self") + 1)
    return axis.at(axis.dim + (dim <= axis.dim))


def squeeze(call: AtenCall) -> Found:
    axis, rank = call.rows("self"), call.rank("self")
    shape = call.symbols.shape(call.args["self"])
    dims = set(call.dims("dim", rank) or range(rank))
    if axis.dim in dims and not call.symbols.several(call.args["self"].shape[axis.dim]):
        raise Mixes("squeeze would drop the batch of a part with a single row; name the dims")
    dropped = [dim for dim in dims if dim < axis.dim and shape[dim] == 1]
    return axis.at(axis.dim - len(dropped))


def slice_(call: AtenCall) -> Found:
    """slice, narrow, diff: a piece of a dim; of the batch only the whole of it."""
    axis = call.axis("self")
    dim = wrap(call.args["dim"], call.rank("self"))
    bounds = [call.args.get(name) for name in ("start", "end", "length")]
    if axis is None or (dim != axis.dim and call.symbols.inside(bounds)):
        raise Mixes("where it cuts depends on the batch size")
    if dim == axis.dim:
        return _slice_rows(call, axis, bounds)
    return axis


def _slice_rows(call: AtenCall, axis: Axis, bounds: list[Any]) -> Axis:
    """A slice along the dim of the batch: all of it, or some whole copies of it (outer)."""
    old = call.symbols.expr(call.args["self"].shape[axis.dim])
    new = call.symbols.expr(call.results[0].shape[axis.dim])
    if call.args.get("step", 1) != 1:
        raise Mixes("it takes a piece of the batch")
    if same(old, new):
        return axis
    rows = call.symbols.batch * axis.inner
    start, outer = exact(call.symbols.expr(bounds[0] or 0), rows), exact(new, rows)
    if axis.outer == 1 or None in (start, outer) or call.symbols.in_expr(start + outer):
        raise Mixes("it takes a piece of the batch")
    return Axis(axis.dim, outer, axis.inner)


def select(call: AtenCall) -> Found:
    """select, unbind: a dim goes, which is not that of the batch."""
    axis = call.rows("self")
    dim = wrap(call.args["dim"], call.rank("self"))
    if dim == axis.dim:
        raise Mixes("it takes single rows out of the batch")
    return axis.at(axis.dim - (dim < axis.dim))


def split(call: AtenCall) -> Found:
    """split, chunk: along any dim but the batch, or between whole copies of it (outer)."""
    axis = call.axis("self")
    dim = wrap(call.args.get("dim", 0), call.rank("self"))
    if axis is None or dim != axis.dim:
        if call.symbols.inside([call.args.get(name) for name in SPLIT_SIZES]):
            raise Mixes("where it cuts depends on the batch size")
        return axis
    found: list[Axis | None] = []
    for result in call.results:
        size = call.symbols.expr(result.shape[dim])
        outer = exact(size, call.symbols.batch * axis.inner) if axis.outer != 1 else None
        if outer is None or call.symbols.in_expr(outer):
            raise Mixes("it cuts the batch itself")
        found.append(Axis(dim, outer, axis.inner))
    return found


def diagonal(call: AtenCall) -> Found:
    axis, rank = call.rows("self"), call.rank("self")
    dims = {wrap(call.args["dim1"], rank), wrap(call.args["dim2"], rank)}
    if axis.dim in dims:
        raise Mixes("the diagonal runs across rows")
    return axis.at(axis.dim - sum(dim < axis.dim for dim in dims))


def diag_embed(call: AtenCall) -> Found:
    axis, rank = call.rows("self"), call.rank("self") + 1
    if axis.dim == rank - 2 or sorted(wrap(call.args[n], rank) for n in ("dim1", "dim2")) != [
        rank - 2,
        rank - 1,
    ]:
        raise Mixes("the diagonal runs across rows")
    return axis


def unfold(call: AtenCall) -> Found:
    axis = call.axis("self")
    if axis is not None and wrap(call.args["dimension"], call.rank("self")) == axis.dim:
        raise Mixes("its windows reach across rows")
    return axis


def cat(call: AtenCall) -> Found:
    """cat: along any dim; along the batch, copies of it stand one after another (outer)."""
    axes = [call.axis_of(tensor) for tensor in call.args["tensors"]]
    dim = wrap(call.args.get("dim", 0), call.results[0].dim())
    given = [axis for axis in axes if axis is not None]
    if given and all(axis.dim == dim for axis in given):
        if len(given) < len(axes) or len({axis.inner for axis in given}) > 1:
            raise Mixes("it joins tensors along the batch")
        return Axis(dim, sum(axis.outer for axis in given), given[0].inner)
    axis = agreed(axes)
    if axis is not None and dim == axis.dim:
        raise Mixes("it joins tensors along the batch")
    return axis


def stack(call: AtenCall) -> Found:
    axis = agreed([call.axis_of(tensor) for tensor in call.args["tensors"]])
    if axis is None:
        return None
    dim = wrap(call.args["dim"], call.results[0].dim())
    return axis.at(axis.dim + (dim <= axis.dim))


def pad(call: AtenCall) -> Found:
    """constant_pad_nd and the like: `pad` holds pairs, from the last dim on."""
    axis = call.rows("self")
    pair = call.rank("self") - 1 - axis.dim
    widths = call.args.get("pad", call.args.get("padding"))[2 * pair : 2 * pair + 2]
    if any(width != 0 for width in widths):
        raise Mixes("it pads the batch")
    return axis


def create(call: AtenCall) -> Found:
    """zeros, full, empty ...: equal entries everywhere, so any place of the rows will do."""
    return call.symbols.uniform(call.results[0])


COUNTS = "what it makes depends on the number of the row"


def position(call: AtenCall) -> Found:
    """linspace, eye: entries tell where they stand."""
    raise Mixes(COUNTS)


def arange(call: AtenCall) -> Found:
    """arange: the numbers of the rows, which are counted anew in every part."""
    axis, step = call.symbols.uniform(call.results[0]), call.symbols.expr(call.args.get("step", 1))
    if axis is None or axis.inner != 1 or call.args.get("start", 0) != 0 or not step.is_Integer:
        raise Mixes(COUNTS)
    return replace(axis, step=step)


def like(call: AtenCall) -> Found:
    """zeros_like and the like: as the model tensor."""
    return call.axis("self")


def complex_view(call: AtenCall) -> Found:
    axis = call.axis("self")
    if axis is not None and axis.dim >= min(call.results[0].dim(), call.rank("self")):
        raise Mixes("it takes rows apart")
    return axis


def dtype_view(call: AtenCall) -> Found:
    axis = call.axis("self")
    old, new = call.symbols.shape(call.args["self"]), call.symbols.shape(call.results[0])
    if axis is not None and not (len(old) == len(new) and same(old[axis.dim], new[axis.dim])):
        raise Mixes("it takes rows apart")
    return axis


def strided(call: AtenCall) -> Found:
    """as_strided: where each row stays within its own bytes, and part of a batch is laid out alike.

    A place in the storage (`storage_offset`) is another one in a part.
    """
    axis, symbols = call.axis("self"), call.symbols
    tensor, result = call.args["self"], call.results[0]
    dims = symbols.dims(result)
    if axis is None or len(dims) != 1 or call.args.get("storage_offset") is not None:
        raise Mixes("as_strided may reach any row")
    steps = [symbols.expr(tensor.stride(axis.dim)), symbols.expr(result.stride(dims[0]))]
    reach, own = _reach(call, result, dims[0]), _reach(call, tensor, axis.dim)
    dense = product(size for dim, size in enumerate(symbols.shape(tensor)) if dim != axis.dim)
    known = all(item.is_Integer for item in (*steps, reach, own, dense))
    if not known or steps[0] != steps[1] or not reach <= own < steps[0] or dense != own + 1:
        raise Mixes("as_strided may reach any row")
    return axis.at(dims[0])


def _reach(call: AtenCall, tensor: Any, but: int) -> Any:
    """How many entries behind the first one the last one is, for a single row."""
    shape, strides = call.symbols.shape(tensor), map(call.symbols.expr, tensor.stride())
    pairs = zip(shape, strides, strict=True)
    return sum((s - 1) * step for dim, (s, step) in enumerate(pairs) if dim != but)

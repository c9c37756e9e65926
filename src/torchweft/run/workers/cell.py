"""A `Cell`: what one recorded call computes, as data, for any number of rows at once.

    function, specs of its arguments --trace--> Cell --build--> callable(weights, *rows) -> rows

A cell is traced once, under `vmap` and on fake tensors, so it holds ATen calls on values whose
first dim is the batch: running it over N rows equals running the function N times. Its calls are
plain data (names of operators, numbers, places of values): another process can build them
without the user's code, and no file or message carries code.

    [["aten.mm.default", [{"v": 0}, {"v": 2}], {}, 3], ...]       call, arguments, options, place

Every cell is checked when it is made, from a trace or from a message: its operators only make
tensors from tensors (`operator_of`), places are there before they are read, nothing given is
changed.
"""

from __future__ import annotations

import keyword
import operator
import os
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, cached_property
from math import prod
from typing import Any

import torch

from torchweft.errors import CaptureError, WeftError, clip, unknown
from torchweft.plan.graph import check_name
from torchweft.private.core import OpOverload, all_op_names
from torchweft.source import Source

Call = tuple[str, list[Any], dict[str, Any], int]
KINDS = ("calls", "pack", "unpack")
MAX_DIMS, MAX_DEPTH = 64, 8
ROOM = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
"""Bytes of this box: nothing that says to be larger is made."""
_CONSTANTS: dict[str, Any] = {
    str(item): item
    for item in vars(torch).values()
    if isinstance(item, (torch.dtype, torch.layout, torch.memory_format))
}
_DTYPES = {name: item for name, item in _CONSTANTS.items() if isinstance(item, torch.dtype)}
NAME = re.compile(r"aten\.([A-Za-z0-9_]{1,100})\.([A-Za-z0-9_]{1,100})")
TYPE = re.compile(r"(Optional\[|List\[)*(Tensor|int|float|bool|number|Device|Generator)\]*")
WORDS = {
    "UPLO", "approximate", "driver", "equation", "indexing", "interpolation", "mode", "norm", "ord",
    "p", "pad_mode", "padding", "padding_side", "reduce", "rounding_mode", "side",
}  # fmt: skip
"""Arguments that are text: each names a way to compute, none a file."""
STATE = {
    "requires_grad_", "resize", "resize_", "resize_as_", "resize_as_sparse_", "set", "set_",
    "sparse_resize_", "sparse_resize_and_clear_", "to_mkldnn",
}  # fmt: skip
INNER = {
    *("_adaptive_avg_pool2d", "_adaptive_avg_pool3d", "_addmm_activation", "_cdist_forward"),
    *("_conj", "_conj_physical", "_ctc_loss", "_embedding_bag", "_embedding_bag_forward_only"),
    *("_euclidean_dist", "_fft_c2c", "_fft_c2r", "_fft_r2c", "_flash_attention_forward"),
    *("_linalg_check_errors", "_linalg_det", "_linalg_eigh", "_linalg_slogdet"),
    *("_linalg_solve_ex", "_linalg_svd", "_log_softmax", "_native_batch_norm_legit"),
    *("_native_batch_norm_legit_no_training", "_neg_view", "_pdist_forward", "_prelu_kernel"),
    *("_reshape_alias", "_safe_softmax", "_scaled_dot_product_cudnn_attention"),
    *("_scaled_dot_product_efficient_attention", "_scaled_dot_product_flash_attention"),
    *("_scaled_dot_product_flash_attention_for_cpu", "_scaled_mm", "_softmax", "_to_copy"),
    *("_thnn_fused_gru_cell", "_thnn_fused_lstm_cell", "_trilinear", "_unsafe_index"),
    *("_unsafe_view", "_upsample_bicubic2d_aa", "_upsample_bilinear2d_aa"),
    *("_upsample_nearest_exact1d", "_upsample_nearest_exact2d", "_upsample_nearest_exact3d"),
    "_weight_norm_interface",
}


@dataclass(frozen=True, eq=False)
class Spec:
    """The shape and dtype of one row; there is one object for each, so identity is equality."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @cached_property
    def num_bytes(self) -> int:
        """Bytes of one row."""
        return prod(self.shape) * self.dtype.itemsize

    def __str__(self) -> str:
        return f"{str(self.dtype).removeprefix('torch.')}[{','.join(map(str, self.shape))}]"


_SPECS: dict[tuple[tuple[int, ...], torch.dtype], Spec] = {}


def spec_of(shape: Sequence[int], dtype: torch.dtype) -> Spec:
    """The one spec of this shape and dtype."""
    key = tuple(shape), dtype
    spec = _SPECS.get(key)
    return spec if spec is not None else _SPECS.setdefault(key, Spec(*key))


def spec_named(shape: Sequence[int], dtype: str) -> Spec:
    """The spec of a shape and the name of a dtype. Raises `CaptureError` if there is none."""
    if not isinstance(dtype, str) or dtype not in _DTYPES:
        raise CaptureError(f"spec: {unknown('dtype', dtype, _DTYPES)}")
    if not isinstance(shape, (list, tuple)) or len(shape) > MAX_DIMS:
        raise CaptureError(f"spec: a shape must be a list of sizes; got {clip(shape)}.")
    if not all(type(size) is int and 0 <= size <= ROOM for size in shape):
        raise CaptureError(f"spec: sizes must be whole numbers up to {ROOM}; got {clip(shape)}.")
    if prod(shape) * _DTYPES[dtype].itemsize > ROOM:
        raise CaptureError(f"spec: {clip(shape)} needs more than the {ROOM} bytes of this box.")
    return spec_of(shape, _DTYPES[dtype])


@contextmanager
def reading(what: str) -> Iterator[None]:
    """Whatever goes wrong in here is the fault of the data that is read: `CaptureError`."""
    try:
        yield
    except WeftError:
        raise
    except (
        ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError
    ) as cause:  # fmt: skip
        raise CaptureError(f"{what}: its data cannot be read: {clip(repr(cause))}.") from None


def count_of(item: Any, most: int) -> int:
    """A count of plain data. Raises `CaptureError` if it is none, or larger than it can be."""
    if type(item) is not int or not 0 <= item <= most:
        raise CaptureError(f"count: it must be a whole number from 0 to {most}; got {clip(item)}.")
    return item


@dataclass(frozen=True, eq=False)
class Cell:
    """Calls on places: first the weights, then the arguments, then what calls make.

    kind: "calls"; or "pack", "unpack": rows of one spec as one row of another, and back.
    """

    name: str
    reads: tuple[Spec, ...]
    makes: tuple[Spec, ...]
    weights: tuple[str, ...] = ()
    calls: tuple[Call, ...] = ()
    outputs: tuple[int, ...] = ()
    kind: str = "calls"
    num_prepared: int = 0

    def __post_init__(self) -> None:
        _check(self)

    @cached_property
    def functions(self) -> tuple[Callable[..., Any], Callable[..., Any]]:
        """(prepare, run): what depends on weights only, and the rest over rows."""
        return build(self)

    @cached_property
    def fresh(self) -> tuple[bool, ...]:
        """Of each result, whether it has memory of its own and is not a view of something else."""
        maker = {place: name for name, _, _, place in self.calls}
        return tuple([_makes_new(maker.get(place, "operator.getitem")) for place in self.outputs])

    def rows_made(self, num_ops: int) -> list[tuple[Spec, int]]:
        """The rows that so many ops make; those of an unpack are all of one spec."""
        if self.kind == "unpack":
            return [(self.makes[0], num_ops * len(self.makes))]
        return [(spec, num_ops) for spec in self.makes]

    def to_data(self) -> dict[str, Any]:
        """The cell as plain data, ready for JSON."""
        specs = [[[list(s.shape), str(s.dtype)] for s in side] for side in (self.reads, self.makes)]
        return {
            "name": self.name, "reads": specs[0], "makes": specs[1], "weights": self.weights,
            "calls": self.calls, "outputs": self.outputs, "kind": self.kind,
            "num_prepared": self.num_prepared,
        }  # fmt: skip

    @staticmethod
    def from_data(data: Any) -> Cell:
        """The cell of plain data. Raises `CaptureError` for data that is none."""
        with reading("cell"):
            reads, makes = (
                tuple(spec_named(shape, dtype) for shape, dtype in data[side])
                for side in ("reads", "makes")
            )
            calls = tuple((name, args, options, at) for name, args, options, at in data["calls"])
            return Cell(
                data["name"], reads, makes, tuple(data["weights"]), calls,
                tuple(data["outputs"]), data["kind"], data["num_prepared"],
            )  # fmt: skip


def _check(cell: Cell) -> None:
    """Raise `CaptureError` for a cell that cannot be, or that calls what it may not."""
    check_name(cell.name, "cell", CaptureError)
    where, first = f"cell: {cell.name}", len(cell.weights) + len(cell.reads)
    if cell.kind not in KINDS:
        raise CaptureError(f"{where}: {unknown('kind', cell.kind, KINDS)}")
    if not all(isinstance(weight, str) for weight in cell.weights):
        raise CaptureError(f"{where} has a weight without a name.")
    count_of(cell.num_prepared, len(cell.calls))
    if cell.kind != "calls":
        return _check_pack(cell)
    given = set(range(first))  # what others have, and views of it: not to be changed
    for number, call in enumerate(cell.calls):
        if number == cell.num_prepared:
            given.update(range(first, first + number))
        unread = range(len(cell.weights), first) if number < cell.num_prepared else range(0)
        _check_call(where, call, first + number, unread, given)
    last = first + len(cell.calls)
    if len(cell.outputs) != len(cell.makes):
        raise CaptureError(f"{where} gives {len(cell.outputs)} of {len(cell.makes)} results.")
    for place in cell.outputs:
        count_of(place, last - 1)
    return None


def _check_pack(cell: Cell) -> None:
    """A gather is what its specs say, and nothing else."""
    many, one = (cell.reads, cell.makes) if cell.kind == "pack" else (cell.makes, cell.reads)
    row = spec_of(one[0].shape[1:], one[0].dtype) if len(one) == 1 else None
    alike = row is not None and all(spec is row for spec in many)
    if not alike or one[0].shape[:1] != (len(many),) or cell.calls or cell.outputs or cell.weights:
        raise CaptureError(f"cell: {cell.name} must be a {cell.kind} of {len(many)} rows alone.")


def _check_call(where: str, call: Call, at: int, unread: range, given: set[int]) -> None:
    """Check the call that makes the place `at`, and reads others before it, but none of `unread`;
    add its place to `given` if it is a view of one."""
    name, args, options, place = call
    if not isinstance(name, str) or not isinstance(args, list) or not isinstance(options, dict):
        raise CaptureError(f"{where}: this cannot be a call: {clip(call)}.")
    schema = getattr(operator_of(name), "_schema", None)
    arguments = schema.arguments if schema is not None else ()
    known = {argument.name for argument in arguments if not keyword.iskeyword(argument.name)}
    if odd := [option for option in options if option not in known]:
        raise CaptureError(f"{where}: {name} has no option {clip(odd[0])}.")
    if type(place) is not int or place != at:
        raise CaptureError(f"{where}: {name} makes {clip(place)}, where {at} is next.")
    for each in _places([args, *options.values()]):
        if count_of(each, at - 1) in unread:
            raise CaptureError(f"{where}: {name} reads {clip(each)}, which is made later.")
    if name == "operator.getitem" and not given.isdisjoint(_places(args)):
        given.add(at)
    for number, argument in enumerate(arguments):
        item = args[number] if number < len(args) else options.get(argument.name)
        if argument.alias_info is not None and not given.isdisjoint(_places(item)):
            if argument.alias_info.is_write:
                raise CaptureError(f"{where} changes its arguments or weights in place.")
            given.add(at)


def _places(item: Any, depth: int = 0) -> Iterator[Any]:
    """The places in an argument. Raises `CaptureError` for what no argument can be."""
    if isinstance(item, list) and depth < MAX_DEPTH:
        for each in item:
            yield from _places(each, depth + 1)
    elif isinstance(item, dict) and item.keys() == {"v"}:
        yield item["v"]
    elif isinstance(item, dict) and item.keys() == {"torch"}:
        if not isinstance(item["torch"], str) or item["torch"] not in _CONSTANTS:
            raise CaptureError(f"cell: {unknown('constant of torch', item['torch'], _CONSTANTS)}")
    elif isinstance(item, int):
        if abs(item) >= 1 << 63:
            raise CaptureError("cell: a number of more than 63 bits.")
    elif item is not None and not isinstance(item, (float, str)) and item != {"device": ""}:
        raise CaptureError(f"cell: {clip(item)} cannot be an argument of a call.")


@cache
def pack_cell(spec: Spec, count: int) -> Cell:
    """The cell that makes one row of so many rows: a gather."""
    made = spec_of((count, *spec.shape), spec.dtype)
    return Cell(f"pack{count}.{_number(spec)}", (spec,) * count, (made,), kind="pack")


@cache
def unpack_cell(spec: Spec) -> Cell:
    """The cell that makes rows of one row: a gather."""
    row = spec_of(spec.shape[1:], spec.dtype)
    return Cell(f"unpack.{_number(spec)}", (spec,), (row,) * spec.shape[0], kind="unpack")


def _number(spec: Spec) -> str:
    dtype = str(spec.dtype).removeprefix("torch.")
    return "_".join([dtype, *map(str, spec.shape)])


def encode(item: Any) -> Any:
    """An argument of a call as plain data; places were encoded before."""
    if isinstance(item, (torch.dtype, torch.layout, torch.memory_format)):
        return {"torch": str(item)}
    if isinstance(item, torch.device):
        return {"device": ""}  # where the cell runs
    if isinstance(item, (list, tuple)):
        return [encode(each) for each in item]
    if item is None or isinstance(item, (bool, int, float, str, dict)):
        return item
    raise CaptureError(f"cell: {clip(item)} cannot be an argument of a call as data.")


def _makes_new(name: str) -> bool:
    function = operator_of(name)
    if isinstance(function, OpOverload):
        return all(each.alias_info is None for each in function._schema.returns)
    return name == "weft.linear"


def build(cell: Cell) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """The two functions of a cell, as straight-line Python. Its names are numbers of ours and the
    options of schemas; what a message says enters as constants."""
    names: dict[str, Any] = {}
    lines: list[str] = []
    last = _last_uses(cell)

    def text(item: Any) -> str:
        if isinstance(item, list):
            return f"[{', '.join(map(text, item))}]"
        if isinstance(item, dict) and "v" in item:
            return f"v{item['v']}"
        if isinstance(item, dict) and "device" in item:
            return "device"
        name = f"k_{len(names)}"
        names[name] = _CONSTANTS[item["torch"]] if isinstance(item, dict) else item
        return name

    for number, (target, args, options, at) in enumerate(cell.calls):
        names[f"f{number}"] = operator_of(target)
        given = [*map(text, args), *(f"{key}={text(value)}" for key, value in options.items())]
        dead = [f"v{place}" for place in last.get(number, ())]
        line = f"  v{at} = f{number}({', '.join(given)})"
        lines.append(line + (f"; del {', '.join(dead)}" if dead else ""))
    num_weights, num_reads = len(cell.weights), len(cell.reads)
    weights = [f"v{place}" for place in range(num_weights)]
    rows = [f"v{num_weights + place}" for place in range(num_reads)]
    head, tail = lines[: cell.num_prepared], lines[cell.num_prepared :]
    kept = weights + [f"v{call[3]}" for call in cell.calls[: cell.num_prepared]]
    pack = f"  ({' '.join(f'{name},' for name in kept)}) = prepared" if kept else "  pass"
    source = [
        f"def prepare(device{''.join(f', {name}' for name in weights)}):",
        *[line.partition(";")[0] for line in head],
        f"  return ({' '.join(f'{name},' for name in kept)})",
        f"def run(device, prepared{''.join(f', {name}' for name in rows)}):",
        pack, *tail,
        f"  return ({' '.join(f'v{place},' for place in cell.outputs)})",
    ]  # fmt: skip
    prepare, run = Source(f"cell {cell.name}", names).build(source, "prepare", "run")
    return prepare, run


def _last_uses(cell: Cell) -> dict[int, list[int]]:
    """Places that no later call needs, by the call that uses them last."""
    last = {
        place: number
        for number, (_, args, options, _) in enumerate(cell.calls)
        for place in _places([args, *options.values()])
    }
    first = len(cell.weights) + len(cell.reads)
    dead: dict[int, list[int]] = {}
    for place, number in last.items():
        if place >= first + cell.num_prepared and place not in cell.outputs:
            dead.setdefault(number, []).append(place)
    return dead


def _of_sizes(function: Callable[..., int]) -> Callable[..., int]:
    def compute(*sizes: int) -> int:
        if not all(isinstance(size, int) for size in sizes):
            raise CaptureError("cell: a size must be computed from whole numbers.")
        if abs(made := function(*sizes)) >= 1 << 63:
            raise CaptureError("cell: a size of more than 63 bits.")
        return made

    return compute


PLAIN: dict[str, Callable[..., Any]] = {
    **{
        f"operator.{name}": _of_sizes(getattr(operator, name))
        for name in ("add", "sub", "mul", "floordiv", "mod", "neg")
    },
    "operator.getitem": operator.getitem,
    "weft.linear": torch.nn.functional.linear,
}
"""What a cell may call beside ATen: arithmetic on numbers of rows, one of several results, and
linears, which are kept whole."""


@cache
def operator_of(name: str) -> Callable[..., Any]:
    """The function behind the name of a call. Raises `CaptureError` if a cell may not call it.

    An ATen operator may be called if its schema says that it gives tensors or numbers, takes
    tensors, numbers and known words, and changes at most its first argument; not if it draws random
    numbers, reads or writes files, prints, or changes what a tensor is (its storage, its flags).
    Operators with a leading underscore check less of what they are given: those that tracing makes
    are listed one by one.
    """
    if name in PLAIN:
        return PLAIN[name]
    words = NAME.fullmatch(name)
    overload = f".{words[2]}" if words and words[2] != "default" else ""
    if words is None or f"aten::{words[1]}{overload}" not in _known():
        raise CaptureError(f"cell: {clip(name)} is no operator of ATen that a cell may call.")
    function: OpOverload[..., Any] = getattr(getattr(torch.ops.aten, words[1]), words[2])
    if why := _refusal(words[1], function):
        raise CaptureError(f"cell: {clip(name)} cannot be called in a cell: {why}.")
    return function


@cache
def _known() -> frozenset[str]:
    """The operators with kernels; the others of this namespace are TorchScript's own functions."""
    return frozenset(all_op_names())


def _refusal(name: str, function: OpOverload[..., Any]) -> str:
    """Why a cell may not call an operator; empty if it may."""
    if name in INNER:
        return ""
    if torch.Tag.nondeterministic_seeded in function.tags:
        return "it draws random numbers"
    if name.startswith("_") and not name.startswith("__"):
        return "it is one of torch's inner operators, which are not listed"
    if name in STATE:
        return "it changes what a tensor is"
    schema = function._schema
    if not schema.returns:
        return "it gives nothing back"
    arguments = [a for a in schema.arguments if a.name not in WORDS or "str" not in str(a.type)]
    kinds = [str(each.type) for each in (*schema.returns, *arguments)]
    if odd := [kind for kind in kinds if not TYPE.fullmatch(kind)]:
        return f"its schema has a {odd[0]}"
    if any(a.alias_info is not None and a.alias_info.is_write for a in schema.arguments[1:]):
        return "it writes to other arguments than its first"
    return ""

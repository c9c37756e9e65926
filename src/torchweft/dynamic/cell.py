"""A `Cell`: what one recorded call computes, as data, for any number of rows at once.

    function, specs of its arguments --trace--> Cell --build--> callable(weights, *rows) -> rows

A cell is traced once, under `vmap` and on fake tensors, so it holds ATen calls on values whose
first dim is the batch: running it over N rows equals running the function N times. Its calls are
plain data (names of operators, numbers, places of values): another process can build them
without the user's code, and no file or message carries code.

    [["aten.mm.default", [{"v": 0}, {"v": 2}], {}, 3], ...]       call, arguments, options, place
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from math import prod
from typing import Any

import torch

from torchweft.errors import CaptureError, clip, unknown

Call = tuple[str, list[Any], dict[str, Any], int]
_PLAIN = {
    name: getattr(operator, name)
    for name in ("add", "sub", "mul", "floordiv", "mod", "neg", "getitem", "truediv", "pow")
}
_DTYPES = {str(item): item for item in vars(torch).values() if isinstance(item, torch.dtype)}
_LAYOUTS = {str(item): item for item in vars(torch).values() if isinstance(item, torch.layout)}
_FORMATS = {
    str(item): item for item in vars(torch).values() if isinstance(item, torch.memory_format)
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
    found = _SPECS.get(key)
    return found if found is not None else _SPECS.setdefault(key, Spec(*key))


def spec_named(shape: Sequence[int], dtype: str) -> Spec:
    """The spec of a shape and the name of a dtype. Raises `CaptureError` for an unknown one."""
    if dtype not in _DTYPES:
        raise CaptureError(f"spec: {unknown('dtype', dtype, _DTYPES)}")
    return spec_of(shape, _DTYPES[dtype])


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
    flops: int = 0
    num_prepared: int = 0

    @cached_property
    def functions(self) -> tuple[Callable[..., Any], Callable[..., Any]]:
        """(prepare, run): what depends on weights only, and the rest over rows."""
        return build(self)

    @cached_property
    def fresh(self) -> tuple[bool, ...]:
        """Of each result, whether it has memory of its own and is no view of something else."""
        maker = {place: name for name, _, _, place in self.calls}
        return tuple([_makes_new(maker.get(place, "operator.getitem")) for place in self.outputs])

    def to_data(self) -> dict[str, Any]:
        """The cell as plain data, ready for JSON."""
        specs = [[[list(s.shape), str(s.dtype)] for s in side] for side in (self.reads, self.makes)]
        return {
            "name": self.name, "reads": specs[0], "makes": specs[1], "weights": self.weights,
            "calls": self.calls, "outputs": self.outputs, "kind": self.kind,
            "flops": self.flops, "num_prepared": self.num_prepared,
        }  # fmt: skip

    @staticmethod
    def from_data(found: dict[str, Any]) -> Cell:
        """The cell of plain data."""
        reads, makes = (
            tuple(spec_named(shape, dtype) for shape, dtype in found[side])
            for side in ("reads", "makes")
        )
        calls = tuple((name, args, options, at) for name, args, options, at in found["calls"])
        return Cell(
            found["name"], reads, makes, tuple(found["weights"]), calls, tuple(found["outputs"]),
            found["kind"], found["flops"], found["num_prepared"],
        )  # fmt: skip


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


def operator_of(name: str) -> Callable[..., Any]:
    """The function behind the name of a call. Raises `CaptureError` if this process has none."""
    space, _, rest = name.partition(".")
    if space == "operator" and rest in _PLAIN:
        plain: Callable[..., Any] = _PLAIN[rest]
        return plain
    if name == "weft.linear":
        return torch.nn.functional.linear
    found: Any = torch.ops
    for word in name.split("."):
        found = getattr(found, word, None)
    if not isinstance(found, torch._ops.OpOverload):
        raise CaptureError(
            f"cell: no operator {clip(name)} here; import the module that registers it."
        )
    return found


def _makes_new(name: str) -> bool:
    function = operator_of(name)
    if isinstance(function, torch._ops.OpOverload):
        return all(each.alias_info is None for each in function._schema.returns)
    return name == "weft.linear"


def build(cell: Cell) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """The two functions of a cell, as straight-line Python of our own identifiers."""
    names: dict[str, Any] = {}
    lines: list[str] = []
    last = _last_uses(cell)

    def text(item: Any) -> str:
        if isinstance(item, dict):
            if "v" in item:
                return f"v{int(item['v'])}"
            if "device" in item:
                return "device"
            word = item["torch"]
            constant = {**_DTYPES, **_LAYOUTS, **_FORMATS}[word]
            names.setdefault(f"k_{len(names)}", constant)
            return next(name for name, value in names.items() if value is constant)
        if isinstance(item, list):
            return f"[{', '.join(map(text, item))}]"
        if item is None or isinstance(item, (bool, int, float, str)):
            name = f"k_{len(names)}"
            names[name] = item
            return name
        raise CaptureError(f"cell: {clip(item)} cannot stand in a cell.")

    for number, (target, args, options, at) in enumerate(cell.calls):
        names[f"f{number}"] = operator_of(target)
        given = [text(arg) for arg in args]
        for key, value in options.items():
            if not key.isidentifier():
                raise CaptureError(f"cell: {clip(key)} is no option of a call.")
            given.append(f"{key}={text(value)}")
        dead = [f"v{place}" for place in last.get(number, ())]
        line = f"  v{at} = f{number}({', '.join(given)})"
        lines.append(line + (f"; del {', '.join(dead)}" if dead else ""))
    num_weights, num_reads = len(cell.weights), len(cell.reads)
    weights = [f"v{place}" for place in range(num_weights)]
    rows = [f"v{num_weights + place}" for place in range(num_reads)]
    head, tail = lines[: cell.num_prepared], lines[cell.num_prepared :]
    kept = weights + [f"v{call[3]}" for call in cell.calls[: cell.num_prepared]]
    pack = f"  ({' '.join(f'{name},' for name in kept)}) = prepared" if kept else "  pass"
    source = "\n".join([
        f"def prepare(device{''.join(f', {name}' for name in weights)}):",
        *[line.partition(";")[0] for line in head],
        f"  return ({' '.join(f'{name},' for name in kept)})",
        f"def run(device, prepared{''.join(f', {name}' for name in rows)}):",
        pack, *tail,
        f"  return ({' '.join(f'v{place},' for place in cell.outputs)})",
    ])  # fmt: skip
    exec(compile(source, f"<weft cell {cell.name}>", "exec"), names)
    return names["prepare"], names["run"]


def _last_uses(cell: Cell) -> dict[int, list[int]]:
    """Places that no later call needs, by the call that uses them last."""
    last: dict[int, int] = {}

    def walk(item: Any, number: int) -> None:
        if isinstance(item, dict) and "v" in item:
            last[item["v"]] = number
        for each in item if isinstance(item, list) else ():
            walk(each, number)

    for number, (_, args, options, _) in enumerate(cell.calls):
        walk(args, number)
        walk(list(options.values()), number)
    first = len(cell.weights) + len(cell.reads)
    found: dict[int, list[int]] = {}
    prepared = {call[3] for call in cell.calls[: cell.num_prepared]}
    for place, number in last.items():
        if place >= first and place not in cell.outputs and place not in prepared:
            found.setdefault(number, []).append(place)
    return found

"""The `Graph`: what a model computes, as ops that make values. It says nothing of how or when.

    values:  x --attn0--> a0 --reduce0--> r0 --mlp0--> y          (inputs, then one maker each)

An op reads values, makes values, and may mutate values in place (a KV cache). A value may be an
*alias* of another (a view, the result of an in-place op): both share bytes, and `root` names the
value whose bytes they are. Ops stand in program order; run one by one, in that order, they are the
model, and every plan must have the same effect.

Rows say what splitting the batch does to an op:

    row-wise    every row of the result needs only its own row: may run part by part
    batch-free  touches no batch: runs once, for all parts
    additive    makes sums over rows (weight gradients): parts run in order and add up
    random      draws numbers: drawn once for all parts, then split
    mixing      looks across rows (batch norm, a loss): runs once, over all parts

A value may be *dealt*: each rank of a communicator holds its share of the rows of each part, from a
reduce_scatter to the all_gather that puts the part together again. Shares of two parts beside each
other are not the share of both, so a dealt value is read in the very parts in which it was made.
"""

from __future__ import annotations

import hashlib
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields, is_dataclass
from functools import cached_property
from math import gcd, lcm
from typing import Any

from torchweft.errors import GraphError, WeftError, clip, unknown
from torchweft.plan.sizes import ONE, ZERO, Size

USES = ("compute", "memory", "network", "io")
ROWS = ("row-wise", "batch-free", "additive", "random", "mixing")
LEVELS = ("torch", "aten", "boundary", "none")
ITEM_BYTES = {
    "float64": 8, "float32": 4, "float16": 2, "bfloat16": 2, "int64": 8, "int32": 4, "int16": 2,
    "int8": 1, "uint8": 1, "bool": 1, "complex64": 8, "complex128": 16, "float8_e4m3fn": 1,
    "float8_e5m2": 1, "uint16": 2, "uint32": 4, "uint64": 8, "complex32": 4, "opaque": 0,
}  # fmt: skip
NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_.$]{0,199}")
PATH = re.compile(r"[A-Za-z0-9_.]{0,200}")


def check_name(name: object, what: str, error: type[WeftError] = GraphError) -> str:
    """`name` itself if it may stand in a graph or a plan. Raises `GraphError` if not."""
    if isinstance(name, str) and NAME.fullmatch(name):
        return name
    raise error(
        f"name: {what} {clip(name)} is not a name: up to 200 letters, digits, '_', '.' and '$'."
    )


@dataclass(frozen=True, slots=True)
class Deal:
    """Each rank of a communicator holds an equal share of the rows, in the order of the ranks.

    rounded: shares are rounded up, so any number of rows will do; the last ones are filled.
    """

    communicator: str
    num_ranks: int
    rounded: bool = False


@dataclass(frozen=True, slots=True)
class Batch:
    """Where the rows of a value are: axis `dim` has outer * (batch rows) * inner entries.

    deal: of a dealt value, by which `num_ranks` its entries are divided.
    """

    dim: int
    outer: Size = ONE
    inner: Size = ONE
    deal: Deal | None = None

    @property
    def row_unit(self) -> int:
        """What the rows of a part must be a multiple of, to be dealt out in equal shares."""
        exact = self.deal is not None and not self.deal.rounded
        num_ranks = self.deal.num_ranks if self.deal is not None and exact else 1
        return num_ranks // gcd(num_ranks, (self.inner.constant or 1) * (self.outer.constant or 1))


@dataclass(frozen=True, slots=True)
class Value:
    """What an op makes or the caller gives: shape, dtype, and which dim is the batch.

    `placeable`: its maker can write it into given memory (an `out=` variant). An `opaque` value
    (dtype "opaque") is not a tensor and has no bytes.
    """

    name: str
    shape: tuple[Size, ...] = ()
    dtype: str = "float32"
    batch: Batch | None = None
    alias_of: str | None = None
    placeable: bool = False

    @property
    def bytes(self) -> Size:
        """How many bytes it takes, as a size."""
        total = Size.of(ITEM_BYTES[self.dtype])
        for dim in self.shape:
            total = total * dim
        return total


@dataclass(frozen=True, slots=True)
class Collective:
    """A talk between ranks: its kind, its communicator, and (for send and recv) the other rank.

    Ranks match their collectives of one communicator by order; `tag` is what must then agree.
    """

    kind: str
    communicator: str
    peer: int | None = None
    tag: str = ""


@dataclass(frozen=True, slots=True)
class Op:
    """One schedulable operator. `body` is a key for what it computes: equal bodies, equal code.

    path: of the module that it is computed in ("" for the model itself); layer: the number of the
    repeated module around it, and block the class of that: `layers.3.mlp`, 3, `DecoderLayer`.
    """

    name: str
    reads: tuple[str, ...] = ()
    makes: tuple[str, ...] = ()
    mutates: tuple[str, ...] = ()
    uses: str = "compute"
    rows: str = "row-wise"
    two_phase: bool = False
    collective: Collective | None = None
    mark: str | None = None
    body: str = ""
    flops: Size = ZERO
    source: str | None = None
    path: str = ""
    layer: int | None = None
    block: str | None = None

    @property
    def touched(self) -> tuple[str, ...]:
        """What it reads or changes, each name once."""
        return tuple(dict.fromkeys(self.reads + self.mutates))

    @property
    def whole(self) -> bool:
        """Whether it runs once over all parts instead of part by part."""
        return self.rows not in ("row-wise", "additive")


@dataclass(frozen=True)
class Graph:
    """Ops in program order with their values; `batch` is the symbol that a split cuts, into parts
    of a multiple of `unit` rows."""

    name: str
    values: tuple[Value, ...]
    ops: tuple[Op, ...]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    batch: str | None = None
    level: str = "none"
    communicators: tuple[tuple[str, tuple[int, ...]], ...] = field(default=())
    unit: int = 1

    def __post_init__(self) -> None:
        for fault in _faults(self):
            raise GraphError(fault)

    @cached_property
    def value(self) -> Mapping[str, Value]:
        """Values by name."""
        return {value.name: value for value in self.values}

    @cached_property
    def op(self) -> Mapping[str, Op]:
        """Ops by name."""
        return {op.name: op for op in self.ops}

    @cached_property
    def maker(self) -> Mapping[str, Op]:
        """The op that makes a value; inputs have none."""
        return {name: op for op in self.ops for name in op.makes}

    @cached_property
    def readers(self) -> Mapping[str, tuple[Op, ...]]:
        """The ops that read or mutate a value by this name."""
        readers: dict[str, list[Op]] = {value.name: [] for value in self.values}
        for op in self.ops:
            for name in op.touched:
                readers[name].append(op)
        return {name: tuple(ops) for name, ops in readers.items()}

    @cached_property
    def root(self) -> Mapping[str, str]:
        """The value whose bytes a value shares; its own name if it is not an alias."""
        roots = {value.name: value.name for value in self.values if value.alias_of is None}
        for value in self.values:
            chain, name = dict[str, None](), value.name
            while name not in roots:
                chain[name], alias = None, self.value[name].alias_of or ""
                if alias in chain or alias not in self.value:
                    why = "itself" if alias in chain else f"{clip(alias)}, which does not exist"
                    raise GraphError(f"alias: value {value.name!r} is an alias of {why}.")
                name = alias
            roots.update(dict.fromkeys(chain, roots[name]))
        return roots

    @cached_property
    def dealt(self) -> frozenset[str]:
        """The values of which a rank holds its share of each part."""
        return frozenset(v.name for v in self.values if v.batch is not None and v.batch.deal)

    @cached_property
    def takes_empty(self) -> bool:
        """Whether parts may have no rows: the model itself runs them, and where ranks exchange
        unequal numbers of rows, one with few of them says in each part what the others say."""
        kinds = [op.collective.kind for op in self.ops if op.collective is not None]
        return self.level == "boundary" and any(kind.startswith("all_to_all") for kind in kinds)

    @cached_property
    def row_unit(self) -> int:
        """What the rows of each part must be a multiple of, for the code and for what is dealt."""
        batches = [value.batch for value in self.values if value.batch is not None]
        return lcm(self.unit, *(batch.row_unit for batch in batches))

    @cached_property
    def mutated(self) -> frozenset[str]:
        """Roots that some op changes in place."""
        return frozenset(self.root[name] for op in self.ops for name in op.mutates)

    @cached_property
    def structure(self) -> Mapping[str, int]:
        """A number for each op's body: equal numbers, equal code, weights as inputs."""
        numbers: dict[str, int] = {}
        return {op.name: numbers.setdefault(op.body or op.name, len(numbers)) for op in self.ops}

    @cached_property
    def digest(self) -> str:
        """16 hex digits that name this graph; any change of the graph changes them."""
        facts: list[object] = [self.name, self.batch, self.level, self.inputs, self.outputs]
        facts += [self.communicators, *([self.unit] if self.unit != 1 else [])]
        text = repr([facts, [_facts(item) for item in self.values + self.ops]])
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def members(self, communicator: str, num_ranks: int) -> tuple[int, ...]:
        """The ranks that talk on a communicator: all of them unless it was declared otherwise."""
        return dict(self.communicators).get(communicator) or tuple(range(num_ranks))

    def __str__(self) -> str:
        return _text(self)


def _facts(item: Value | Op) -> list[object]:
    """Every field, with sizes as text: what the digest of a graph is made of."""
    facts = [getattr(item, name) for name in item.__slots__]
    return [list(map(str, fact)) if isinstance(fact, tuple) else str(fact) for fact in facts]


def _faults(graph: Graph) -> Iterator[str]:
    """What contradicts itself in a graph; each rule trusts those before it."""
    check_name(graph.name, "graph")
    if graph.batch is not None:
        check_name(graph.batch, "batch")
    if not isinstance(graph.unit, int) or graph.unit < 1:
        yield f"unit: parts are multiples of a number of rows from 1 on; got {clip(graph.unit)}."
    if graph.level not in LEVELS:
        yield f"level: {unknown('level', graph.level, LEVELS)}"
    seen: set[str] = set()
    for value in graph.values:
        if check_name(value.name, "value") in seen:
            yield f"duplicate: two values are named {value.name!r}."
        seen.add(value.name)
        where, batch = f"value {value.name!r}", value.batch
        if value.dtype not in ITEM_BYTES:
            yield f"dtype: {where}: {unknown('dtype', value.dtype, ITEM_BYTES)}"
        if batch is not None and graph.batch is None:
            yield f"batch: {where} has a batch, but graph {graph.name!r} has no batch symbol."
        if batch is not None and not 0 <= batch.dim < max(1, len(value.shape)):
            yield f"batch: {where} has no dim {batch.dim}."
        if batch is not None and batch.deal is not None:
            check_name(batch.deal.communicator, "communicator")
            if batch.deal.num_ranks < 2:
                yield f"dealt: {where} is dealt to {batch.deal.num_ranks} ranks; needed are two."
    assert len(graph.root) == len(graph.values), "every value has a root"
    names = Counter(check_name(op.name, "op") for op in graph.ops)
    if twice := [name for name, count in names.items() if count > 1]:
        yield f"duplicate: several ops are named {min(twice)!r}."
    defined: set[str] = set()
    for name in graph.inputs:
        if name not in graph.value:
            yield f"input: {unknown('value', name, graph.value)}"
        if name in defined:
            yield f"input: {name!r} is an input twice."
        defined.add(name)
    for op in graph.ops:
        yield from _op_faults(graph, op, defined)
        defined.update(op.makes)
    for name in graph.outputs:
        if name not in defined:
            yield f"output: no op makes {clip(name)}, and it is no input."
        maker = graph.maker.get(name)
        if maker and not maker.whole and graph.value[name].alias_of is not None:
            yield (
                f"output: {name!r} is an alias, so its parts cannot be merged into one; "
                f"declare op {maker.name!r} 'mixing', then it runs over all parts."
            )
    for name in (*graph.inputs, *graph.outputs):
        if name in graph.dealt:
            yield (
                f"dealt: {name!r} goes in or out of the graph, where it is the share of the whole "
                "batch, not of each part; let the op that makes it be 'mixing'."
            )
    if orphans := [value.name for value in graph.values if value.name not in defined]:
        yield f"orphan: nothing makes value {orphans[0]!r}. Drop it, or list it as an input."


def _op_faults(graph: Graph, op: Op, defined: set[str]) -> Iterator[str]:
    where = f"op {op.name!r}"
    if op.mark is not None:
        check_name(op.mark, "mark")
    if op.block is not None:
        check_name(op.block, "block")
    if not PATH.fullmatch(op.path):
        yield f"path: {where}: {clip(op.path)} is not a path: up to 200 letters, digits, '_', '.'."
    if op.layer is not None and op.layer < 0:
        yield f"layer: {where}: layers are numbered from 0 on; got {op.layer}."
    if op.uses not in USES:
        yield f"uses: {where}: {unknown('resource', op.uses, USES)}"
    if op.rows not in ROWS:
        yield f"rows: {where}: {unknown('kind of rows', op.rows, ROWS)}"
    touched = {*op.touched, *op.makes}
    for name in op.touched:
        if name not in graph.value:
            yield f"reads: {where}: {unknown('value', name, graph.value)}"
        if name not in defined:
            yield f"reads: {where} reads {name!r} before anything makes it."
    for name in op.makes:
        if name not in graph.value:
            yield f"makes: {where}: {unknown('value', name, graph.value)}"
        if name in defined:
            yield f"makes: {where} makes {name!r} a second time."
        alias = graph.value[name].alias_of
        if alias is not None and alias not in touched:
            yield f"alias: {where} makes {name!r}, an alias of {alias!r}, without reading it."
    if op.collective is not None:
        check_name(op.collective.communicator, "communicator")
        check_name(op.collective.kind, "collective")
        if op.collective.tag:
            check_name(op.collective.tag, "tag")
        if (op.collective.kind in ("send", "recv")) != (op.collective.peer is not None):
            yield f"collective: {where}: send and recv have a peer, others have none."
    yield from _row_faults(graph, op, where)


def _row_faults(graph: Graph, op: Op, where: str) -> Iterator[str]:
    def batched(names: tuple[str, ...]) -> list[str]:
        return [name for name in names if graph.value[name].batch is not None]

    touched = op.touched
    if op.rows == "batch-free" and batched(touched + op.makes):
        yield f"rows: {where} is batch-free but touches {batched(touched + op.makes)[0]!r}."
    if op.rows == "row-wise" and len(batched(op.makes)) < len(op.makes):
        yield f"rows: {where} is row-wise but makes a value without a batch; use 'mixing'."
    if op.rows == "row-wise" and not batched(touched + op.makes):
        yield f"rows: {where} is row-wise but touches no batch; use 'batch-free'."
    if op.rows != "row-wise" and (shares := graph.dealt.intersection(touched + op.makes)):
        yield f"dealt: {where} is {op.rows} but touches {min(shares)!r}, the shares of each part."
    if op.rows == "additive" and (batched(op.makes) or op.mutates or not op.makes):
        yield f"rows: {where} is additive: it makes sums without a batch and mutates nothing."
    if op.rows == "additive" and any(graph.value[name].alias_of for name in op.makes):
        yield f"rows: {where} is additive, so what it makes cannot be an alias."
    whole = {graph.root[name] for name in touched if graph.value[name].batch is None}
    mixed = whole & {graph.root[name] for name in batched(touched)}
    if op.rows == "row-wise" and (both := mixed & {graph.root[name] for name in op.mutates}):
        yield f"rows: {where} changes {min(both)!r} by rows and touches all of it; use 'mixing'."


def _text(graph: Graph) -> str:
    """The graph as numbered lines: inputs, one line an op, outputs."""
    lines = [
        f"graph {graph.name} {graph.digest}  level {graph.level}  batch {graph.batch or 'none'}"
    ]
    lines += [f"  input  {_value_text(graph, name)}" for name in graph.inputs]
    wide = max((len(op.name) for op in graph.ops), default=0)
    for number, op in enumerate(graph.ops):
        phases = " two-phase" if op.two_phase else ""
        talk = f" {op.collective.kind}@{op.collective.communicator}" if op.collective else ""
        mark = f" mark {op.mark}" if op.mark else ""
        inside = f" in {op.path}" if op.path and not op.name.startswith(op.path) else ""
        reads = ", ".join(op.reads)
        makes = ", ".join(_value_text(graph, name) for name in op.makes)
        mutates = f" mutates {', '.join(op.mutates)}" if op.mutates else ""
        kind = f"#{graph.structure[op.name]}"
        lines.append(
            f"{number:>5}  {op.uses:<8} {op.rows:<10} {kind:<4} {op.name:<{wide}}"
            f"  ({reads}) -> {makes or '-'}{mutates}{talk}{phases}{mark}{inside}"
        )
    lines += [f"  output {_value_text(graph, name)}" for name in graph.outputs]
    return "\n".join(lines)


def _value_text(graph: Graph, name: str) -> str:
    value = graph.value[name]
    dims = []
    for number, dim in enumerate(value.shape):
        starred = value.batch is not None and value.batch.dim == number
        dims.append(f"{dim}{'*' if starred else ''}")
    alias = f" alias of {value.alias_of}" if value.alias_of else ""
    deal = value.batch.deal if value.batch is not None else None
    dealt = f" dealt@{deal.communicator}" if deal is not None else ""
    return f"{name}: {value.dtype}[{', '.join(dims)}]{alias}{dealt}"


VERSION = 1


def graph_data(graph: Graph) -> dict[str, object]:
    """The graph as plain data; fields that have their default value are left out."""
    groups = {name: list(ranks) for name, ranks in graph.communicators}
    return {"weft_graph": VERSION, **_plain(graph), "communicators": groups}


def _plain(item: Any) -> Any:
    if isinstance(item, Size):
        return str(item)
    if isinstance(item, tuple):
        return [_plain(each) for each in item]
    if not is_dataclass(item):
        return item
    facts = [(spec, getattr(item, spec.name)) for spec in fields(item)]
    return {spec.name: _plain(fact) for spec, fact in facts if fact != spec.default}

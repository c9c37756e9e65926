"""The `Likeness` of two calls of a block: whether what was traced for one holds for the other.

    blocks[0](x, y)   traced, a Likeness is kept
    blocks[1](x, y)   alike: known without being traced        (or traced, and a Likeness is kept)

Dynamo asks this of some guards that the first call made. It does not ask for the class, the hooks
and the settings of modules inside a block, for one tensor that stands in two places, for a keyword
against a position, for `1` against `True`, for autocast. Here two calls are alike if, seen from
their arguments, there is no telling them apart:

1. Torch is in the same state, and nothing was written since into what existed before.
2. The arguments have the same structure, kinds and plain values.
3. Whatever is reached from the modules, and whatever was read while the first call was traced, has
   a partner in the other call: of the same class, with the same plain values, and one object has
   one partner. So the same things are shared in both, with each other and with the outside.

A plain value in a module may differ if it was not read (the number of a layer, its name).
"""

from __future__ import annotations

import contextlib
import functools
import types
from collections import OrderedDict, deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, fields, replace
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from torch import Tensor, fx, nn

from torchweft.errors import WeftError
from torchweft.private.core import is_traceable_wrapper_subclass
from torchweft.private.dynamo import (
    AttributeMutationNew,
    AttrSource,
    ChainedSource,
    GlobalSource,
    GlobalStateGuard,
    Guard,
    InputFingerprint,
    InputTag,
    InvokeSubgraphReuseCondition,
    NNModuleSource,
    Source,
    TypeSource,
    VariableBuilder,
    higher_order_ops,
    invoke_subgraph,
    is_from_local_source,
)

UNREAD = frozenset((int, float, bool, str))  # values in a module that may differ if not read
PLAIN = (*UNREAD, complex, bytes, range, slice, types.NoneType, types.EllipsisType)
PLAIN_OF_TORCH = (torch.dtype, torch.device, torch.layout, torch.memory_format, torch.Size)
NOT_THEIRS = ("torch", "builtins")
REDUCED = (types.SimpleNamespace, functools.partial)
STATE = ("__reduce__", "__reduce_ex__", "__getstate__")
NOWHERE = (AttributeError, LookupError, NotImplementedError, RuntimeError, TypeError, ValueError)


class BlockError(WeftError):
    """A model that cannot be captured block by block; it is captured whole instead."""


class Unlike(Exception):  # noqa: N818 - not a failure: a finding
    """Two calls can be told apart."""


def require(alike: object) -> None:
    """Raise `Unlike` otherwise."""
    if not alike:
        raise Unlike


@dataclass
class Likeness(InvokeSubgraphReuseCondition):
    """What a call has to be like, beyond what Dynamo asks for."""

    first: InputFingerprint = field(kw_only=True)
    traced: tuple[Source, ...] = field(kw_only=True)
    read: frozenset[Source] = field(kw_only=True)
    inside: tuple[Guard, ...] = field(kw_only=True)
    modes: tuple[Any, ...] = field(kw_only=True)
    written: dict[tuple[int, str], str] = field(kw_only=True)
    state: GlobalStateGuard = field(default_factory=GlobalStateGuard)
    values: dict[Source, Any] = field(default_factory=dict)  # of what the first call has read
    reached: dict[frozenset[int], set[int]] = field(default_factory=dict)
    kept: list[Any] = field(default_factory=list)

    def guard(self, tx: Any, other: InputFingerprint) -> None:
        """Guard a call with these arguments as the traced one is. Raises `Unlike` if it is not."""
        require(self.state.check() and self.modes == _modes(tx) and self.written == _written(tx))
        require(not other.has_unknown and self.first.treespec == other.treespec)
        pairs = Pairs()
        for argument in zip(_arguments(self.first), _arguments(other), strict=True):
            _require_argument(pairs, *argument)
        moves: dict[Source, Source] = {}
        gone: set[Source] = set()
        for old, new in zip(self.first.arg_sources, other.arg_sources, strict=True):
            if old is not None and new is None:
                gone.add(old)
            elif old is not None and new is not None:
                moves[old] = new
                if isinstance(old, NNModuleSource) and isinstance(new, NNModuleSource):
                    moves[old.base] = new.base
        # Else it reads from an argument that nobody else can name.
        require(not gone or not any(gone.intersection(chain(source)) for source in self.read))
        scope, known = _scope(tx), dict[Source, Any]()
        tensors: dict[Source, Tensor] = {}
        for source in self.read:
            place = move(source, moves)
            try:
                was = source.get_value(scope, {}, self.values)
                now = place.get_value(scope, {}, known)
            except NOWHERE:
                raise Unlike from None
            pairs.require_alike(was, now)
            if isinstance(now, Tensor):
                tensors[place] = now
        mutated = tx.output.side_effects.mutated_sources
        require(not mutated or not any(move(each, moves) in mutated for each in self.traced))
        shared = frozenset(map(id, pairs.shared))
        if shared not in self.reached:
            self.reached[shared] = _reached(pairs.shared)
            self.kept.append(pairs.shared)  # what is known by its id must not go away
        known_to_all = self.reached[shared].union(thing for thing, _ in self.written)
        # Else the blocks themselves can be reached through what both share.
        require(pairs.parted().isdisjoint(known_to_all))
        for place, tensor in tensors.items():
            VariableBuilder(tx, place)(tensor)
        for guard in self.inside:
            tx.output.guards.add(_moved(guard, moves), collect_debug_stack=False)
        ordered = [move(source, moves) for source in tx.output.guard_on_key_order]
        tx.output.guard_on_key_order.update(ordered)


def move(source: Source, moves: dict[Source, Source]) -> Source:
    """The same source but for what has moved, here or further down; kept in `moves`."""
    moved = moves.get(source)
    if moved is None:
        held = [(name, getattr(source, name)) for name in _field_names(type(source))]  # type: ignore[arg-type]
        inner = {name: move(each, moves) for name, each in held if isinstance(each, Source)}
        same = all(inner[name] is each for name, each in held if name in inner)
        moved = moves[source] = source if same else replace(source, **inner)
    return moved


@functools.cache
def _field_names(kind: type[Source]) -> tuple[str, ...]:
    return tuple(each.name for each in fields(kind))


class Pairs:
    """Which object of one call stands for which of another."""

    def __init__(self) -> None:
        self.there: dict[object, object] = {}
        self.back: dict[object, object] = {}
        self.shared: list[Any] = []
        self.kept: list[Any] = []  # what is known by its id must not go away

    def match(self, old: object, new: object) -> None:
        """Let two keys stand for each other. Raises `Unlike` if one stands for a third."""
        require(self.there.setdefault(old, new) == new and self.back.setdefault(new, old) == old)

    def require_alike(self, old: Any, new: Any) -> None:
        """Raise `Unlike` if two things, or what is reached from them, can be told apart."""
        waiting = [(old, new)]
        while waiting:
            pair = a, b = waiting.pop()
            require(type(a) is type(b))
            if type(a) in PLAIN + PLAIN_OF_TORCH or isinstance(a, np.generic):
                require(repr(a) == repr(b))
                continue
            new_here = id(a) not in self.there
            self.match(id(a), id(b))
            if new_here and a is b:
                self.shared.append(a)
            elif new_here:
                self.kept.append(pair)
                self.shared.append(type(a))
                waiting += self._inside(a, b)

    def parted(self) -> set[object]:
        """What stands for something else in the other call."""
        return {key for old, new in self.there.items() if old != new for key in (old, new)}

    def _inside(self, a: Any, b: Any) -> list[tuple[Any, Any]]:
        """What two objects of one class hold, in pairs. Raises `Unlike`."""
        match a:
            case Tensor():
                return self._tensor(a, b)
            case nn.Module():
                require(list(vars(a)) == list(vars(b)))
                # Plain values may differ: those that were read are looked at.
                pairs = [(name, value, vars(b)[name]) for name, value in vars(a).items()]
                return [
                    (x, y) for n, x, y in pairs if n == "training" or {type(x), type(y)} - UNREAD
                ]
            case set() | frozenset():
                require(all(type(each) in PLAIN for each in [*a, *b]))
                require(sorted(map(repr, a)) == sorted(map(repr, b)))
                return []
        held, other = _held(a), _held(b)
        if held is None or other is None or len(held) != len(other):
            raise Unlike
        return list(zip(held, other, strict=True))

    def _tensor(self, a: Tensor, b: Tensor) -> list[tuple[Any, Any]]:
        require(_laid(a) == _laid(b))
        if is_traceable_wrapper_subclass(a):
            (names, about), (other_names, other) = a.__tensor_flatten__(), b.__tensor_flatten__()
            require(names == other_names and about == other)
            return [(getattr(a, name), getattr(b, name)) for name in names]
        self.match(_bytes(a), _bytes(b))
        return []


def _held(thing: Any) -> list[Any] | None:
    """All that makes an object what it is, but its class; None if that cannot be seen."""
    kind = type(thing)
    try:
        if kind is types.FunctionType:
            code = [id(thing.__code__), id(thing.__globals__), vars(thing)]
            cells = [cell.cell_contents for cell in thing.__closure__ or ()]
            return [*code, thing.__defaults__, thing.__kwdefaults__, *cells]
        if kind is types.MethodType:
            return [thing.__func__, thing.__self__]
        if kind in (list, tuple, deque):
            return list(thing)
        if kind in (dict, OrderedDict):
            return [*thing, *thing.values()]
        own = any(getattr(kind, name) != getattr(object, name) for name in STATE)
        if isinstance(thing, type) or (own and kind not in REDUCED):
            return None
        _, made_from, *state = thing.__reduce_ex__(2)
        return [*made_from, *(list(each) if isinstance(each, Iterator) else each for each in state)]
    except (TypeError, ValueError):  # something hidden, or a cell without contents
        return None


def _reached(things: Iterable[Any]) -> set[int]:
    """The ids of all that is reached from some things."""
    waiting, seen = list(things), dict[int, Any]()
    while waiting:
        thing = waiting.pop()
        if type(thing) in PLAIN or id(thing) in seen:
            continue
        seen[id(thing)] = thing  # what is known by its id must not go away
        waiting.append(type(thing))
        if isinstance(thing, type):  # what a class of the user's holds for all its instances
            theirs = [c for c in thing.__mro__ if c.__module__.partition(".")[0] not in NOT_THEIRS]
            held = [item for each in theirs for item in vars(each).items()]
            waiting += [value for name, value in held if not name.startswith("__")]
        elif isinstance(thing, nn.Module):
            waiting += vars(thing).values()
        elif not isinstance(thing, Tensor):
            waiting += thing if isinstance(thing, set | frozenset) else _held(thing) or ()
    return set(seen)


def _arguments(call: InputFingerprint) -> list[tuple[InputTag, Any, Source | None]]:
    return [
        (tag, vt.realize(), source)
        for (tag, vt), source in zip(call.flat_vts, call.arg_sources, strict=True)
    ]


def _require_argument(
    pairs: Pairs,
    first: tuple[InputTag, Any, Source | None],
    other: tuple[InputTag, Any, Source | None],
) -> None:
    """Raise `Unlike` unless two arguments are alike, and stand in the same places."""
    (tag, old, source), (new_tag, new, new_source) = first, other
    require(tag == new_tag and type(old) is type(new))
    if tag is InputTag.TENSOR:
        was, now = (vt.as_proxy().node.meta["example_value"] for vt in (old, new))
        same = _identity(old) == _identity(new)
        require(same or (_is_private(source) and _is_private(new_source)))
        require(old.python_type() is new.python_type() and _seen(was) == _seen(now))
        pairs.match(_identity(old), _identity(new))
        pairs.match(_bytes(was), _bytes(now))
    elif tag is not InputTag.SYMNODE:
        pairs.require_alike(old.value, new.value)


def _is_private(source: Source | None) -> bool:
    """Whether a block can get hold of a tensor only by being given it: no weight, no global."""
    if source is None:
        return True
    in_module = any(isinstance(each, NNModuleSource) for each in chain(source))
    return is_from_local_source(source) and not in_module


def _identity(vt: Any) -> int:
    """One number for one tensor, whether it is given from outside or made in the graph."""
    node = vt.as_proxy().node
    given = getattr(node.meta.get("grapharg"), "example", None)
    return id(given if isinstance(given, Tensor) else node)


def _laid(tensor: Tensor) -> object:
    strides = tensor.stride() if tensor.layout is torch.strided else ()
    kind = (tensor.dtype, tensor.device, tensor.requires_grad)
    return tensor.shape, strides, kind, _seen(tensor)


def _seen(tensor: Tensor) -> object:
    """What Dynamo does not compare of arguments."""
    offset = str(tensor.storage_offset()) if tensor.layout is torch.strided else ""
    flags = (tensor.is_leaf, tensor.is_conj(), tensor.is_neg(), tensor.is_inference())
    return offset, tensor.layout, flags


def _bytes(tensor: Tensor) -> object:
    dense = tensor.layout is torch.strided
    return ("bytes", tensor.untyped_storage()._cdata if dense else id(tensor))


def _modes(tx: Any) -> tuple[Any, ...]:
    return tuple(tx.symbolic_torch_function_state.mode_stack)


def _written(tx: Any) -> dict[tuple[int, str], str] | None:
    """Plain values written so far into attributes of things that existed before, by their ids.

    None if more was written: what is read from there is not to be seen from outside.
    """
    effects = tx.output.side_effects
    written: dict[tuple[int, str], str] = {}
    sources: set[Source] = set()
    for item, values in effects.store_attr_mutations.items():
        if isinstance(item.mutation_type, AttributeMutationNew):
            continue
        for name, value in values.items():
            if not hasattr(item, "value") or not item.source or not value.is_python_constant():
                return None
            sources.add(AttrSource(item.source, name))
            written[id(item.value), name] = repr(value.as_python_constant())
    return None if effects.tensor_hooks or set(effects.mutated_sources) - sources else written


def _known(guard: Guard) -> bool:
    """Whether a like block needs no such guard: its tensors have one, the class is the first's."""
    of_class = any(isinstance(each, TypeSource) for each in chain(guard.originating_source))
    return of_class or guard.create_fn_name() == "TENSOR_MATCH"


def _moved(guard: Guard, moves: dict[Source, Source]) -> Guard:
    """The guard on another block that this is on the first."""
    create: Any = guard.create_fn
    if guard.create_fn_name() == "DUPLICATE_INPUT":  # one thing in two places
        create = functools.partial(create.func, source_b=move(create.keywords["source_b"], moves))
    return Guard(move(guard.originating_source, moves), create, user_stack=guard.user_stack)


def chain(source: Source) -> Iterator[Source]:
    """A source, and what it is found in."""
    yield source
    while isinstance(source, ChainedSource):
        source = source.base
        yield source


def _scope(tx: Any) -> dict[str, Any]:
    return {"G": tx.output.root_tx.f_globals, "L": tx.output.root_tx.f_locals}


def _globals(tx: Any) -> Iterator[Source]:
    """The globals that were read so far, by any block: those of Python modules too."""
    scope, known = _scope(tx), dict[Source, Any]()
    for source in {guard.originating_source: None for guard in tx.output.guards}:
        links = list(chain(source))[::-1]
        if isinstance(links[0], GlobalSource):
            values = ((each, each.get_value(scope, {}, known)) for each in links)
            yield next((at for at, it in values if not isinstance(it, types.ModuleType)), source)


@contextlib.contextmanager
def ask_for_likeness() -> Iterator[None]:
    """Let Dynamo take a region for another only where the calls are alike."""
    build, reusable = invoke_subgraph.build_reuse_condition, invoke_subgraph.is_reusable
    same = higher_order_ops.are_same_graph_modules

    def likeness(tx: Any, first: InputFingerprint, traced: Any) -> Likeness | None:
        written = _written(tx)
        condition = None if written is None else build(tx, first, traced)
        if written is None or condition is None:
            return None
        roots = {each for each in first.arg_sources if each is not None}
        names = {each.name for each in roots if isinstance(each, NNModuleSource)}
        inside = [
            guard
            for guard in tx.output.guards
            if names & {each.name for each in chain(guard.originating_source)}
        ]
        twice = [guard for guard in inside if guard.create_fn_name() == "DUPLICATE_INPUT"]
        read = frozenset(traced).union(guard.originating_source for guard in inside)
        read = read.union(guard.create_fn.keywords["source_b"] for guard in twice)
        read = read.union(_globals(tx))
        # What Dynamo would ask of guards and sources is asked for here, and faster.
        return Likeness(
            **{**vars(condition), "guards": [], "traced_sources": type(traced)()},
            first=first,
            traced=tuple(traced),
            read=read - {each for each in roots if is_from_local_source(each)},
            inside=tuple(each for each in inside if not _known(each)),
            modes=_modes(tx),
            written=written,
        )

    def is_alike(tx: Any, condition: Any, other: InputFingerprint, entry: Any) -> bool:
        if not reusable(tx, condition, other, entry):
            return False
        with contextlib.suppress(Unlike):
            if isinstance(condition, Likeness):
                condition.guard(tx, other)
            return True
        return False

    def are_same(name: str, a: fx.GraphModule, b: fx.GraphModule, fake_mode: Any) -> bool:
        return same(name, a, b, fake_mode) and _text(a) == _text(b)

    with (
        patch.object(invoke_subgraph, "build_reuse_condition", likeness),
        patch.object(invoke_subgraph, "is_reusable", is_alike),
        patch.object(higher_order_ops, "are_same_graph_modules", are_same),
    ):
        yield


def _text(gm: fx.GraphModule) -> list[str]:
    """What a graph computes and how it is marked; `1`, `True` and `1.0` are told apart."""
    numbers = {node: ("node", number) for number, node in enumerate(gm.graph.nodes)}
    return [
        f"{fx.map_arg((node.args, node.kwargs), numbers.__getitem__)} {node.meta.get('custom')} "
        f"{getattr(node.meta.get('example_value'), 'dtype', None)}"
        for node in gm.graph.nodes
    ]

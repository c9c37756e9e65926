"""The `Blocks` of a model: repeated modules, traced once, however often they are called.

    model.layers[0..63]  --wrap-->  Dynamo traces layer 0, and finds the others alike
                         --adopt-> each call has its own weights

Dynamo's nested regions do the tracing: while it traces, the class of a block has a `forward` that
asks for a region. Afterwards the class is what it was. (A region asked for by one instance, through
`layer.forward = ...`, would hand the weights of the first layer to all others.) Which layers are
alike is asked more strictly than Dynamo does, and those that are get the guards of the first, so
that a change in any layer is noticed as ever (`likeness`).

`inline` then puts what a block calls in the place of each call: ops of equal structure share one
body. What a block does behind its last collective joins what the next one does before its first: an
op of its own at the border would wait for all parts. Where nobody waits for other ranks, or for a
disk, ops end at the borders of blocks: else a stack would be a single op, and no two layers alike.

    block0 = [head, all_reduce, tail]      ->      head  all_reduce  tail head  all_reduce  tail
    block1 = [head, all_reduce, tail]                                ^^^^^^^^^ one op

Whatever does not fit raises `BlockError`; the model is then traced as if there were no blocks.
"""

from __future__ import annotations

import contextlib
import logging
import re
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

from torchweft.capture.blocks.likeness import BlockError, ask_for_likeness, chain, move
from torchweft.capture.marks import MarkRule, marks_of
from torchweft.capture.ops.units import BLOCK, is_collective
from torchweft.capture.rows.axes import SYMBOLIC, AtenCall
from torchweft.capture.rows.rows import AGAIN, BYTES, CallRows, Rows, id_of, is_getitem
from torchweft.private.core import FakeTensor, no_dispatch, tree_leaves, tree_map
from torchweft.private.dynamo import (
    Guard,
    GuardsSet,
    InstructionTranslator,
    Source,
    TorchDynamoException,
    TracingContext,
    invoke_subgraph_placeholder,
)

log = logging.getLogger("torchweft")
MIN_BLOCKS = 2
MAX_TEXT = 300
MODULE = re.compile(r"_modules\['([^']+)'\]")
INVOKE = torch.ops.higher_order.invoke_subgraph
CALLS = "weft_inlined"  # of a graph: its inlined calls, those of one block together
SLOW = ("network", "io")


class Blocks:
    """The repeated modules of one model."""

    def __init__(self, model: nn.Module, rules: Sequence[MarkRule] = ()) -> None:
        self.model, self.rules = model, tuple(rules)
        self.refused = self.skipped = ""
        self._tried = False
        self._plain: dict[type, types.FunctionType] = {}
        self._asked = contextlib.ExitStack()

    def wrap(self, *, at_start: bool) -> None:
        """Let Dynamo trace each repeated module as a region, until `unwrap`.

        at_start: whether nothing of the call has run yet, so that it can be begun again.
        """
        owners = [] if self.refused else find_blocks(self.model, self.rules)
        learns = any(each.requires_grad for each in self.model.parameters())
        wanted = bool(owners) and torch.is_grad_enabled() and learns
        self.skipped = "block: gradients are wanted." if wanted else ""
        self._tried = at_start and not self.refused and not self.skipped
        if self._tried and not self._plain:
            for owner in owners:
                self._plain[owner] = vars(owner)["forward"]
                owner.forward = _region(self._plain[owner])  # type: ignore[attr-defined]
            self._asked.enter_context(ask_for_likeness())

    def unwrap(self) -> None:
        """Give every class its own `forward` back."""
        self._asked.close()
        while self._plain:
            owner, forward = self._plain.popitem()
            owner.forward = forward  # type: ignore[attr-defined]

    def refuse(self, error: TorchDynamoException) -> bool:
        """Whether Dynamo failed because of the blocks, perhaps: from now on there are none."""
        tried, self._tried = self._tried, False
        if tried:
            inner = getattr(error, "inner_exception", error)
            self.refused = " ".join(str(inner).split())[:MAX_TEXT]
            log.info("captured without blocks: %s", self.refused)
        return tried

    def adopt(self, gm: fx.GraphModule, example_inputs: Sequence[Any]) -> bool:
        """Take what Dynamo traced, and see that each block has its own weights.

        Tells whether there are blocks. Raises `BlockError` if one would run with the weights of
        another.
        """
        if not self._plain:
            return False
        guards = TracingContext.get().guards_context.dynamo_guards
        _forget_wrappers(guards, self._is_wrapper)
        placeholders = [node for node in gm.graph.nodes if node.op == "placeholder"]
        self._require_found_again(placeholders)
        self.unwrap()
        given = {
            node: tensor
            for node, tensor in zip(placeholders, example_inputs, strict=True)
            if isinstance(tensor, Tensor)
        }
        modules = {id(module): module for module in self.model.modules()}
        first: dict[str, dict[int, str]] = {}
        nodes = gm.graph.find_nodes(op="call_function", target=INVOKE)
        for node in nodes:
            stack = list(node.meta.get("nn_module_stack") or {})
            module = modules.get(int(stack[-1].partition("@")[0])) if stack else None
            if module is None:
                raise BlockError(f"block: nobody knows which module {node.name} calls.")
            text = f"{type(module).__name__} in {node.name}"
            names = _weights(node, module, given)
            if not names:
                raise BlockError(f"block: {text} uses no weight of its own.")
            if first.setdefault(str(node.args[1]), names) != names:
                raise BlockError(f"block: {text} was given weights that are not its own.")
        return bool(nodes)

    def _require_found_again(self, placeholders: Sequence[fx.Node]) -> None:
        """Raise if a call would look behind a wrapper, which is gone by then, for what it needs."""
        effects = InstructionTranslator.current_tx().output.side_effects
        sources = [
            *(node.meta["grapharg"].source for node in placeholders if "grapharg" in node.meta),
            *(item.source for item in effects.id_to_variable.values() if effects.is_modified(item)),
        ]
        for source in sources:
            if source is not None and _behind(source, self._is_wrapper):
                raise BlockError(f"block: its forward holds what it reads or writes: {source.name}")

    def _is_wrapper(self, source: Source) -> bool:
        """Whether what Dynamo found there is a `forward` of ours, and not the user's own."""
        path = MODULE.findall(source.name)
        if not source.name.endswith("['forward']") or not path:
            return False
        kinds = type(self.model.get_submodule(".".join(path))).__mro__
        return next(kind for kind in kinds if "forward" in vars(kind)) in self._plain


def _weights(node: fx.Node, module: nn.Module, given: Mapping[fx.Node, Tensor]) -> dict[int, str]:
    """The names of the module's own tensors that a call is given, by their places."""
    own = {id(tensor): name for name, tensor in _tensors(module)}
    used = [(n, arg) for n, arg in enumerate(node.args) if isinstance(arg, fx.Node)]
    operands = [(n, id(given[arg])) for n, arg in used if arg in given]
    return {n: own[number] for n, number in operands if number in own}


def find_blocks(model: nn.Module, rules: Sequence[MarkRule] = ()) -> list[type]:
    """The classes of repeated modules: children of a list or a sequence, alike in their weights.

    Of blocks within blocks, the outer ones. A class whose blocks are not all marked alike is none.
    """
    children: dict[type, dict[object, list[nn.Module]]] = {}
    for holder in model.modules():
        if isinstance(holder, nn.ModuleList | nn.Sequential):
            for child in holder:
                if _owner(child) is not None:
                    alike = children.setdefault(type(child), {})
                    kinds = [(name, each.shape, each.dtype) for name, each in _tensors(child)]
                    alike.setdefault((id(holder), tuple(kinds)), []).append(child)
    repeated = {
        kind: [block for group in alike.values() for block in group]
        for kind, alike in children.items()
        if any(len(group) >= MIN_BLOCKS for group in alike.values())
    }
    outer = [block for blocks in repeated.values() for block in blocks]
    inside = {id(part) for block in outer for part in block.modules() if part is not block}
    paths = {id(module): path for path, module in model.named_modules()}
    owners = [
        _owner(blocks[0])
        for blocks in repeated.values()
        if not any(id(block) in inside for block in blocks)
        and len({_marked(block, paths[id(block)], rules) for block in blocks}) == 1
    ]
    return list(dict.fromkeys(owner for owner in owners if owner is not None))


def _owner(module: nn.Module) -> type | None:
    """The class that has a block's `forward`; None if this module can be no block."""
    if type(module).__module__.partition(".")[0] == "torch" or "forward" in vars(module):
        return None
    if not any(True for _ in module.parameters()):
        return None
    owner = next(kind for kind in type(module).__mro__ if "forward" in vars(kind))
    plain = isinstance(vars(owner)["forward"], types.FunctionType)
    mine = owner.__module__.partition(".")[0] != "torch"
    return owner if plain and mine else None


def _tensors(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from module.named_parameters(remove_duplicate=False)
    yield from module.named_buffers(remove_duplicate=False)


def _marked(block: nn.Module, path: str, rules: Sequence[MarkRule]) -> frozenset[object]:
    """Which modules inside a block are marked by rules that tell one instance from another."""
    return frozenset(
        (number, inner)
        for number, rule in enumerate(rules)
        for inner, module in block.named_modules()
        if module is rule.wanted
        or (rule.form == "path" and rule.wanted.fullmatch(f"{path}.{inner}".rstrip(".")))
    )


def _region(forward: Callable[..., Any]) -> Callable[..., Any]:
    def region(*args: Any, **kwargs: Any) -> Any:
        return invoke_subgraph_placeholder(forward, *args, **kwargs)  # type: ignore[no-untyped-call]

    return region


def _forget_wrappers(guards: GuardsSet, is_wrapper: Callable[[Source], bool]) -> None:
    """Let guards on what a wrapper holds be guards on the `forward` that it stood for."""
    traced = list(guards)
    guards.clear()
    for guard in traced:
        if moved := _behind(guard.originating_source, is_wrapper):
            source = move(guard.originating_source, dict([moved]))
            guard = Guard(source, guard.create_fn, user_stack=guard.user_stack)
        guards.add(guard, collect_debug_stack=False)


def _behind(source: Source, is_wrapper: Callable[[Source], bool]) -> tuple[Source, Source] | None:
    """The `forward` that a wrapper holds, and the wrapper, if a source is found in there."""
    links = list(chain(source))
    for held, wrapper in zip(links, links[3:], strict=False):
        is_cell = held.name == f"{wrapper.name}.__closure__[0].cell_contents"
        if is_cell and is_wrapper(wrapper):
            return held, wrapper
    return None


@dataclass(frozen=True)
class InlinedCall:
    """One inlined call of a block: what it was given, and its nodes in the block's own order."""

    operands: tuple[Any, ...]
    nodes: tuple[fx.Node, ...]


def inline(gm: fx.GraphModule, rules: Sequence[MarkRule] = ()) -> None:
    """Put what blocks call into the graph itself, with a note where ops end at their borders.

    Raises `BlockError` for a block that is marked otherwise than the first of its kind.
    """
    first: dict[str, fx.Node] = {}
    inlined: dict[str, list[InlinedCall]] = {}
    calls = gm.graph.find_nodes(op="call_function", target=INVOKE)
    open_borders = _near_slow(gm, calls, rules)
    for call in calls:
        name = _name(call)
        if first.setdefault(name, call) is call:
            for node in reversed(_code(gm, call).graph.nodes):  # sizes that nobody uses
                if not node.users and (is_getitem(node) or node.target == "size"):
                    node.graph.erase_node(node)
        elif call.meta.get("custom") != first[name].meta.get("custom"):
            raise BlockError(f"block: {call} is marked otherwise than {first[name]}.")
        one = _inline(gm, call, first[name])
        inlined.setdefault(name, []).append(one)
        for node in one.nodes if call not in open_borders else ():
            node.meta[BLOCK] = call.name
    gm.meta[CALLS] = list(inlined.values())
    gm.graph.lint()
    gm.recompile()


def _near_slow(
    gm: fx.GraphModule, calls: Sequence[fx.Node], rules: Sequence[MarkRule]
) -> set[fx.Node]:
    """The calls of blocks that are slow, or that nothing but something slow parts from another."""
    code = {_name(call): _code(gm, call) for call in calls}
    slow = {name for name in code if _slow(code[name].graph, rules)}
    chosen = {call for call in calls if _name(call) in slow}
    outside = _slow(gm.graph, rules)
    last: list[fx.Node] = []
    waits = False
    for node in gm.graph.nodes:
        if node in outside:
            waits = True
        elif node in calls or node.op == "output":
            chosen.update([*last, node] if waits else [])
            last, waits = [node], False
    return chosen


def _slow(graph: fx.Graph, rules: Sequence[MarkRule]) -> set[fx.Node]:
    """Calls that talk to other ranks, or that lean on the network or a disk as a mark says."""
    marks, _ = marks_of(graph, rules)
    talks = {node for node in graph.nodes if is_collective(node)}
    marked = {node for node, (mark, _) in marks.items() if mark.uses in SLOW}
    return {node for node in talks | marked if node.target is not INVOKE}


def _inline(gm: fx.GraphModule, call: fx.Node, first: fx.Node) -> InlinedCall:
    """Put what a block calls in the place of its call."""
    operands, inner = call.args[2:], list(_code(gm, call).graph.nodes)
    placeholders = [node for node in inner if node.op == "placeholder"]
    known: dict[fx.Node, Any] = dict(zip(placeholders, operands, strict=True))
    with gm.graph.inserting_before(call):
        for node in inner[len(placeholders) : -1]:
            known[node] = gm.graph.node_copy(node, known.__getitem__)
            if node.op in ("get_attr", "call_module"):
                known[node].target = f"{_name(call)}.{node.target}"
            known[node].meta["nn_module_stack"] = _stack(node, call, first)
            if call is not first:
                known[node].meta[AGAIN] = True
    made: Any = fx.map_arg(inner[-1].args[0], known.__getitem__)
    for taker in list(call.users):
        if not is_getitem(taker):
            raise BlockError(f"block: what {call} makes is handed on as a whole.")
        taker.replace_all_uses_with(made[taker.args[1]])
        gm.graph.erase_node(taker)
    gm.graph.erase_node(call)
    return InlinedCall(operands, tuple(known[node] for node in inner[len(placeholders) : -1]))


def _stack(node: fx.Node, call: fx.Node, first: fx.Node) -> dict[str, Any]:
    """The modules that a node of a block is called by, as part of the block that is called."""
    above, here = (each.meta["nn_module_stack"] for each in (first, call))
    (old, _), (path, _) = (list(stack.values())[-1] for stack in (above, here))
    inside = {k: v for k, v in node.meta.get("nn_module_stack", {}).items() if k not in above}
    moved = {f"{k}@{call}": (p.replace(old, path, 1), kind) for k, (p, kind) in inside.items()}
    return {**here, **moved}


def _name(call: fx.Node) -> str:
    return str(getattr(call.args[0], "target", ""))


def _code(gm: fx.GraphModule, call: fx.Node) -> fx.GraphModule:
    code = gm.get_submodule(_name(call))
    assert isinstance(code, fx.GraphModule), "a region is a graph"
    return code


class Twins:
    """The inlined calls of a graph, those of one block together.

    The first is looked at call by call, on fake tensors (`rows`): about a millisecond each. Another
    whose operands lie alike has the same kinds, axes and sizes, and tensors of its own. A twin's
    bytes are a number only, but what the rest of the graph uses has bytes which torch knows of.
    """

    def __init__(self, inlined: Sequence[Sequence[InlinedCall]]) -> None:
        worked = [calls for calls in inlined if calls[0].nodes]
        self.pairs = {each.nodes[0]: (calls[0], each) for calls in worked for each in calls[1:]}
        self.plain: dict[fx.Node, bool] = {}

    def __call__(self, node: fx.Node, rows: Rows) -> bool:
        """Whether an inlined call that starts here is like the first; then all of it is known."""
        if node not in self.pairs:
            return False
        first, other = self.pairs[node]
        start, twin = first.nodes[0], _Twin(rows)
        if start not in self.plain:  # else each call of the block has symbols of its own
            leaves = tree_leaves([rows.value(node) for node in first.nodes])
            sizes = [leaf for leaf in leaves if isinstance(leaf, (Tensor, *SYMBOLIC))]
            self.plain[start] = not any(map(free_unbacked_symbols, sizes))
        if not self.plain[start] or not twin.match(first, other):
            return False
        for old, new in zip(first.nodes, other.nodes, strict=True):
            rows.calls[new] = twin.call(rows.calls[old], new)
        return True


class _Twin:
    """Tensors of one inlined call, and numbers of bytes, by those of the first."""

    def __init__(self, rows: Rows) -> None:
        self.rows = rows
        self.tensors: dict[int, Tensor] = {}
        self.bytes: dict[int, int] = {}

    def match(self, first: InlinedCall, other: InlinedCall) -> bool:
        """Whether two calls are given alike operands, and what they hand out can be told apart."""
        for old, new in self._given(first, other):
            if self.rows.symbols.laid(old) != self.rows.symbols.laid(new):
                return False
            if isinstance(old, Tensor):
                if self.rows.axis(old) != self.rows.axis(new):
                    return False
                if self.bytes.setdefault(id_of(old), id_of(new)) != id_of(new):
                    return False  # two share bytes there, and not here
                self.tensors[id(old)] = new
        if len(set(self.bytes.values())) < len(self.bytes):
            return False  # two share bytes here, and not there
        return all(map(self._make, self._shown(first, other)))

    def call(self, old: CallRows, node: fx.Node) -> CallRows:
        return replace(
            old,
            node=node,
            value=tree_map(self._tensor, old.value),
            written=[self._tensor(each) for each in old.written],
            twins=cache(partial(self._atens, old)),
        )

    def _given(self, first: InlinedCall, other: InlinedCall) -> Iterator[tuple[Any, Any]]:
        """Pairs of operands, and each constant of the block with itself."""
        for pair in zip(first.operands, other.operands, strict=True):
            yield tuple(self.rows.value(n) if isinstance(n, fx.Node) else n for n in pair)
        for node in first.nodes:
            if node.op == "get_attr":
                yield self.rows.value(node), self.rows.value(node)

    def _shown(self, first: InlinedCall, other: InlinedCall) -> list[Tensor]:
        """The tensors of the first call whose like is used by other nodes of the graph."""
        inside, pairs = set(other.nodes), zip(first.nodes, other.nodes, strict=True)
        nodes = [old for old, new in pairs if not inside.issuperset(new.users)]
        leaves = tree_leaves([self.rows.value(node) for node in nodes])
        return list({id(leaf): leaf for leaf in leaves if isinstance(leaf, Tensor)}.values())

    def _make(self, old: Tensor) -> bool:
        """Make a tensor with bytes that nobody else shows; whether that is what it should be."""
        if id(old) not in self.tensors:
            if id_of(old) in self.bytes:
                return False
            options: Any = {"dtype": old.dtype, "device": old.device}
            self._keep(old, torch.empty_strided(old.shape, old.stride(), **options))
        return True

    def _tensor(self, old: Any) -> Any:
        if not isinstance(old, Tensor):
            return old
        if id(old) not in self.tensors:
            assert isinstance(old, FakeTensor), "calls are looked at on fake tensors"
            with no_dispatch():
                new = FakeTensor(old.fake_mode, Tensor.detach(old), old.device)
            setattr(new, BYTES, self.bytes.get(id_of(old), -id(new)))
            self._keep(old, new)
        return self.tensors[id(old)]

    def _keep(self, old: Tensor, new: Tensor) -> None:
        self.tensors[id(old)] = new
        self.bytes[id_of(old)] = id_of(new)
        if (axis := self.rows.axis(old)) is not None:
            self.rows.axes[new] = axis

    def _atens(self, old: CallRows) -> list[AtenCall]:
        return [
            replace(
                aten,
                given=tree_map(self._tensor, aten.given),
                args=tree_map(self._tensor, dict(aten.args)),
                results=[self._tensor(each) for each in aten.results],
            )
            for aten in old.atens
        ]

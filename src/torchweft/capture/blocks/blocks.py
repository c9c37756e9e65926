"""The `Blocks` of a model: repeated modules, traced once, however often they are called.

    model.layers[0..63]  --wrap-->  Dynamo traces layer 0, and finds the others alike
                         --adopt-> each call has its own weights

Dynamo's nested regions do the tracing: while it traces, the class of a block has a `forward` that
asks for a region. Afterwards the class is what it was. (A region asked for by one instance, through
`layer.forward = ...`, would hand the weights of the first layer to all others.) Which layers are
alike is asked more strictly than Dynamo does, and those that are get the guards of the first, so
that a change in any layer is noticed as ever (`likeness`).

Whatever does not fit raises `BlockError`; the model is then traced as if there were no blocks.
"""

from __future__ import annotations

import contextlib
import logging
import re
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx, nn

from torchweft.capture.blocks.likeness import ask_for_likeness, chain, move
from torchweft.capture.marks import MarkRule
from torchweft.errors import WeftError
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


class BlockError(WeftError):
    """A model that cannot be captured block by block; it is captured whole instead."""


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

"""The `Capture` of a model: a graph, a body for each op, and how calls bind to it.

    def backend(gm, example_inputs):          # what Dynamo calls
        captured = capture(gm, example_inputs)
        ...

    inputs --bind--> values, env --ops in program order--> values --rebuild--> outputs

`env` gives each symbol its number at this call; `graph.batch` is the one that a split cuts.

`probe` tries ops that no rule vouches for on real rows: what an op makes of x[:1], x[1:4], x[4:]
and of permuted rows must be those rows of what it makes of x. One that passes is row-wise as far as
anybody saw (`Capture.assumed`). That is no proof (it may mix rows once a number is large), so only
strict=False has ops tried: marked ops and custom operators, on the values of one real call; never
one that writes, draws random numbers or talks to other ranks.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, cached_property, partial
from itertools import pairwise
from operator import attrgetter, itemgetter
from typing import Any

import torch
from torch import fx

from torchweft.capture.blocks.blocks import inline
from torchweft.capture.bodies.bodies import Body
from torchweft.capture.failures import break_of
from torchweft.capture.guards import SymbolSlot, symbol_slots
from torchweft.capture.marks import MarkRule, target_name
from torchweft.capture.offload import LOADS, add_loads
from torchweft.capture.ops.assembly import RNG, Assembly, assemble, value_name
from torchweft.capture.ops.collectives import drop_buffers
from torchweft.capture.ops.units import source_of
from torchweft.capture.rewrites.decompose import ALIKE
from torchweft.capture.rewrites.kinds import KINDS
from torchweft.capture.rewrites.rewriting import Rewritten, rewrite
from torchweft.capture.rows.axes import SYMBOLIC, Symbols, rows_at, size_of
from torchweft.capture.rows.rows import Rows
from torchweft.capture.splitters import STATE
from torchweft.errors import CaptureError, SizeError, unknown
from torchweft.plan.deals import Alike
from torchweft.plan.graph import Graph, Op
from torchweft.plan.rewrite import Rewrite
from torchweft.plan.sizes import ONE, Size
from torchweft.private.core import is_traceable_wrapper_subclass

MARKED = "_dynamo_propagated_dynamic_indices"
GOOD_SHARE = 0.9  # of calls in such ops: no other symbol is tried
MIN_ROWS = 4  # to try an op on
TOLERANCE = 1e-4
CURE = "(if it is row-wise, weft.row_wise or rows='row-wise' says so; strict=False tries it)"


@dataclass(frozen=True)
class Capture:
    """A graph with everything that is needed to run it."""

    graph: Graph
    bodies: Mapping[str, Body]
    reasons: Mapping[str, str]
    num_calls: Mapping[str, int]
    slots: Mapping[str, int]
    constants: Mapping[str, torch.Tensor]
    symbols: tuple[SymbolSlot, ...]
    num_inputs: int
    outputs: tuple[Slot, ...]
    same: tuple[str, ...] = ()
    matched: frozenset[MarkRule] = field(default=frozenset())
    assumed: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    broken: str = ""
    unplaced: Mapping[str, str] = field(default_factory=dict)
    unbatched: str = ""
    saved: frozenset[str] = frozenset()  # outputs that nobody but the backward graph gets
    lone: str = ""  # why no part may have a single row
    rewritten: Rewritten = field(default_factory=Rewritten)
    alike: tuple[Alike, ...] = ()  # what its ranks must be given alike
    anew: Callable[[Sequence[Rewrite]], Capture] | None = None  # with more rewrites

    def bind(self, inputs: Sequence[Any]) -> tuple[dict[str, Any], dict[str, int]]:
        """Values by name and numbers by symbol, from the inputs of one call."""
        given = self.pick((*inputs, *self.constants.values(), None))
        return dict(zip(self.graph.inputs, given, strict=True)), self.env(inputs)

    @cached_property
    def pick(self) -> Callable[[tuple[Any, ...]], tuple[Any, ...]]:
        """The graph's inputs in their order, from those of a call, the constants, and what stands
        for the rest: None, or the `Switch` of a call that is cut."""
        behind = {name: number for number, name in enumerate(self.constants, self.num_inputs)}
        last = self.num_inputs + len(self.constants)
        return getter([self.slots.get(n, behind.get(n, last)) for n in self.graph.inputs])

    @cached_property
    def sizes_of(self) -> Callable[[tuple[Any, ...]], object]:
        """What tells calls of unlike sizes apart, from the inputs of one."""
        plain = [slot.argument for slot in self.symbols if slot.dim is None]
        if not self.symbols:
            return lambda inputs: None
        if len(plain) == len(self.symbols):
            return itemgetter(*plain)
        return lambda inputs: tuple(self.env(inputs).values())

    def env(self, inputs: Sequence[Any]) -> dict[str, int]:
        """Numbers by symbol, from the inputs of one call."""
        return {slot.symbol: slot.number(inputs) for slot in self.symbols}

    @cached_property
    def gives_as_made(self) -> bool:
        """Whether the outputs of a call are the graph's outputs, in their order and no more."""
        return not self._handed_on and self.outputs == tuple(
            Slot(value=name) for name in self.graph.outputs
        )

    def rebuild(self, values: Mapping[str, Any], env: Mapping[str, int]) -> tuple[Any, ...]:
        """The outputs as Dynamo wants them: tensors, numbers, None.

        Behind a graph break the outputs are inputs of the next graph: its batch shall have a
        symbol too, so they say where it is.
        """
        for name, dim in self._handed_on:
            tensor = values[name]
            if isinstance(tensor, torch.Tensor) and tensor.shape[dim] > 1:
                mark_batch(tensor, dim)
        return tuple(slot.take(values, env) for slot in self.outputs)

    @cached_property
    def _handed_on(self) -> tuple[tuple[str, int], ...]:
        """Outputs in which a dim is the batch and nothing else, with that dim."""
        if not self.broken:
            return ()
        places = [(name, self.graph.value[name].batch) for name in self.graph.outputs]
        plain = [(name, at) for name, at in places if at and at.outer == at.inner == ONE]
        return tuple((name, at.dim) for name, at in plain)

    def splits(self, env: Mapping[str, int]) -> bool:
        """Whether the symbols that were taken for one batch are equal in this call."""
        batch = self.graph.batch
        return batch is not None and all(
            env.get(name, env[batch]) == env[batch] for name in self.same
        )


@dataclass(frozen=True)
class Slot:
    """One leaf of the outputs: a value, a size, or a constant."""

    value: str | None = None
    size: Size | None = None
    constant: Any = None

    def take(self, values: Mapping[str, Any], env: Mapping[str, int]) -> Any:
        if self.value is not None:
            return values[self.value]
        return self.constant if self.size is None else self.size.evaluate(env)


def getter(slots: Sequence[int]) -> Callable[[Sequence[Any]], tuple[Any, ...]]:
    """The function that takes some items of a sequence, as a tuple."""
    if len(slots) > 1:
        return itemgetter(*slots)
    return lambda items: tuple(items[slot] for slot in slots)


def mark_batch(tensor: torch.Tensor, dim: int) -> None:
    """Ask Dynamo for a symbol where the batch is, without a guard on having asked.

    `maybe_mark_dynamic` is guarded: whoever else compiles with this tensor would compile anew.
    """
    setattr(tensor, MARKED, {*getattr(tensor, MARKED, ()), dim})


def capture(
    gm: fx.GraphModule,
    example_inputs: Sequence[Any] = (),
    *,
    rules: Sequence[MarkRule] = (),
    batch: int | str | Sequence[str] | None = None,
    name: str = "graph",
    blocks: bool = False,
    from_disk: bool = False,
    **known: Any,
) -> Capture:
    """Turn Dynamo's graph into ours.

    `batch` says what a split cuts: a dim of the inputs, the name of a symbol, or several names
    that are one. By default the dims that the user marked dynamic, else dim 0. With `blocks`
    a region of the graph gives way to what it calls, else each call of it stays whole. With
    `from_disk` ops bring in weights that are on disk. `known` are more options of `assemble`.

    Raises `CaptureError` for a graph that cannot be cut into ops, naming call and source line.
    """
    _refuse_subclasses(gm)
    for part in gm.modules():
        if isinstance(part, fx.GraphModule):
            drop_buffers(part)
    if blocks:
        inline(gm, rules)
    if from_disk and add_loads(gm, example_inputs):
        rules = (*LOADS, *rules)
    tried = candidates(gm, example_inputs, batch)
    captured, _ = analyse(gm, tried, rules=rules, name=name, **known)
    return replace(captured, broken=break_of(gm))


def analyse(
    gm: fx.GraphModule,
    tried: Sequence[Symbols],
    *,
    name: str = "graph",
    rewrites: Sequence[Rewrite] = (),
    **known: Any,
) -> tuple[Capture, Rows]:
    """Cut a graph by the best of several symbols for the batch; what was found of its rows.

    rewrites: what is changed of the graph first. known: the options of `assemble`.
    """
    anew = cache(partial(_anew, gm, tried, name=name, rewrites=tuple(rewrites), known=known))
    look, rewritten = partial(_best, tried=tried, known=known), Rewritten()
    if rewrites:
        gm, rewritten = rewrite(gm, rewrites, lambda graph: look(graph)[0], KINDS)
    built, matched = look(gm)
    captured = _captured(built, matched, name)
    return replace(captured, rewritten=rewritten, anew=anew), built.rows


def _anew(
    gm: fx.GraphModule,
    tried: Sequence[Symbols],
    more: Sequence[Rewrite],
    *,
    name: str,
    rewrites: Sequence[Rewrite],
    known: Mapping[str, Any],
) -> Capture:
    """The same graph with more rewrites."""
    return analyse(gm, tried, name=name, rewrites=(*rewrites, *more), **known)[0]


def _best(
    gm: fx.GraphModule, tried: Sequence[Symbols], known: Mapping[str, Any]
) -> tuple[Assembly, frozenset[MarkRule]]:
    """A graph cut by the symbol by which most calls are in ops that run in parts."""
    tries: list[tuple[float, Assembly, frozenset[MarkRule]]] = []
    for symbols in tried:
        built, matched = assemble(gm, symbols, **known)
        apart = [op.name for op in built.ops if op.rows in ("row-wise", "additive")]
        inside = sum(built.num_calls[op] for op in apart)  # ops whose parts can run one by one
        tries.append((inside / max(1, sum(built.num_calls.values())), built, matched))
        if tries[-1][0] >= GOOD_SHARE:
            break
    return max(tries, key=itemgetter(0))[1:]


def _refuse_subclasses(gm: fx.GraphModule) -> None:
    """Raise for tensor subclasses: what they do (DTensor: collectives) is not in this graph."""
    for node in gm.graph.nodes:
        value = node.meta.get("example_value")
        if isinstance(value, torch.Tensor) and is_traceable_wrapper_subclass(value):
            kind, source = type(value).__name__, source_of(node)
            raise CaptureError(
                f"subclass: {node.name!r} is a {kind}, whose work cannot be seen at the torch level"
                + (f", at {source}." if source else "."),
                rule="subclass",
                source=source,
            )


def candidates(
    gm: fx.GraphModule, example_inputs: Sequence[Any], batch: int | str | Sequence[str] | None
) -> list[Symbols]:
    """The symbols that may be the batch: those asked for, else the commonest sizes of its dim.

    Where no input has it there, as behind a graph break: where `mark_batch` saw it.
    """
    counts: Counter[Any] = Counter()
    marked: Counter[Any] = Counter()
    carried: Counter[Any] = Counter()
    hints: dict[Any, Any] = {}
    known: dict[str, Any] = {}
    wanted = batch if isinstance(batch, int) else 0
    for number, dim, size in symbolic_sizes(gm):
        expr = size.node.expr
        known.update({str(symbol): symbol for symbol in expr.free_symbols})
        if dim is not None and expr.is_symbol:
            given = example_inputs[number] if number < len(example_inputs) else None
            hints[expr] = size.node.hint
            counts[expr] += dim == wanted
            marked[expr] += dim in getattr(given, "_dynamo_dynamic_indices", ())
            carried[expr] += dim in getattr(given, MARKED, ())
    if batch is not None and not isinstance(batch, int):
        names = [batch] if isinstance(batch, str) else list(batch)
        for name in names:
            if name not in known:
                raise CaptureError(f"batch: {unknown('symbol', name, known)}", rule="batch")
        first, *others = [known[name] for name in names]
        return [Symbols(first, frozenset(others))]
    counts = +marked if batch is None and +marked else +counts or +carried
    return _likely(counts, hints) or _received(gm) or [Symbols()]


def _received(gm: fx.GraphModule) -> list[Symbols]:
    """The rows of what is received, in a graph that is given nothing else that has any."""
    messages = (node for node in gm.graph.nodes if "irecv" in target_name(node))
    shapes = [node.meta["example_value"].shape for node in messages]
    sizes = [shape[0].node.expr for shape in shapes if shape and isinstance(shape[0], torch.SymInt)]
    return [Symbols(expr) for expr in dict.fromkeys(sizes) if expr.is_symbol]


def _likely(counts: Counter[Any], hints: Mapping[Any, Any]) -> list[Symbols]:
    """Symbols to try, the likeliest first.

    Inputs that never meet have a symbol each although they are one batch (texts and pictures, a
    mask and its tokens). They are tried as one where they are equal in the example, and kept as
    one if more calls are row-wise then; `Capture.splits` asks at each call if they are equal.
    """
    most = max(counts.values(), default=0)
    common = [symbol for symbol, count in counts.items() if count == most][:4]
    likely = [Symbols(symbol) for symbol in common]
    same = [symbol for symbol in counts if hints[symbol] == hints[common[0]] is not None]
    if len(same) > 1:
        likely.insert(0, Symbols(common[0], frozenset(same) - {common[0]}))
    return likely


def _captured(built: Assembly, matched: frozenset[MarkRule], name: str) -> Capture:
    placeholders = built.gm.graph.find_nodes(op="placeholder")
    slot_of = {node: number for number, node in enumerate(placeholders)}
    given = built.inputs.items()
    held = {n: str(node.target) for n, node in given if node.op == "get_attr"}
    batch = built.rows.symbols.batch
    beside = (name for name in built.values if name == RNG or name.startswith(STATE))
    outputs, named = _outputs(built)
    sizes = []
    for number, dim, size in symbolic_sizes(built.gm):
        with contextlib.suppress(SizeError):  # no polynomial tells a symbol
            sizes.append((number, dim, size_of(size.node.expr)))
    graph = Graph(
        name=name,
        values=tuple(built.values.values()),
        ops=tuple(built.ops),
        inputs=(*built.inputs, *beside),
        outputs=named,
        batch=str(batch) if batch is not None else None,
        level=built.rows.level,
        unit=built.rows.symbols.unit,
    )
    return Capture(
        graph=graph,
        bodies=built.bodies,
        reasons=built.reasons,
        num_calls=built.num_calls,
        slots={n: slot_of[node] for n, node in given if node.op == "placeholder"},
        constants={n: attrgetter(path)(built.gm) for n, path in held.items()},
        symbols=symbol_slots(sizes),
        num_inputs=len(placeholders),
        outputs=outputs,
        same=tuple(sorted(map(str, built.rows.symbols.same))),
        matched=matched,
        unplaced=built.unplaced,
        unbatched=_unbatched(placeholders) if batch is None else "",
        lone=next(iter(built.rows.lone), ""),
        alike=built.gm.meta.get(ALIKE, ()),
    )


def _unbatched(placeholders: Sequence[fx.Node]) -> str:
    values = [node.meta.get("example_value", node.meta.get("val")) for node in placeholders]
    tensors = [v for v in values if isinstance(v, torch.Tensor) and v.dim()]
    inputs = [value for value in tensors if not isinstance(value, torch.nn.Parameter)]
    sizes = sorted({str(value.shape[0]) for value in inputs})
    if not inputs:
        return "No tensor with rows is given to it."
    if sizes == ["1"]:
        return "Its inputs have one row."
    return f"Dynamo fixed the rows of its inputs: {', '.join(sizes)}."


def symbolic_sizes(gm: fx.GraphModule) -> Iterator[tuple[int, int | None, torch.SymInt]]:
    """The symbolic sizes of inputs: (input, dim or None for a number, size)."""
    for number, node in enumerate(gm.graph.find_nodes(op="placeholder")):
        value = node.meta.get("example_value")
        sizes = enumerate(value.shape) if isinstance(value, torch.Tensor) else [(None, value)]
        yield from ((number, dim, size) for dim, size in sizes if isinstance(size, torch.SymInt))


def _outputs(built: Assembly) -> tuple[tuple[Any, ...], tuple[str, ...]]:
    """A slot for each output, and the names of the values among them."""
    named: dict[str, None] = {}

    def slot(node: Any) -> Slot:
        if not isinstance(node, fx.Node):
            return Slot(constant=node)
        value = built.rows.value(node)
        if built.is_copied(node) and not isinstance(value, SYMBOLIC):
            return Slot(constant=value)
        if built.is_copied(node):
            try:
                return Slot(size=size_of(built.rows.symbols.expr(value)))
            except SizeError:
                raise CaptureError(
                    f"capture: output {value} is not an integer expression of the input sizes."
                ) from None
        name = value_name(built.canonical[node])
        named[name] = None
        return Slot(value=name)

    args = built.output.args[0]
    items = args if isinstance(args, list | tuple) else (args,)
    return tuple(slot(item) for item in items), tuple(named)


def untried(captured: Capture) -> Capture:
    """What was captured, with a cure beside the reason of each op that could be tried."""
    told = {op.name for op in captured.graph.ops if _is_candidate(captured, op)}
    items = captured.reasons.items()
    return replace(captured, reasons={n: f"{why} {CURE}" if n in told else why for n, why in items})


def probe(captured: Capture, inputs: Sequence[Any]) -> Capture:
    """Try ops that are mixing for want of a rule; those that pass become row-wise, as assumed."""
    copies = [x.detach().clone() if isinstance(x, torch.Tensor) else x for x in inputs]
    values, env = captured.bind(copies)  # ops that write leave the caller's tensors alone
    batch = captured.graph.batch
    candidates = {op.name for op in captured.graph.ops if _is_candidate(captured, op)}
    if batch is None or env[batch] < MIN_ROWS or not captured.splits(env) or not candidates:
        return captured
    passed: list[str] = []
    with torch.no_grad():
        for op in captured.graph.ops:
            reads = [values[name] for name in op.reads]
            if op.collective is not None:
                made = _unheard(captured, op, reads, env)
            else:
                made = captured.bodies[op.name](*reads, env=env)
            values.update(zip(op.makes, made, strict=True))
            if op.name in candidates and _passes(captured, op, reads, made, env):
                passed.append(op.name)
    if not passed:
        return captured
    ops = [replace(op, rows="row-wise") if op.name in passed else op for op in captured.graph.ops]
    reasons = {name: why for name, why in captured.reasons.items() if name not in passed}
    graph = replace(captured.graph, ops=tuple(ops))
    return replace(captured, graph=graph, reasons=reasons, assumed=tuple(passed))


def _is_candidate(captured: Capture, op: Op) -> bool:
    if op.rows != "mixing" or op.mutates or op.collective is not None or not op.makes:
        return False
    made = [captured.graph.value[name] for name in op.makes]
    if any(value.batch is None or value.alias_of is not None for value in made):
        return False
    why = captured.reasons.get(op.name, "")
    return op.mark is not None or (
        "no rule says how" in why and "no rule says how aten." not in why
    )


def _passes(
    captured: Capture, op: Op, reads: list[Any], made: Sequence[Any], env: dict[str, int]
) -> bool:
    """Whether parts, and permuted rows, give those rows of the whole."""
    graph, batch = captured.graph, captured.graph.batch
    assert batch is not None, "a graph without a batch has no rows to try"
    rows = env[batch]

    def some(name: str, value: Any, chosen: torch.Tensor) -> Any:
        """Some rows of a value; all of it if it has no rows."""
        place = graph.value[name].batch
        return value if place is None else rows_at(value, place, rows, chosen)

    spans = [torch.arange(*span) for span in pairwise((0, 1, rows // 2 + 1, rows))]
    try:
        for chosen in (*spans, torch.roll(torch.arange(rows), 1).flip(0)):
            given = [some(name, read, chosen) for name, read in zip(op.reads, reads, strict=True)]
            sizes = {**env, **dict.fromkeys((batch, *captured.same), len(chosen))}
            results = captured.bodies[op.name](*given, env=sizes)
            for name, result, whole in zip(op.makes, results, made, strict=True):
                want = some(name, whole, chosen)
                if result.shape != want.shape or result.dtype != want.dtype:
                    return False
                if not torch.allclose(result, want, TOLERANCE, TOLERANCE, equal_nan=True):
                    return False
    except (RuntimeError, ValueError, IndexError, TypeError, AssertionError):
        return False
    return True


def _unheard(
    captured: Capture, op: Op, reads: Sequence[Any], env: dict[str, int]
) -> tuple[Any, ...]:
    """What stands in for the results of a collective: other ranks may have nothing to try.

    Its own share where that has the right shape, else numbers at random.
    """
    made = []
    for value in map(captured.graph.value.__getitem__, op.makes):
        shape = [size.evaluate(env) for size in value.shape]
        alike = [r for r in reads if isinstance(r, torch.Tensor) and list(r.shape) == shape]
        dtype = getattr(torch, value.dtype)
        made.append(alike[0].clone() if alike else torch.rand(shape).to(dtype))
    return tuple(made)

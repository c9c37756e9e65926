"""The `Structure`: one body on reads of certain shapes, compiled by Inductor, with no guards.

    call = Structure(body, reads, ...).call       # body.function, but with Inductor's kernels
    call(x, weight, bias, *sizes)

Inductor gets the body's own graph, on fake tensors whose sizes are symbols. What it takes for
granted is one look-up away, and Dynamo is not asked: reads lie in memory without gaps, in the
order of their dims, and have known shapes (weights are looked at once a call, for all ops: see
`TrustedInputs`). What is new leads to another *variant*: dims in another order, sizes that break
what the variants so far took for granted. A read with gaps is copied. Where Inductor fails, or a
copy would hide a write, the body runs eagerly; the report names what Inductor failed at.

The form of a body that writes where it is told is a structure of its own, compiled when a plan
first runs it. Its last arguments are slices of rooms, whose layout we know (see `epilogue`).
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence, Set
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import sympy
import torch
from torch import Tensor, fx
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv

from torchweft.capture.bodies.bodies import Body, Function, ResultBytes
from torchweft.capture.guards import Guards, symbol_slots
from torchweft.capture.marks import target_name
from torchweft.capture.rows.axes import Order, order_of
from torchweft.capture.rows.rows import id_of
from torchweft.errors import RunError
from torchweft.plan.graph import ITEM_BYTES, Value
from torchweft.plan.sizes import Size
from torchweft.private.aot import functorch_config
from torchweft.private.core import FakeTensorMode, HigherOrderOperator
from torchweft.private.dynamo import ConstantSource, TracingContext, convert_frame, tracing

log = logging.getLogger("torchweft")
MAX_VARIANTS = 8
MAX_SIZES = 4096
VOUCHED = ("torch", "aten", "prims", "_operator")


@dataclass(frozen=True)
class Variant:
    """What Inductor made for one layout, and the sizes for which it is right.

    `source` is the code that Inductor wrote.
    """

    function: Function
    orders: tuple[Order, ...]
    guards: Guards
    source: str = ""


class Structure:
    """A body on reads of certain shapes; `call` takes reads, sizes and slices and gives makes."""

    def __init__(
        self,
        name: str,
        body: Body,
        reads: Sequence[Value],
        guarded: Set[int],
        *,
        writes: bool,
        rooms: tuple[ResultBytes, ...] = (),
    ) -> None:
        self.name, self.body, self.eager = name, body, body.function
        self.reads, self.writes, self.rooms = reads, writes, rooms
        fakes = body.examples
        self.orders = [order_of(fake) if isinstance(fake, Tensor) else None for fake in fakes]
        unsure = {n for n, order in enumerate(self.orders) if order is None}
        self.checked = sorted(unsure | {*range(len(fakes))} - guarded)
        symbolic = {n for n, v in enumerate(reads) if any(size.symbols for size in v.shape)}
        self.told = sorted(symbolic.union(self.checked))
        self.is_vouched = _is_vouched(body.code)
        numbers = [(len(reads) + n, None, size) for n, size in enumerate(body.sizes)]
        dims = [(n, dim, size) for n, v in enumerate(reads) for dim, size in enumerate(v.shape)]
        self.slots = symbol_slots([*numbers, *dims])
        self.variants: list[Variant] = []
        self.refused = self._refusal()
        self.call = self.eager if self.refused else self._steady()

    def _refusal(self) -> str:
        """Why the body is none for Inductor; empty if it is."""
        if self.body.switches_grad:
            return "it switches gradients on or off"
        if any(value.dtype not in ITEM_BYTES for value in self.reads):
            return "a read is no plain tensor"
        shapes = [value.shape for value in self.reads] + [room.shape for room in self.rooms]
        wanted = {s for sizes in (*shapes, self.body.sizes) for size in sizes for s in size.symbols}
        if wanted - {slot.symbol for slot in self.slots}:
            return "a size cannot be told from its reads"
        return ""

    def _steady(self) -> Function:
        """The call itself: a look-up, then the kernels."""
        known = dict[object, Function]()
        first, num_sizes = len(self.reads), len(self.body.sizes)
        key_of = _key_of(self.checked, self.told, slice(first, first + num_sizes))

        def call(*arguments: Any) -> Any:
            key = key_of(arguments)
            function = known.get(key)
            given = list(arguments)
            if function is None:
                function = self._choose(given)
                if len(known) >= MAX_SIZES:
                    known.clear()
                if key is not None:  # else a read lies otherwise, and perhaps otherwise again
                    known[key] = function
            return function(given)

        def careful(*arguments: Any) -> Any:
            """For a body that writes: Inductor was told that no read shares the bytes."""
            tensors = arguments[: len(self.reads)]
            shared = len({id_of(tensor) for tensor in tensors}) < len(tensors)
            return self.eager(*arguments) if shared else call(*arguments)

        return careful if self.writes else call

    def _choose(self, arguments: list[Any]) -> Function:
        """The function for these arguments; reads with gaps among them are replaced by copies."""
        orders = list(self.orders)
        for place in self.checked:
            orders[place] = order_of(arguments[place])
            if orders[place] is None:
                if self.writes:  # a copy would hide the write
                    return self._eagerly
                arguments[place] = arguments[place].contiguous()
                orders[place] = order_of(arguments[place])
        return self._find(tuple(order or () for order in orders), arguments)

    def _eagerly(self, arguments: list[Any]) -> Any:
        return self.eager(*arguments)

    def _find(self, orders: tuple[Order, ...], arguments: Sequence[Any]) -> Function:
        """A variant that is right for these reads, compiled if there is none."""
        env = {slot.symbol: slot.number(arguments) for slot in self.slots}
        self._require_shapes(arguments, env)
        # Lanes may compile at once, and a compilation patches modules for all threads.
        with convert_frame.compile_lock:
            for variant in self.variants:
                if variant.orders == orders and not variant.guards.refuse(env):
                    return variant.function
            if len(self.variants) == MAX_VARIANTS:
                self.refused = f"for layouts beyond the first {MAX_VARIANTS}"
            if all(env.values()) and not self.refused:
                try:
                    self.variants.append(self._compile(orders, env))
                    return self.variants[-1].function
                except Exception as error:  # whatever Inductor raises: eager is right, and told
                    text = (str(error).strip().splitlines() or [""])[0]
                    self.refused = f"Inductor failed: {type(error).__name__}: {text[:200]}"
                    log.warning("%s runs eagerly: %s", self.name, self.refused)
        return self._eagerly

    def _require_shapes(self, arguments: Sequence[Any], env: Mapping[str, int]) -> None:
        """Raise `RunError` if a read is not what the graph says: kernels trust their sizes."""
        for place in self.told:
            shape = tuple(arguments[place].shape)
            wanted = tuple(size.evaluate(env) for size in self.reads[place].shape)
            if shape != wanted:
                raise RunError(
                    f"run: {self.name} reads {self.reads[place].name!r} of shape {shape}, but its "
                    f"graph says {wanted}. What makes it, a custom operator or a kernel, must make "
                    "the shape that it declares."
                )

    def _compile(self, orders: tuple[Order, ...], env: Mapping[str, int]) -> Variant:
        from torchweft.private.inductor import READS_SHAPES, compile_fx, compile_fx_inner, config

        shapes = ShapeEnv(specialize_zero_one=False, duck_shape=False)
        mode = FakeTensorMode(shape_env=shapes)
        symbols: dict[str, Any] = {}
        for name, value in env.items():
            source = ConstantSource(name)
            symbol = shapes.create_symbol(
                value, source, DimDynamic.DYNAMIC, None, do_not_specialize_zero_one=True
            )
            symbols[name] = shapes.create_symintnode(symbol, hint=value, source=source)
        # Now: behind the compilation a symbol that was taken for its number is that number.
        names = {size.node.expr: sympy.Symbol(n, integer=True) for n, size in symbols.items()}
        fakes = self._fakes(mode, orders, symbols)
        unseen = tuple(
            slot
            for slot in self.slots
            if slot.factor != 1 or not (READS_SHAPES or slot.dim is None)
        )
        made: list[Any] = []

        def inner(*args: Any, **kwargs: Any) -> Any:
            made.append(compile_fx_inner(*args, **kwargs))
            return made[-1]

        context = TracingContext(mode)
        with (
            torch.no_grad(),
            tracing(context),
            config.patch(fallback_random=True),  # the numbers that eager draws
            self._passes(),
            config.patch(size_asserts=config.size_asserts and not self.is_vouched),
            functorch_config.patch(enable_autograd_cache=False),  # Inductor's own cache is used
        ):
            code = _copy(self.body.code, len(unseen))
            fakes = [*(symbols[slot.symbol] for slot in unseen), *fakes]
            whole: Any = compile_fx(code, fakes, inner_compile=inner)
        guards = Guards(tuple(guard.expr.xreplace(names) for guard in shapes.guards))
        text = "\n".join(str(getattr(graph, "source_code", "")) for graph in made)
        plain = len(made) == 1 and _is_plain(context.fw_metadata, len(self.rooms))
        kernels = made[0].current_callable if plain else lambda given: tuple(whole(*given))

        def telling(given: list[Any]) -> Any:
            return kernels([*(slot.number(given) for slot in unseen), *given])

        return Variant(telling if unseen else kernels, orders, guards, text)

    def _passes(self) -> AbstractContextManager[Any]:
        """Inductor's settings while it compiles: ours comes behind the user's own passes."""
        from torchweft.capture.bodies.epilogue import Epilogue
        from torchweft.private.graph_passes import get_custom_graph_passes
        from torchweft.private.inductor import config

        if not self.rooms:
            return nullcontext()
        users = get_custom_graph_passes(config.post_grad_custom_post_pass)
        passes = [*users, Epilogue(len(self.rooms))]
        patched: AbstractContextManager[Any] = config.patch(post_grad_custom_post_pass=passes)
        return patched

    def _fakes(
        self, mode: FakeTensorMode, orders: Sequence[Order], symbols: Mapping[str, Any]
    ) -> list[Any]:
        """What Inductor compiles for: tensors of symbolic sizes, the sizes themselves, slices."""

        def fake(sizes: Sequence[Size], order: Order, like: Any) -> Tensor:
            shape = [size.evaluate(symbols) for size in sizes]
            lying = torch.empty([shape[dim] for dim in order], dtype=like.dtype, device=like.device)
            return lying.permute([order.index(dim) for dim in range(len(order))])

        given = zip(self.reads, orders, self.body.examples, strict=True)
        with mode:
            reads = [fake(value.shape, order, like) for value, order, like in given]
            slices = [fake(room.shape, room.order, room) for room in self.rooms]
        return [*reads, *(size.evaluate(symbols) for size in self.body.sizes), *slices]


def _key_of(checked: Sequence[int], told: Sequence[int], sizes: slice) -> Function:
    """What tells calls of unlike sizes apart; None for a call with a read that lies otherwise.

    told: the reads whose shape is looked at. sizes: where those stand in the arguments.
    """
    if sizes.start == sizes.stop and len(told) == 1 and tuple(checked) == tuple(told):
        place = told[0]

        def shape(arguments: Sequence[Any]) -> Any:
            tensor = arguments[place]
            return tensor.shape if tensor.is_contiguous() else None

        return shape

    def shapes(arguments: Sequence[Any]) -> Any:
        for place in checked:
            if not arguments[place].is_contiguous():
                return None
        return (*[arguments[place].shape for place in told], *arguments[sizes])

    return shapes


def _is_vouched(code: fx.GraphModule) -> bool:
    """Whether all calls of a body are torch's own, which make the shapes that they declare.

    Inductor's code then need not look at sizes: those of the reads are known from the look-up, or
    they are `TrustedInputs`.
    """
    return all(
        node.op in ("placeholder", "call_method", "output")
        or (
            node.op == "call_function"
            and not isinstance(node.target, HigherOrderOperator)
            and target_name(node).partition(".")[0] in VOUCHED
        )
        for node in code.graph.nodes
    )


def _copy(code: fx.GraphModule, num_more: int) -> fx.GraphModule:
    """A body's graph as Inductor may change it, without notes of where it came from.

    It takes more numbers first: Inductor computes with a symbol only if an argument is just that,
    and a read of `14*s0` rows is not (nor, since torch 2.14, one of `s0` rows).
    """
    graph = fx.Graph()
    for number in range(num_more):
        graph.placeholder(f"symbol{number}")
    graph.output(graph.graph_copy(code.graph, {}))
    for node in graph.nodes:
        node.meta = {}
    return fx.GraphModule(code, graph, class_name="Body")


def _is_plain(metadata: Any, num_slices: int) -> bool:
    """Whether the compiled graph takes the body's arguments and gives its makes, no more."""
    if metadata is None or metadata.num_intermediate_bases or metadata.mutated_inp_runtime_indices:
        return False
    reads = metadata.input_info[: len(metadata.input_info) - num_slices]
    if any(info.mutates_data or info.mutates_metadata for info in reads):
        return False
    return all(
        info.output_type.name == "non_alias" and issubclass(info.raw_type, Tensor | None)
        for info in metadata.output_info
    )

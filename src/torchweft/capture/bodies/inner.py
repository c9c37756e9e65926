"""The inner compiler: what runs the calls inside an op.

    eager      torch's own kernels, call by call
    onednn     the same, but float32 matrix products by oneDNN instead of the default library
    inductor   each body compiled by Inductor with a dynamic batch; equal structures share one

A collective has nothing to compile, and a mark may ask for eager. Other kernels than eager's may
differ in the last bits.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import fx

from torchweft.capture.bodies.bodies import Body, Function, Into
from torchweft.capture.bodies.inductor import Structure
from torchweft.capture.bodies.outs import PRODUCTS, unfit_for
from torchweft.capture.dynamo import Capture, getter
from torchweft.capture.ops.units import storages
from torchweft.capture.rows.axes import order_of
from torchweft.errors import CaptureError
from torchweft.plan.graph import Graph, Op
from torchweft.private.dynamo import TensorGuards

aten = torch.ops.aten


def compile_bodies(captured: Capture, inner: str) -> dict[str, Body]:
    """The bodies of a graph as the inner compiler makes them (Inductor: at their first call)."""
    compiler = _Compiler(captured, inner)
    return {op.name: compiler.body(op) for op in captured.graph.ops}


class _Compiler:
    """Compiles the forms of bodies, equal ones once."""

    def __init__(self, captured: Capture, inner: str) -> None:
        self.captured, self.inner = captured, inner
        examples = [leaf for body in captured.bodies.values() for leaf in body.examples]
        wanted = any(isinstance(leaf, torch.Tensor) and leaf.requires_grad for leaf in examples)
        # Whether autograd records the calls of the graph, seen from where it is captured.
        self.live = captured.graph.level == "torch" and torch.is_grad_enabled() and wanted
        self.made: dict[object, tuple[Function, tuple[Structure, ...]]] = {}

    def body(self, op: Op) -> Body:
        body = self.captured.bodies[op.name]
        chosen = body.inner or self.inner
        if body.issue is not None or chosen == "eager":
            return body
        (function, by), into = self._form(op, chosen, body, None), body.into
        if into is not None and not any(unfit_for(chosen, room) for room in into.rooms):
            telling, more = self._form(op, chosen, body, into)
            by, into = by + more, replace(into, function=_filling(telling, into))
        return replace(body, compiled=function, by=by, into=into)

    def _form(
        self, op: Op, chosen: str, body: Body, into: Into | None
    ) -> tuple[Function, tuple[Structure, ...]]:
        """A body's plain form, or the one that writes where it is told; what Inductor compiles."""
        graph, given, writes = self.captured.graph, self.captured.slots, bool(op.mutates)
        reads = [graph.value[name] for name in op.reads]
        shapes = tuple((value.shape, value.dtype) for value in reads)
        # Dynamo checks the layout of these at every call: inputs that are not split.
        unsplit = {n for n, v in enumerate(reads) if v.name in given and v.batch is None}
        guarded = frozenset(unsplit if graph.level == "torch" else ())
        key = (chosen, id(body.code), into and into.key, shapes, _laid(body), guarded, writes)
        if key in self.made:
            return self.made[key]
        form, rooms = (_in_place(body, into), into.rooms) if into else (body, ())
        if chosen == "onednn":
            self.made[key] = _by_onednn(form), ()
        elif self.live:  # autograd must see through the op: Dynamo and AOTAutograd do that
            self.made[key] = torch.compile(form.function, dynamic=True), ()
        else:
            made = Structure(op.name, form, reads, guarded, writes=writes, rooms=rooms)
            self.made[key] = made.call, (made,)
        return self.made[key]


def _in_place(body: Body, into: Into) -> Body:
    """The form of a body that writes into rooms and gives its other makes."""
    assert into.code is not None, "captured bodies have the graph of this form"
    graph = fx.Graph()
    makes: Any = graph.graph_copy(into.code.graph, {})
    graph.output(tuple(None if n in into.placed else make for n, make in enumerate(makes)))
    code = fx.GraphModule(into.code, graph, class_name="Into")
    return Body(into.key, code, into.sizes, examples=body.examples)


def _filling(function: Function, into: Into) -> Function:
    """The form that gives all makes: those in rooms are views of the slices."""
    num_rooms, num_sizes = len(into.rooms), len(into.sizes)
    views = [(n, at - num_rooms, v) for at, r in enumerate(into.rooms) for n, v in r.views.items()]

    def write(*arguments: Any) -> Any:
        made = list(function(*arguments))
        for number, at, view in views:
            sizes = arguments[-num_sizes - num_rooms : -num_rooms]
            made[number] = arguments[at] if view is None else view(arguments[at], *sizes)
        return made

    return write


def compiled(bodies: Iterable[Body]) -> tuple[int, tuple[str, ...]]:
    """How often Inductor compiled for these bodies, and which run eagerly instead."""
    structures = {id(form): form for body in bodies for form in body.by}.values()
    number = sum(len(structure.variants) for structure in structures)
    told = [f"{each.name} runs eagerly: {each.refused}" for each in structures if each.refused]
    return number, tuple(dict.fromkeys(told))


def _laid(body: Body) -> tuple[object, ...]:
    """How the reads of a body lie in memory: their strides, and which of them share bytes."""
    strides = tuple(str(getattr(leaf, "stride", tuple)()) for leaf in body.examples)
    numbers = [sorted(storages(leaf)) for leaf in body.examples]
    return strides, tuple(numbers.index(number) for number in numbers)


def _by_onednn(body: Body) -> Function:
    """The body with its matrix products replaced."""
    graph = fx.Graph()
    graph.output(graph.graph_copy(body.code.graph, {}))
    for node in graph.nodes:
        if node.op == "call_function":
            node.target = ONEDNN.get(node.target, node.target)
    code = fx.GraphModule(body.code, graph, class_name="Body")
    return Body(body.key, code, body.sizes, body.switches_grad).function


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> Any:
    """`F.linear` by oneDNN where it can: float32 on a CPU, no gradients, plain tensors."""
    if _suits(x, weight) and weight.dim() == 2 and (bias is None or _suits(bias, weight)):
        return torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
    return F.linear(x, weight, bias)


def mm(x: torch.Tensor, weight: torch.Tensor) -> Any:
    """`aten.mm` by oneDNN where it can."""
    if _suits(x, weight) and weight.t().is_contiguous():
        return torch.ops.mkldnn._linear_pointwise(x, weight.t(), None, "none", [], "")
    return torch.mm(x, weight)


def _suits(x: torch.Tensor, weight: torch.Tensor) -> bool:
    return (
        x.dtype is weight.dtype is torch.float32
        and x.device.type == "cpu"
        and x.numel() > 0
        and not torch.is_grad_enabled()
        and not torch.is_autocast_enabled("cpu")
        and type(x) in PLAIN
        and type(weight) in PLAIN
    )


PLAIN = (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer)
ONEDNN: Mapping[Any, Function] = MappingProxyType(
    dict(zip(PRODUCTS, (linear, linear, mm), strict=True))
)
Wanted = tuple[tuple[int | None, ...], tuple[int, ...] | None, Any]
"""Shape, order of dims in memory, and type."""


class TrustedInputs:
    """Weights whose sizes and layout no kernel of Inductor looks at: one check a call for them all.

    Dynamo guards them too, but a tensor that stays in its dict is not looked at again: what
    `weight.data = ...` or `model.to(memory_format=...)` changes goes unseen. So each call compares
    types, sizes and strides with those that were compiled for, at the speed of a guard.
    """

    def __init__(self, wanted: Mapping[str, Wanted], inputs: Sequence[str]) -> None:
        self.wanted = wanted
        self._pick = getter([inputs.index(name) for name in wanted])
        self._guards: Any = None

    def check(self, given: Sequence[Any]) -> None:
        """Raise `CaptureError` if an input is not as it was."""
        tensors = self._pick(given)
        guards = self._guards
        if guards is None or not guards.check(*tensors):
            self._look(tensors)

    def changed(self, given: Sequence[Any]) -> CaptureError | None:
        """What is wrong with inputs that are not as they were; None if nothing is."""
        try:
            self.check(given)
        except CaptureError as error:
            return error
        return None

    def _look(self, tensors: Sequence[Any]) -> None:
        """The same, one by one; what is right now is what guards compare with from now on."""
        for tensor, (name, wanted) in zip(tensors, self.wanted.items(), strict=True):
            if (tuple(tensor.shape), order_of(tensor), tensor.dtype) != wanted:
                raise CaptureError(
                    f"run: {name!r} has changed since it was compiled, where Dynamo does not look: "
                    f"it is {tensor.dtype} {tuple(tensor.shape)} with strides {tensor.stride()}. "
                    "Call torch._dynamo.reset() after such a change, and it is compiled anew."
                )
        self._guards = TensorGuards(*tensors, dynamic_dims_sizes=None, dynamic_dims_strides=None)


def trusted_inputs(graph: Graph, bodies: Mapping[str, Body]) -> TrustedInputs | None:
    """The inputs that bodies of a graph take for granted; None if there are none."""
    wanted: dict[str, Wanted] = {}
    for op in graph.ops:
        for form in bodies[op.name].by:
            if form.refused or not form.is_vouched:
                continue
            for number, name in enumerate(op.reads):
                if number not in form.told:
                    shape = tuple(size.constant for size in graph.value[name].shape)
                    like = form.body.examples[number]
                    wanted[name] = (shape, form.orders[number], like.dtype)
    return TrustedInputs(wanted, graph.inputs) if wanted else None

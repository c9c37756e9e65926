"""The inner compiler: what runs the calls inside an op.

    eager      torch's own kernels, call by call
    onednn     the same, but float32 matrix products by oneDNN instead of the default library
    inductor   each body compiled by Inductor with a dynamic batch; equal structures share one

A collective has nothing to compile, and a mark may ask for eager. Other kernels than eager's may
differ in the last bits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import fx

from torchweft.capture.bodies import Body
from torchweft.capture.dynamo import Captured
from torchweft.capture.inductor import Structure
from torchweft.capture.outs import Into
from torchweft.capture.units import storages
from torchweft.errors import StrategyError, unknown
from torchweft.graph import Op
from torchweft.marks import INNERS
from torchweft.sizes import ZERO, Size

Function = Callable[..., Any]


@dataclass(frozen=True)
class InnerBody:
    """A body with another function; `into` is eager's, for a body without products."""

    key: str
    function: Function
    sizes: tuple[Size, ...]
    graph: bool = True
    by: Structure | None = None
    into: Into | None = None

    def __call__(self, *reads: Any) -> Any:
        return self.function(*reads)


def check_inner(inner: str) -> str:
    """The name of an inner compiler that can be had here. Raises `StrategyError` for others."""
    if inner not in INNERS:
        raise StrategyError(f"inner: {unknown('inner backend', inner, INNERS)}")
    if inner == "onednn" and not torch._C._has_mkldnn:
        raise StrategyError("inner: this build of torch has no oneDNN.")
    return inner


def compile_bodies(captured: Captured, inner: str) -> dict[str, Body | InnerBody]:
    """The bodies of a graph as the inner compiler makes them (Inductor: at their first call)."""
    made: dict[object, Function | Structure] = {}
    found: dict[str, Body | InnerBody] = {}
    live = captured.graph.level == "torch" and _wants_gradients(captured)
    for op in captured.graph.ops:
        body = captured.bodies[op.name]
        chosen = body.inner or inner
        if body.issue is not None or chosen == "eager":
            found[op.name] = body
            continue
        reads = [captured.graph.value[name] for name in op.reads]
        shapes = tuple((value.shape, value.dtype) for value in reads)
        guarded, writes = _guarded(captured, op), bool(op.mutates)
        key = (chosen, id(body.code), shapes, _laid(body), guarded, writes)
        if key not in made:
            if chosen == "onednn":
                made[key] = _by_onednn(body)
            elif live:  # autograd must see through the op: Dynamo and AOTAutograd do that
                made[key] = torch.compile(body.function, dynamic=True)
            else:
                made[key] = Structure(op.name, body, reads, guarded, writes=writes)
        what, into = made[key], body.into if op.flops == ZERO else None
        by = what if isinstance(what, Structure) else None
        function = what.call if isinstance(what, Structure) else what
        found[op.name] = InnerBody(body.key, function, body.sizes, body.graph, by, into)
    return found


def compiled(bodies: Iterable[Body | InnerBody]) -> tuple[int, tuple[str, ...]]:
    """How often Inductor compiled for these bodies, and which run eagerly instead."""
    structures = {
        id(body.by): body.by for body in bodies if isinstance(body, InnerBody) and body.by
    }
    number = sum(len(structure.variants) for structure in structures.values())
    told = [f"{s.name} runs eagerly: {s.refused}" for s in structures.values() if s.refused]
    return number, tuple(told)


def _wants_gradients(captured: Captured) -> bool:
    """Whether autograd records the calls of a graph, seen from where it is captured."""
    if not torch.is_grad_enabled():
        return False
    examples = [leaf for body in captured.bodies.values() for leaf in body.examples]
    return any(isinstance(leaf, torch.Tensor) and leaf.requires_grad for leaf in examples)


def _laid(body: Body) -> tuple[object, ...]:
    """How the reads of a body lie in memory: their strides, and which of them share bytes."""
    strides = tuple(str(getattr(leaf, "stride", tuple)()) for leaf in body.examples)
    numbers = [sorted(storages(leaf)) for leaf in body.examples]
    return strides, tuple(numbers.index(number) for number in numbers)


def _guarded(captured: Captured, op: Op) -> frozenset[int]:
    """The reads of an op whose layout Dynamo checks at every call: inputs that are not split."""
    graph = captured.graph
    if graph.level != "torch":
        return frozenset()
    return frozenset(
        number
        for number, name in enumerate(op.reads)
        if name in captured.slots and graph.value[name].batch is None
    )


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
        x.dtype is torch.float32
        and weight.dtype is torch.float32
        and x.device.type == "cpu"
        and x.numel() > 0
        and not torch.is_grad_enabled()
        and not torch.is_autocast_enabled("cpu")
        and type(x) in PLAIN
        and type(weight) in PLAIN
    )


PLAIN = (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer)
ONEDNN: Mapping[Any, Function] = MappingProxyType(
    {F.linear: linear, torch._C._nn.linear: linear, torch.ops.aten.mm.default: mm}
)

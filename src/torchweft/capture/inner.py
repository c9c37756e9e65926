"""The inner compiler: what runs the calls inside an op.

    eager      torch's own kernels, call by call
    onednn     the same, but float32 matrix products by oneDNN instead of the default library
    inductor   each body compiled by Inductor with a dynamic batch; equal bodies share one

A collective has nothing to compile. Other kernels than eager's may differ in the last bits.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import fx

from torchweft.capture.bodies import Body
from torchweft.errors import StrategyError, unknown
from torchweft.sizes import Size

INNERS = ("eager", "inductor", "onednn")
Function = Callable[..., Any]


@dataclass(frozen=True)
class InnerBody:
    """A body with another function."""

    key: str
    function: Function
    sizes: tuple[Size, ...]
    graph: bool = True

    def __call__(self, *reads: Any) -> Any:
        return self.function(*reads)


def check_inner(inner: str) -> str:
    """The name of an inner compiler that can be had here. Raises `StrategyError` for others."""
    if inner not in INNERS:
        raise StrategyError(f"inner: {unknown('inner backend', inner, INNERS)}")
    if inner == "onednn" and not torch._C._has_mkldnn:
        raise StrategyError("inner: this build of torch has no oneDNN.")
    return inner


def compile_bodies(bodies: Mapping[str, Body], inner: str) -> dict[str, Body | InnerBody]:
    """The bodies of a graph as the inner compiler makes them (Inductor: at their first call)."""
    if inner == "eager":
        return dict(bodies)
    made: dict[int, Function] = {}
    found: dict[str, Body | InnerBody] = {}
    for name, body in bodies.items():
        if body.issue is not None:
            found[name] = body
            continue
        function = made.get(id(body.code))
        if function is None:
            function = _by_onednn(body) if inner == "onednn" else _by_inductor(body)
            made[id(body.code)] = function
        found[name] = InnerBody(body.key, function, body.sizes, body.graph)
    return found


def _by_inductor(body: Body) -> Function:
    return torch.compile(body.function, dynamic=True)


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

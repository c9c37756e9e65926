"""Passes that make a graph of AOTAutograd easy to cut; what it computes stays the same, bit by bit.

layer_norm_backward -> (x, w, b)      one call for x (row-wise), one for w and b (sums)
native_dropout(x)   -> (y, mask)      the mask is drawn without x; y = x * mask * scale
view(x)                               reshape: a part of x may have gaps
copy_(x, index_put(x, ...))           index_put_(x, ...), see `inplace`
copy(empty, wait_tensor(t))           the result itself, see `drop_buffers`
return y, y.view(...)                 the view is taken again at the end, for the caller only
"""

from __future__ import annotations

import operator
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch import fx
from torch.fx.experimental.proxy_tensor import py_sym_types

from torchweft.capture.aten.inplace import VIEWS, is_view, put_back
from torchweft.capture.ops.collectives import drop_buffers
from torchweft.private.core import is_fake, suggest_memory_format

aten = torch.ops.aten
NORMS = (aten.native_batch_norm.default, aten._native_batch_norm_legit_no_training.default)


def prepare(gm: fx.GraphModule) -> tuple[list[str], list[str]]:
    """Run all passes; the names of the outputs as they were before, and notes on mutations."""
    notes = put_back(gm)
    output = gm.graph.output_node()
    outputs: Any = output.args[0]
    names = [getattr(item, "name", "") for item in outputs]
    for node in list(gm.graph.nodes):
        if node.op != "call_function":
            continue
        if node.target in SPLIT:
            split_gradient(gm.graph, node)
        elif node.target is aten.native_dropout.default and node.args[2] in (True, None):
            split_dropout(gm.graph, node)
        elif node.target in VIEWS:
            node.target = aten.reshape.default
        elif node.target is aten.new_zeros.default:
            node.target, node.args = aten.zeros.default, node.args[1:]
            node.kwargs = {"dtype": node.meta["val"].dtype, **node.kwargs}
        elif node.target in NORMS:
            drop_statistics(gm.graph, node)
    part_outputs(gm.graph, output)
    for node in gm.graph.nodes:
        if "val" in node.meta:
            node.meta["example_value"] = node.meta["val"]
    drop_buffers(gm)
    gm.graph.lint()
    gm.recompile()
    return names, notes


def layer_norm_backward(
    grad: Any, x: Any, shape: Any, mean: Any, rstd: Any, weight: Any, bias: Any, mask: Any
) -> Any:
    """Its kernel reads the statistics as if they had no gaps; those of a part may have some."""
    statistics = (mean.contiguous(), rstd.contiguous())
    return aten.native_layer_norm_backward.default(grad, x, shape, *statistics, weight, bias, mask)


def rms_norm_backward(grad: Any, x: Any, shape: Any, rstd: Any, weight: Any, mask: Any) -> Any:
    """As for `layer_norm_backward`."""
    return aten._fused_rms_norm_backward.default(grad, x, shape, rstd.contiguous(), weight, mask)


def group_norm_backward(
    grad: Any, x: Any, mean: Any, rstd: Any, weight: Any, *sizes_and_mask: Any
) -> Any:
    """Its kernel takes `grad` to lie in memory as `x` does, which in parts is not sure.

    Where channels come last it writes the gradient of `x` whether or not it has room for that, and
    dies. No other CPU kernel of `SPLIT` does: those of layer norm, batch norm and convolution were
    tried with every mask and memory format.
    """
    *sizes, mask = sizes_and_mask
    on_cpu = x.device.type == "cpu"
    form = suggest_memory_format(x) if on_cpu else torch.contiguous_format
    given = [item.contiguous(memory_format=form) for item in (grad, x)]
    channels_last = x.dim() > 3 and x.stride(1) <= min(x.stride()[2:])
    spare = on_cpu and channels_last and not mask[0] and not is_fake(x)
    made = aten.native_group_norm_backward.default(
        *given, mean.contiguous(), rstd.contiguous(), weight, *sizes, [spare or mask[0], *mask[1:]]
    )
    return (None, *made[1:]) if spare else made


SPLIT: Mapping[Any, tuple[int, Any]] = MappingProxyType(
    {
        aten.native_layer_norm_backward.default: (7, layer_norm_backward),
        aten.native_group_norm_backward.default: (9, group_norm_backward),
        aten.convolution_backward.default: (10, aten.convolution_backward.default),
        aten._fused_rms_norm_backward.default: (5, rms_norm_backward),
        aten.native_batch_norm_backward.default: (9, aten.native_batch_norm_backward.default),
    }
)
"""Gradients of several tensors: which argument says whose, and what is called instead."""


def split_gradient(graph: fx.Graph, node: fx.Node) -> None:
    """One call for the gradient of the input, another for those of the weights."""
    at, node.target = SPLIT[node.target]
    mask = list(node.args[at])  # type: ignore[arg-type]
    if not mask[0] or not any(mask[1:]):
        return
    wanted = [[True] + [False] * (len(mask) - 1), [False, *mask[1:]]]
    halves = []
    for outputs in wanted:
        arguments = (*node.args[:at], outputs, *node.args[at + 1 :])
        with graph.inserting_before(node):
            half = graph.call_function(node.target, arguments, dict(node.kwargs))  # type: ignore[arg-type]
        half.meta = dict(node.meta)
        value = node.meta["val"]
        half.meta["val"] = tuple(v if use else None for v, use in zip(value, outputs, strict=True))
        halves.append(half)
    for user in list(node.users):
        assert user.target is operator.getitem, "several results are taken out one by one"
        user.args = (halves[0] if user.args[1] == 0 else halves[1], user.args[1])
        halves[1 if user.args[1] else 0].append(user)
    graph.erase_node(node)


def draw_mask(size: list[int], order: list[int], keep: float, device: torch.device) -> torch.Tensor:
    """The mask of native_dropout, drawn as that draws it: in the order of its input's memory."""
    return torch.empty_permuted(size, order, dtype=torch.bool, device=device).bernoulli_(keep)


def split_dropout(graph: fx.Graph, node: fx.Node) -> None:
    """Draw the mask by itself, so that only the drawing needs the whole batch."""
    source, chance, _ = node.args
    value, mask_value = node.meta["val"]
    keep = 1.0 - float(chance)  # type: ignore[arg-type]
    if value.device.type != "cpu":  # other kernels may draw otherwise
        return
    with graph.inserting_before(node):
        size = [_size(graph, source, dim, length) for dim, length in enumerate(value.shape)]
        strides = [getattr(getattr(s, "node", None), "hint", s) for s in mask_value.stride()]
        order = sorted(range(value.dim()), key=lambda dim: -strides[dim])
        mask = graph.call_function(draw_mask, (size, order, keep, value.device))
        kept = graph.call_function(aten.mul.Tensor, (source, mask))
        scaled = graph.call_function(aten.mul.Tensor, (kept, 1.0 / keep if keep else 0.0))
    for made, meaning in ((mask, mask_value), (kept, value), (scaled, value)):
        made.meta = dict(node.meta)
        made.meta["val"] = meaning
    for user in list(node.users):
        user.replace_all_uses_with(mask if user.args[1] == 1 else scaled)
        graph.erase_node(user)
    graph.erase_node(node)


def drop_statistics(graph: fx.Graph, node: fx.Node) -> None:
    """Batch norm by running statistics saves two empty tensors, which have no rows."""
    for user in list(node.users):
        if user.args[1] != 0:
            value = user.meta["val"]
            if value.numel() == 0:
                user.target = aten.empty.memory_format
                user.args = ([0],)
                user.kwargs = {"dtype": value.dtype, "device": value.device}


def _size(graph: fx.Graph, source: Any, dim: int, length: Any) -> Any:
    """A size as an argument: a number, or a call that asks for it."""
    if not isinstance(length, py_sym_types):
        return length
    node = graph.call_function(aten.sym_size.int, (source, dim))
    node.meta["val"] = length
    return node


def part_outputs(graph: fx.Graph, output: fx.Node) -> None:
    """Views that go out beside what they show are taken again, at the end.

    A view that shares its bytes with another output is handed out whole; readers inside of the
    graph shall not wait for that.
    """
    items: Any = output.args[0]
    roots = [_root(item) if isinstance(item, fx.Node) else None for item in items]
    made = list(items)
    for number, (item, root) in enumerate(zip(items, roots, strict=True)):
        if root is None or root is item or set(item.users) == {output}:
            continue
        if roots.count(root) > 1 or root.op == "placeholder":
            with graph.inserting_before(output):
                made[number] = _again(graph, item)
    output.args = (tuple(made),)


def _root(node: fx.Node) -> fx.Node:
    return _root(node.all_input_nodes[0]) if _shows_first(node) else node


def _again(graph: fx.Graph, node: fx.Node) -> fx.Node:
    """A view, taken once more."""
    if not _shows_first(node):
        return node
    source = _again(graph, node.all_input_nodes[0])
    copied = graph.node_copy(node, lambda used: source if used is node.all_input_nodes[0] else used)
    copied.meta = dict(node.meta)
    return copied


def _shows_first(node: fx.Node) -> bool:
    return is_view(node) and node.all_input_nodes[:1] == list(node.args[:1])

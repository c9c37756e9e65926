"""The aten level: Dynamo's graph goes through AOTAutograd, each graph that comes out is captured.

    gm --AOTAutograd--> inference                                   no gradients wanted
                    \\-> forward --saved values--> backward          gradients wanted

Wanted where the torch level would be blind (tensor subclasses such as DTensor hide their
collectives) or would have no backward graph to cut. Forward and backward agree on the symbol of the
batch, and the backward graph takes the rows of saved values from the forward graph: the shape
`[5*s0, H]` alone does not tell them. Passes make each graph easy to cut; what it computes stays the
same, bit by bit:

    layer_norm_backward -> (x, w, b)      one call for x (row-wise), one for w and b (sums)
    native_dropout(x)   -> (y, mask)      the mask is drawn without x; y = x * mask * scale
    view(x)                               reshape: a part of x may have gaps
    copy_(x, index_put(x, ...))           index_put_(x, ...), see `put_back`
    copy(empty, wait_tensor(t))           the result itself, see `drop_buffers`
    return y, y.view(...)                 the view is taken again at the end, for the caller only
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from types import MappingProxyType
from typing import Any, cast

import torch
from torch import fx
from torch.fx.experimental.proxy_tensor import py_sym_types

from torchweft.capture.dynamo import Capture, analyse, candidates, symbolic_sizes
from torchweft.capture.failures import break_of
from torchweft.capture.ops.collectives import drop_buffers
from torchweft.capture.rows.axes import Axis, Symbols
from torchweft.capture.rows.rows import Rows
from torchweft.errors import RunError
from torchweft.private.aot import aot_autograd, make_boxed_func, min_cut_rematerialization_partition
from torchweft.private.core import (
    is_fake,
    is_traceable_wrapper_subclass,
    suggest_memory_format,
    tree_leaves,
)
from torchweft.private.dynamo import TracingContext

aten = torch.ops.aten
Cuts = tuple[tuple[Any, Any], ...]
"""How a view is cut out of a tensor: slices and selections with their arguments, first to last."""
NAMES = (
    "index_put.default index_copy.default index_add.default index_fill.int_Scalar scatter.src "
    "scatter.value scatter_add.default masked_fill.Scalar masked_scatter.default fill.Scalar "
    "copy.default add.Tensor sub.Tensor mul.Tensor div.Tensor lerp.Scalar"
)
WRITES: dict[Any, Any] = {
    getattr(getattr(aten, name), overload): getattr(getattr(aten, f"{name}_"), overload)
    for name, overload in (text.split(".") for text in NAMES.split())
}
PIECES: dict[Any, Any] = {
    aten.slice_scatter.default: aten.slice.Tensor,
    aten.select_scatter.default: aten.select.int,
}
VIEWS = (aten.view.default, aten._unsafe_view.default, aten.reshape.default)
NORMS = (aten.native_batch_norm.default, aten._native_batch_norm_legit_no_training.default)
Make = Callable[[fx.GraphModule, Callable[[], Capture]], Callable[..., Any]]
"""(graph, how to capture it) -> what runs in its place."""


def level_of(gm: fx.GraphModule, example_inputs: Sequence[Any]) -> str:
    """The level that a graph of Dynamo needs: "aten" for subclasses and gradients, else "torch"."""
    tensors = [item for item in example_inputs if isinstance(item, torch.Tensor)]
    graphs = [part.graph for part in gm.modules() if isinstance(part, fx.GraphModule)]
    values = [node.meta.get("example_value") for graph in graphs for node in graph.nodes]
    if any(is_traceable_wrapper_subclass(value) for value in [*tensors, *values]):
        return "aten"
    wanted = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)
    return "aten" if wanted else "torch"


def run_aten(
    gm: fx.GraphModule,
    example_inputs: Sequence[Any],
    make: Make,
    *,
    batch: int | str | Sequence[str] | None = None,
    name: str = "graph",
    **known: Any,
) -> Callable[..., Any]:
    """What runs in the place of a graph of Dynamo: pieces of its ATen graphs, under autograd.

    known: the options of `assemble`.
    """
    dim = batch if isinstance(batch, int) else 0
    tried = candidates(gm, example_inputs, batch)
    pair = _Pair(make, known, tried, dim, name, break_of(gm))
    backend = aot_autograd(
        fw_compiler=partial(pair.compile, "forward"),
        bw_compiler=partial(pair.compile, "backward"),
        inference_compiler=partial(pair.compile, "inference"),
        partition_fn=pair.partition,
        keep_inference_input_mutations=True,
    )
    run = backend(gm, example_inputs)
    return _once_differentiable(run) if pair.has_gradients else run


def _once_differentiable(run: Callable[..., Any]) -> Callable[..., Any]:
    """The same, but who asks for the gradient of a gradient is told by us, and not by torch."""
    told, first = False, cast(Any, FirstGradient)

    def call(*inputs: Any) -> Any:
        nonlocal told
        outputs = run(*inputs)
        for leaf in () if told else tree_leaves(outputs):
            node = getattr(leaf, "grad_fn", None)
            while node is not None and not hasattr(node, "_forward_cls"):  # of a view
                node = node.next_functions[0][0] if node.next_functions else None
            compiled: Any = getattr(node, "_forward_cls", None)
            if stock := getattr(compiled, "_double_backward", None):
                compiled._double_backward = lambda *given: first.apply(*stock(*given))
                told = True
                break
        return outputs

    return call


class FirstGradient(torch.autograd.Function):
    """Gradients that were asked for with `create_graph=True`; they have none of their own."""

    @staticmethod
    def forward(ctx: Any, *gradients: Any) -> Any:
        return gradients

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        raise RunError(
            "backward: the gradient of a gradient was asked for, and compiled graphs have none. "
            "Call model.forward(...) there: that is the model as it is."
        )


@dataclass
class _Pair:
    """The graphs that come of one graph of Dynamo, captured as they come.

    saved: where the rows of the forward graph's results are, by name; shown: the same, by shape,
    for those that the caller gets.
    """

    make: Make
    known: Mapping[str, Any]
    tried: Sequence[Symbols]
    dim: int
    name: str
    broken: str
    num_outputs: int = 0
    has_gradients: bool = False
    saved: dict[str, Axis | None] = field(default_factory=dict)
    shown: list[tuple[Any, Axis | None]] = field(default_factory=list)

    def partition(self, joint: fx.GraphModule, inputs: Any, **options: Any) -> Any:
        """How AOTAutograd cuts forward from backward; here we learn how many outputs are asked."""
        self.num_outputs, self.has_gradients = options["num_fwd_outputs"], True
        return min_cut_rematerialization_partition(joint, inputs, **options)

    def compile(
        self, kind: str, gm: fx.GraphModule, example_inputs: Sequence[Any]
    ) -> Callable[..., Any]:
        """What runs in the place of a graph: inference, forward, or backward (of gradients)."""
        context = TracingContext.try_get() if kind != "inference" else None
        if context is not None and context.fw_metadata is not None:
            # Nothing writes into saved values: backward may run again. Graphs of tensor subclasses
            # share the list that AOTAutograd asks, so it is emptied, not replaced.
            (context.fw_metadata.bw_donated_idxs or []).clear()
        return make_boxed_func(self.make(gm, partial(self._capture, kind, gm)))

    def _capture(self, kind: str, gm: fx.GraphModule) -> Capture:
        names, notes = prepare(gm)
        given: Mapping[str, Axis | None] | None = None if kind == "inference" else {}
        if kind == "backward":
            given = {n.name: self._rows_of(n) for n in gm.graph.nodes if n.op == "placeholder"}
        else:
            self.tried = self._known(gm)
        name = f"{self.name}.{kind}"
        captured, rows = analyse(gm, self.tried, name=name, level="aten", given=given, **self.known)
        if kind == "forward":
            self._remember(names, rows)
        if kind == "backward":
            return captured
        made = [slot.value or "" for slot in captured.outputs]
        shown = {"", *captured.graph.inputs, *made[: self.num_outputs]}
        saved = frozenset(made[self.num_outputs :] if kind == "forward" else ()) - shown
        return replace(captured, notes=tuple(notes), broken=self.broken, saved=saved)

    def _known(self, gm: fx.GraphModule) -> Sequence[Symbols]:
        """The symbols to try that the graph knows; a DTensor's own piece has symbols of its own."""
        sizes = [size for _, dim, size in symbolic_sizes(gm) if dim is not None]
        known = set[Any]().union(*(size.node.expr.free_symbols for size in sizes))
        tried = [symbols for symbols in self.tried if symbols.batch in known]
        return tried or candidates(gm, (), self.dim)

    def _remember(self, names: Sequence[str], rows: Rows) -> None:
        """Note the symbol of the batch, and where the rows of each output are."""
        self.tried = [rows.symbols]
        outputs: Any = next(node for node in rows.calls if node.op == "output").args[0]
        for number, (item, name) in enumerate(zip(outputs, names, strict=True)):
            value = rows.value(item) if isinstance(item, fx.Node) else None
            if not isinstance(value, torch.Tensor):
                continue
            self.saved[name] = rows.axis(value)
            if number < self.num_outputs:
                self.shown.append((rows.symbols.shape(value), rows.axis(value)))

    def _rows_of(self, node: fx.Node) -> Axis | None:
        """Where the rows of an input of the backward graph are; None if that is not certain."""
        value = node.meta.get("val")
        if not isinstance(value, torch.Tensor):
            return None
        if node.name in self.saved:
            return self.saved[node.name]
        symbols = self.tried[0]
        plain = symbols.uniform(value)
        if plain is not None and plain.inner == 1:
            return plain
        shape = symbols.shape(value)
        axes = {axis for shown, axis in self.shown if shown == shape}
        return axes.pop() if len(axes) == 1 else None


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
            drop_statistics(node)
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


def drop_statistics(node: fx.Node) -> None:
    """Batch norm by running statistics saves two empty tensors, which have no rows."""
    for user in list(node.users):
        value = user.meta["val"]
        if user.args[1] != 0 and value.numel() == 0:
            user.target, user.args = aten.empty.memory_format, ([0],)
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


def put_back(gm: fx.GraphModule) -> list[str]:
    """Turn writes to copies of inputs into writes to the inputs; notes on what stays a copy.

        new = index_put(cache, [i], row)       the whole cache is copied, twice
        ... reads new ...                 ->   index_put_(cache, [i], row)
        copy_(cache, new)                      ... reads cache ...

    A write goes back in place if nobody reads the old content behind it. Where somebody does, or
    where the new content is handed out as it is, the copies stay, and a note says why.
    """
    notes: list[str] = []
    for node in list(gm.graph.nodes):
        if node.target is aten.copy_.default and node.args[0].op == "placeholder":
            name, why = node.args[0].name, _put_back(gm.graph, node)
            notes += [f"{name} is written through a copy of the whole: {why}"] if why else []
    return notes


def _put_back(graph: fx.Graph, copy: fx.Node) -> str:
    """Put the writes behind one final copy back in place; why not, if they stay."""
    target, last = copy.args[0], copy.args[1]
    assert isinstance(target, fx.Node) and isinstance(last, fx.Node), "copy_ takes two tensors"
    versions = _versions(target, last)
    if not versions:
        # Whole new content (running statistics) has to be copied anyhow.
        return f"{last.name} is no known write to it" if target in last.all_input_nodes else ""
    for version in versions:
        inside = _inside(version)
        if why := _refused(graph, target, inside, copy):
            return why
        with graph.inserting_before(version):
            _write(graph, target, inside)
        version.replace_all_uses_with(target, delete_user_cb=lambda user: user is not copy)
        if version is last:
            copy.replace_all_uses_with(target)  # a cache that goes out too is the input itself
            graph.erase_node(copy)
        for node in inside:
            graph.erase_node(node)
    return ""


def _versions(target: fx.Node, last: fx.Node) -> list[fx.Node]:
    """The writes that lead from an input to its final content, first to last; none if unknown."""
    versions: list[fx.Node] = []
    node: Any = last
    while node is not target:
        if not _is_write(node, target):
            return []
        versions.append(node)
        node = node.args[0]
    return versions[::-1]


def _is_write(node: Any, whole: Any) -> bool:
    """Whether a call makes the content of a tensor anew, and could be done in place."""
    if not isinstance(node, fx.Node) or node.target not in WRITES.keys() | PIECES.keys():
        return False
    value, wanted = node.meta["val"], whole.meta["val"]
    return value.dtype == wanted.dtype and list(value.shape) == list(wanted.shape)


def _inside(version: fx.Node) -> list[fx.Node]:
    """The calls that one write is made of, from the whole to the piece of a piece.

    slice_scatter(x, index_put(slice(x), ...)) is an index_put into a slice, if both slices are one.
    """
    inside = [version]
    cuts: Cuts = ()
    while inside[-1].target in PIECES:
        source, *where = inside[-1].args[1:]
        cuts = (*cuts, (PIECES[inside[-1].target], tuple(where)))
        if not isinstance(source, fx.Node) or len(source.users) > 1 or not source.args:
            break
        if _cut_out(source.args[0])[1] != cuts or not _is_write(source, source.args[0]):
            break
        inside.append(source)
    return inside


def _cut_out(node: Any) -> tuple[Any, Cuts]:
    """What a view was cut out of, and how."""
    if not isinstance(node, fx.Node) or node.target not in PIECES.values():
        return node, ()
    root, cuts = _cut_out(node.args[0])
    return root, (*cuts, (node.target, node.args[1:]))


def _refused(graph: fx.Graph, target: fx.Node, inside: list[fx.Node], copy: fx.Node) -> str:
    """Why a write cannot stand where its functional form stands; empty if it can."""
    version = inside[0]
    if any(user.op == "output" for user in version.users):
        return f"{version.name} is handed out as it is"
    if any(_cut_out(node.args[0])[0] is not target for node in inside):
        return f"{inside[-1].name} starts from something else"
    aliases = list(_aliases(target))
    place = {node: number for number, node in enumerate(graph.nodes)}
    for alias in aliases:
        for user in alias.users:
            if user.op == "output":
                return f"{alias.name} is handed out"
            if place[user] > place[version] and user is not copy:
                return f"{user.name} reads its old content after the write"
    operands = inside[-1].args[1:] if inside[-1].target in WRITES else ()
    if set(aliases) & set(tree_leaves(operands)):
        return f"{version.name} writes what it reads"
    return ""


def _aliases(node: fx.Node) -> Iterator[fx.Node]:
    """A value and every view of it."""
    yield node
    for user in node.users:
        shows = user.target is operator.getitem or is_view(user)
        if shows and user.args and user.args[0] is node:
            yield from _aliases(user)


def is_view(node: fx.Node) -> bool:
    """Whether a call gives another look at the bytes of an argument, or may do so."""
    schema = getattr(node.target, "_schema", None)
    returned = [result.alias_info for result in schema.returns] if schema is not None else []
    return node.target in VIEWS or any(info and not info.is_write for info in returned)


def _write(graph: fx.Graph, view: fx.Node, inside: list[fx.Node]) -> None:
    """The write of a version, done to `view`, at the graph's point of insertion."""
    for version in inside:
        if version.target in WRITES:
            form, args = WRITES[version.target], (view, *version.args[1:])
            _call(graph, form, args, version, version.kwargs)
            return
        source: Any = version.args[1]
        view = _call(graph, PIECES[version.target], (view, *version.args[2:]), source)
    _call(graph, aten.copy_.default, (view, source), source)


def _call(
    graph: fx.Graph, target: Any, args: tuple[Any, ...], like: fx.Node, kwargs: Any = None
) -> fx.Node:
    node = graph.call_function(target, args, dict(kwargs or {}))
    node.meta = dict(like.meta)
    return node

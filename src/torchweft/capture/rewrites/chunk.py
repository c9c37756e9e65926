"""`chunk`: a product and the collective that it feeds, in pieces that pass each other.

    y = linear(x, w);  z = all_reduce(y)       ->      y0 = linear(x, w[:n])    z0 = all_reduce(y0)
                                                       y1 = linear(x, w[n:])    z1 = all_reduce(y1)
                                                       z = cat([z0, z1], -1)

By columns (dim -1) each piece takes a slice of the weight, which is a view; by rows (another dim) a
slice of `x`. Nothing is summed in another order, so pieces are equal bit by bit wherever the kernel
of a product does not depend on how many columns stand beside.

Between the product and the collective, views and casts that leave the cut dim alone are taken
along. A collective that works along dim 0, cut along dim 0, is given the rows that each rank is to
have of the piece. `cat` stands where the whole is first needed and is part of that op: a copy of
the result, which Inductor fuses into what reads it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import torch
from torch import fx

from torchweft.capture.marks import target_name
from torchweft.capture.ops.collectives import kind_of
from torchweft.capture.ops.units import is_collective, is_copy, is_wait, storages
from torchweft.capture.rewrites.rewriting import CannotError, Site, copy_of, name_of
from torchweft.capture.rows.rows import CallRows
from torchweft.plan.rewrite import Rewrite

if TYPE_CHECKING:
    from torchweft.capture.ops.assembly import Assembly

aten = torch.ops.aten
ALIGNED = 16  # borders of large pieces: kernels work on so many columns at once
SCATTERS, GATHERS = "reduce_scatter_tensor", "all_gather_into_tensor"
COLLECTIVES = ("all_reduce", SCATTERS, GATHERS)
PRODUCTS: Mapping[str, tuple[int, int, int | None]] = MappingProxyType(
    {  # by the end of the target: places of the input, the weight, the bias
        "linear": (0, 1, 2),
        "mm": (0, 1, None),
        "matmul": (0, 1, None),
        "addmm": (1, 2, 0),
    }
)
RESHAPES = ("view", "reshape", "_unsafe_view")
KEEPING = (
    "contiguous", "clone", "to", "float", "half", "bfloat16", "_to_copy", "dropout", "detach",
    "flatten", "squeeze", "unsqueeze",
)  # fmt: skip


@dataclass
class Cutter:
    """Writes the pieces of one graph, as calls of its level."""

    built: Assembly

    def __post_init__(self) -> None:
        self.graph = self.built.gm.graph
        self.aten = self.built.rows.level == "aten"
        self.order = {node: number for number, node in enumerate(self.graph.nodes)}

    def shape(self, node: fx.Node) -> list[Any]:
        value = self.built.rows.value(node)
        if not isinstance(value, torch.Tensor):
            raise CannotError(f"{node.name} is no tensor")
        return list(value.shape)

    def slice(self, given: fx.Node, dim: int, start: int, stop: int) -> fx.Node:
        if self.aten:
            return self.graph.call_function(aten.slice.Tensor, (given, dim, start, stop))
        return self.graph.call_function(torch.narrow, (given, dim, start, stop - start))

    def call(self, name: str, *args: Any) -> fx.Node:
        """A call of a function that torch and ATen have by one name."""
        target = getattr(aten, name) if self.aten else getattr(torch, name)
        overload = {"unflatten": "int", "flatten": "using_ints"}.get(name, "default")
        return self.graph.call_function(getattr(target, overload) if self.aten else target, args)


def chunk(
    built: Assembly, rewrite: Rewrite, named: Sequence[fx.Node]
) -> tuple[list[Site], list[str]]:
    """Cut what is named: each collective among it, or behind it, with its product.

    Where there is no collective the products themselves. Raises `CannotError` if nothing was cut.
    """
    cutter = Cutter(built)
    chains, reasons = list[Passage](), list[str]()
    for node in starts_of(named):
        try:
            chains.append(chain_to(node))
        except CannotError as why:
            reasons.append(f"{node.name}: {why}")
    products = [node for node in named if name_of(node) in PRODUCTS]
    if not chains and not reasons:
        chains = [Passage(node, [], None, None, None) for node in products]
    sites: list[Site] = []
    for chain in chains:
        try:
            sites.append(_cut(cutter, chain, rewrite))
        except CannotError as why:
            reasons.append(f"{chain.product.name}: {why}")
    if not sites:
        calls = ", ".join(dict.fromkeys(map(name_of, named)))
        none = f"it has no {', '.join(PRODUCTS)} and no collective that one feeds, only {calls}"
        raise CannotError(f"{'; '.join(reasons[:3]) or none}.")
    return sites, reasons


@dataclass
class Passage:
    """From a product over views to the collective that it feeds, and where that ends."""

    product: fx.Node
    views: list[fx.Node]
    start: fx.Node | None
    wait: fx.Node | None
    copy: fx.Node | None

    @property
    def nodes(self) -> list[fx.Node]:
        ends = [node for node in (self.start, self.wait, self.copy) if node is not None]
        return [self.product, *self.views, *ends]

    @property
    def what(self) -> str:
        name = name_of(self.product)
        return f"{name} and {kind_of(self.start)}" if self.start is not None else name


def starts_of(named: Sequence[fx.Node]) -> list[fx.Node]:
    """The collectives among calls, and those that their products feed."""
    starts: dict[fx.Node, None] = {}
    for node in named:
        if is_collective(node):
            starts[node] = None
        elif name_of(node) in PRODUCTS:
            starts |= dict.fromkeys(_fed(node))
    return list(starts)


def _fed(product: fx.Node) -> Iterator[fx.Node]:
    """The collective that a product feeds, over views."""
    node = product
    while True:
        users = list(node.users)
        yield from (user for user in users if is_collective(user) and user.args[0] is node)
        if len(users) != 1 or name_of(users[0]) not in (*RESHAPES, *KEEPING):
            return
        node = users[0]


def chain_to(start: fx.Node) -> Passage:
    """The product behind a collective, and all calls between them. Raises `CannotError`."""
    if kind_of(start) not in COLLECTIVES or target_name(start).startswith("weft."):
        raise CannotError(f"{kind_of(start)} is none of {', '.join(COLLECTIVES)}")
    waits = [user for user in start.users if is_wait(user)]
    if len(waits) != 1 or len(start.users) > 1:
        raise CannotError("its result is not waited for in one place")
    node: Any = start.args[0]
    copy = next((user for user in waits[0].users if is_copy(user)), None)
    if copy is not None and (copy.args[0] is not node or len(waits[0].users) > 1):
        raise CannotError("its result is copied into something else")
    order = {each: number for number, each in enumerate(start.graph.nodes)}
    late = [user for user in node.users if user not in (start, copy)]
    if late and (copy is None or any(order[user] < order[copy] for user in late)):
        raise CannotError("what it sends is read by others too")
    views: list[fx.Node] = []
    while name_of(node) in (*RESHAPES, *KEEPING):
        views.insert(0, node)
        node = node.args[0]
        if len(node.users) > 1:
            raise CannotError("what it sends is read by others too")
    if not isinstance(node, fx.Node) or name_of(node) not in PRODUCTS:
        fed = target_name(node) if isinstance(node, fx.Node) else "a list"
        raise CannotError(f"it is fed by {fed}, which is none of {', '.join(PRODUCTS)}")
    return Passage(node, views, start, waits[0], copy)


def _cut(cutter: Cutter, chain: Passage, rewrite: Rewrite) -> Site:
    """Put pieces in the place of a chain. Raises `CannotError`, with the graph as it was."""
    cut = _Cut.of(cutter, chain, rewrite)
    site, before = Site(chain.nodes, chain.what), set(cutter.graph.nodes)
    start, end = chain.start or chain.product, chain.nodes[-1]
    with cutter.graph.inserting_before(start):
        pieces = [cut.piece(chain, number) for number in range(rewrite.pieces)]
    with cutter.graph.inserting_before(end):
        whole = cut.join(pieces)
    site.new = [node for node in cutter.graph.nodes if node not in before]
    for node in site.new:
        if not node.meta:  # what joins the pieces
            copy_of(end, node)
    cutter.built.rows.calls[whole] = CallRows(whole, cutter.built.rows.value(end))
    end.replace_all_uses_with(whole)
    if chain.copy is not None and isinstance(chain.copy.args[0], fx.Node):
        chain.copy.args[0].replace_all_uses_with(
            whole, delete_user_cb=lambda user: user not in chain.nodes
        )
    for node in reversed(chain.nodes):
        cutter.graph.erase_node(node)
    return site


@dataclass
class _Cut:
    """How a chain is cut: the product at `dim`, the result at `at`, both at `bounds`.

    num_ranks: of a collective along the dim that is cut, whose rows lie rank by rank; else 1.
    gathers: whether that gives the rows of all ranks.
    """

    cutter: Cutter
    dim: int
    by_columns: bool
    at: int
    bounds: list[int]
    num_ranks: int
    gathers: bool

    @classmethod
    def of(cls, cutter: Cutter, chain: Passage, rewrite: Rewrite) -> _Cut:
        """Raises `CannotError`."""
        shape, asked = cutter.shape(chain.product), rewrite.dim
        if not -len(shape) <= asked < len(shape):
            raise CannotError(f"its result has no dim {asked}")
        dim = asked % len(shape)
        size = shape[dim]
        if not isinstance(size, int):
            raise CannotError(
                f"dim {dim} has {size} entries, another number in each call. Cut its columns "
                "(dim=-1); the batch itself is cut by s.split"
            )
        by_columns, at, num_ranks = dim == len(shape) - 1, dim, 1
        _check_views(cutter, chain, rewrite.pieces, by_columns=by_columns, size=size)
        if chain.start is not None:
            at = len(cutter.shape(chain.start.args[0])) - 1 if by_columns else dim  # type: ignore[arg-type]
            if at == 0 and by_columns and kind_of(chain.start) == SCATTERS:
                raise CannotError("its columns are dealt out to the ranks")
            if at == 0 and kind_of(chain.start) != "all_reduce":
                num_ranks = int(str(chain.start.args[-2]))
            if num_ranks > 1 and kind_of(chain.start) == SCATTERS:
                size //= num_ranks  # of each rank's rows
        if size < rewrite.pieces:
            raise CannotError(f"dim {dim} has {size} entries, fewer than {rewrite.pieces} pieces")
        _check_operands(cutter, chain.product, dim, by_columns=by_columns)
        _check_way(cutter, chain)
        step = ALIGNED if size >= ALIGNED * rewrite.pieces else 1
        bounds = [size * n // rewrite.pieces // step * step for n in range(rewrite.pieces)]
        gathers = chain.start is not None and kind_of(chain.start) == GATHERS
        return cls(cutter, dim, by_columns, at, [*bounds, size], num_ranks, gathers)

    def piece(self, chain: Passage, number: int) -> fx.Node:
        """One piece of a chain: its last call."""
        graph, before = self.cutter.graph, set(self.cutter.graph.nodes)
        label = f"{number + 1}of{len(self.bounds) - 1}"
        span = self.bounds[number], self.bounds[number + 1]
        made = self._product(chain, *span)
        for node in [*chain.views, *([chain.start, chain.wait] if chain.start else [])]:
            assert node is not None, "what starts is waited for"
            args: tuple[Any, ...] = (made, *node.args[1:])
            if name_of(node) in RESHAPES and self.by_columns:
                args = _resized(args, span[1] - span[0])
            made = copy_of(
                node, graph.create_node(node.op, node.target, args, dict(node.kwargs)), label
            )
        for node in [node for node in graph.nodes if node not in before]:
            if not node.meta:
                copy_of(chain.product, node, label)
        return made

    def _product(self, chain: Passage, start: int, stop: int) -> fx.Node:
        cutter, node = self.cutter, chain.product
        args = operands(node)
        input_at, weight_at, bias_at = PRODUCTS[name_of(node)]
        if self.by_columns:
            weight = args[weight_at]
            at = 0 if name_of(node) == "linear" else len(cutter.shape(weight)) - 1
            args[weight_at] = cutter.slice(weight, at, start, stop)
        elif self.num_ranks > 1 and not self.gathers:
            by_rank = cutter.call("unflatten", args[input_at], 0, [self.num_ranks, -1])
            args[input_at] = cutter.call("flatten", cutter.slice(by_rank, 1, start, stop), 0, 1)
        else:
            args[input_at] = cutter.slice(args[input_at], self.dim, start, stop)
        if bias_at is not None and isinstance(dict(enumerate(args)).get(bias_at), fx.Node):
            args[bias_at] = self._bias(args[bias_at], cutter.shape(node), start, stop)
        return cutter.graph.create_node(node.op, node.target, tuple(args), dict(node.kwargs))

    def _bias(self, bias: fx.Node, shape: Sequence[Any], start: int, stop: int) -> fx.Node:
        """The bias of a piece; one that is broadcast along the dim serves all of them."""
        sizes = self.cutter.shape(bias)
        at = self.dim - len(shape) + len(sizes)
        return self.cutter.slice(bias, at, start, stop) if at >= 0 and sizes[at] != 1 else bias

    def join(self, pieces: Sequence[fx.Node]) -> fx.Node:
        """The whole: the pieces side by side, those of each rank together."""
        call = self.cutter.call
        if self.num_ranks == 1 or not self.gathers:
            return call("cat", list(pieces), self.at)
        by_rank = [call("unflatten", piece, 0, [self.num_ranks, -1]) for piece in pieces]
        return call("flatten", call("cat", by_rank, 1), 0, 1)


def operands(product: fx.Node) -> list[Any]:
    """The arguments of a product by place. Raises `CannotError` for some that it has by name."""
    args = list(product.args)
    if name_of(product) == "linear":
        for name in ("weight", "bias")[len(args) - 1 :] if args else ():
            if name in product.kwargs:
                args.append(product.kwargs[name])
    if set(product.kwargs) - {"alpha", "beta", "bias"} or len(args) < 2:
        raise CannotError(f"it is called with {', '.join(product.kwargs)}")
    return args


def _check_operands(cutter: Cutter, product: fx.Node, dim: int, *, by_columns: bool) -> None:
    """Raise `CannotError` if a slice of an operand does not give that slice of the product."""
    args, shape = operands(product), cutter.shape(product)
    input_at, weight_at, _ = PRODUCTS[name_of(product)]
    wide = len(cutter.shape(args[weight_at]))
    if by_columns and wide < 2:
        raise CannotError("its weight has no columns")
    if not by_columns and (len(cutter.shape(args[input_at])) != len(shape) or wide > 2):
        raise CannotError(f"dim {dim} is not one of its input's rows alone")


def _check_way(cutter: Cutter, chain: Passage) -> None:
    """Raise `CannotError` if the product would be another one where its collective starts."""
    built, last = cutter.built, chain.start or chain.product
    if built.modes[chain.product] != built.modes[last]:
        raise CannotError("autocast or gradients are switched between it and its collective")
    read = storages([built.rows.value(node) for node in chain.product.all_input_nodes])
    node = chain.product
    while (node := node.next) is not last and last is not chain.product:
        call = built.rows.calls.get(node)  # pieces of another chain write nowhere
        if call is not None and read & storages(call.written):
            raise CannotError("what it reads is written before its collective starts")


def _check_views(
    cutter: Cutter, chain: Passage, pieces: int, *, by_columns: bool, size: int
) -> None:
    """Raise `CannotError` if a view behind the product does not leave the cut dim alone."""
    before = cutter.shape(chain.product)
    for node in chain.views:
        after = cutter.shape(node)
        kept = after[-1] is size or after[-1] == size if by_columns else after == before
        if name_of(node) in RESHAPES and by_columns:
            kept = kept and sizes_of(node.args)[-1] in (size, -1)
        if name_of(node) == "squeeze" and size < 2 * pieces:
            raise CannotError(f"{node.name} would drop the dim of a piece of one; ask for fewer")
        if not kept or cutter.built.rows.calls[node].draws:
            raise CannotError(f"{node.name} does not leave the dim alone that is to be cut")
        before = after


def sizes_of(args: Sequence[Any]) -> list[Any]:
    """The sizes that a view is called with."""
    return list(args[1]) if len(args) == 2 and isinstance(args[1], list | tuple) else list(args[1:])


def _resized(args: tuple[Any, ...], size: int) -> tuple[Any, ...]:
    """The arguments of a view, with as many columns as a piece has."""
    *sizes, last = sizes_of(args)
    sizes.append(-1 if last == -1 else size)
    one = len(args) == 2 and isinstance(args[1], list | tuple)
    return (args[0], sizes) if one else (args[0], *sizes)

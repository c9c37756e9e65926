"""`decompose`: an all_reduce as a reduce_scatter and an all_gather, with work on shares in between.

    z = all_reduce(y)                r = reduce_scatter(y)        rows of this rank, summed
    h = x + z                 ->     g = share(x) + r             the residual stream stays dealt
    n = norm(h)                      n = all_gather(norm(g))
    linear(n, w)                     linear(n, w)

A *row* is an entry of all dims but the last. The rows of all these dims are dealt out, as one dim
of [1, ..., rows, H], so that dims counted from either side mean what they did. The all_gather moves
down past calls that treat each row by itself, up to whatever needs other rows, or is a product.

    moves past    calls entry by entry, along the last dim (norms, softmax), cat of columns
    beside it     weights and numbers without rows; other shares; values that all ranks have alike

Alike on all ranks is what all_reduce and all_gather of the same group make, and what is computed
of that and of inputs, which ranks then compare at each call (`Alike`). A call whose operands are
all put together anyway stays with the rows of the whole, for its result may be needed whole too.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import TYPE_CHECKING, Any

import torch
from torch import fx

from torchweft.capture.blocks.blocks import CALLS
from torchweft.capture.marks import target_name
from torchweft.capture.ops.collectives import kind_of
from torchweft.capture.ops.units import is_collective, is_copy, is_wait, storages
from torchweft.capture.rewrites.chunk import Cutter, starts_of
from torchweft.capture.rewrites.rewriting import (
    CALLED,
    CannotError,
    Site,
    copy_of,
    find,
    written_in,
)
from torchweft.capture.rows.axes import SYMBOLIC, AtenCall, tensors_in
from torchweft.capture.rows.rows import is_getitem
from torchweft.capture.rows.table import ALONG, POINTWISE, REDUCE, communicator_of
from torchweft.plan.deals import Alike
from torchweft.plan.rewrite import Rewrite
from torchweft.private.core import HigherOrderOperator, OpOverload, tree_leaves
from torchweft.ranks import shares  # noqa: F401 - the ops that it registers
from torchweft.ranks.ranks import user_group

if TYPE_CHECKING:
    from torchweft.capture.ops.assembly import Assembly

ALIKE = "weft_alike"  # of a graph: what its ranks must have in common
ENTRIES = frozenset(POINTWISE.split()) | {"detach", "alias"}
LAST = frozenset(name for name in ALONG.split() if "softmax" in name) | {"cat"}
KEEPS = frozenset(REDUCE.split())
SHARED = ("all_reduce", "all_gather_into_tensor")  # what they make all ranks of the group have
OWN = ("aten", "prims", "prim")


@dataclass(frozen=True)
class Deck:
    """What is dealt: the sizes of all dims but the last, and to whom."""

    leading: tuple[Any, ...]
    group: str
    num_ranks: int


@dataclass
class Legs:
    """An all_reduce that is taken apart; `end` is what others read of it."""

    start: fx.Node
    wait: fx.Node
    end: fx.Node
    deck: Deck

    @property
    def nodes(self) -> list[fx.Node]:
        return list(dict.fromkeys([self.start, self.wait, self.end]))


def decompose(
    built: Assembly, rewrite: Rewrite, named: Sequence[fx.Node]
) -> tuple[list[Site], list[str]]:
    """Take apart what is named: each all_reduce among it, or behind its products.

    Raises `CannotError` if there was nothing that could be.
    """
    graph, legs, reasons = built.gm.graph, list[Legs](), list[str]()
    if any(node.name.startswith("tangents") for node in graph.find_nodes(op="placeholder")):
        raise CannotError("a backward graph is left as it is.")
    written = written_in(built)
    for start in starts_of(named):
        try:
            legs.append(_legs(built, start, written))
        except CannotError as why:
            reasons.append(f"{start.name}: {why}")
    order = {node: at for at, node in enumerate(graph.nodes)}
    legs.sort(key=lambda leg: order[leg.start])
    every = [node for node in graph.nodes if node.op in CALLED]
    past = [node for name in rewrite.past for node in (every if name == "*" else find(graph, name))]
    dealing = Dealing(Cutter(built), {leg.end: leg for leg in legs}, set(past), written)
    dealing.settle()
    for leg in legs if rewrite.past else ():
        if not any(user in dealing.dealt for user in leg.end.users):
            del dealing.ends[leg.end]
            stop = dealing.stops.get(next(iter(leg.end.users), leg.end), "")
            reasons.append(f"{leg.start.name}: nothing that follows can be done on shares{stop}")
    dealing.settle()
    if not dealing.ends:
        none = "it has no all_reduce, and no product that feeds one"
        raise CannotError(f"{'; '.join(reasons[:3]) or none}.")
    alike = list(dealing.alike())
    sites = ShareWriter(dealing).write()
    built.gm.meta[CALLS] = []  # blocks are no longer alike: what is dealt goes from one to the next
    built.gm.meta[ALIKE] = (*built.gm.meta.get(ALIKE, ()), *alike)
    return sites, reasons


def _legs(built: Assembly, start: fx.Node, written: dict[fx.Node, set[int]]) -> Legs:
    """An all_reduce whose result is read in one way. Raises `CannotError` for others."""
    if kind_of(start) != "all_reduce" or target_name(start).startswith("weft."):
        raise CannotError(f"{target_name(start)} is no all_reduce of torch's")
    given, how, group = start.args
    waits = [user for user in start.users if is_wait(user)]
    if len(waits) != 1 or len(start.users) > 1 or not isinstance(given, fx.Node):
        raise CannotError("its result is not waited for in one place")
    value, wait = built.rows.value(given), waits[0]
    leading = tuple(built.rows.symbols.shape(value)[:-1])
    axis = built.rows.axis(value)
    if how not in ("sum", "avg") or not value.dtype.is_floating_point:
        raise CannotError(
            f"it is {how} of {value.dtype}; sums and averages of floats are taken apart"
        )
    if not leading or all(size == 1 for size in leading) or (axis and axis.dim == len(leading)):
        raise CannotError("it has no rows but in its last dim")
    copies = [user for user in wait.users if is_copy(user) and user.args[1] is wait]
    end = wait if not copies else copies[0]
    if copies and (len(wait.users) > 1 or end.args[0] is not given):
        raise CannotError("its result is copied into something else")
    if copies:
        _take_over(built, given, start, end)
    mine = storages(value) if copies else storages(built.rows.value(wait))
    if any(mine & ids for node, ids in written.items() if node is not end):
        raise CannotError("what it makes is written in place")
    num_ranks = user_group(str(group)).size()
    return Legs(start, wait, end, Deck(leading, str(group), num_ranks))


def _take_over(built: Assembly, given: fx.Node, start: fx.Node, end: fx.Node) -> None:
    """Have those that read what is reduced in place read the copy that ends it.

    Raises `CannotError` if they see it by another name, or it belongs to somebody else.
    """
    rows, order = built.rows, {node: at for at, node in enumerate(start.graph.nodes)}
    mine = storages(rows.value(given))
    for node in start.graph.nodes:
        if node.op == "output" or not storages(rows.value(node)) & mine:
            continue
        if node.op in ("placeholder", "get_attr"):
            raise CannotError("it reduces an input in place")
        behind = {user for user in node.users if order[start] < order[user]}
        if node is given:
            behind = {user for user in behind if order[user] < order[end]}
        if order[node] < order[start] and behind - {end}:
            raise CannotError("what it reduces in place is read by others too")
    given.replace_all_uses_with(end, delete_user_cb=lambda user: order[user] > order[end])


@dataclass
class Dealing:
    """Which calls can be done on shares.

    ends: where shares begin. past: the calls that they may go through. dealt: those that they do.
    stops: why not, by call.
    """

    cutter: Cutter
    ends: dict[fx.Node, Legs]
    past: set[fx.Node]
    written: dict[fx.Node, set[int]]
    dealt: dict[fx.Node, Deck] = field(default_factory=dict)
    stops: dict[fx.Node, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.rows, self.graph = self.cutter.built.rows, self.cutter.graph
        others = [ids for node, ids in self.written.items() if node not in self.ends]
        self.changed = set[int]().union(*others)
        self.kept = set[fx.Node]()  # calls that had better see all rows
        self.common = self._common()

    def settle(self) -> None:
        """Find the calls that are done on shares, until none would be put together for nothing."""
        while True:
            self.dealt = {}
            for node in self.graph.nodes:
                if node in self.ends:
                    self.dealt[node] = self.ends[node].deck
                elif node in self.past and node not in self.kept and (deck := self._deck(node)):
                    self.dealt[node] = deck
            whole = {node for node in self.dealt if any(u not in self.dealt for u in node.users)}
            vain = {
                node for node in self.dealt.keys() - self.ends.keys()
                if all(used in whole for used in node.all_input_nodes if used in self.dealt)
            }  # fmt: skip
            if not vain:
                return
            self.kept |= vain

    def _deck(self, node: fx.Node) -> Deck | None:
        """What a call is done on shares of, if it can be."""
        decks = {self.dealt[used] for used in node.all_input_nodes if used in self.dealt}
        if not decks:
            return None
        try:
            if len(decks) > 1:
                raise CannotError("it meets shares of other rows")
            (deck,) = decks
            self._check(node, deck)
        except CannotError as why:
            self.stops[node] = f": {node.name}: {why}"
            return None
        return deck

    def _check(self, node: fx.Node, deck: Deck) -> None:
        """Raise `CannotError` if a call does not treat each row by itself."""
        call, made = self.rows.calls[node], tensors_in(self.rows.value(node))
        if is_collective(node) or is_wait(node) or call.draws or node in self.written:
            raise CannotError("it talks, writes in place or draws random numbers")
        if not made or not all(self._has_rows(tensor, deck) for tensor in made):
            raise CannotError("its result has other rows")
        if storages(self.rows.value(node)) & self.changed:
            raise CannotError("its result is written in place")
        for used in node.all_input_nodes:
            if used not in self.dealt:
                self._check_operand(used, deck)
        same = {id(self.rows.value(used)) for used in node.all_input_nodes}
        if call.atens and not isinstance(node.target, HigherOrderOperator):
            for aten in call.atens:
                self._check_aten(aten, deck)
        elif not is_getitem(node) and id(self.rows.value(node)) not in same:
            raise CannotError("it cannot be looked into")

    def _check_operand(self, used: fx.Node, deck: Deck) -> None:
        value = self.rows.value(used)
        if not isinstance(value, torch.Tensor):
            raise CannotError(f"it reads {used.name}, which is no tensor")
        if not self._has_rows(value, deck) and not self._is_free(value, deck):
            raise CannotError(f"it reads {used.name}, which has other rows")
        if not self._is_common(used, deck):
            raise CannotError(f"it reads {used.name}, which ranks may not have alike")

    def _check_aten(self, aten: AtenCall, deck: Deck) -> None:
        """Raise `CannotError` if an operator looks further than one row."""
        for tensor in [*aten.tensors, *aten.results]:
            if not self._has_rows(tensor, deck) and not self._is_free(tensor, deck):
                raise CannotError(f"{aten.name} moves rows")
        if any(isinstance(leaf, SYMBOLIC) for leaf in tree_leaves(dict(aten.args))):
            raise CannotError(f"{aten.name} looks at the number of rows")
        last, args = len(deck.leading), aten.args
        given = args.get("dim")
        dims = given if isinstance(given, list | tuple) else [given]
        along = bool(dims) and all(dim in (-1, last) for dim in dims)
        norm = len(args.get("normalized_shape", ())) == 1
        if torch.Tag.pointwise in aten.func.tags or aten.name in ENTRIES or norm:
            return
        if along and (aten.name in LAST or (aten.name in KEEPS and args.get("keepdim"))):
            return
        raise CannotError(f"{aten.name} looks across rows")

    def _has_rows(self, tensor: torch.Tensor, deck: Deck) -> bool:
        return tuple(self.rows.symbols.shape(tensor)[:-1]) == deck.leading

    def _is_free(self, tensor: torch.Tensor, deck: Deck) -> bool:
        """Whether all rows of a deck read the same of it."""
        return tensor.dim() < 2 or (
            tensor.dim() <= len(deck.leading) + 1 and all(size == 1 for size in tensor.shape[:-1])
        )

    # What all ranks have alike.

    def _common(self) -> dict[fx.Node, set[str] | None]:
        """For each node the groups whose ranks have it alike if they are given inputs alike; None:
        all of them."""
        found: dict[fx.Node, set[str] | None] = {}
        for node in self.graph.nodes:
            groups = [g for used in node.all_input_nodes if (g := found.get(used)) is not None]
            found[node] = set.intersection(*groups) if groups else None
            if node.op not in CALLED:
                continue
            call, start = self.rows.calls[node], node.args[0] if node.args else None
            if is_wait(node) and isinstance(start, fx.Node) and is_collective(start):
                group = _group_of(start)
                found[node] = {group} if kind_of(start) in SHARED and group else set()
            elif node in self.ends:
                found[node] = found[self.ends[node].wait]
                continue
            spaces = {aten.func.namespace for aten in call.atens}
            if isinstance(node.target, OpOverload):
                spaces.add(node.target.namespace)
            foreign = not spaces <= {*OWN, "_c10d_functional"}
            if foreign or call.draws or isinstance(node.target, HigherOrderOperator):
                found[node] = set()
            if storages(call.value) & self.changed:
                found[node] = set()
        return found

    def _is_common(self, node: fx.Node, deck: Deck) -> bool:
        if node.op in ("placeholder", "get_attr"):
            return not storages(self.rows.value(node)) & self.changed
        groups = self.common[node]
        return groups is None or deck.group in groups

    def alike(self) -> Iterator[Alike]:
        """What the ranks of each group must have in common for the calls on shares."""
        decks = {deck.group: deck for deck in self.dealt.values()}
        lists = {group: self._behind(group) for group in decks}
        for group, nodes in lists.items():
            known = {node: f"%{at}" for at, node in enumerate(nodes)}
            known = {node: known.get(node, "%") for node in self.graph.nodes}
            lines = []
            for node in nodes:
                given = fx.map_arg((node.args, node.kwargs), known.__getitem__)
                lines.append(f"{node.op} {target_name(node)} {given}" if node.op in CALLED else "-")
            names = [node.name for node in nodes if node.op in ("placeholder", "get_attr")]
            code = blake2b("\n".join(lines).encode(), digest_size=8).hexdigest()
            yield Alike(communicator_of(group), frozenset(names), code)

    def _behind(self, group: str) -> list[fx.Node]:
        """The calls on shares of a group, and what they read that is no share, in graph order."""
        waiting = [node for node, deck in self.dealt.items() if deck.group == group]
        behind = set[fx.Node]()
        while waiting:
            node = waiting.pop()
            if node in behind:
                continue
            behind.add(node)
            ends = node in self.ends or is_wait(node)
            waiting += [] if ends else node.all_input_nodes
        return [node for node in self.graph.nodes if node in behind]


def _group_of(start: fx.Node) -> str:
    """The process group of a collective."""
    texts = [arg for arg in start.args if isinstance(arg, str)]
    return texts[-1] if texts else ""


@dataclass
class ShareWriter:
    """Writes what `Dealing` has found into the graph.

    flat: shares as they come in, and made: as calls have them. shares: of what all ranks have.
    """

    dealing: Dealing
    flat: dict[fx.Node, fx.Node] = field(default_factory=dict)
    made: dict[fx.Node, fx.Node] = field(default_factory=dict)
    shares: dict[tuple[fx.Node, Deck], fx.Node] = field(default_factory=dict)

    def write(self) -> list[Site]:
        dealing, graph = self.dealing, self.dealing.graph
        before, sites = set(graph.nodes), list[Site]()
        for node, deck in list(dealing.dealt.items()):
            leg = dealing.ends.get(node)
            if leg is not None:
                self.flat[node] = self._scatter(leg)
            else:
                self.made[node] = self._move(node, deck)
            if any(user not in dealing.dealt for user in node.users):
                with graph.inserting_before(node):
                    whole = self._gather(node, deck)
                node.replace_all_uses_with(
                    whole, delete_user_cb=lambda user: user not in dealing.dealt
                )
            if leg is not None:
                sites.append(Site(leg.nodes, "all_reduce"))
        gone = [*dealing.dealt, *(each for leg in dealing.ends.values() for each in leg.nodes)]
        for node in reversed([node for node in graph.nodes if node in set(gone)]):
            graph.erase_node(node)
        if sites:
            sites[0].new = [node for node in graph.nodes if node not in before]
        return sites

    def _call(self, near: fx.Node, name: str, *args: Any) -> fx.Node:
        return copy_of(near, self.dealing.cutter.call(name, *args))

    def _flat(self, near: fx.Node, given: fx.Node, num_dims: int) -> fx.Node:
        """All rows as one dim."""
        return given if num_dims == 1 else self._call(near, "flatten", given, 0, num_dims - 1)

    def _waited(self, near: fx.Node, sent: fx.Node) -> fx.Node:
        wait = torch.ops._c10d_functional.wait_tensor.default
        return copy_of(near, near.graph.call_function(wait, (copy_of(near, sent),)))

    def _apart(self, near: fx.Node, given: fx.Node, num_dims: int) -> fx.Node:
        """Rows of shares, behind as many dims of size one as there were others."""
        for _ in range(num_dims - 1):
            given = self._call(near, "unsqueeze", given, 0)
        return given

    def _scatter(self, leg: Legs) -> fx.Node:
        start, deck, weft = leg.start, leg.deck, torch.ops.weft
        given, how, group = start.args
        with start.graph.inserting_before(start):
            flat = self._flat(start, given, len(deck.leading))  # type: ignore[arg-type]
            args = (flat, how, deck.num_ranks, group, True)
            sent = start.graph.call_function(weft.reduce_scatter_tensor.default, args)
        with start.graph.inserting_before(leg.wait):
            return self._waited(start, sent)

    def _gather(self, near: fx.Node, deck: Deck) -> fx.Node:
        """All rows of shares, in the shape of the whole."""
        graph, value = near.graph, self.dealing.rows.value(near)
        sizes: list[Any] = [
            self._size(near, dim, size) for dim, size in enumerate(value.shape[:-1])
        ]
        rows = sizes[0]
        for size in sizes[1:]:
            rows = rows * size if isinstance(rows, int) and isinstance(size, int) else (
                graph.call_function(operator.mul, (rows, size))
            )  # fmt: skip
        given = self.flat.get(near) or self._flat(near, self.made[near], len(sizes))
        args = (given, deck.num_ranks, deck.group, rows)
        sent = graph.call_function(torch.ops.weft.all_gather_into_tensor.default, args)
        whole = self._waited(near, sent)
        return whole if len(sizes) == 1 else self._call(near, "unflatten", whole, 0, sizes)

    def _size(self, near: fx.Node, dim: int, size: Any) -> Any:
        """A size of the whole, as a number or as a call that finds it."""
        if isinstance(size, int):
            return size
        given = next(leg for leg in self.dealing.ends.values()
                     if leg.deck == self.dealing.dealt[near]).start.args[0]  # fmt: skip
        return near.graph.call_function(torch.ops.aten.sym_size.int, (given, dim))

    def _move(self, node: fx.Node, deck: Deck) -> fx.Node:
        """The same call, of shares."""
        graph, rows = node.graph, self.dealing.rows
        given = dict[fx.Node, fx.Node]()
        with graph.inserting_before(node):
            for used in node.all_input_nodes:
                value = rows.value(used)
                plain = isinstance(value, torch.Tensor) and self.dealing._has_rows(value, deck)
                dealt = used in self.made or used in self.flat
                given[used] = self._share(node, used, deck) if plain and not dealt else used
            for used in given.keys() & self.flat.keys() - self.made.keys():
                self.made[used] = self._apart(node, self.flat[used], len(deck.leading))
            given |= {used: self.made[used] for used in given if used in self.made}
            args, kwargs = fx.map_arg((node.args, node.kwargs), given.__getitem__)
            return copy_of(node, graph.create_node(node.op, node.target, args, kwargs))

    def _share(self, near: fx.Node, used: fx.Node, deck: Deck) -> fx.Node:
        if (used, deck) not in self.shares:
            flat = self._flat(near, used, len(deck.leading))
            share = torch.ops.weft_rows.share.default
            call = near.graph.call_function(share, (flat, deck.num_ranks, deck.group))
            self.shares[used, deck] = self._apart(near, copy_of(near, call), len(deck.leading))
        return self.shares[used, deck]

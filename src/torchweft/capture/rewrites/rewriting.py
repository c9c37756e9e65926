"""`rewrite`: a captured graph with what rewrites ask for, as a new graph; the old one stays.

    calls --find, replace, one rewrite after another--> calls --assemble--> ops, bodies, values

Rewriting comes before calls are gathered into ops. So rows, marks, bodies, places and the order of
collectives are derived anew, by the same code as for a graph that a user wrote in pieces; nothing
downstream knows of rewrites but for a note on each new call: which piece it is.

A `Site` is a place in the graph that one rewrite changes: the calls that go, and those that come in
their place. Inlined blocks that were changed alike stay twins.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING

from torch import fx

from torchweft.capture.blocks.blocks import CALLS, InlinedCall
from torchweft.capture.marks import target_name
from torchweft.capture.ops.names import stack_of
from torchweft.capture.ops.units import PIECE, storages
from torchweft.capture.rows.rows import id_of
from torchweft.errors import CaptureError, unknown
from torchweft.plan.rewrite import Rewrite

if TYPE_CHECKING:
    from torchweft.capture.ops.assembly import Assembly

NAMES = "weft_names"  # of a node: the ops that it has been part of
SHAPES = ("example_value", "val", "tensor_meta")
CALLED = ("call_function", "call_method", "call_module")


class CannotError(Exception):
    """A rewrite cannot be done there; the text says why."""


@dataclass
class Site:
    """Calls of one place, those that stand there once they are replaced, and what it is."""

    old: list[fx.Node]
    what: str
    new: list[fx.Node] = field(default_factory=list)


@dataclass(frozen=True)
class Rewritten:
    """What became of rewrites: lines of history, and why some found nothing that they could do."""

    lines: tuple[str, ...] = ()
    done: frozenset[Rewrite] = frozenset()
    refused: Mapping[Rewrite, str] = field(default_factory=dict, hash=False)


def require_done(rewrites: Iterable[Rewrite], seen: Sequence[Rewritten]) -> None:
    """Raise `CaptureError` for a rewrite that none of the captured graphs has room for."""
    for item in rewrites:
        if not any(item in each.done for each in seen):
            why = [each.refused[item] for each in seen if item in each.refused]
            raise CaptureError("; ".join(dict.fromkeys(why)), rule="rewrite")


Look = Callable[[fx.GraphModule], "Assembly"]
Rewriter = Callable[["Assembly", Rewrite, Sequence[fx.Node]], tuple[list[Site], list[str]]]
"""(the graph as it was cut, what to do, the calls that are named) -> places done, and why others
were left. Raises `CannotError`."""


def rewrite(
    gm: fx.GraphModule, rewrites: Sequence[Rewrite], look: Look, kinds: Mapping[str, Rewriter]
) -> tuple[fx.GraphModule, Rewritten]:
    """A copy of the graph after all rewrites, in their order; each sees what others have made."""
    gm = _copy(gm)
    lines, refused = list[str](), dict[Rewrite, str]()
    for item in rewrites:
        built = look(gm)
        _note_ops(built)
        try:
            named = [node for target in item.targets for node in find(gm.graph, target)]
            sites, left = kinds[item.kind](built, item, list(dict.fromkeys(named)))
        except CannotError as why:
            refused[item] = f"rewrite: {item}: {why}"
            continue
        _keep_twins(gm, sites)
        gm.graph.lint()
        gm.recompile()
        what = ", ".join(
            f"{sum(s.what == w for s in sites)} {w}" for w in {s.what: 0 for s in sites}
        )
        more = f"; {len(left)} left whole: {left[0]}" if left else ""
        lines.append(f"rewrite {item}: {what}{more}")
    done = frozenset(rewrites) - refused.keys()
    return gm, Rewritten(tuple(lines), done, refused)


def find(graph: fx.Graph, target: str) -> list[fx.Node]:
    """The calls that a name is about: those of an op, or whatever is known by it.

    Raises `CannotError` with the names that exist.
    """
    calls = [node for node in graph.nodes if node.op in CALLED]
    if target.startswith("="):
        return [node for node in calls if target[1:] in node.meta.get(NAMES, ())]
    patterns = (target, f"*.{target}")
    named = [(node, set(_names(node))) for node in calls]
    found = [
        n for n, names in named if any(fnmatchcase(each, p) for each in names for p in patterns)
    ]
    if not found:
        known = dict.fromkeys(name for node in calls for name in node.meta.get(NAMES, ()))
        raise CannotError(unknown("op or module", target, known))
    return found


def _names(node: fx.Node) -> Iterable[str]:
    """What a call is known by: its ops and marks, the modules around it, what it calls there."""
    called = name_of(node)
    yield from (*node.meta.get(NAMES, ()), called)
    for path, _ in stack_of(node):
        yield path
        yield f"{path}.{called}"


def written_in(built: Assembly) -> dict[fx.Node, set[int]]:
    """For each call that writes into what it is given, the bytes."""
    written = dict[fx.Node, set[int]]()
    for node, call in built.rows.calls.items():
        given = storages([built.rows.value(used) for used in node.all_input_nodes])
        if ids := given & {id_of(tensor) for tensor in call.written}:
            written[node] = ids
    return written


def name_of(node: fx.Node) -> str:
    """The end of what a call calls: "linear", "mm", "all_reduce"."""
    return target_name(node).removesuffix(".default").split(".")[-1]


def _note_ops(built: Assembly) -> None:
    """Note on each call the ops that it is part of, beside those that it was part of before."""
    for op, region in built.regions_of.items():
        names = [op, *([region.mark.name] if region.mark is not None else [])]
        for node in region.calls:
            node.meta[NAMES] = dict.fromkeys([*node.meta.get(NAMES, ()), *names])


def copy_of(node: fx.Node, made: fx.Node, piece: str = "") -> fx.Node:
    """A new call that stands in for part of another: it has its place in the model, and a piece."""
    meta = {key: value for key, value in node.meta.items() if key not in SHAPES}
    if piece:
        before = meta.get(PIECE, "")
        meta[PIECE] = f"{before}.{piece}" if before else piece
    made.meta = {**meta, **made.meta}
    return made


def _copy(gm: fx.GraphModule) -> fx.GraphModule:
    """A copy of a graph with all that was noted of it."""
    graph, known = fx.Graph(), dict[fx.Node, fx.Node]()
    made = graph.graph_copy(gm.graph, known)
    output = graph.output(made)
    output.meta = dict(gm.graph.output_node().meta)
    copied = fx.GraphModule(gm, graph)
    copied.meta = dict(gm.meta)
    copied.meta[CALLS] = [
        [
            InlinedCall(
                fx.map_arg(each.operands, known.__getitem__),
                tuple(known[node] for node in each.nodes),
            )
            for each in calls
        ]
        for calls in gm.meta.get(CALLS, ())
    ]
    return copied


def _keep_twins(gm: fx.GraphModule, sites: Sequence[Site]) -> None:
    """Bring the inlined calls of blocks up to date: those that were changed alike stay together."""
    order = {node: number for number, node in enumerate(gm.graph.nodes)}
    groups: list[list[InlinedCall]] = []
    for calls in gm.meta.get(CALLS, ()):
        alike: dict[object, list[InlinedCall]] = {}
        for number, each in enumerate(calls):
            inside = set(each.nodes)
            mine = [site for site in sites if inside & set(site.old)]
            whole = all(inside.issuperset(site.old) for site in mine)
            places = [sorted(map(each.nodes.index, s.old)) for s in mine] if whole else []
            nodes = [*inside & order.keys(), *(node for site in mine for node in site.new)]
            kept = InlinedCall(each.operands, tuple(sorted(nodes, key=order.__getitem__)))
            changed = str(sorted(places)) if whole else f"alone {number}"
            alike.setdefault(changed, []).append(kept)
        groups += alike.values()
    gm.meta[CALLS] = groups

"""What a declaration means in the place of some ops of a graph, and whether it fits them.

reads_of, makes_of    what ops need from outside, and make for others
given_to, used_up     what a kernel is given, and what of it it may use up
talks_of              what it says in some phases
faults_of             what is wrong with it, as sentences
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from fnmatch import fnmatchcase

from torchweft.plan.graph import Collective, Graph
from torchweft.plan.kernels.declaration import Declaration


def reads_of(graph: Graph, names: Iterable[str]) -> list[str]:
    """What ops need from outside, in order."""
    inside: set[str] = set()
    reads: dict[str, None] = {}
    for op in map(graph.op.__getitem__, names):
        reads |= dict.fromkeys(name for name in op.reads if name not in inside)
        inside.update(op.makes)
    return list(reads)


def makes_of(graph: Graph, names: Sequence[str]) -> list[str]:
    """What ops make that is wanted outside of them: in order, what their kernel gives."""
    made = [name for op in names for name in graph.op[op].makes]
    outside = {name for name in made if {op.name for op in graph.readers[name]} - {*names}}
    return [name for name in made if name in outside or name in graph.outputs]


def given_to(graph: Graph, names: Sequence[str], declared: Declaration | None) -> list[str]:
    """The values that a kernel is given, in order; a pattern that fits none or several is left."""
    reads = reads_of(graph, names)
    if declared is None or declared.reads is None:
        return reads
    chosen = [_fitting(pattern, reads) or _fitting(pattern, _weights(graph))
              for pattern in declared.reads]  # fmt: skip
    return [found[0] for found in chosen if len(found) == 1]


def used_up(graph: Graph, names: Sequence[str], declared: Declaration | None) -> set[str]:
    """The reads of a kernel whose bytes it may write."""
    given = given_to(graph, names, declared)
    patterns = declared.writes if declared is not None else ()
    return {name for name in given if any(fnmatchcase(name, each) for each in patterns)}


def talks_of(
    graph: Graph, names: Sequence[str], declared: Declaration | None, phases: Sequence[str]
) -> list[Collective]:
    """What a kernel says in these phases; nothing if it is not declared."""
    ops = [op for op in map(graph.op.__getitem__, names) if op.collective is not None]
    groups = [(op.collective.communicator, op.collective.tag or op.name) for op in ops
              if op.collective is not None]  # fmt: skip
    said = []
    for at, (kind, phase) in enumerate(declared.talks if declared is not None and groups else ()):
        communicator, tag = groups[min(at, len(groups) - 1)]
        said += [Collective(kind, communicator, tag=tag)] if phase in phases else []
    return said


def faults_of(
    graph: Graph, names: Sequence[str], by: str, declared: Declaration | None
) -> Iterator[str]:
    """What is wrong with a kernel in the place of these ops."""
    ops = [graph.op[name] for name in names]
    talking = [op for op in ops if op.collective is not None]
    where = f"kernel {by!r} in the place of {' '.join(names)}"
    if declared is None:
        if talking:
            like = f"weft.kernel({by}, talks=[('all_reduce', 'issue')])"
            yield (f"{where}: {talking[0].name!r} talks to other ranks, and the kernel does not "
                   f"declare what it says. Declare it, such as {like}.")  # fmt: skip
        return
    groups = {op.collective.communicator for op in talking if op.collective is not None}
    if declared.talks and len(groups) != 1:
        many = f"on {len(groups)} groups" if groups else "on none"
        yield f"{where} talks, and these ops do so {many}: there is not one group to give it."
    if any(op.collective is not None and op.collective.peer is not None for op in ops):
        yield f"{where}: a message between two ranks is not a kernel's."
    reads = reads_of(graph, names)
    for pattern in declared.reads or ():
        fitting = _fitting(pattern, reads) or _fitting(pattern, _weights(graph))
        if len(fitting) != 1:
            found = f"fits {', '.join(fitting[:5])}" if fitting else "fits nothing"
            yield (f"{where}: reads={pattern!r} {found}. The ops read {', '.join(reads)}; a weight "
                   "of the graph may be read too.")  # fmt: skip
    given = given_to(graph, names, declared)
    for pattern in declared.writes:
        if not _fitting(pattern, given):
            yield f"{where}: writes={pattern!r} fits none of what it is given: {', '.join(given)}."
    for name in sorted(used_up(graph, names, declared)):
        family = [other for other, root in graph.root.items() if root == graph.root[name]]
        others = {op.name for each in family for op in graph.readers[each]} - {*names}
        if graph.root[name] in graph.inputs:
            yield f"{where} may not write {name!r}: its bytes are the caller's."
        elif graph.value[name].batch is None and not any(op.whole for op in ops):
            yield f"{where} may not write {name!r}, which all parts read."
        elif others:
            yield f"{where} may not write {name!r}, which {min(others)!r} reads too."
        elif kept := [each for each in family if each in graph.outputs]:
            yield f"{where} may not write {name!r}: {kept[0]!r} is an output of the graph."


def _fitting(pattern: str, names: Iterable[str]) -> list[str]:
    return [name for name in names if fnmatchcase(name, pattern)]


def _weights(graph: Graph) -> list[str]:
    """Inputs that nothing changes and that have no rows: they are there at any time, whole."""
    return [n for n in graph.inputs if graph.value[n].batch is None and n not in graph.mutated]

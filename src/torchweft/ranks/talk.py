"""The `Talk`: the collectives of one call, agreed with the other ranks before the first of them.

    digests(plan, bodies, env, bounds)  ->  {group: number}     equal on ranks that can talk
    with Talk(plan, digests, speaker, watchdog_s): run     a rank that fails takes its groups down

What ranks must have in common is the model that they call, the order of its collectives, the
kernels that make them and the sizes of those that need equal sizes; what they compute in between
is their own affair, but for what is computed of dealt rows: parts deal other rows to each rank.
"""

from __future__ import annotations

import re
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from types import MappingProxyType
from typing import Any

import torch
from torch.distributed import ProcessGroup
from torch.distributed import distributed_c10d as c10d

from torchweft.errors import PlanError, RunError
from torchweft.plan.deals import beside
from torchweft.plan.graph import Collective, Graph
from torchweft.plan.plan import Plan, Range, Step
from torchweft.private.core import TorchDispatchMode
from torchweft.ranks.faults import LostError
from torchweft.ranks.ranks import EAGER, RANKS, REFUSED, WAITS, Channel, channel
from torchweft.ranks.speakers import Speaker, number_of, stable_name

SEQUENCE = "sequence"
"""The rule that a model breaks which comes to other boundaries than the plan was made for."""
KERNEL = "kernel"
"""The rule that a user's kernel breaks which raises, or gives or says what it should not."""
MENDED = (SEQUENCE, KERNEL)
"""After these the groups are opened anew at the next call: no rank has to give up its model."""
TALKS = ("run", "issue", "complete")
PLAIN = (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer)
UNEQUAL = ("all_to_all", "send", "recv", "batch_p2p", "isend", "irecv")


def digests(
    plan: Plan,
    bodies: Mapping[str, Any],
    env: Mapping[str, int],
    bounds: Sequence[int],
) -> dict[str, int]:
    """For each process group of a plan a number for its collectives, in order, with their sizes."""
    lines: dict[str, list[str]] = {}
    graph = plan.graph
    messages: dict[str, list[tuple[Collective, str, Range | None]]] = {}
    begun: dict[tuple[tuple[str, ...], object], int] = {}  # kernels that end by talking, in order
    for step in plan.steps:
        if step.kind == "complete":
            for talk in plan.talks(step):
                number = begun[step.names, step.parts]
                lines[talk.communicator].append(f"{talk.kind} at the end of kernel {number}")
        if step.kind not in ("run", "issue"):
            continue
        begun[step.names, step.parts] = len(begun)
        for name in step.names:
            op = graph.op[name]
            if op.collective is None:
                continue
            told = lines.setdefault(op.collective.communicator, [])
            if op.collective.peer is not None:
                said = messages.setdefault(op.collective.communicator, [])
                said.append((replace(op.collective, tag=""), name, step.parts))
                continue
            told += [op.collective.kind, *(graph.value[read].dtype for read in op.reads)]
            if step.by is not None:
                told.append(f"by {_spoken(plan, step.by)}")
            if not op.collective.kind.startswith(UNEQUAL):
                start, stop = step.parts or (0, plan.num_parts)
                rows = {graph.batch: bounds[stop] - bounds[start]} if graph.batch else {}
                shapes = [graph.value[read].shape for read in op.reads]
                here = {**env, **rows}
                sizes = [[size.evaluate(here) for size in shape] for shape in shapes]
                told.append(f"{getattr(bodies[name], 'key', '')} {sizes}")
    if plan.num_parts > 1:  # the rows of a share are others then, so all ranks must treat all alike
        for communicator, common in beside(graph.ops, graph.value)[0].items():
            told = lines.setdefault(communicator, [])
            for name in common.ops:
                sizes = [size.evaluate(env) for size in getattr(bodies[name], "sizes", ())]
                told.append(f"shares {getattr(bodies[name], 'key', '')} {sizes}")
    for communicator, said in messages.items():
        if any(parts is not None for _, _, parts in said):
            lines[communicator].append(f"messages in parts {bounds} {_cut_of(said, plan)}")
    return {group_of(name): number_of("\n".join(told)) for name, told in lines.items()}


def _cut_of(said: Sequence[tuple[Collective, str, Range | None]], plan: Plan) -> object:
    """How messages are cut and ordered, which both ends must do alike: nothing to add if op by op,
    each part by part; else all of it, by direction, which only the ranks of a pair can agree on."""
    by_direction: dict[Collective, list[tuple[str, Range | None]]] = {}
    for direction, name, parts in said:
        by_direction.setdefault(direction, []).append((name, parts))
    order, detail = {op.name: at for at, op in enumerate(plan.graph.ops)}, []
    every = [(part, part + 1) for part in range(plan.num_parts)]
    for direction, each in by_direction.items():
        names = sorted({name for name, _ in each}, key=order.__getitem__)
        if each != [(name, parts) for name in names for parts in every]:
            numbered = [(names.index(name), parts) for name, parts in each]
            ends = (torch.distributed.get_rank(), direction.peer)
            detail.append((ends if direction.kind == "send" else ends[::-1], numbered))
    return sorted(detail)


def _spoken(plan: Plan, by: str) -> str:
    """A kernel as ranks must have it in common: what it does, and when it says what."""
    made, told = plan.kernels.get(by), plan.declaration.get(by)
    functions = [made.function, made.issue, made.complete] if made is not None else []
    names = [stable_name(function) for function in functions if function is not None]
    return f"{' '.join(names) or by} {told.phases, told.talks}" if told else " ".join(names) or by


def _communicators_of(plan: Plan, step: Step) -> list[str]:
    """The communicators that a step talks on; none for a step of values."""
    ops = [plan.graph.op[name] for name in step.names] if step.kind in TALKS else []
    return [op.collective.communicator for op in ops if op.collective is not None]


def slowest(names: Iterable[str], seconds: Sequence[float], watchdog_s: float) -> list[float]:
    """The largest of these numbers on all ranks of these communicators; alone, they stay."""
    largest = list(seconds)
    for name in sorted(names):
        largest = channel(group_of(name), watchdog_s).largest(largest)
    return largest


def communicators(graph: Graph) -> set[str]:
    """The communicators that a graph talks by."""
    return {op.collective.communicator for op in graph.ops if op.collective is not None}


def is_planned(names: Iterable[str], speaker: Speaker) -> bool:
    """Whether the ranks of these communicators run the next call of a model by plans."""
    return all(channel(group_of(name)).is_planned(speaker) for name in names)


def refuse(names: Iterable[str], speaker: Speaker, watchdog_s: float) -> None:
    """Tell the other ranks of these communicators that this one has no plan for the call."""
    for name in sorted(names):
        with suppress(PlanError, RunError):  # all ranks are told, or none is left to be told
            _say(REFUSED, [name], speaker, watchdog_s)


def run_eagerly(names: Iterable[str], speaker: Speaker, watchdog_s: float) -> None:
    """Tell the other ranks that this one runs the call as it is, and hear that all of them do.

    Raises `PlanError`, on all ranks and before anything is started, if one of them has a plan.
    """
    _say(EAGER, names, speaker, watchdog_s)


def meet(names: Iterable[str], number: int, speaker: Speaker, watchdog_s: float) -> None:
    """Wait until all ranks of these communicators have come to the same place between calls.

    Raises `PlanError` if some of them are elsewhere, `RunError` if they do not come.
    """
    _say(number_of(f"between calls: {number}"), names, speaker, watchdog_s)


class Ear(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Hears on which communicators a call talks, as graphs would name them."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.names: set[str] = set()

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Compiled code runs as usual while it is heard."""
        return True

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if not all(kind in PLAIN for kind in types):
            return NotImplemented  # a subclass shows what it does to plain tensors itself
        given = [*args, *(kwargs or {}).values()]
        if func.namespace in ("c10d", "_c10d_functional"):
            groups = [each for each in given if isinstance(each, torch.ScriptObject)]
            names = [ProcessGroup.unbox(g).group_name for g in groups if _is_group(g)]
            texts = names or [each for each in given if isinstance(each, str)][-1:]
            self.names |= {re.sub(r"\W", "_", f"group_{text}") for text in texts}
        return func(*args, **(kwargs or {}))


def _is_group(thing: torch.ScriptObject) -> bool:
    return "ProcessGroup" in str(thing._type())


def announce(names: Iterable[str], speaker: Speaker, watchdog_s: float) -> None:
    """Tell the other ranks that this one runs a call as it is, and wait for none of them."""
    for name in sorted(names):
        channel(group_of(name), watchdog_s).announce(speaker)


def _say(digest: int, names: Iterable[str], speaker: Speaker, watchdog_s: float) -> None:
    """A call without a plan, as the other ranks of these communicators see it."""
    told = {group_of(name): digest for name in names}
    with Talk(None, told, speaker, watchdog_s) as talk:
        talk.agree()


def group_of(communicator: str) -> str:
    """The process group that a communicator of a graph stands for."""
    for name in c10d._world.pg_names.values():
        if re.sub(r"\W", "_", f"group_{name}") == communicator:
            return str(name)
    raise RunError(f"run: the process group of {communicator!r} is gone; compile the model again.")


class Talk:
    """One call with collectives: told to the others at its start, ended or failed for all.

    weights: of each group with dealt rows, a number for what these meet (`Checksums`).
    """

    def __init__(
        self,
        plan: Plan | None,
        told: Mapping[str, int],
        speaker: Speaker,
        watchdog_s: float,
        weights: Mapping[str, int] = MappingProxyType({}),
        whole: Callable[[], int] = int,
    ) -> None:
        self.whole = whole  # gives the digest of the call with the batch whole, or 0
        self.plan, self.steps = plan, plan.steps if plan is not None else ()
        self.told, self.speaker, self.watchdog_s = told, speaker, watchdog_s
        self.weights = weights
        self.channels: list[Channel] = []

    def __enter__(self) -> Talk:
        """Tell the others. Raises `RunError` if a group is dead or its ranks do not come."""
        try:
            for name in sorted(self.told):  # opened in one order everywhere, no two wait crosswise
                self._begin(name, self.told[name])
        except LostError as error:
            raise self._lost(error, None) from error
        except RunError as error:
            self._give_up(error, RANKS)
            raise
        return self

    def _begin(self, name: str, digest: int) -> Channel:
        begun, graph = channel(name, self.watchdog_s), self.plan.graph_name if self.plan else ""
        if (weights := self.weights.get(name)) is not None:
            digest = (digest ^ weights) | 1 << 62
            graph += f", shares meet weights {weights:016x}"
        begun.begin(digest, self.speaker, graph, self.whole)
        self.channels.append(begun)
        return begun

    def join(self, name: str) -> None:
        """Tell the ranks of one more group that the model runs as it is, unless they were told."""
        if all(begun.name != name for begun in self.channels):
            self._begin(name, EAGER).agree()

    def agree(self) -> None:
        """Wait until the others have told theirs: a device graph does not ask on its way."""
        for begun in self.channels:
            begun.agree()

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is None:
            self._end()
            return
        _let_go(error)
        if dead := next((begun.dead for begun in self.channels if begun.dead), ""):
            self._give_up(error, "")  # a group was taken down under this call
            raise RunError(f"run: {dead}. Make a new process group.") from error
        if isinstance(error, PlanError) and error.rule == RANKS:
            self._give_up(error, RANKS)
            return
        if isinstance(error, LostError):
            raise self._lost(error, None) from error
        lost = error.__cause__
        if isinstance(error, RunError) and isinstance(lost, LostError):
            raise self._lost(lost, error) from lost
        mends = error.rule if isinstance(error, RunError) and error.rule in MENDED else ""
        at = error.step if isinstance(error, RunError) else None
        # What is in flight lands by itself; the others wait only for what is still to be issued.
        plan, left = self.plan, self.steps[at or 0 :]
        if mends and at is not None and not any(plan.talks(step) for step in left if plan):
            self._end()
        else:
            self._give_up(error, mends)

    def _end(self) -> None:
        for begun in self.channels:
            begun.end(self.steps)

    def _give_up(self, error: BaseException, mends: str) -> None:
        """Leave the groups that do not agree; take down the others, which may wait for us."""
        why = f"{type(error).__name__}: {error}".splitlines()[0]
        for begun in self.channels:
            if begun.differs:
                begun.leave()
            else:
                # What the user's own group still carries may meet talks of a later call.
                mended = "" if begun.carried and mends == KERNEL else mends
                begun.fail(why, note=f"raised: {why}", mends=mended)

    def _lost(self, lost: LostError, error: RunError | None) -> RunError:
        """The error of a rank whose peer is gone: who, the step it waited in, what was finished."""
        failed = self._failed(lost, error)
        why = str(lost)
        if failed is not None and not failed.dead:
            for begun in self.channels:  # those that wait for this rank learn what it waits for
                begun.tell(WAITS + failed.title)
            why = failed.why(why)
        why = why.rstrip(".")
        at = error.step if error is not None else None
        where = "the start of the call" if self.steps else "a collective"
        where = self.steps[at].label if at is not None else where
        last = _last_collective(self.steps[: at or 0])
        if not last:
            before = next(filter(None, (_last_collective(c.steps) for c in self.channels)), "")
            last = f"{before} of the call before" if before else "none"
        text = (
            f"run: {why}. This rank waited in {where}; the last collective that all "
            f"ranks finished: {last}."
        )
        mends = failed.mends if failed is not None else ""
        for group in {*self.channels, *([failed] if failed is not None else [])}:
            group.fail(why, note=f"gave up: {why}", mends=mends)
        story, lane = (error.story, error.lane) if error is not None else ("", None)
        rule = next((begun.mends for begun in self.channels if begun.mends), "run")
        return RunError(text, rule=rule, story=story, lane=lane, step=at)

    def _failed(self, lost: LostError, error: RunError | None) -> Channel | None:
        """The channel that a rank waited in: what it noted, else that of the step."""
        if lost.channel is not None or self.plan is None or error is None or error.step is None:
            return lost.channel
        names = _communicators_of(self.plan, self.steps[error.step])
        groups = {group_of(name) for name in names}
        return next((begun for begun in self.channels if begun.name in groups), None)


def _last_collective(steps: Sequence[Step]) -> str:
    """The last collective that these steps finish; empty if there is none."""
    ends = (step.label for step in reversed(steps) if step.kind == "complete")
    return next(ends, "").removeprefix("complete ")


def _let_go(error: BaseException | None) -> None:
    """Clear the frames of an error and of all that led to it: the works that they hold would keep
    sockets open, and the other ranks waiting."""
    seen: list[BaseException] = []
    while error is not None and error not in seen:  # errors that are raised again may run in rings
        traceback.clear_frames(error.__traceback__)
        seen.append(error)
        error = error.__cause__ or error.__context__

"""The `KernelRun`: a step by a user's kernel, with all that a kernel is held to.

    made = run(sizes, *reads)                      flight = issue(sizes, *reads)
                                                   made = complete(sizes, flight)

    talks     a phase that talks is given the group, once all ranks agree on the call
    results   count, shapes, dtypes and devices are those of the graph: once a shape
    writes    version counters of what it reads stay, but for what it may write: at every call

What counters do not show (inference tensors, raw pointers, a collective in place), what is really
said over the wire, and results that share bytes with what was read, are looked at in the first call
of each step of a program: that call is as much slower as copies of what is read take.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup, Work

from torchweft.errors import RunError, WeftError, clip
from torchweft.plan.kernels.declaration import CUSTOM, PHASES, SPEECH, Declaration
from torchweft.plan.kernels.fitting import given_to, makes_of, used_up
from torchweft.plan.kernels.kernel import Kernel
from torchweft.plan.plan import Plan, Step
from torchweft.private.core import TorchDispatchMode
from torchweft.ranks.faults import LostError
from torchweft.ranks.ranks import group, lost
from torchweft.ranks.talk import KERNEL, PLAIN, group_of

MAX_SHAPES = 4096
SAID = ("c10d", "_c10d_functional", "_c10d_functional_autograd")
LISTENING = ("wait_tensor", "wait_tensors")


@dataclass(slots=True)
class KernelFlight:
    """What a kernel has issued, what it was given, and copies of that, if they are to be compared.

    work: what it waits for, if it says so, for traces.
    """

    made: Any
    reads: tuple[Any, ...]
    copies: tuple[Any, ...] | None = None
    work: Any = None


class KernelRun:
    """One step by a kernel; its issue and its complete share one."""

    def __init__(self, plan: Plan, step: Step, kernel: Kernel) -> None:
        graph, names, declared = plan.graph, step.names, plan.declaration.get(step.by or "")
        self.values = [graph.value[name] for name in makes_of(graph, names)]
        self.sizes = [size for value in self.values for size in value.shape]
        self.kernel, self.where = kernel, _where(plan, step)
        self.names = given_to(graph, names, declared)
        free = {graph.root[name] for name in used_up(graph, names, declared)}
        free |= {graph.root[name] for op in names for name in graph.op[op].mutates}
        self.kept = [at for at, name in enumerate(self.names) if graph.root[name] not in free]
        # Other steps may write other rows of the same tensor meanwhile: no counter tells whose.
        shared = graph.mutated | {place.value for place in plan.places}
        self.counted = [at for at in self.kept if graph.root[self.names[at]] not in shared]
        self.said = _said(declared)
        talks = {t.communicator for t in plan.talks(step._replace(kind="run"))}
        self.group = next(iter(talks), "")
        self.right: set[tuple[int, ...]] = set()
        self.looked = False

    def run(self, sizes: tuple[int, ...], *reads: Any) -> Any:
        """Both phases at once: what was made."""
        return self.complete(sizes, self.issue(sizes, *reads))

    def issue(self, sizes: tuple[int, ...], *reads: Any) -> KernelFlight:
        """The first phase, or all of it. Raises `RunError`."""
        copies = None if self.looked else tuple(self._copies(reads))
        start: Any = self.kernel.issue or self.kernel.function
        made = self._phase(PHASES[0], start, reads, reads, copies is not None)
        works = made if isinstance(made, tuple | list) else (made,)
        work = next((each for each in works if isinstance(each, Work)), None)
        return KernelFlight(made, reads, copies, work)

    def complete(self, sizes: tuple[int, ...], flight: KernelFlight) -> Any:
        """What was made, held against the graph. Raises `RunError`."""
        made, reads, looks = flight.made, flight.reads, flight.copies is not None
        if self.kernel.complete is not None:
            made = self._phase(PHASES[1], self.kernel.complete, (made,), reads, looks)
        if made is None and not self.values:
            made = ()
        if sizes not in self.right:
            self._check(made, sizes, reads)
        if flight.copies is not None:
            self._look(made, reads, flight.copies)
        return made

    def _phase(
        self, phase: str, function: Callable[..., Any], args: Any, reads: Any, looks: bool
    ) -> Any:
        """Call the function of a phase, and see what it says and what it writes."""
        said, before = self.said[phase], self._counters(reads)
        name = group_of(self.group) if said else ""
        options = {"group": group(name)} if said else {}
        ear = KernelEar(said, options.get("group")) if looks else None
        try:
            with ear or nullcontext():
                made = function(*args, **options)
        except Exception as caught:
            if ear is not None and ear.wrong:
                raise self._wrong(ear.wrong) from caught
            if isinstance(caught, WeftError | LostError):
                raise
            error = _shown_by(caught)
            if said and (gone := lost(error, name)) is not None:
                raise gone from error
            raise self._wrong(f"raised {type(error).__name__}: {error}") from error
        if ear is not None and (silent := ear.silent()):
            raise self._wrong(f"declares {silent} at {phase}, and did not say it")
        if self._counters(reads) != before:
            pairs = zip(self.counted, before, self._counters(reads), strict=True)
            raise self._wrote([self.names[at] for at, old, new in pairs if old != new])
        return made

    def _counters(self, reads: Sequence[Any]) -> list[int]:
        given = [reads[at] for at in self.counted]
        return [
            each._version if isinstance(each, Tensor) and not each.is_inference() else -1
            for each in given
        ]

    def _check(self, made: Any, sizes: tuple[int, ...], reads: Sequence[Any]) -> None:
        """Hold what was made against the graph; a shape that was right is not looked at again."""
        if not isinstance(made, tuple | list):
            raise self._gave(_shown(made), f"a tuple of {len(self.values)}")
        if len(made) != len(self.values):
            names = ", ".join(value.name for value in self.values)
            raise self._gave(f"{len(made)} values", f"{len(self.values)}: {names}")
        left, devices = list(sizes), {r.device for r in reads if isinstance(r, Tensor)}
        for value, one in zip(self.values, made, strict=True):
            shape, left = left[: len(value.shape)], left[len(value.shape) :]
            if value.dtype == "opaque":
                continue
            fits = isinstance(one, Tensor) and list(one.shape) == shape
            if not fits or str(one.dtype) != f"torch.{value.dtype}":
                raise self._gave(_shown(one), f"{value.dtype}{shape}", value.name)
            if devices and one.device not in devices:
                where = f"one on {devices.pop()}"
                raise self._gave(f"a tensor on {one.device}", where, value.name)
        if len(self.right) >= MAX_SHAPES:
            self.right.clear()
        self.right.add(sizes)

    # The first call.

    def _copies(self, reads: Sequence[Any]) -> list[Any]:
        kept = [reads[at] for at in self.kept]
        return [each.detach().clone() if _is_plain(each) else None for each in kept]

    def _look(self, made: Sequence[Any], reads: Sequence[Any], copies: Sequence[Any]) -> None:
        """See whether what was read is as it was, and shares no bytes with what was made."""
        pairs = [(at, copy) for at, copy in zip(self.kept, copies, strict=True) if copy is not None]
        if wrote := [self.names[at] for at, copy in pairs if not _same_bits(copy, reads[at])]:
            raise self._wrote(wrote)
        for value, one in zip(self.values, made, strict=True):
            for at, _ in pairs if value.alias_of is None and _is_plain(one) else ():
                bytes_of = one.untyped_storage().data_ptr()
                if bytes_of and bytes_of == reads[at].untyped_storage().data_ptr():
                    name = self.names[at]
                    cure = f"Give a copy, or declare writes=[{name!r}] if it may be used up."
                    why = f"gave for {value.name!r} the bytes of {name!r}, which it reads"
                    raise self._wrong(f"{why}. {cure}")
        self.looked = True

    def _wrote(self, names: Sequence[str]) -> RunError:
        listed = ", ".join(map(repr, names))
        cure = f"Work on a copy, or declare writes={list(names)!r} if nobody else wants it"
        return self._wrong(f"wrote {listed}, which it only reads. {cure}")

    def _gave(self, came: str, expected: str, name: str = "") -> RunError:
        what = f" for {name!r}" if name else ""
        return self._wrong(f"gave {came}{what}; expected {expected}")

    def _wrong(self, what: str) -> RunError:
        return RunError(f"kernel: {self.where} {what.rstrip('.')}.", rule=KERNEL)


class KernelEar(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Hears what a kernel says, and stops what it did not declare before it is said."""

    def __init__(self, declared: Sequence[str], given: Any) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.expected = [kind for kind in declared if kind != CUSTOM]
        self.given, self.wrong = given, ""

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Compiled code runs as usual while it is heard."""
        return True

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if not all(kind in PLAIN for kind in types):
            return NotImplemented
        name = func.__name__.split(".")[0]
        if func.namespace in SAID and name not in LISTENING:
            self._hear(_kind_of(name), [*args, *(kwargs or {}).values()])
        return func(*args, **(kwargs or {}))

    def _hear(self, kind: str, given: Sequence[Any]) -> None:
        boxes = [each for each in given if isinstance(each, torch.ScriptObject)]
        groups = [ProcessGroup.unbox(box) for box in boxes if "ProcessGroup" in str(box._type())]
        if self.expected[:1] != [kind]:
            told = f"the next that it declares is {self.expected[0]}" if self.expected else (
                f"it does not declare that: weft.kernel(..., talks=[({kind!r}, 'issue')])"
            )  # fmt: skip
            self.wrong = f"says {kind}; {told}"
        elif self.given is not None and self.given not in groups:
            self.wrong = f"says {kind} on another group than the one that it is given: group="
        if self.wrong:
            raise RunError(f"kernel: it {self.wrong}.", rule=KERNEL)
        self.expected.pop(0)

    def silent(self) -> str:
        """What was declared and is still unsaid; empty if all was said."""
        return ", ".join(self.expected)


def _shown_by(error: BaseException) -> BaseException:
    """The error itself, where torch hides it: it logs none of a group that is not its own."""
    while error.__context__ is not None and "world group map" in str(error):
        error = error.__context__
    return error


def _kind_of(name: str) -> str:
    """The kind of what c10d is told: `all_gather` of `_allgather_base_`."""
    plain = name.strip("_").replace("_", "")
    return next((kind for kind in SPEECH if plain.startswith(kind.replace("_", ""))), name)


def _said(declared: Declaration | None) -> dict[str, list[str]]:
    talks = declared.talks if declared is not None else ()
    return {phase: [kind for kind, at in talks if at == phase] for phase in PHASES}


def _where(plan: Plan, step: Step) -> str:
    written = next((line for line in plan.history if line.startswith("write ")), "")
    strategy = f" of strategy {written.removeprefix('write ')}" if written else ""
    label = step.label if step.kind == "run" else step.label.partition(" ")[2]
    return f"kernel {step.by!r}{strategy} in place of {label}"


def _is_plain(thing: Any) -> bool:
    return type(thing) in PLAIN and thing.layout == torch.strided


def _same_bits(one: Tensor, other: Tensor) -> bool:
    flat = [each.detach().contiguous().reshape(-1).view(torch.uint8) for each in (one, other)]
    return torch.equal(*flat)


def _shown(thing: Any) -> str:
    if isinstance(thing, Tensor):
        return f"{str(thing.dtype).removeprefix('torch.')}{list(thing.shape)}"
    return f"{type(thing).__name__} {clip(thing)}"

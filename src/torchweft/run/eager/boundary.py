"""Boundary mode: an unmodified eager model runs once a part, and a plan decides who goes on.

    first call    unsplit, as it is: a recorder notes the boundaries it comes to  --> a piece
    later calls   the piece's plan resumes the parts, each in a thread of its own, stop by stop
    first split   the model runs unsplit too, and both must give the same

Boundaries are marks and collectives. For models that cannot be captured in a graph: what they
compute between two boundaries is their own affair. So nobody knows here what a split does to the
rows of an op; it is tried, once, with all that the model changes put back in between. A model that
comes to other boundaries than its first run did falls back: it runs as it is from then on. With
collectives that call raises on all ranks, and they fall back together at the next.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from torchweft.capture.dynamo import Capture
from torchweft.capture.failures import FAILURE, as_own, first_line
from torchweft.capture.marks import listener, listening
from torchweft.errors import CaptureError, RunError
from torchweft.plan.graph import Graph
from torchweft.ranks.ranks import EagerError
from torchweft.ranks.talk import SEQUENCE, Talk
from torchweft.run.compare import compare
from torchweft.run.cpu import Lanes
from torchweft.run.eager.arguments import Arguments, Nest, RowSpan
from torchweft.run.eager.build import EagerRecord, build
from torchweft.run.eager.collectives import Eager, catch_collectives
from torchweft.run.eager.parts import EagerPart, cancel
from torchweft.run.eager.recorder import Recorder
from torchweft.run.eager.watch_marks import MarkWatch
from torchweft.run.modes import Modes
from torchweft.run.service import Service

log = logging.getLogger("torchweft")
MAX_FORMS = 256


class PlannedPiece(Protocol):
    """A captured graph that runs by plans."""

    graph: Graph

    @property
    def talks(self) -> bool:
        """Whether calls talk with other ranks."""

    def __call__(self, *inputs: Any) -> Any:
        """Run one call."""


@dataclass
class EagerForm:
    """Calls of one form: what was recorded of the first, and what has become of the others."""

    recorded: EagerRecord
    piece: PlannedPiece
    tried: bool = False
    fallen: str = ""


class Boundary:
    """A model in boundary mode. Calls may come from several threads.

    make_piece: makes a piece of a capture, and of the reason if it must not be split.
    adopt: is told of a piece that is used from now on.
    """

    def __init__(
        self,
        service: Service,
        call: Callable[..., Any],
        model: Any,
        make_piece: Callable[[Capture, str], PlannedPiece],
        adopt: Callable[[Any], None],
    ) -> None:
        self.service, self.call, self.model = service, call, model
        self.make_piece, self.adopt = make_piece, adopt
        self.watch = MarkWatch(model, service.options.all_rules)
        self.modules = tuple(model.modules()) if isinstance(model, nn.Module) else ()
        self.cases: dict[object, EagerForm] = {}
        self.failed: dict[object, str] = {}
        self.threads = Lanes(linger_s=None)
        weakref.finalize(self, self.threads.release)
        catch_collectives()

    def close(self) -> None:
        """Take the hooks off the model, and end its threads."""
        self.watch.close()
        self.threads.release()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run one call."""
        if listener() is not None:  # inside of a part of another model, or recorded by it
            return self.call(*args, **kwargs)
        try:
            given = Arguments.of(args, kwargs, self.service.options.batch_dim)
            key = self._key(given)
        except Exception as error:
            self.service.fall_back(first_line(as_own(error, "capture")))
            return self._eager(args, kwargs)
        case, reason = self.cases.get(key), self.failed.get(key)
        if case is None and reason is None and len(self.cases) + len(self.failed) < MAX_FORMS:
            return self._record(key, given, args, kwargs)
        if case is None:
            reason = reason or f"forms: calls come in more than {MAX_FORMS} forms"
            self.service.fall_back(reason)
            return self._eager(args, kwargs)
        if case.fallen:
            self.service.fall_back(case.fallen, case.piece.graph.name)
            return self._eager(args, kwargs)
        return self._run(case, given, args, kwargs)

    def _key(self, given: Arguments) -> object:
        """What tells calls of unlike forms apart; sizes do not, but for one row or none."""
        state = (
            torch.is_grad_enabled(), torch.is_inference_mode_enabled(),
            torch.is_autocast_enabled("cpu"), tuple(module.training for module in self.modules),
        )  # fmt: skip
        leaves = tuple(map(_form, given.nest.leaves))
        return given.nest.key, leaves, given.batched, given.rows < 2, state

    def _record(self, key: object, given: Arguments, args: Any, kwargs: Any) -> Any:
        """The first call of a form: unsplit, as it is, and recorded."""
        service = self.service
        with self._talk() as ranks, Recorder(Eager(ranks)) as recorder, self.watch:
            outputs = self.call(*args, **kwargs)
        recorder.rules.update(self.watch.silent)
        if not given.holds(args, kwargs):  # a part would change a list of its own
            recorder.mixes = recorder.mixes or "argument: the model changes what it is given"
        try:
            case = self._case(recorder, given, outputs)
        except Exception as error:
            self.failed[key] = first_line(as_own(error, "capture"))
            service.fall_back(self.failed[key])
            return outputs
        if self.cases.setdefault(key, case) is case:
            self.adopt(case.piece)
        return outputs

    def _case(self, recorder: Recorder, given: Arguments, outputs: Any) -> EagerForm:
        """What was recorded, as a piece."""
        options = self.service.options
        recorded = build(
            recorder, given, outputs,
            model=self.model, name=f"boundary{len(self.cases)}", dim=options.batch_dim,
            states=[splitter.name for splitter in options.splitters],
        )  # fmt: skip
        unsplit, assumed = recorded.uncut, recorded.captured.assumed
        if options.strict and assumed and not unsplit:
            unsplit = (
                f"strict: {assumed[0]}, cannot be tried on rows; strict=False splits it untried"
            )
        return EagerForm(recorded, self.make_piece(recorded.captured, unsplit))

    def _eager(self, args: Any, kwargs: Any) -> Any:
        """The model as it is."""
        with self._talk() as ranks, listening(Eager(ranks)):
            return self.call(*args, **kwargs)

    def _talk(self) -> Talk:
        """The talk with other ranks in a call without a plan."""
        return Talk(None, {}, self.service.speaker, self.service.options.watchdog_s)

    def _run(self, case: EagerForm, given: Arguments, args: Any, kwargs: Any) -> Any:
        """A call by a plan; until a split has been tried, with the means to take it back."""
        run = Run(self, case, given, (args, kwargs))
        try:
            merged = case.piece(*given.tensors, run, RowSpan(0, given.rows))
        except BaseException as error:
            run.cancel()
            if not self._falls(case, run.trial, error):
                raise
            if run.trial is not None:
                run.trial.take_back()
            self.service.fall_back(case.fallen, case.piece.graph.name)
            return self._eager(args, kwargs)
        outputs = run.outputs(merged)
        if run.trial is None:
            return outputs
        return self._compare(case, run.trial, outputs, args, kwargs)

    def _falls(self, case: EagerForm, trial: _Trial | None, error: BaseException) -> bool:
        """Whether a call that failed may run as it is instead; from now on the others do, if so."""
        if isinstance(error, CaptureError) and error.rule == FAILURE:  # nothing has run yet
            case.fallen = first_line(error)
            return not case.piece.talks
        if isinstance(error, EagerError):
            case.fallen = "ranks: another rank runs the model as it is"
        elif isinstance(error, RunError) and error.rule == SEQUENCE:
            case.fallen = str(error).splitlines()[0]
        elif trial is not None and isinstance(error, RunError) and not case.piece.talks:
            case.fallen = f"parts: {str(error).splitlines()[0]}"
        else:
            return False
        again = trial is not None or not case.recorded.held
        return again and not case.piece.talks

    def _compare(self, case: EagerForm, trial: _Trial, outputs: Any, args: Any, kwargs: Any) -> Any:
        """Compare the first split with the model as it is. What the latter gives stands."""
        found = (Nest(outputs).leaves, [tensor.clone() for tensor in trial.tensors])
        trial.take_back()
        wanted = self._eager(args, kwargs)
        verdict = compare((Nest(wanted).leaves, list(trial.tensors)), found)
        case.tried = True
        if not verdict:
            case.fallen = f"rows: in parts the model gives other results than whole: {verdict}"
            self.service.fall_back(case.fallen, case.piece.graph.name)
        return wanted


class Run:
    """One call by a plan: its parts, begun by the plan's first op. `whole` are its arguments."""

    def __init__(self, boundary: Boundary, case: EagerForm, given: Arguments, whole: Any) -> None:
        self.boundary, self.case, self.given, self.whole = boundary, case, given, whole
        self.parts: list[EagerPart] = []
        self.trial: _Trial | None = None
        self.modes = Modes(boundary.service.options.num_threads)

    def begin(self, rows: RowSpan, tensors: Sequence[Any]) -> EagerPart:
        """Start the part of these rows and let it run up to its first stop."""
        boundary, case = self.boundary, self.case
        splits = rows.shape[0] < self.given.rows
        if splits and not self.parts and not case.tried:
            self.trial = _Trial.of(case, boundary.model, self.given)
        # The whole call gets the caller's own arguments: it may change a dict that it is given.
        args, kwargs = self.given.with_tensors(tensors) if splits else self.whole

        def run() -> Any:
            with boundary.watch:
                return boundary.call(*args, **kwargs)

        part = EagerPart(run, case.recorded.stops, rows.start, self.modes)
        self.parts.append(part)
        part.start(boundary.threads)
        return part

    def outputs(self, merged: Sequence[Tensor]) -> Any:
        """What the model gives, from the merged tensors. Raises `RunError` if parts disagree."""
        if len(self.parts) == 1:
            return self.parts[0].outputs
        nests = [Nest(part.outputs) for part in sorted(self.parts, key=lambda part: part.first)]
        others = [[leaf for leaf in nest.leaves if not isinstance(leaf, Tensor)] for nest in nests]
        if any(nest.key != nests[0].key for nest in nests) or any(o != others[0] for o in others):
            raise RunError("output: the parts give unlike outputs, which cannot be merged.")
        tensors = iter(merged)
        leaves = [next(tensors) if isinstance(e, Tensor) else e for e in nests[0].leaves]
        return nests[0].rebuild(leaves)

    def cancel(self) -> None:
        """End all parts that are not over."""
        if not cancel(self.parts, self.boundary.service.options.watchdog_s):
            log.error("a part of a failed call does not end: its model is stuck")
        self.parts.clear()


@dataclass(frozen=True)
class _Trial:
    """What a model may change, and what it was before the call."""

    tensors: tuple[Tensor, ...]
    before: tuple[Tensor, ...]

    @staticmethod
    def of(case: EagerForm, model: Any, given: Arguments) -> _Trial | None:
        """None where the model changes what nobody can put back: its split is assumed."""
        if any(not held.known for held in case.recorded.held):
            return None
        tensors = tuple(held.tensor(model, given.tensors) for held in case.recorded.held)
        return _Trial(tensors, tuple(tensor.clone() for tensor in tensors))

    def take_back(self) -> None:
        """Put everything back as it was."""
        with torch.no_grad():
            for tensor, before in zip(self.tensors, self.before, strict=True):
                tensor.copy_(before)


def _form(leaf: Any) -> object:
    if isinstance(leaf, Tensor):
        return leaf.dtype, leaf.dim(), leaf.device
    return leaf if isinstance(leaf, bool | str | None) else type(leaf)

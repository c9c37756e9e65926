"""Boundary mode: an unmodified eager model runs once a part, and a plan decides who goes on.

    first call    unsplit, as it is: a recorder notes the boundaries it comes to  --> a piece
    later calls   the piece's plan resumes the parts, each in a thread of its own, stop by stop
    first split   the model runs unsplit too, and both must give the same

Boundaries are marks and collectives. For models that cannot be captured in a graph: what they
compute between two boundaries is their own affair. So it is not known what a split does to the
rows of an op; it is tried, once, with all that the model changes put back in between. A model that
comes to other boundaries than its first run did falls back: it runs as it is from then on. With
collectives that call raises on all ranks, and they fall back together at the next.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from torchweft.capture.failures import FAILURE, as_own, first_line
from torchweft.capture.marks import listener, listening
from torchweft.errors import CaptureError, RunError
from torchweft.ranks.faults import EagerError
from torchweft.ranks.talk import SEQUENCE, Talk
from torchweft.run.compare import compare
from torchweft.run.cpu import Lanes
from torchweft.run.eager.build import Arguments, EagerForm, Nest, RowSpan, build
from torchweft.run.eager.listeners import (
    Eager,
    EagerPart,
    MarkWatch,
    Recorder,
    cancel,
    catch_collectives,
)
from torchweft.run.modes import Modes
from torchweft.run.service import Service

log = logging.getLogger("torchweft")
MAX_FORMS = 256


class Boundary:
    """A model in boundary mode. Calls may come from several threads.

    make_piece: makes a piece of a capture; `unsplit` is the reason if it must not be split.
    adopt: is told of a piece that is used from now on.
    """

    def __init__(
        self,
        service: Service,
        call: Callable[..., Any],
        model: Any,
        make_piece: Callable[..., Any],
        adopt: Callable[[Any], None],
    ) -> None:
        self.service, self.call, self.model = service, call, model
        self.make_piece, self.adopt = make_piece, adopt
        self.watch = MarkWatch(model, service.options.all_rules)
        self.named = tuple(model.named_modules()) if isinstance(model, nn.Module) else ()
        self.forms: dict[object, EagerForm] = {}
        self.failed: dict[object, str] = {}
        self.threads = Lanes(linger_s=None)
        weakref.finalize(self, self.threads.release)
        catch_collectives()

    def close(self) -> None:
        """Take the hooks off the model, and end its threads."""
        self.watch.close()
        self.threads.release()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if listener() is not None:  # inside of a part of another model, or recorded by it
            return self.call(*args, **kwargs)
        try:
            given = Arguments.of(args, kwargs, self.service.options.batch_dim)
            key = self._key(given)
        except Exception as error:
            return self._fall_back(first_line(as_own(error, "capture")), args, kwargs)
        form, reason = self.forms.get(key), self.failed.get(key)
        if given.rows < 2 and (larger := self.forms.get(self._key(given, few=False))) is not None:
            form = larger if larger.piece.graph.takes_empty else form
        if form is not None:
            return self._run(form, given, args, kwargs)
        if reason is None and len(self.forms) + len(self.failed) < MAX_FORMS:
            return self._record(key, given, args, kwargs)
        reason = reason or f"forms: calls come in more than {MAX_FORMS} forms"
        return self._fall_back(reason, args, kwargs)

    def _key(self, given: Arguments, few: bool | None = None) -> object:
        """What tells calls of unlike forms apart; sizes do not, but for one row or none."""
        state = (
            torch.is_grad_enabled(), torch.is_inference_mode_enabled(),
            torch.is_autocast_enabled("cpu"), tuple(module.training for _, module in self.named),
        )  # fmt: skip
        leaves = tuple(map(_kind, given.nest.leaves))
        return given.nest.key, leaves, given.batched, given.rows < 2 if few is None else few, state

    def _record(self, key: object, given: Arguments, args: Any, kwargs: Any) -> Any:
        """The first call of a form: unsplit, as it is, and recorded."""
        paths = {id(module): path for path, module in self.named}
        with self._talk() as ranks, Recorder(Eager(ranks), paths) as recorder, self.watch:
            outputs = self.call(*args, **kwargs)
        recorder.rules.update(self.watch.silent)
        if not given.holds(args, kwargs):  # a part would change a list of its own
            recorder.refuse("argument: the model changes what it is given")
        try:
            form = self._form(recorder, given, outputs)
        except Exception as error:
            self.failed[key] = first_line(as_own(error, "capture"))
            self.service.fall_back(self.failed[key])
            return outputs
        if self.forms.setdefault(key, form) is form:
            self.adopt(form.piece)
        return outputs

    def _form(self, recorder: Recorder, given: Arguments, outputs: Any) -> EagerForm:
        """What was recorded, with a piece of it."""
        options = self.service.options
        form = build(
            recorder, given, outputs,
            model=self.model, name=f"boundary{len(self.forms)}", dim=options.batch_dim,
            states=[splitter.name for splitter in options.splitters],
        )  # fmt: skip
        if options.strict and form.captured.assumed and not form.unsplit:
            what = f"{form.captured.assumed[0]}, cannot be tried on rows"
            form.unsplit = f"strict: {what}; strict=False splits it untried"
        form.piece = self.make_piece(form.captured, unsplit=form.unsplit)
        return form

    def _fall_back(self, reason: str, args: Any, kwargs: Any, where: str = "a graph") -> Any:
        """The model as it is, counted."""
        self.service.fall_back(reason, where)
        return self._eager(args, kwargs)

    def _eager(self, args: Any, kwargs: Any) -> Any:
        with self._talk() as ranks, listening(Eager(ranks)):
            return self.call(*args, **kwargs)

    def _talk(self) -> Talk:
        """The talk with other ranks in a call without a plan."""
        return Talk(None, {}, self.service.speaker, self.service.options.watchdog_s)

    def _run(self, form: EagerForm, given: Arguments, args: Any, kwargs: Any) -> Any:
        """A call by a plan; until a split has been tried, with the means to take it back."""
        name = form.piece.graph.name
        if not form.piece.is_planned:
            self.service.num_stock += 1
            return self._eager(args, kwargs)
        if form.fallen:
            return self._fall_back(form.fallen, args, kwargs, name)
        run = Run(self, form, given, (args, kwargs))
        try:
            merged = form.piece(*given.tensors, run, RowSpan(0, given.rows))
        except BaseException as error:
            run.cancel()
            if not self._falls(form, run, error):
                raise
            run.take_back()
            return self._fall_back(form.fallen, args, kwargs, name)
        outputs = run.outputs(merged)
        return outputs if run.before is None else self._compare(form, run, outputs)

    def _falls(self, form: EagerForm, run: Run, error: BaseException) -> bool:
        """Whether a call that failed may run as it is instead; from now on the others do, if so."""
        talks, is_trial = form.piece.talks, run.before is not None
        if isinstance(error, CaptureError) and error.rule == FAILURE:  # nothing has run yet
            form.fallen = first_line(error)
            return not talks
        if isinstance(error, EagerError):
            form.fallen = "ranks: another rank runs the model as it is"
        elif isinstance(error, RunError) and error.rule == SEQUENCE:
            form.fallen = first_line(error)
        elif is_trial and isinstance(error, RunError) and not talks:
            form.fallen = f"parts: {first_line(error)}"
        else:
            return False
        return not talks and (is_trial or not form.changed)

    def _compare(self, form: EagerForm, run: Run, outputs: Any) -> Any:
        """Compare the first split with the model as it is. What the latter gives stands."""
        split = Nest(outputs).leaves, [tensor.clone() for tensor in run.changed]
        run.take_back()
        whole = self._eager(*run.whole)
        verdict = compare((Nest(whole).leaves, run.changed), split)
        form.tried = True
        if not verdict:
            form.fallen = f"rows: in parts the model gives other results than whole: {verdict}"
            self.service.fall_back(form.fallen, form.piece.graph.name)
        return whole


class Run:
    """One call by a plan: its parts, begun by the plan's first op. `whole` are its arguments.

    changed, before: what the first split of a form may change, and copies of what it was; None
    where there is nothing to try, or where what the model changes cannot be put back.
    """

    def __init__(self, boundary: Boundary, form: EagerForm, given: Arguments, whole: Any) -> None:
        self.boundary, self.form, self.given, self.whole = boundary, form, given, whole
        self.parts: list[EagerPart] = []
        self.changed: list[Tensor] = []
        self.before: list[Tensor] | None = None
        self.modes = Modes(boundary.service.options.num_threads)

    def begin(self, rows: RowSpan, tensors: Sequence[Any]) -> EagerPart:
        """Start the part of these rows and let it run up to its first stop."""
        boundary, form = self.boundary, self.form
        splits = rows.shape[0] < self.given.rows
        known = all(changed.known for changed in form.changed)
        if splits and known and not self.parts and not form.tried:
            tensors_of = (boundary.model, self.given.tensors)
            self.changed = [each.tensor(*tensors_of) for each in form.changed]
            self.before = [tensor.clone() for tensor in self.changed]
        # The whole call gets the caller's own arguments: it may change a dict that it is given.
        args, kwargs = self.given.nest.with_tensors(tensors) if splits else self.whole

        def run() -> Any:
            with boundary.watch:
                return boundary.call(*args, **kwargs)

        part = EagerPart(run, form.stops, rows.start, self.modes)
        self.parts.append(part)
        part.start(boundary.threads)
        return part

    def take_back(self) -> None:
        """Put everything back as it was before the call, if that is known."""
        with torch.no_grad():
            for tensor, before in zip(self.changed, self.before or (), strict=True):
                tensor.copy_(before)

    def outputs(self, merged: Sequence[Tensor]) -> Any:
        """What the model gives, from the merged tensors. Raises `RunError` if parts disagree."""
        if len(self.parts) == 1:
            return self.parts[0].outputs
        nests = [Nest(part.outputs) for part in sorted(self.parts, key=lambda part: part.first)]
        others = [[leaf for leaf in nest.leaves if not isinstance(leaf, Tensor)] for nest in nests]
        if any(nest.key != nests[0].key for nest in nests) or any(o != others[0] for o in others):
            raise RunError("output: the parts give unlike outputs, which cannot be merged.")
        return nests[0].with_tensors(merged)

    def cancel(self) -> None:
        """End all parts that are not over."""
        if not cancel(self.parts, self.boundary.service.options.watchdog_s):
            log.error("a part of a failed call does not end: its model is stuck")
        self.parts.clear()


def _kind(leaf: Any) -> object:
    """What must be equal of a leaf in calls of one form."""
    if isinstance(leaf, Tensor):
        return leaf.dtype, leaf.dim(), leaf.device
    return leaf if isinstance(leaf, bool | str | None) else type(leaf)

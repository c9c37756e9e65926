"""What a user calls. One screen, from model to outputs:

compile --> Session --(Dynamo: one graph at a time)--> Piece --> plan, program, run

model = weft.compile(model, strategy="overlap")     in place; .generate, state_dict() untouched
print(weft.report(model))                           plans, shares, fallbacks with reasons
print(weft.plans(model)[0])                         a plan, as text
weft.trace(model, x).save("run.json")               what really happened
weft.check(model, x, strategy="overlap")            equal to eager, or the first op that differs
"""

from __future__ import annotations

import copy
import functools
import inspect
import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar, overload

import torch
from torch import nn

from torchweft.capture.blocks.blocks import Blocks
from torchweft.capture.marks import MarkRule
from torchweft.capture.splitters import Splitter
from torchweft.capture.tracing import Watch, compile_by
from torchweft.errors import WeftError, clip
from torchweft.plan.machine import Machine
from torchweft.plan.plan import Plan
from torchweft.plan.trace import Trace
from torchweft.plan.write.strategy import Strategy
from torchweft.private.dynamo import trace_rules, wrap_inline
from torchweft.ranks.ranks import WATCHDOG_S
from torchweft.ranks.speakers import Speaker, stable_name
from torchweft.serve.boundary import Boundary
from torchweft.serve.gate import Check, compare, run_copy
from torchweft.serve.reporting import Report, report_of
from torchweft.serve.session import Session

if TYPE_CHECKING:
    from torchweft.dynamic.model import Dynamic
    from torchweft.dynamic.reporting import DynamicReport

Model = TypeVar("Model", bound=Callable[..., Any])


def compile(
    model: Model,
    strategy: str | Strategy | Callable[..., None] = "sequential",
    *,
    rules: Sequence[MarkRule] = (),
    inner: str = "eager",
    fallback: str = "sequential",
    strict: bool = True,
    batch: int | str | None = None,
    machine: Machine | None = None,
    num_threads: int | None = None,
    jitter: bool = False,
    shadow: int = 0,
    level: str | None = None,
    watchdog_s: float = WATCHDOG_S,
    graphs: bool | Sequence[int] = False,
    blocks: bool = True,
    zero_copy: bool = True,
    capture: str = "graph",
    splitters: Sequence[Splitter] = (),
) -> Model:
    """Run a model (in place) or a function (wrapped) by plans of a strategy.

    rules: marks from outside the model. fallback: what happens to a call that cannot run as the
    strategy says, "sequential" (counted, with its reason) or "error". strict=False: ops that no
    rule vouches for are split if the first call's rows show no difference. batch: the dim of the
    inputs that a split cuts, default 0. inner: what runs the calls inside an op, "eager", "onednn"
    or "inductor". shadow=N compares every N-th call with eager.
    level: where graphs are captured, "torch" or "aten"; by default "aten" for DTensors and where
    gradients are wanted, else "torch". watchdog_s: how long a rank waits for the others.
    graphs: on an accelerator, capture each plan in a device graph and replay it; a list of sizes
    of the batch has calls filled up to the next of them, so that few graphs serve all.
    blocks: whether repeated modules, such as the layers of a transformer, are captured once.
    zero_copy: whether parts write their rows of whole values in place; else copies join them.
    capture: "graph", through Dynamo, or "boundary": the eager model itself runs once a part, and
    control passes at marks and collectives.
    splitters: what cuts the side state that calls touch beside their arguments; see `Splitter`.
    With WEFT_DISABLE=1 the model comes back untouched.
    """
    blocks = blocks and capture == "graph"
    session = Session(
        strategy, rules=rules, inner=inner, fallback=fallback, strict=strict, batch=batch,
        machine=machine, num_threads=num_threads, jitter=jitter, shadow=shadow, level=level,
        watchdog_s=watchdog_s, graphs=graphs, zero_copy=zero_copy, capture=capture,
        splitters=splitters,
        blocks=Blocks(model, rules) if blocks and isinstance(model, nn.Module) else None,
    )  # fmt: skip
    if not callable(model):
        raise WeftError(f"compile: {clip(model)} is neither a model nor a function.")
    if os.environ.get("WEFT_DISABLE") == "1":
        return model
    wrap, session.speaker = _wrap if capture == "graph" else _wrap_eager, _speaker_of(model)
    if isinstance(model, nn.Module):
        before = getattr(model._compiled_call_impl, "boundary", None)
        if before is not None:
            before.close()
        model._compiled_call_impl = wrap(session, model._call_impl, model)
        return model
    plain = _plain(model)  # compiled again: the new strategy takes the place of the old
    return functools.wraps(plain)(wrap(session, plain, plain))  # type: ignore[return-value]


def _wrap_eager(session: Session, call: Callable[..., Any], model: Any) -> Callable[..., Any]:
    """The call in boundary mode: the model itself, part by part."""
    boundary = Boundary(session, call, model)

    def weft_call(*args: Any, **kwargs: Any) -> Any:
        with session.speaker:
            if session.shadow is None:
                return boundary(*args, **kwargs)
            return session.shadow(boundary, call, args, kwargs)

    weft_call.session, weft_call.boundary = session, boundary  # type: ignore[attr-defined]
    return weft_call


def _wrap(session: Session, call: Callable[..., Any], model: Any) -> Callable[..., Any]:
    """The compiled call: the batch of its inputs is dynamic, dims of equal size stay apart."""
    if isinstance(model, nn.Module) and trace_rules.check(model.forward):
        call = wrap_inline(call)  # Dynamo skips torch's own modules, such as Sequential
    compiled = compile_by(session.backend, call)
    dim = session.batch if isinstance(session.batch, int) else 0
    watch = Watch(dim, session.blocks, partial(session.fall_back, None))

    here = session.here

    def weft_call(*args: Any, **kwargs: Any) -> Any:
        here.ran = False
        with session.speaker:
            if session.shadow is None:
                outputs = watch(compiled, args, kwargs)
            else:
                outputs = session.shadow(lambda *a, **k: watch(compiled, a, k), call, args, kwargs)
        if watch.news:
            watch.news = False
            session.settle(watch.breaks)
        if not here.ran:
            session.fall_back(None, "capture: Dynamo captured no graph of this call")
        return outputs

    weft_call.session = session  # type: ignore[attr-defined]
    return weft_call


def _plain(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function without our own wrapper; decorators of its author stay."""
    found: Callable[..., Any] = inspect.unwrap(function, stop=lambda f: not hasattr(f, "session"))
    return found


def _speaker_of(model: Any) -> Speaker:
    """A model as other ranks know it; one that is compiled again stays the same to them."""
    is_module = isinstance(model, nn.Module)
    before = getattr(model._compiled_call_impl if is_module else model, "session", None)
    if isinstance(before, Session):
        return before.speaker
    return Speaker(stable_name(type(model) if is_module else model))


def session_of(model: Callable[..., Any]) -> Session:
    """The session behind a compiled model or function. Raises `WeftError` if there is none."""
    call = model._compiled_call_impl if isinstance(model, nn.Module) else model
    session = getattr(call, "session", None)
    if not isinstance(session, Session):
        name = getattr(model, "__name__", type(model).__name__)
        raise WeftError(
            f"compile: {name!r} was not compiled by weft.compile (or WEFT_DISABLE=1 is set).",
            rule="compile",
        )
    return session


@overload
def report(model: Dynamic) -> DynamicReport: ...  # type: ignore[overload-overlap]
@overload
def report(model: Callable[..., Any]) -> Report: ...
def report(model: Any) -> Any:
    """What became of a compiled or dynamic model: plans, shares, fallbacks with reasons."""
    if not isinstance(model, nn.Module) and hasattr(type(model), "report"):  # a `Dynamic`
        return model.report()
    return report_of(session_of(model))


def plans(model: Callable[..., Any]) -> list[Plan]:
    """The plans in use, one a captured graph and bucket."""
    return [entry.plan for piece in session_of(model).pieces for entry in piece.all_entries()]


def trace(model: Callable[..., Any], *args: Any, **kwargs: Any) -> Trace:
    """Run one call and tell what happened when, on which lane."""
    session = session_of(model)
    model(*args, **kwargs)
    traces: list[Trace] = []
    with session.collect(traces):
        model(*args, **kwargs)
    if not traces:
        raise WeftError("trace: no captured graph ran in this call.", rule="trace")
    return max(traces, key=lambda found: found.makespan_s)


def check(
    model: Callable[..., Any],
    inputs: Any,
    *,
    strategy: str | Strategy | Callable[..., None] | None = None,
    tolerance: float | None = None,
    **options: Any,
) -> Check:
    """Compare a model under a strategy with plain PyTorch: outputs, changed inputs and buffers.

    inputs: a tensor, a tuple of arguments, or a dict of named ones. The model is copied, not
    changed. `options` are those of `compile`. The verdict is true unless something differs by more
    than the tolerance (relative to the largest number; default 1e-4 for float32); then it names
    the first op that differs.
    """
    args = inputs if isinstance(inputs, tuple) else () if isinstance(inputs, dict) else (inputs,)
    kwargs = inputs if isinstance(inputs, dict) else {}
    plain = copy.deepcopy(model) if isinstance(model, nn.Module) else _plain(model)
    subject = copy.deepcopy(plain) if isinstance(plain, nn.Module) else plain
    if strategy is None:
        strategy = session_of(model).strategy
    subject = compile(subject, strategy, **options)
    session, state = session_of(subject), torch.get_rng_state()
    try:
        wanted = run_copy(plain, args, kwargs, state)
        if session.capture == "boundary":  # its first call is the model as it is
            run_copy(subject, args, kwargs, state)
        with session.keep_inputs():
            found = run_copy(subject, args, kwargs, state)
        verdict = compare(wanted, found, tolerance)
        if wrong := session.wrong_kernel(tolerance):
            return replace(verdict, equal="different", first_op=wrong)
        if verdict:
            return verdict
        return replace(verdict, first_op=session.first_difference(tolerance))
    finally:
        torch.set_rng_state(state)
        session.lanes.close()


def warmup(model: Callable[..., Any], inputs: Iterable[Any]) -> None:
    """Make plans ahead of traffic: one call for each of the given inputs (a tensor or a tuple)."""
    for each in inputs:
        with torch.no_grad():
            if isinstance(each, dict):
                model(**each)
            else:
                model(*(each if isinstance(each, tuple) else (each,)))

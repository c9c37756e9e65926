"""What a user calls. One screen, from model to outputs:

compile --> Session --(Dynamo: one graph at a time)--> Piece --> plan, program, run

model = weft.compile(model, strategy="overlap")     in place; .generate, state_dict() untouched
print(weft.report(model))                           plans, shares, fallbacks with reasons
print(weft.plans(model)[0])                         a plan, as text
weft.trace(model, x).save("run.json")               what really happened
print(weft.explain(model, x))                       and why: an owner for every exposed millisecond
weft.check(model, x, strategy="overlap")            equal to eager, or the first op that differs
weft.disable(model); weft.enable(model, share=0.1)  at run time, all ranks together
weft.restore(model)                                 as it was
"""

from __future__ import annotations

import copy
import functools
import inspect
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ParamSpec, Protocol, TypeVar, cast, overload

import torch
from torch import nn
from torch.distributed import is_initialized

from torchweft.capture.blocks.blocks import Blocks
from torchweft.capture.tracing import Watch, compile_by
from torchweft.errors import WeftError, clip
from torchweft.options import Options, is_disabled
from torchweft.plan.improve.predict import auto
from torchweft.plan.plan import Plan
from torchweft.plan.strategies import overlap, sequential
from torchweft.plan.trace import Trace
from torchweft.private.dynamo import trace_rules, wrap_inline
from torchweft.ranks.ranks import EVERY
from torchweft.ranks.speakers import Speaker, stable_name
from torchweft.run.compare import Check, compare
from torchweft.serve.auto import Auto
from torchweft.serve.session import Report, Session

if TYPE_CHECKING:
    from torchweft.dynamic.model import Dynamic, DynamicReport
    from torchweft.plan.explain.explanation import Explanation

Model = TypeVar("Model", bound=Callable[..., Any])
P = ParamSpec("P")
MAX_WARM, MAX_TRIED = 60, 1000  # calls that a race takes, or so, and at most
ALONE = nullcontext()  # without process groups there is nobody to talk to


class Compile(Protocol[P]):
    """`compile` as editors and type checkers see it: a model, and all that `Options` takes."""

    def __call__(self, model: Model, *strategy: P.args, **options: P.kwargs) -> Model:
        """The compiled model."""
        ...


def _takes(options: Callable[P, Options]) -> Callable[[Callable[..., Any]], Compile[P]]:
    """Show a function of a model as one that takes the options one by one."""

    def wrap(function: Callable[..., Any]) -> Compile[P]:
        first = inspect.Parameter("model", inspect.Parameter.POSITIONAL_OR_KEYWORD)
        signature = inspect.Signature([first, *inspect.signature(options).parameters.values()])
        function.__signature__ = signature  # type: ignore[attr-defined]
        listed = inspect.getdoc(options).partition("\n\n")[2]  # type: ignore[union-attr]
        function.__doc__ = f"{inspect.getdoc(function)}\n\n{listed}"
        return function

    return wrap


@_takes(Options)
def compile(model: Any, *strategy: Any, **given: Any) -> Any:
    """Run a model (in place) or a function (wrapped) by plans of a strategy.

    With WEFT_DISABLE=1 the model comes back untouched, whatever the options say.
    """
    if is_disabled():
        return model
    options = Options.of(*strategy, **given)
    if not callable(model):
        raise WeftError(f"compile: {clip(model)} is neither a model nor a function.")
    return _compile(model, options)


def _compile(model: Any, options: Options) -> Any:
    is_graph, is_module = options.capture == "graph", isinstance(model, nn.Module)
    blocks = Blocks(model, options.rules) if options.blocks and is_graph and is_module else None
    session = Session(options, speaker=_speaker_of(model), blocks=blocks)
    wrap = _wrap if is_graph else _wrap_eager
    if is_module:
        if _session(model) is not None:
            restore(model)
        before, call = model._compiled_call_impl, wrap(session, model._call_impl, model)
        call.session, call.before = session, before  # type: ignore[attr-defined]
        model._compiled_call_impl = call
        return model
    plain = _plain(model)  # compiled again: the new strategy takes the place of the old
    call = functools.wraps(plain)(wrap(session, plain, plain))
    call.session = session  # type: ignore[attr-defined]
    return call


def restore(model: Model) -> Model:
    """Undo `compile`: the model as it was, or the function itself; our threads and hooks go.

    Once is enough, twice does no harm. Raises `WeftError` for what was never compiled.
    """
    is_module, session = isinstance(model, nn.Module), _session(model)
    if session is not None:
        session.close()
        if not is_module:
            return cast(Model, _plain(model))
        call: Any = model._compiled_call_impl  # type: ignore[attr-defined]
        model._compiled_call_impl = call.before  # type: ignore[attr-defined]
        return model
    # A module that was restored has the attribute of its own, and nothing in it.
    was_restored = is_module and vars(model).get("_compiled_call_impl", model) is None
    if was_restored or is_disabled():
        return model
    raise WeftError(f"restore: {_name_of(model)!r} was not compiled by weft.compile.")


def enable(model: Callable[..., Any], share: float = 1.0) -> None:
    """Let a compiled model run by plans, all of its calls or a share of them, evenly spread.

    The others run as the user wrote them. Models that talk with other ranks begin together, within
    some calls: one rank is enough to ask for it. Raises `WeftError` if ranks cannot agree.
    """
    if not isinstance(share, int | float) or not 0 <= share <= 1:
        raise WeftError(f"enable: share must be a number from 0 to 1; got {clip(share)}.")
    session_of(model).set_share(max(round(EVERY * share), 1) if share else 0)


def disable(model: Callable[..., Any]) -> None:
    """Let a compiled model run as the user wrote it from now on; `enable` takes it back.

    Its plans are kept. Models that talk with other ranks go back together, within some calls.
    """
    enable(model, share=0)


def _wrap_eager(session: Session, call: Callable[..., Any], model: Any) -> Callable[..., Any]:
    """The call in boundary mode: the model itself, part by part."""
    boundary = session.boundary(call, model)

    def woven(args: Any, kwargs: Any) -> Any:
        with session.speaker if is_initialized() else ALONE:
            if session.shadow is None:
                return boundary(*args, **kwargs)
            return session.shadow(boundary, call, args, kwargs)

    return _choosing(session, call, woven)


def _choosing(
    session: Session, call: Callable[..., Any], woven: Callable[[Any, Any], Any]
) -> Callable[..., Any]:
    """The call of a compiled model: by plans, unless it is not to be, or `auto` knows better."""
    if session.options.resolved_strategy == auto:
        session.auto = Auto(session, call, woven)
        woven = session.auto

    def weft_call(*args: Any, **kwargs: Any) -> Any:
        if session.share != EVERY and not session.is_planned():
            return call(*args, **kwargs)
        return woven(args, kwargs)

    return weft_call


def _wrap(session: Session, call: Callable[..., Any], model: Any) -> Callable[..., Any]:
    """The compiled call: the batch of its inputs is dynamic, dims of equal size stay apart."""
    plain = call
    if isinstance(model, nn.Module) and trace_rules.check(_function_of(model.forward)):
        call = wrap_inline(call)  # Dynamo skips torch's own modules, such as Sequential
    fall_back, here = session.service.fall_back, session.service.here
    watch = Watch(
        functools.partial(compile_by, session.backend, call),
        model,
        dim=session.options.batch_dim,
        blocks=session.blocks,
        fall_back=fall_back,
    )

    def woven(args: Any, kwargs: Any) -> Any:
        here.ran = False
        with session.speaker if is_initialized() else ALONE:
            if session.shadow is None:
                outputs = watch(args, kwargs)
            else:
                outputs = session.shadow(lambda *a, **k: watch(a, k), call, args, kwargs)
        if watch.news:
            watch.news = False
            session.settle(watch.breaks)
        if not here.ran:
            fall_back("capture: Dynamo captured no graph of this call")
        return outputs

    return _choosing(session, plain, woven)


def _function_of(forward: Any) -> Any:
    """What is called in the end: hosts put a `partial` in the place of a module's forward."""
    while isinstance(forward, functools.partial):
        forward = forward.func
    return forward


def _plain(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function without our own wrapper; decorators of its author stay."""
    plain: Callable[..., Any] = inspect.unwrap(function, stop=lambda f: not hasattr(f, "session"))
    return plain


def _name_of(model: Any) -> str:
    return str(getattr(model, "__name__", type(model).__name__))


def _session(model: Any) -> Session | None:
    call = model._compiled_call_impl if isinstance(model, nn.Module) else model
    session = getattr(call, "session", None)
    return session if isinstance(session, Session) else None


def _speaker_of(model: Any) -> Speaker:
    """A model as other ranks know it; one that is compiled again stays the same to them."""
    if (before := _session(model)) is not None:
        return before.speaker
    return Speaker(stable_name(type(model) if isinstance(model, nn.Module) else model))


def session_of(model: Callable[..., Any]) -> Session:
    """The session behind a compiled model or function. Raises `WeftError` if there is none."""
    if (session := _session(model)) is not None:
        return session
    why = "was not compiled by weft.compile (or WEFT_DISABLE=1 is set)."
    raise WeftError(f"compile: {_name_of(model)!r} {why}")


@overload
def report(model: Dynamic) -> DynamicReport: ...  # type: ignore[overload-overlap]
@overload
def report(model: Callable[..., Any]) -> Report: ...
def report(model: Any) -> Any:
    """What became of a compiled or dynamic model: plans, shares, fallbacks with reasons."""
    if not isinstance(model, nn.Module) and hasattr(type(model), "report"):  # a `Dynamic`
        return model.report()
    return Report(session_of(model))


def plans(model: Callable[..., Any]) -> list[Plan]:
    """The plans in use, one for each captured graph and bucket."""
    return [entry.plan for piece in session_of(model).pieces for entry in piece.plans.all_entries()]


def trace(model: Callable[..., Any], *args: Any, **kwargs: Any) -> Trace:
    """Run one call and tell what happened when, on which lane. It runs by a plan, though "auto" may
    have found that the model is as fast as it is."""
    session = session_of(model)
    with nullcontext() if session.auto is None else session.auto.by_plans():
        model(*args, **kwargs)
        with session.service.collect() as traces:
            model(*args, **kwargs)
    if not traces:
        raise WeftError("trace: no captured graph ran in this call.", rule="trace")
    return max(traces, key=lambda each: each.makespan_s)


def explain(model: Callable[..., Any], *args: Any, **kwargs: Any) -> Explanation:
    """Run one call and tell where its time went: planned against actual, owners, what-ifs."""
    from torchweft.serve.explaining import explain_call  # no other call needs it

    return explain_call(session_of(model), model, args, kwargs)


def check(
    model: Callable[..., Any], inputs: Any, *, tolerance: float | None = None, **options: Any
) -> Check:
    """Compare a model under a strategy with plain PyTorch: outputs, changed inputs and buffers.

    inputs: a tensor, a tuple of arguments, or a dict of named ones. The model is copied, not
    changed. `options` are those of `compile`; those that are not given are the ones that the model
    was compiled with. The verdict is true unless something differs by more than the tolerance
    (relative to the largest number; default 1e-4 for float32); then it names the first op that
    differs. Outputs of low precision (bfloat16, float16, float8) may differ from those of the plain
    model by no more than these differ from themselves in batches of other sizes; that is measured.
    """
    from torchweft.serve.gate import first_difference, own_differences, run_copy, wrong_kernel

    args, kwargs = arguments_of(inputs)
    known = _session(model) if "strategy" in options else session_of(model)
    chosen = (known.options if known is not None else Options()).but(**options)
    if chosen.resolved_strategy == auto:  # each that may serve: those in use, or all kinds of them
        used = known.auto.strategies() if known is not None and known.auto is not None else []
        ways = used or ([sequential] if chosen.fallback == "error" else [sequential, overlap])
        told: dict[str, Any] = {"tolerance": tolerance, **options}
        verdicts = [check(model, inputs, **told | {"strategy": way}) for way in ways]
        return next((verdict for verdict in verdicts if not verdict), verdicts[-1])
    plain = subject = _plain(model)
    if isinstance(model, nn.Module):
        copies: dict[int, Any] = {}  # by the id of what was copied: rules may be about a module
        plain, subject = copy.deepcopy(model), copy.deepcopy(model, copies)
        pairs = [(rule, copies.get(id(rule.wanted), rule.wanted)) for rule in chosen.rules]
        chosen = replace(chosen, rules=[replace(rule, wanted=about) for rule, about in pairs])
    subject = _compile(subject, chosen)
    session, state = session_of(subject), torch.get_rng_state()
    try:
        wanted = run_copy(plain, args, kwargs, state)
        if chosen.capture == "boundary":  # its first call is the model as it is
            run_copy(subject, args, kwargs, state)
        with session.service.keep_inputs() as kept:
            got = run_copy(subject, args, kwargs, state)
        own: dict[int, float] = {}
        if tolerance is None:
            own = own_differences(plain, args, kwargs, wanted[0], chosen.batch_dim)
        verdict = compare(wanted, got, tolerance, own)
        verdict = replace(verdict, own_diff=max(own.values())) if own else verdict
        if wrong := wrong_kernel(kept, tolerance):
            return replace(verdict, equal="different", first_op=wrong)
        if verdict:
            return verdict
        return replace(verdict, first_op=first_difference(kept, tolerance))
    finally:
        torch.set_rng_state(state)
        session.close()


def warmup(
    model: Callable[..., Any],
    inputs: Iterable[Any],
    *,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> None:
    """Make plans ahead of traffic: one call for each of the inputs, given as for `check`.

    Under "auto" each is called until its choice is made, with torch.compile as one to choose from.
    progress: told how many calls were made, and how many may be needed.
    """
    session, done = session_of(model), 0
    if isinstance(inputs, torch.Tensor | dict):
        got = type(inputs).__name__
        raise WeftError(f"warmup: inputs must be a list of what is called, as [x]; got {got}.")
    if session.share != EVERY:
        raise WeftError(
            "warmup: the model is disabled, at least for a share of its calls. Enable it."
        )
    chooser = session.auto
    for args, kwargs in map(arguments_of, inputs):
        with torch.no_grad(), nullcontext() if chooser is None else chooser.tuning():
            model(*args, **kwargs)
            for _ in range(MAX_TRIED):
                if chooser is None or chooser.is_settled(args, kwargs):
                    break
                model(*args, **kwargs)
                done += 1
                progress(done, max(done, MAX_WARM))
            else:
                session.service.fall_back(f"warmup: no choice was made in {MAX_TRIED} calls")
            if chooser is not None:
                model(*args, **kwargs)  # by the choice, which may be one of an earlier process


def arguments_of(inputs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of a call: those of a tuple, the named ones of a dict, or a single one."""
    if isinstance(inputs, dict):
        return (), inputs
    return inputs if isinstance(inputs, tuple) else (inputs,), {}

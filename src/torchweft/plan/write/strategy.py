"""A `Strategy`: a named function that writes a plan, with its options; `write` lets it do so.

    @strategy
    def overlap(s, *, parts=2): ...          registered as "overlap"

    overlap(parts=4)                         the same strategy with other options; nothing runs yet
    overlap(s)                               what it writes, inside of another strategy
    get_strategy("overlap")                  by name; unknown names list the choices

The function gets a `Scheduler`, the recorder; keyword-only arguments are its options. It is a
user's code: it may raise, or never come back. What it raises is wrapped with its source line; after
`limit_s` seconds it is stopped.
"""

from __future__ import annotations

import ctypes
import inspect
import threading
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from hashlib import sha256
from pathlib import Path
from typing import Any, overload

from torchweft.errors import PlanError, StrategyError, WeftError, clip, unknown
from torchweft.files import read_text
from torchweft.plan.context import Context
from torchweft.plan.graph import NAME, Graph
from torchweft.plan.kernels.kernel import Kernel
from torchweft.plan.machine import Costs, Machine, cpu
from torchweft.plan.plan import Plan
from torchweft.plan.write.scheduler import Rewriter, Scheduler

MAX_SHOWN = 100
PLAN_FILE = ".plan"


@dataclass(frozen=True)
class Strategy:
    """A function that writes plans, and the options it is called with.

    inner: what runs the calls inside of its ops; None: as the model was compiled.
    """

    name: str
    function: Callable[..., None]
    options: Mapping[str, Any] = field(default_factory=dict, hash=False)
    inner: str | None = None

    def __repr__(self) -> str:
        return str(self)

    @overload
    def __call__(self, /, **options: Any) -> Strategy: ...
    @overload
    def __call__(self, s: Scheduler, /, **options: Any) -> None: ...
    def __call__(self, /, *given: Any, **options: Any) -> Strategy | None:
        """The same strategy with these options; called on a scheduler, what it writes is recorded.

        Raises `StrategyError` for an option that it does not have.
        """
        known = option_defaults(self.function)
        for name in options:
            if name not in known:
                raise StrategyError(
                    f"strategy {self.name!r}: {unknown('option', name, known)}", rule="option"
                )
        chosen = replace(self, options={**self.options, **options})
        if not given:
            return chosen
        if len(given) > 1 or not isinstance(given[0], Scheduler):
            like = next(iter(known), "option")
            raise StrategyError(
                f"strategy {self.name!r}: {clip(given[0])} is no scheduler; options have names: "
                f"{self.name}({like}=...).",
                rule="option",
            )
        if self.inner is not None:
            raise StrategyError(
                f"strategy {self.name!r} by {self.inner!r} is for a whole plan: give it to "
                "weft.compile, and call the strategy without it here.",
                rule="inner",
            )
        chosen.function(given[0], **chosen.options)
        return None

    def __str__(self) -> str:
        chosen = {**option_defaults(self.function), **self.options}
        by = f" by {self.inner}" if self.inner else ""
        told = (f"{name}={_short(repr(value))}" for name, value in chosen.items())
        return f"{self.name}({', '.join(told)}){by}"


def _short(text: str) -> str:
    """A value as people read it; of a long one, such as a whole plan, a name."""
    return text if len(text) <= MAX_SHOWN else f"<{sha256(text.encode()).hexdigest()[:8]}>"


def option_defaults(function: Callable[..., object]) -> dict[str, Any]:
    """The options of a strategy function and their defaults."""
    parameters = inspect.signature(function).parameters.values()
    return {item.name: item.default for item in parameters if item.kind is item.KEYWORD_ONLY}


_REGISTRY: dict[str, Strategy] = {}


def strategy(function: Callable[..., None]) -> Strategy:
    """Register a function as a strategy under its own name (a decorator)."""
    made = as_strategy(function)
    if made.name in _REGISTRY and _REGISTRY[made.name].function.__module__ != function.__module__:
        raise StrategyError(f"strategy: there is already one named {made.name!r}.", rule="name")
    _REGISTRY[made.name] = made
    return made


Way = str | Path | Plan | Sequence[Plan] | Callable[..., None]
"""What can be made a strategy; itself, too, for it can be called on a scheduler."""


def as_strategy(what: Way) -> Strategy:
    """A strategy from its name, from itself, or from any function of a scheduler; from plans, or
    the path of a file of them, the one that writes them again."""
    if isinstance(what, Strategy):
        return what
    plans = [what] if isinstance(what, Plan) else what
    if isinstance(plans, list | tuple) and plans and all(isinstance(p, Plan) for p in plans):
        return get_strategy("replay")(plan="".join(map(str, plans)))
    if isinstance(what, Path) or (isinstance(what, str) and what.endswith(PLAN_FILE)):
        text = read_text(what, PlanError, "plan")
        Plan.parse_all(text)  # a broken file is refused now, and not in the first call
        return get_strategy("replay")(plan=text)
    if isinstance(what, str):
        return get_strategy(what)
    if not callable(what):
        raise StrategyError(f"strategy: {what!r} is neither a name nor a function.", rule="name")
    name = getattr(what, "__name__", type(what).__name__)
    if not NAME.fullmatch(name):
        name = "unnamed"
    parameters = list(inspect.signature(what).parameters.values())
    if not parameters or parameters[0].kind is parameters[0].KEYWORD_ONLY:
        raise StrategyError(
            f"strategy {name!r}: its first argument is the scheduler.", rule="signature"
        )
    if any(p.kind is p.KEYWORD_ONLY and p.default is p.empty for p in parameters):
        raise StrategyError(f"strategy {name!r}: every option needs a default.", rule="signature")
    return Strategy(name, what)


def get_strategy(name: str) -> Strategy:
    """The registered strategy of this name. Raises `StrategyError` listing the choices."""
    if name not in _REGISTRY:
        raise StrategyError(f"strategy: {unknown('strategy', name, _REGISTRY)}", rule="name")
    return _REGISTRY[name]


def strategy_names() -> list[str]:
    """The names of all registered strategies."""
    return sorted(_REGISTRY)


def write(
    strategy: str | Strategy | Callable[..., None],
    graph: Graph,
    context: Context,
    machine: Machine | None = None,
    *,
    costs: Costs | None = None,
    kernels: Mapping[str, Kernel] | None = None,
    rewriter: Rewriter | None = None,
    limit_s: float = 10.0,
) -> Plan:
    """The bare plan that a strategy writes for a graph and a context.

    kernels: those that the strategy may name. rewriter: what carries out its rewrites.
    Raises `StrategyError` if the strategy makes a mistake, raises, or takes longer than `limit_s`.
    """
    chosen = as_strategy(strategy)
    scheduler = Scheduler(graph, context, machine or cpu(), costs, kernels, rewriter)
    try:
        with _limit(limit_s):
            chosen.function(scheduler, **chosen.options)
    except _TooLongError:
        text = f"loop: strategy {chosen.name!r} had not finished after {limit_s:g} s."
        raise StrategyError(text, rule="loop", source=_source(chosen)) from None
    except WeftError as error:
        if isinstance(error, StrategyError):
            error.source = error.source or _line(error, chosen)
        raise
    except (Exception, SystemExit) as error:
        text = f"raised: strategy {chosen.name!r} raised {type(error).__name__}: {error}"
        line = _line(error, chosen)
        raise StrategyError(f"{text}\n  at {line}", rule="raised", source=line) from error
    return scheduler.finish(str(chosen))


class _TooLongError(BaseException):
    """Thrown into a strategy that does not come back."""


@contextmanager
def _limit(limit_s: float) -> Iterator[None]:
    """Stop the code inside after `limit_s` seconds by an exception in its own thread.

    Python code that loops for ever cannot be stopped any other way from within its process.
    """
    thread, lock, state = threading.get_ident(), threading.Lock(), {"running": True}

    def stop() -> None:
        with lock:
            if state["running"]:
                raise_in = ctypes.pythonapi.PyThreadState_SetAsyncExc
                raise_in(ctypes.c_ulong(thread), ctypes.py_object(_TooLongError))

    timer = threading.Timer(limit_s, stop)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        with lock:
            state["running"] = False
        timer.cancel()


def _line(error: BaseException, strategy: Strategy) -> str:
    """The line of the strategy's own code that the error came from."""
    code = getattr(strategy.function, "__code__", None)
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        if code is not None and frame.filename == code.co_filename and frame.name == code.co_name:
            return f"{frame.filename}:{frame.lineno}: {frame.line}"
    return _source(strategy)


def _source(strategy: Strategy) -> str:
    code = getattr(strategy.function, "__code__", None)
    return f"{code.co_filename}:{code.co_firstlineno}" if code else strategy.name

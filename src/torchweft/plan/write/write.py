"""Writing: a strategy and a graph become a bare plan, or a clear error at the strategy's own line.

A strategy is a user's code: it may raise, or never come back. What it raises is wrapped with its
source line; after `limit_s` seconds it is stopped.
"""

from __future__ import annotations

import ctypes
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from torchweft.errors import StrategyError, WeftError
from torchweft.plan.context import Context
from torchweft.plan.cost import Costs
from torchweft.plan.graph import Graph
from torchweft.plan.machine import Machine, cpu
from torchweft.plan.plan import Plan
from torchweft.plan.write.scheduler import Scheduler
from torchweft.plan.write.strategy import Strategy, as_strategy


def write(
    strategy: str | Strategy | Callable[..., None],
    graph: Graph,
    context: Context,
    machine: Machine | None = None,
    *,
    costs: Costs | None = None,
    limit_s: float = 10.0,
) -> Plan:
    """The bare plan that a strategy writes for a graph and a context.

    Raises `StrategyError` if the strategy makes a mistake, raises, or takes longer than `limit_s`.
    """
    chosen = as_strategy(strategy)
    scheduler = Scheduler(graph, context, machine or cpu(), costs)
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

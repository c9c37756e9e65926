"""The `Service`: what the graphs of one compiled model share, and the book of what became of calls.

service = Service(options, speaker)
service.fall_back("split: 3 rows cannot make 4 parts", "piece0")     counted, first logged
with service.collect() as traces: model(x)                           every call inside is traced
with service.keep_inputs() as kept: model(x)                         what each graph was given
"""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from torch import Tensor, fx

from torchweft.capture.failures import first_line
from torchweft.errors import StrategyError, WeftError
from torchweft.options import Options
from torchweft.plan.trace import Trace
from torchweft.ranks.speakers import Speaker
from torchweft.ranks.talk import refuse, run_eagerly
from torchweft.run.cpu import Lanes

log = logging.getLogger("torchweft")


class Service:
    """Options, threads and counts of one compiled model. Calls may come from several threads."""

    def __init__(self, options: Options, speaker: Speaker) -> None:
        self.options, self.speaker, self.lanes = options, speaker, Lanes()
        self.fallbacks: Counter[str] = Counter()
        self.here = threading.local()  # ran: whether a graph has run in this thread's call
        self.num_stock = 0  # calls, of graphs or models, that were not to run by plans
        self.salt = 0  # what ranks must have in common in this call, beyond its collectives
        self.costs_salt = options.costs_number  # nor do ranks with unequal costs agree
        self.watches = False  # whether calls are traced or kept: they take the long way then
        self.traces: list[Trace] | None = None
        self.kept: dict[Any, list[Any]] | None = None
        self._lock = threading.Lock()

    def fall_back(self, reason: str, where: str = "a graph") -> None:
        """Count a call that runs sequentially against the strategy's will; the first is logged.

        Raises `StrategyError` under fallback="error".
        """
        self.here.ran = True
        if self.options.fallback == "error":
            raise StrategyError(f"fallback: {reason}", rule="fallback")
        with self._lock:
            self.fallbacks[reason] += 1
            is_first = self.fallbacks[reason] == 1
        if is_first:
            log.warning("%s falls back: %s", where, reason)

    def run_stock(
        self, gm: fx.GraphModule, inputs: Sequence[Any], communicators: Iterable[str]
    ) -> Any:
        """Run a user's graph in a call that is not to run by plans, as the other ranks do."""
        self.num_stock += 1
        run_eagerly(communicators, self.speaker, self.options.watchdog_s)
        return gm.forward(*inputs)

    def refuse(self, communicators: Iterable[str]) -> None:
        """Tell the other ranks that this one has no plan for the call."""
        refuse(communicators, self.speaker, self.options.watchdog_s)

    def run_as_it_is(
        self,
        gm: fx.GraphModule,
        inputs: Sequence[Any],
        error: WeftError,
        communicators: Iterable[str],
        where: str = "a graph",
    ) -> Any:
        """Run a user's graph where we failed, counted; under fallback="error" raise why.

        The other ranks of its communicators must run theirs as it is too.
        """
        if self.options.fallback == "error":
            self.refuse(communicators)
            raise error
        self.fall_back(first_line(error), where)
        run_eagerly(communicators, self.speaker, self.options.watchdog_s)
        return gm.forward(*inputs)

    def collect(self) -> AbstractContextManager[list[Trace]]:
        """Trace every call inside."""
        return self._watch("traces", [])

    def keep_inputs(self) -> AbstractContextManager[dict[Any, list[Any]]]:
        """Keep a copy of what each graph is called with inside."""
        return self._watch("kept", {})

    @contextmanager
    def _watch(self, name: str, book: Any) -> Iterator[Any]:
        setattr(self, name, book)
        self.watches = True
        try:
            yield book
        finally:
            setattr(self, name, None)
            self.watches = False

    def keep(self, piece: Any, inputs: Sequence[Any]) -> None:
        """Keep a copy of what a graph is called with, if that is asked for."""
        if self.kept is not None:
            self.kept[piece] = [i.clone() if isinstance(i, Tensor) else i for i in inputs]

    def forget_inputs(self, piece: Any) -> None:
        """Forget what a graph was called with: another one runs the call in its place."""
        if self.kept is not None:
            self.kept.pop(piece, None)

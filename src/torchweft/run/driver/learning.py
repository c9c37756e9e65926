"""Learning beside serving: a learner's turns fall between the inputs of a dynamic model.

    input ... answer  input ... answer | turn | input ... answer  input ...

A call that was placed tells the learner its problem; when a turn is due it starts in a thread of
its own once the answer is on its way, and the next input waits for its end: at most the learner's
`limit_s` and the step under way. So no gradient is computed in the middle of an input. Before a
turn, devices that nothing has run on are measured anew, so that one that recovered is used again. A
turn that fails is logged and counted; it never fails an input.
"""

from __future__ import annotations

import logging
import time
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial

from torchweft.placement.learn.learner import Learner
from torchweft.plan.trace import format_s
from torchweft.run.driver.executor import Job
from torchweft.run.driver.placing import Placer

log = logging.getLogger("torchweft")


class Turns:
    """The turns of one learner, between the inputs of one model."""

    def __init__(self, learner: Learner, placer: Placer) -> None:
        self.learner, self.placer = learner, placer
        self.thread = ThreadPoolExecutor(1, "weft learner")
        self.under_way: Future[None] | None = None
        self.num_failed = 0
        self.waited_s = 0.0  # inputs, for turns to end

    def served(self, job: Job) -> None:
        """A placed call was answered: its problem can be learned from."""
        assert job.script.drawing is not None, "a placed call has a drawing"
        self.learner.served(partial(self.placer.problem, job.script.drawing))

    def begin(self) -> None:
        """Before an input: wait for the turn under way."""
        if self.under_way is not None:
            began_s = time.perf_counter()
            self.under_way.result()
            self.waited_s += time.perf_counter() - began_s
            self.under_way = None

    def end(self) -> None:
        """After an input: start a turn if one is due."""
        if self.learner.due:
            self.under_way = self.thread.submit(self._turn)

    def _turn(self) -> None:
        try:
            self.placer.executor.look_around()
            self.learner.turn()
        except Exception as error:
            self.num_failed += 1
            self.learner.last = self.learner.num_served  # not again with the very next input
            log.warning("learning: a turn failed, serving goes on: %s", error)

    def close(self) -> None:
        """Wait for the last turn, and end the thread."""
        self.thread.shutdown()

    def __str__(self) -> str:
        failed = f"; {self.num_failed} turns failed" if self.num_failed else ""
        return f"{self.learner}; inputs waited {format_s(self.waited_s)} for it{failed}"

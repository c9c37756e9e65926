"""The `Budget`: how far trials may put a model behind what its calls would take as they are.

    behind_s <= SHARE * stock_s + room * AHEAD_S         but for what the trial under way takes

The seconds of calls come in; out comes from which call on a trial may be made. A *dear* one is the
first of a form of calls (which sizes are 1), for Dynamo has to capture it. Half of the seconds that
choices gain may be spent on trials too. `room` is the share of a call that overlap could hide at
best: what its thread waits for, or what it computes, whichever is less. Where there is some, trials
are an investment, and begin at once. Ranks tell each other their seconds at calls that all of them
count alike, so they allow the same trials.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Hashable, Sequence

SHARE = 0.02  # what a stream of calls cannot tell from stock
AHEAD_S = 20.0  # of calls: half of what they could gain at best may be spent before
CAPTURE_S, TRIAL_S = 2.0, 0.05  # what trials take, before any was seen
MIN_COMMON = 16  # a form of which there is less than one in so many calls is not captured


class Budget:
    """Seconds of one model's calls. behind_s: by how much they took longer than as they are."""

    def __init__(self) -> None:
        self.actual_s = self.behind_s = 0.0
        self.wall_s = self.busy_s = 0.0  # of calls as they are; what their thread computed
        self.costs = {True: CAPTURE_S, False: TRIAL_S}  # of a trial that is dear, of another one
        self.starts = {True: math.inf, False: math.inf}  # the calls from which on it is allowed
        self.usual_s: dict[Hashable, float] = {}  # by kind: of a call as it is
        self.seen: Counter[Hashable] = Counter()  # forms of the calls that have no choice yet
        self.tried: set[Hashable] = set()  # forms that have run by a plan

    def allows(self, kind: Hashable, number: int) -> bool:
        """Whether call `number`, of a kind that has no choice yet, may be a trial."""
        form = form_of(kind)
        self.seen[form] += 1
        is_dear = form not in self.tried
        if is_dear and MIN_COMMON * self.seen[form] < number:
            return False
        return number >= self.starts[is_dear]

    def note(self, seconds: float, speed: float = 1.0) -> None:
        """A call has run by the way that is so many times as fast as the model as it is."""
        self.actual_s += seconds
        self.behind_s -= (speed - 1) / 2 * seconds

    def note_usual(self, kind: Hashable, seconds: float, busy_s: float | None = None) -> None:
        """A call has run as it is. busy_s: the processor's time of its thread, if it was seen."""
        self.note(seconds)
        if busy_s is not None:
            self.wall_s, self.busy_s = self.wall_s + seconds, self.busy_s + min(busy_s, seconds)
        self.usual_s[kind] = (self.usual_s.get(kind, seconds) + seconds) / 2

    def note_trial(self, kind: Hashable, seconds: float) -> None:
        """A call was a trial by a plan."""
        over_s, form = seconds - self.usual_s.get(kind, 0.0), form_of(kind)
        self.note(seconds)
        self.behind_s += over_s
        self.costs[form not in self.tried] = max(over_s, 0.0)
        self.tried.add(form)

    def agree(self, number: int, agreed: Callable[[Sequence[float]], list[float]]) -> None:
        """Say from which calls on trials are allowed, once call `number` has run on all ranks."""
        mine = [self.actual_s, self.behind_s, self.room, *self.costs.values()]
        actual_s, behind_s, room, *costs_s = agreed(mine)
        stock_s = actual_s - behind_s
        for is_dear, cost_s in zip(self.costs, costs_s, strict=True):
            wait_s = max(0.0, (behind_s + cost_s - room * AHEAD_S) / SHARE - stock_s)
            call_s = max(0.0, stock_s) / number
            num_calls = wait_s / call_s if call_s else math.inf if wait_s else 0.0
            self.starts[is_dear] = number + num_calls

    @property
    def room(self) -> float:
        """The share of the calls' seconds that overlap could hide at best."""
        least_s = min(self.busy_s, self.wall_s - self.busy_s)
        return least_s / self.wall_s if self.wall_s else 0.0

    def line(self) -> str:
        """What is awaited, for people."""
        first = self.starts[True]
        when = f"from call {first:.0f} on" if first < math.inf else "later"
        return f"auto: trials may take {SHARE:.0%} of the seconds of calls: {when}, or in a warm-up"


def form_of(kind: Hashable) -> Hashable:
    """What kinds have in common that Dynamo captures together: types, and which sizes are 1."""
    if isinstance(kind, tuple):
        return tuple(map(form_of, kind))
    return -2 if type(kind) is int and kind not in (0, 1) else kind

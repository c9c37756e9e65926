"""`Traffic`: the messages of a placed call, and which of them a group or the caller waited for.

    spans of copies --> messages (lane, when it was sent) --> (bytes, seconds) of those waited for

What nobody waited for may take as long as it likes; so links are priced by the others, from when a
value was made until it was home, or until the group that waited for it began.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from torchweft.run.workers.cell import Spec
from torchweft.run.workers.graphing import HOME
from torchweft.run.workers.program import Task

Message = tuple[str, float]  # lane, when it was sent


class Traffic:
    """The messages of one call."""

    def __init__(
        self,
        spans: Sequence[tuple[str, str, str, float, float]],
        blocks: Mapping[str, tuple[Spec, int, int]],
    ) -> None:
        self.num_bytes: Counter[Message] = Counter()
        self.num: Counter[str] = Counter()  # of messages that a device sent or got
        self.there: dict[tuple[str, str], tuple[float, Message]] = {}  # (value, device)
        self.until_s: dict[Message, float] = {}  # those that were waited for
        self.home_s = 0.0  # when the last rows were home
        for label, lane, _, start_s, end_s in spans:
            if not label.startswith("copy "):
                continue
            _, value, _, target = label.split(" ")
            message = lane, start_s
            if message not in self.num_bytes:
                self.num.update(lane.split(".to."))
            spec, _, count = blocks[value]
            self.num_bytes[message] += count * spec.num_bytes
            self.there[value, target] = end_s, message
            if target == HOME:
                self.until_s[message] = end_s
                self.home_s = max(self.home_s, end_s)

    def await_at(
        self, device: str, tasks: Sequence[Task], spans: Sequence[tuple[float, float]]
    ) -> None:
        """See which messages the groups of a device waited for; spans: (start, end) of each."""
        free_s = 0.0
        for task, (start_s, end_s) in zip(tasks, spans, strict=True):
            came = [self.there[v, device] for v in task.needs if (v, device) in self.there]
            if came and (last := max(came))[0] > free_s:
                self.until_s[last[1]] = start_s
            free_s = end_s

    def waited(self) -> dict[tuple[str, str], list[tuple[int, float]]]:
        """By (source, target): bytes and seconds of the messages that were waited for."""
        by_link: dict[tuple[str, str], list[tuple[int, float]]] = {}
        for (lane, start_s), until_s in self.until_s.items():
            source, _, target = lane.partition(".to.")
            facts = self.num_bytes[lane, start_s], until_s - start_s
            by_link.setdefault((source, target), []).append(facts)
        return by_link

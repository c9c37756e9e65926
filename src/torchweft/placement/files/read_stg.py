"""STG files: task graphs of the Standard Task Graph Set (Kasahara Lab, Waseda University).

         10                      how many tasks; with a second number: on how many processors
          0    0    0            task, its time, how many predecessors it has, and which
          1   20    1    0       tasks 0 and 11 are the dummies at entry and exit, not counted
          5    3    3    2    3    4
    # ...                        information

With communication costs, each predecessor stands on a line of its own, with its cost:

          1    5    1
                         0    2
The prototype set counts from task 1 and has no entry dummy. Fields are parted by blanks.
"""

from __future__ import annotations

from typing import NamedTuple, NoReturn

from torchweft.errors import PlacementError, excerpt
from torchweft.files import check_length
from torchweft.placement.files.work import Work
from torchweft.placement.problem import MAX_DEVICES, MAX_OPS


class _Row(NamedTuple):
    number: int
    seconds: float
    before: list[tuple[int, float]]


def read_stg(text: str, name: str) -> tuple[Work, int | None]:
    """The work, and the number of processors if the file has one.

    Raises `PlacementError` with the line that is wrong.
    """
    return _StgReader(text).work(name)


class _StgReader:
    """Reads line by line and knows where it is when something is wrong."""

    def __init__(self, text: str) -> None:
        check_length(text, PlacementError, "an STG graph")
        self.lines = text.splitlines()
        self.words = [line.partition("#")[0].split() for line in self.lines]
        self.at = -1

    def fail(self, why: str) -> NoReturn:
        lines = [line[:100] for line in self.lines] or [""]
        at = min(max(self.at, 0), len(lines) - 1)
        shown = excerpt(lines, at, around=1, count_from=1)
        raise PlacementError(f"file: STG line {at + 1}: {why}\n{shown}", rule="file")

    def next(self) -> list[float] | None:
        """The numbers of the next line that has any; None at the end."""
        self.at += 1
        while self.at < len(self.words) and not self.words[self.at]:
            self.at += 1
        if self.at >= len(self.words):
            return None
        try:
            numbers = [float(word) for word in self.words[self.at]]
        except ValueError:
            self.fail("there are words where numbers should be.")
        if not all(0 <= number < 1e15 for number in numbers):
            self.fail("a number is below zero or too large.")
        return numbers

    def whole(self, number: float) -> int:
        if number != int(number):
            self.fail(f"{number:g} is not a whole number.")
        return int(number)

    def work(self, name: str) -> tuple[Work, int | None]:
        head = self.next()
        if head is None or len(head) > 2:
            self.fail("the first line is the number of tasks, and perhaps of processors.")
        num_tasks = self.whole(head[0])
        processors = self.whole(head[1]) if len(head) == 2 else None
        if not 0 < num_tasks <= MAX_OPS or processors not in (None, *range(1, MAX_DEVICES + 1)):
            self.fail(f"1 to {MAX_OPS} tasks on 1 to {MAX_DEVICES} processors can be placed.")
        rows: dict[int, _Row] = {}
        while (numbers := self.next()) is not None:
            row = self.row(numbers)
            if row.number in rows:
                self.fail(f"task {row.number} stands twice.")
            rows[row.number] = row
        if not num_tasks <= len(rows) <= num_tasks + 2:
            self.fail(f"{num_tasks} tasks were announced, and {len(rows)} are there: cut off?")
        places = {number: at for at, number in enumerate(rows)}
        edges = []
        for at, row in enumerate(rows.values()):
            for number, cost in row.before:
                if number not in places or number == row.number:
                    raise PlacementError(
                        f"file: STG task {row.number} has predecessor {number}, "
                        f"{'which is itself' if number == row.number else 'which is missing'}.",
                        rule="file",
                    )
                edges.append((places[number], at, cost))
        seconds = tuple(row.seconds for row in rows.values())
        ops = tuple(f"t{number}" for number in rows)
        return Work(name, ops, {"cpu": seconds}, tuple(edges)), processors

    def row(self, numbers: list[float]) -> _Row:
        """A task, with its predecessors here or on the next lines."""
        if len(numbers) < 3:
            self.fail("a task has a number, a time and a count of predecessors.")
        number, count, rest = self.whole(numbers[0]), self.whole(numbers[2]), numbers[3:]
        before: list[tuple[int, float]] = []
        if len(rest) == count:
            before = [(self.whole(item), 0.0) for item in rest]
        elif len(rest) == 2 * count:
            before = [(self.whole(a), cost) for a, cost in zip(rest[::2], rest[1::2], strict=True)]
        elif rest:
            self.fail(f"{count} predecessors were announced, and {len(rest)} numbers follow.")
        else:
            for _ in range(count):
                pair = self.next()
                if pair is None or len(pair) != 2:
                    self.fail("a predecessor and its communication cost should stand here.")
                before.append((self.whole(pair[0]), pair[1]))
        return _Row(number, numbers[1], before)

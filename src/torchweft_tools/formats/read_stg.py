"""STG files: task graphs of the Standard Task Graph Set (Kasahara Lab, Waseda University).

         10                      number of tasks; a second number: the number of processors
          0    0    0            task, its time, how many predecessors it has, and which
          1   20    1    0       tasks 0 and 11 are the dummies at entry and exit, not counted
          5    3    3    2    3    4
    # ...                        information

With communication costs, each predecessor has a line of its own, with its cost:

          1    5    1
                         0    2
The prototype set counts from task 1 and has no entry dummy. Blanks separate fields.
"""

from __future__ import annotations

from typing import NoReturn

from torchweft.errors import PlacementError, excerpt
from torchweft.files import check_length
from torchweft.placement.problem import MAX_DEVICES, MAX_OPS
from torchweft_tools.formats.work import Work


def read_stg(text: str, name: str) -> tuple[Work, int | None]:
    """The work, and the number of processors if the file has one.

    Raises `PlacementError` with the line that is wrong.
    """
    read = _StgReader(text)
    num_tasks, processors = read.head()
    seconds: dict[int, float] = {}
    edges = []
    while (numbers := read.next()) is not None:
        if (task := read.whole(numbers[0])) in seconds:
            read.fail(f"another line defines task {task}; tasks must be unique.")
        edges += [(other, task, cost) for other, cost in read.before(numbers)]
        seconds[task] = numbers[1]
    if not num_tasks <= len(seconds) <= num_tasks + 2:
        read.fail(f"the file must have {num_tasks} tasks; it has {len(seconds)}. Was it cut off?")
    for other, task, _ in edges:
        if other == task or other not in seconds:
            why = "which is itself" if other == task else "which is missing"
            text = f"STG task {task} has predecessor {other}, {why}."
            raise PlacementError(f"file: {text}", rule="file")
    at = {task: number for number, task in enumerate(seconds)}
    between = tuple((at[other], at[task], cost) for other, task, cost in edges)
    ops = tuple(f"t{task}" for task in seconds)
    return Work(name, ops, {"cpu": tuple(seconds.values())}, between), processors


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
            self.fail("all fields must be numbers.")
        if not all(0 <= number < 1e15 for number in numbers):
            self.fail("numbers must be from 0 to 1e15.")
        return numbers

    def whole(self, number: float) -> int:
        if number != int(number):
            self.fail(f"{number:g} is not a whole number.")
        return int(number)

    def head(self) -> tuple[int, int | None]:
        """The number of tasks, and of processors if there is one."""
        head = self.next()
        if head is None or len(head) > 2:
            self.fail("the first line must be the number of tasks, and perhaps of processors.")
        num_tasks = self.whole(head[0])
        processors = self.whole(head[1]) if len(head) == 2 else None
        if not 0 < num_tasks <= MAX_OPS or processors not in (None, *range(1, MAX_DEVICES + 1)):
            self.fail(f"1 to {MAX_OPS} tasks on 1 to {MAX_DEVICES} processors can be placed.")
        return num_tasks, processors

    def before(self, numbers: list[float]) -> list[tuple[int, float]]:
        """The predecessors of a task and their costs, from its line or from the next lines."""
        if len(numbers) < 3:
            self.fail("a task needs a number, a time and a count of predecessors.")
        count, rest = self.whole(numbers[2]), numbers[3:]
        if len(rest) == count:
            return [(self.whole(item), 0.0) for item in rest]
        if len(rest) == 2 * count:
            return [(self.whole(a), cost) for a, cost in zip(rest[::2], rest[1::2], strict=True)]
        if rest:
            self.fail(f"{count} predecessors must follow; got {len(rest)} numbers.")
        predecessors = []
        for _ in range(count):
            pair = self.next()
            if pair is None or len(pair) != 2:
                self.fail("this line must be a predecessor and its communication cost.")
            predecessors.append((self.whole(pair[0]), pair[1]))
        return predecessors

"""The bound: seconds that no placement of a problem can beat, from paths and from loads.

    path    an op starts after its slowest input, wherever that was made: the longest way through
            the graph if every device ran any number of ops at once
    load    with weights y of the devices, adding up to 1: sum over ops of min(y * seconds); the
            least busy mix of devices must still do all the work

Memory is left out: it can only make things slower.
"""

from __future__ import annotations

from torchweft.placement.problem import INF, Matrix, Problem


def heads(problem: Problem) -> Matrix:
    """For each op and device: no placement ends the op on the device earlier."""
    rows: list[tuple[float, ...]] = []
    every = range(problem.num_devices)
    for op in range(problem.num_ops):
        row = []
        for device in every:
            at_s = problem.ready_s[op][device]
            for source, seconds in problem.preds[op]:
                early_s = rows[source]
                there_s = min(early_s[d] + seconds[d][device] for d in problem.allowed[source])
                at_s = max(at_s, there_s)
            row.append(at_s + problem.seconds[op][device])
        rows.append(tuple(row))
    return tuple(rows)


def tails(problem: Problem) -> Matrix:
    """For each op and device: after the op has ended there, no placement is done sooner.

    This is the optimistic cost table of PEFT.
    """
    rows: list[tuple[float, ...]] = [()] * problem.num_ops
    every = range(problem.num_devices)
    for op in reversed(range(problem.num_ops)):
        row = [0.0] * problem.num_devices
        for target, seconds in problem.succs[op]:
            own, behind, allowed = problem.seconds[target], rows[target], problem.allowed[target]
            left = [(d, own[d] + behind[d]) for d in allowed]
            for device in every:
                away = seconds[device]
                least_s = min(away[d] + left_s for d, left_s in left)
                if least_s > row[device]:
                    row[device] = least_s
        rows[op] = tuple(row)
    return tuple(rows)


def speeds(problem: Problem) -> list[float]:
    """How fast each device is: one over the seconds of all ops that it runs; 0 if they take 0."""
    totals = [
        sum(row[d] for row in problem.seconds if row[d] < INF) for d in range(problem.num_devices)
    ]
    return [1 / total if total > 0 else 0.0 for total in totals]


def load_s(problem: Problem) -> float:
    """The load bound, with equal weights and with weights by how fast each device is."""
    usable = [
        [(d, problem.seconds[op][d]) for d in problem.allowed[op]] for op in range(problem.num_ops)
    ]
    best_s = 0.0
    for weights in ([1.0] * problem.num_devices, speeds(problem)):
        if (whole := sum(weights)) > 0:
            found_s = sum(min(weights[d] * s for d, s in row) for row in usable) / whole
            best_s = max(best_s, found_s)
    return best_s


def bound_s(problem: Problem) -> float:
    """A lower bound of the score of every placement of the problem."""
    if problem.objective == "throughput":
        longest = [
            min(row[d] for d in problem.allowed[op]) for op, row in enumerate(problem.seconds)
        ]
        return max(load_s(problem), *longest)
    early, late = heads(problem), tails(problem)
    path_s = max(
        min(early[op][d] + late[op][d] for d in problem.allowed[op])
        for op in range(problem.num_ops)
    )
    return max(load_s(problem), path_s)

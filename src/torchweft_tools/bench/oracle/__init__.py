"""The oracle: a slow judge of plans that shares no code with the verifier it is compared with.

    plans of all ranks --read--> readings --search (all interleavings) or close (closure)--> verdict

Small plans are judged by trying every interleaving of their lanes, larger ones by the closure of
their events; on small plans both must agree (`tests/pure/test_oracle.py`). A single plan is judged
alone, as if its peers did what it needs. `exhaustive` is the oracle of placements: it tries all.
"""

from __future__ import annotations

from collections.abc import Sequence

from torchweft.plan.plan import Plan
from torchweft_tools.bench.oracle.closure import close
from torchweft_tools.bench.oracle.content import UnsafeError
from torchweft_tools.bench.oracle.interleavings import TooManyError, count_bound, search
from torchweft_tools.bench.oracle.reading import Reading, read

MAX_STATES = 20_000


def is_safe(plans: Sequence[Plan], *, max_states: int = MAX_STATES) -> tuple[bool, str]:
    """Whether plans (one per rank) are safe together, and a short reason if they are not."""
    verdict, reason, _ = judge(plans, max_states=max_states)
    return verdict, reason


def judge(plans: Sequence[Plan], *, max_states: int = MAX_STATES) -> tuple[bool, str, str]:
    """As `is_safe`, with the method that decided: rules, interleavings or closure."""
    method = "rules"
    try:
        readings = _read_all(plans)
        method = "interleavings"
        if count_bound(readings) > 20 * max_states or not _search(readings, max_states):
            method = "closure"
            close(readings)
    except UnsafeError as error:
        return False, str(error), method
    return True, "", method


def by_interleavings(plans: Sequence[Plan], *, max_states: int = MAX_STATES) -> bool | None:
    """The verdict of trying every interleaving; None if there are too many states."""
    try:
        return True if _search(_read_all(plans), max_states) else None
    except UnsafeError:
        return False


def by_closure(plans: Sequence[Plan]) -> bool:
    """The verdict of the closure of all events."""
    try:
        close(_read_all(plans))
    except UnsafeError:
        return False
    return True


def _read_all(plans: Sequence[Plan]) -> list[Reading]:
    return [read(plan, rank, len(plans)) for rank, plan in enumerate(plans)]


def _search(readings: Sequence[Reading], max_states: int) -> bool:
    try:
        search(readings, max_states)
    except TooManyError:
        return False
    return True

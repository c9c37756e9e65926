"""A `PlanEntry`: a plan in use; a `CallShape`: what a call of known sizes needs of it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from torchweft.errors import MemoryPlanError
from torchweft.plan.context import Bucket, Context
from torchweft.plan.plan import Plan
from torchweft.plan.trace import Trace

if TYPE_CHECKING:
    from torchweft.serve.piece import Piece


class CallShape(NamedTuple):
    """Row borders of the parts, sizes that bodies need, digests of the collectives by group.

    refused: why the call must not be cut at these borders, or run by the plan; empty if it may.
    context: what was known of the call. error: that the plan needs more memory than there is.
    """

    bounds: tuple[int, ...]
    numbers: tuple[int, ...]
    digests: dict[str, int]
    refused: str = ""
    context: Context = Context()
    error: MemoryPlanError | None = None


@dataclass
class PlanEntry:
    """A plan in use, with its program and what calls have shown of it.

    piece: the graph that it is of, as it is or as a strategy has rewritten it.
    inner: what runs the calls inside of its ops. traced: the call that its trace is of.
    recent: the entry of the last call, for all that were written for the same facts.
    is_spent: whether it was written at costs that hold no more; the next call writes another.
    """

    piece: Piece
    plan: Plan
    program: Any
    bucket: Bucket
    facts: tuple[object, ...] = ()
    inner: str | None = None
    num_calls: int = 0
    is_spent: bool = False
    trace: Trace | None = None
    traced: CallShape | None = None
    shapes: dict[object, CallShape] = field(default_factory=dict)
    recent: list[PlanEntry] = field(default_factory=list)

"""`Together`: the calls of a piece that talks, made by all ranks by plans that fit together.

    begin, tell the digest  --all alike-->   run
                            --unlike-->      each tells the digest of the call run whole
                                             --all alike-->  run whole, counted
                                             --unlike-->     `PlanError`, on all ranks

Ranks may have unequal numbers of rows where no collective says otherwise: experts on several ranks,
attention of other requests on each. One of them may have fewer rows than parts, and cannot cut: a
part without rows would need a graph that holds for none, and Dynamo has no symbol for 0 and 1
(boundary mode has no graph, and cuts: `Graph.takes_empty`). So all of them run that call whole.
They find out before the first collective; what was computed until then is computed again, and
where that must not be, ranks wait for each other before the first op.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from torchweft.capture.failures import first_line
from torchweft.errors import WeftError
from torchweft.ranks.faults import WholeError
from torchweft.ranks.talk import UNEQUAL, Talk
from torchweft.serve.book.entry import CallShape, PlanEntry

if TYPE_CHECKING:
    from torchweft.serve.piece import Piece


class Together:
    """How the calls of one piece are agreed on."""

    def __init__(self, piece: Piece) -> None:
        self.piece, graph, options = piece, piece.graph, piece.service.options
        talks = [op for op in graph.ops if op.collective is not None]
        # What has rows and equal sizes on all ranks says that the rows are equal: then plans that
        # differ are a mistake.
        are_equal = any(
            graph.value[name].batch is not None
            for op in talks
            if op.collective is not None and not op.collective.kind.startswith(UNEQUAL)
            for name in op.reads
        )
        once = piece.writes or any(op.rows == "random" for op in graph.ops)
        # Several groups would hear of it one by one; and side state is that of a plan's parts.
        is_plain = len(piece.communicators) == 1 and not piece.splitters
        is_graph = graph.level != "boundary" and options.fallback != "error"
        self.may_run_whole = is_plain and is_graph and not are_equal
        self.agrees_first = bool(options.graphs) or (self.may_run_whole and once)

    def __call__(self, entry: PlanEntry, given: Sequence[Any], shape: CallShape) -> tuple[Any, ...]:
        """Run a call by its plan, or whole if the ranks cut it differently."""
        try:
            return self._talk(entry, given, shape)
        except WholeError as error:
            self.piece.fall_back(first_line(error))
            entry, shape = self._whole(shape)
            entry.num_calls += 1
            return self._talk(entry, given, shape)

    def _talk(self, entry: PlanEntry, given: Sequence[Any], shape: CallShape) -> tuple[Any, ...]:
        service = self.piece.service
        salt = service.salt ^ service.costs_salt

        def told(shape: CallShape) -> dict[str, int]:
            return {name: (digest ^ salt) | 1 << 62 for name, digest in shape.digests.items()}

        def whole() -> int:
            if not self.may_run_whole or entry.inner is not None:
                return 0
            try:
                return next(iter(told(self._whole(shape)[1]).values()))
            except WeftError:
                return 0

        weights = self.piece.checksums.numbers(given, in_parts=entry.plan.num_parts > 1)
        facts = entry.plan, told(shape), service.speaker, service.options.watchdog_s
        with Talk(*facts, weights, whole) as talk:
            if self.agrees_first:
                talk.agree()
            return self.piece.run_agreed(entry, given, shape)

    def _whole(self, shape: CallShape) -> tuple[PlanEntry, CallShape]:
        """The plan that cuts nothing, for a call."""
        context, plans = shape.context, self.piece.plans
        entry = plans.sequential(context)
        return entry, plans.shape(entry, context, context.env(self.piece.graph.batch))

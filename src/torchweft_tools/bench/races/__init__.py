"""The bench of published races: the mistakes of overlapped engines, as a test of the verifier.

    thread --rebuilt by hand--> broken plans --verify--> refused, by the rule that was broken
                                mended plans --verify--> accepted; lowered by us: accepted too

`docs/races.md` lists the threads. `flagged` counts the broken forms that are refused by the right
rule; a race that the plan format cannot express has a row that says why, known and not flagged. The
oracle, which tries all interleavings, judges every plan too, unless `--quick`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torchweft.plan.plan import Plan
from torchweft.plan.verify import findings_ranks
from torchweft_tools.bench.oracle import is_safe
from torchweft_tools.bench.races.buffers import BUFFERS
from torchweft_tools.bench.races.collectives import COLLECTIVES
from torchweft_tools.bench.races.known_race import KnownRace
from torchweft_tools.bench.races.streams import STREAMS

Row = dict[str, Any]
RACES: tuple[KnownRace, ...] = (*STREAMS, *BUFFERS, *COLLECTIVES)
COLUMNS = ("thread", "rule", "raised", "verdict", "mended", "lowered", "oracle")


def run(*, quick: bool = False) -> tuple[list[Row], Row]:
    """A row for each thread, and the counts.

    quick: leave out the oracle.
    """
    rows = [judge(race, oracle=not quick) for race in RACES]
    mended = [row["mended"] for row in rows if row["mended"] != "-"]
    summary = {
        "known": len(rows),
        "flagged": sum(row["verdict"] == "flagged" for row in rows),
        "mended": len(mended),
        "mended_accepted": mended.count("accepted"),
    }
    return rows, summary


def judge(race: KnownRace, *, oracle: bool = True) -> Row:
    """The verdicts of the verifier (and the oracle) on one thread; - where there is none."""
    row: Row = {"thread": race.thread, "rule": race.rule or "-", "raised": "-", "verdict": "",
                "mended": "-", "lowered": "-", "oracle": "-", "wrong": race.wrong,
                "cure": race.cure, "finding": "", "why_not": race.why_not}  # fmt: skip
    if race.broken:
        forms = [race.broken_plans(), race.mended_plans(), race.lowered_plans()]
        row["raised"], row["finding"] = _verdict(forms[0])
        row["mended"], row["lowered"] = _verdict(forms[1])[0], _verdict(forms[2])[0]
        if oracle:
            verdicts = [_verdict(plans)[0] == "accepted" for plans in forms]
            agrees = verdicts == [is_safe(plans)[0] for plans in forms]
            row["oracle"] = "agrees" if agrees else "disagrees"
    row["verdict"] = "flagged" if row["raised"] == race.rule else "missed"
    if race.rule is None:
        row["verdict"] = "not said"
    return row


def _verdict(plans: Sequence[Plan]) -> tuple[str, str]:
    """`accepted`, or the rule of the first finding and its text."""
    for finding in findings_ranks(plans):
        return finding.rule, str(finding)
    return "accepted", ""

"""Files that are right and huge are refused before they are worked through."""

from __future__ import annotations

from pathlib import Path

import pytest

from torchweft.errors import PlacementError, PlanError, WeftError
from torchweft.files import MAX_TEXT
from torchweft.plan.lower.lower import lower
from torchweft.plan.machine import cpu
from torchweft.plan.plan import MAX_MEMORY, Plan
from torchweft.plan.strategies import get_strategy
from torchweft.plan.verify import findings
from torchweft.plan.verify.coverage import MAX_FINDINGS
from torchweft.plan.write.strategy import write
from torchweft_tools.bench.fuzz.files import CONTEXT, chain
from torchweft_tools.formats.read_any import read_problem
from torchweft_tools.formats.read_trees import MAX_BRACKETS
from torchweft_tools.formats.weft_files import MAX_SPANS, read_trace
from torchweft_tools.formats.work import MAX_EDGES

GRAPH = chain(4)
HEAD, _, STEPS = str(
    lower(write(get_strategy("sequential"), GRAPH, CONTEXT, cpu()))
).partition("steps\n")  # fmt: skip


def test_a_plan_of_too_much_text_is_refused() -> None:
    with pytest.raises(PlanError, match=f"more than {MAX_TEXT} characters"):
        Plan.parse(HEAD + "history a\n" * (MAX_TEXT // 10) + "steps\n" + STEPS)


def test_a_plan_of_too_many_buffers_is_refused() -> None:
    places = "".join(f"place p{n} alone\n" for n in range(MAX_MEMORY + 1))
    with pytest.raises(PlanError, match=f"at most {MAX_MEMORY} buffers and places"):
        Plan.parse(HEAD + places + "steps\n" + STEPS)


def test_findings_end_somewhere() -> None:
    """To look for the names that were meant takes its time for each."""
    lane = STEPS.split()[0]
    steps = "".join(f"  {lane} unknown{n}\n" for n in range(MAX_FINDINGS + 50))
    plan = Plan.parse(f"{HEAD}steps\n{steps}end\n").bind(GRAPH)
    assert len(findings(plan)) == MAX_FINDINGS


@pytest.mark.parametrize(
    "text",
    [
        "(2 a)\n" * (MAX_BRACKETS + 1),
        "(2 " + "a " * (MAX_TEXT // 2) + ")",
        "4\n" + "\n" * MAX_TEXT,
        "800\n" + "".join(f"{n} 1 {n} {' '.join(map(str, range(n)))}\n" for n in range(800)),
    ],
    ids=["brackets", "words", "blank lines", "edges"],
)
def test_other_formats_have_limits(text: str, tmp_path: Path) -> None:
    path = tmp_path / "graph"
    path.write_text(text)
    more = f"more than ({MAX_BRACKETS} brackets|{MAX_TEXT} characters)|at most {MAX_EDGES} can be"
    with pytest.raises(PlacementError, match=more):
        read_problem(path)


def test_a_trace_of_too_many_spans_is_refused() -> None:
    with pytest.raises(WeftError, match=f"more than {MAX_SPANS} spans"):
        read_trace({"version": 1, "spans": [[]] * (MAX_SPANS + 1)})

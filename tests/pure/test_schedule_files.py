"""Schedule files: what they may say, how mistakes are told, and the commands that take them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from torchweft.errors import PlanError
from torchweft.files import MAX_TEXT
from torchweft_tools.cli import app
from torchweft_tools.formats.read_schedule import MAX_CELLS, MAX_RANKS, read_schedule
from torchweft_tools.formats.schedule_plans import read_seconds, schedule_plans

GPIPE = "0F0,0F1,,0B0,0B1\n,1F0,1F1,1B0,1B1\n"


@pytest.mark.parametrize(
    ("before", "after", "text"),
    [
        ("0F1", "0X1", r"rank 0 \(line 1\), cell 2: '0X1' is no action"),
        ("1F0", "1F", r"rank 1 \(line 2\), cell 2: '1F' is no action"),
        ("1F0", "1F00000000000000", "is no action"),
        ("1B1", "-1B1", "is no action"),
        ("0F1", "0F0", r"cell 2: 0F0 stands twice: first at rank 0 \(line 1\), cell 1"),
        ("0B1", "1B1", "stage 1 computes here and at rank 0"),
        ("1F1", "", "1F1 stands nowhere"),
        ("0B1", "0W1", "0I1 stands nowhere"),
        ("0B1", "0B1,0W1", "0W1 does a part of what 0B1 does"),
        ("0F1", "0F1;0F2", "has several actions"),
        ("0F1", "(0B0;0F1)OVERLAP_F_B", "is not a forward beside a backward"),
        ("0F1", "(0F1)OVERLAP_F_B", "is not a forward beside a backward"),
        ("0F1", "0F1,1SEND_F1", "1SEND_F1: stage 1 is on rank 1"),
        ("1F1", "1F1,1SEND_F1", "1SEND_F1: no other rank has to do with that"),
        ("0F1", "0F1,0RESHARD", "weights are not unsharded"),
        ("0F1", "0F1,7UNSHARD", "stage 7 computes nothing"),
        ("0F0", "0F20001", "there is a microbatch 20001"),
        ("0F0", '"0F0', "is not CSV"),
    ],
)
def test_mistakes_are_told_with_their_cell_and_a_cure(before: str, after: str, text: str) -> None:
    with pytest.raises(PlanError, match=text) as caught:
        schedule_plans(read_schedule(GPIPE.replace(before, after, 1)))
    assert caught.value.rule == "schedule"
    assert len(str(caught.value).splitlines()) == 2  # the second line is the cure


def test_rows_that_wait_for_each_other_are_told_by_cell() -> None:
    with pytest.raises(PlanError) as caught:
        schedule_plans(read_schedule("0B0,0F0\n1F0,1B0\n"))
    assert caught.value.rule == "deadlock"
    assert "rank 0 (line 1), cell 1 (0B0) needs 0F0, 1B0 first" in str(caught.value)
    assert "rank 1 (line 2), cell 1 (1F0) needs 0F0 first" in str(caught.value)


@pytest.mark.parametrize(
    "text",
    [
        "0F0," * (MAX_CELLS + 1),
        "0F0\n" * (MAX_RANKS + 1),
        "0F0" + "," * MAX_TEXT,
        "\n" * 10,
        "",
        "0F0," + "x" * 200_000,  # longer than a field of Python's csv module may be
    ],
    ids=["cells", "ranks", "characters", "blank lines", "nothing", "one cell"],
)
def test_files_have_limits(text: str) -> None:
    with pytest.raises(PlanError, match=r"at most|more than|no action|not CSV") as caught:
        read_schedule(text)
    assert len(str(caught.value)) < 1000


def test_messages_of_one_rank_may_go_to_several() -> None:
    """Three ranks; the one in the middle sends both ways. Forward only is a schedule too."""
    rows = "0F0,0F1,0B0,0B1\n1F0,1F1,1B0,1B1\n2F0,2B0,2F1,2B1\n"
    made = schedule_plans(read_schedule(rows))
    assert made.findings == []
    forward = schedule_plans(read_schedule("0F0,0F1\n1F0,1F1\n2F0,2F1\n"))
    assert forward.findings == []
    traces = forward.simulate({"F": 1.0, "1F": 3.0})
    # Rank 1 takes the second message when it has sent the first one on: one stream, one order.
    assert [trace.makespan_s for trace in traces] == [4.0, 7.0, 8.0]
    assert all(trace.peak_bytes == 0 for trace in traces)


def test_costs_are_by_kind_and_by_stage() -> None:
    assert read_seconds(["F=0.5", "2F=1e-3"], 3) == {"F": 0.5, "2F": 0.001}
    for word in ("F", "F=x", "X=1", "3F=1", "0OVERLAP_F_B=1", "F=nan", "F=-1", "F=1=2"):
        with pytest.raises(PlanError, match="cost: "):
            read_seconds([word], 3)


def test_a_dropped_receive_is_told_by_verify_and_simulate(tmp_path: Path, capsys) -> None:
    path = tmp_path / "schedule.csv"
    path.write_text("0F0,0SEND_F0\n1RECV_F0,1F0\n")
    assert app.run(["verify", str(path)]) == 0
    assert "schedule of 2 ranks, 2 stages, 1 microbatches, with its messages: safe" in (
        capsys.readouterr().out
    )
    path.write_text("0F0,0SEND_F0\n1F0\n")
    assert app.run(["verify", str(path), "--json"]) == 1
    data = json.loads(capsys.readouterr().out)
    assert data["safe"] is False
    assert data["findings"][0]["rank"] == 1
    assert "RECV_F0 never runs" in data["findings"][0]["message"]
    assert app.run(["simulate", str(path)]) == 1
    assert "RECV_F0 never runs" in capsys.readouterr().err


def test_simulate_takes_stage_costs(tmp_path: Path, capsys) -> None:
    path, trace = tmp_path / "schedule.csv", tmp_path / "trace.json"
    path.write_text(GPIPE)
    words = ["--stage-cost", "F=1", "--stage-cost", "B=2", "--trace", str(trace)]
    assert app.run(["simulate", str(path), *words, "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert data["simulated"] is True
    assert data["makespan_s"] == 9.0
    assert data["bubbles"] == pytest.approx([1 / 3, 1 / 3])
    assert data["kept"] == [2, 2]
    assert "rank1.compute" in trace.read_text()
    assert app.run(["simulate", str(path)]) == 0
    text = capsys.readouterr().out
    assert "(simulated)" in text
    assert "rank 1: computes 6 ms, idle 33.3%" in text


def test_plan_files_still_need_their_graph(tmp_path: Path, capsys) -> None:
    assert app.run(["verify", str(tmp_path / "some.plan")]) == 2
    assert app.run(["simulate", str(tmp_path / "some.plan"), "--batch", "2"]) == 2
    assert "--graph" in capsys.readouterr().err

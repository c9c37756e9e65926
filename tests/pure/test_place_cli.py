"""The commands `torchweft place ...` and the placement bench: what they print, and their errors."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from torchweft.files import write_json
from torchweft.placement import planner_names
from torchweft.placement.learn.policy import POLICIES
from torchweft.plan.machine import Device, Lane, Link, Machine, to_data
from torchweft.plan.plan import Plan
from torchweft.plan.verify import verify
from torchweft_tools.bench import placement as bench
from torchweft_tools.cli import app as cli
from torchweft_tools.demo.blueprint import transformer
from torchweft_tools.formats.weft_files import (
    load_graph,
    load_placement,
    load_trace,
    read_placement,
    save_graph,
)

Capture = pytest.CaptureFixture[str]
TREE = (
    "(3 (2 It) (4 (4 (2 's) (4 (3 (2 a) (4 (3 lovely) (2 film))) (3 (2 with) (2 acting)))) (2 .)))"
)
MACHINE = Machine(
    "pair",
    (Device("a"), Device("b", flops_per_s=2e10)),
    (Lane("a", "a"), Lane("b", "b")),
    (Link("a", "b"), Link("b", "a")),
)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a tree, a graph of ours and a machine; commands run in it."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("WEFT_DEBUG", raising=False)
    monkeypatch.delenv("WEFT_DATA", raising=False)
    Path("tree.txt").write_text(TREE + "\n")
    save_graph(transformer(2, 64, tensor_parallel=False), "graph.json")
    write_json("machine.json", to_data(MACHINE))
    return tmp_path


def out(words: str, capsys: Capture, code: int = 0) -> str:
    assert cli.run(words.split()) == code
    found = capsys.readouterr()
    return found.out if code == 0 else found.err


def data(words: str, capsys: Capture) -> dict[str, Any]:
    found = json.loads(out(f"{words} --json", capsys))
    assert isinstance(found, dict)
    return found


@pytest.mark.usefixtures("folder")
@pytest.mark.parametrize("name", [n for n in planner_names() if n != "cp-sat"])
def test_plan_prints_placement_starts_makespan_bound_and_planning_time(name, capsys):
    found = data(f"place plan --graph tree.txt --planner {name} --deadline-ms 20", capsys)
    assert found["planner"] == name
    assert len(found["placement"]) == 15
    assert {"op", "device", "start_s", "end_s"} == set(found["placement"][0])
    assert found["makespan_s"] == max(row["end_s"] for row in found["placement"])
    assert found["bound_s"] <= found["makespan_s"]
    assert found["planning_s"] > 0
    assert read_placement(found).planner == name


@pytest.mark.usefixtures("folder")
def test_plan_of_our_own_graph_is_written_as_placement_and_as_plan(capsys):
    words = "place plan --graph graph.json --machine machine.json --batch 64 --planner heft"
    text = out(f"{words} -o found.json --as-plan found.plan", capsys)
    assert "placement of transformer2 by heft, for latency" in text
    assert load_placement("found.json").ops[0] == "attn0"
    verify(Plan.load("found.plan", load_graph("graph.json")))
    resident = data(f"{words} --weights-resident", capsys)
    assert resident["makespan_s"] <= load_placement("found.json").makespan_s


@pytest.mark.usefixtures("folder")
def test_compare_has_a_row_for_every_planner_that_takes_the_graph(capsys):
    found = data("place compare --graph tree.txt --devices 1,2 --deadline-ms 20", capsys)
    rows = {row["planner"] for row in found["rows"]}
    assert rows | set(found["refused"]) == {*planner_names(), "exhaustive"}
    assert min(row["over_best"] for row in found["rows"]) == 1.0
    text = out("place compare --graph tree.txt --planner heft --planner peft", capsys)
    assert "over best" in text
    assert "peft" in text


@pytest.mark.usefixtures("folder")
def test_nothing_is_over_a_score_of_no_time_at_all_but_another(capsys):
    Path("none.stg").write_text("3\n1 0 0\n2 0 1\n   1 5\n3 0 1\n   2 5\n")
    words = "place compare --graph none.stg --planner heft --planner round-robin"
    assert [row["over_best"] for row in data(words, capsys)["rows"]] == [1.0, None]
    assert " - " in out(words, capsys)


@pytest.mark.usefixtures("folder")
def test_compare_and_explain_take_a_policy_as_plan_does(capsys):
    words = f"--graph tree.txt --policy {POLICIES / 'seed1.safetensors'} --deadline-ms 1"
    planned = data(f"place plan {words} --planner learned", capsys)
    rows = data(f"place compare {words} --planner learned --planner heft", capsys)["rows"]
    scores = {row["planner"]: row["score_s"] for row in rows}
    assert scores["learned"] == planned["makespan_s"]
    assert set(scores) == {"learned", "heft"}
    explained = data(f"place explain {words} --planner learned", capsys)
    assert explained["placement"] == planned["placement"]


@pytest.mark.usefixtures("folder")
def test_explain_shows_timeline_critical_path_use_and_another_device(capsys):
    words = "place explain --graph tree.txt --planner heft --ratio 1"
    text = out(f"{words} -o trace.json", capsys)
    assert "critical path" in text
    assert "used: device0" in text
    assert "another device1 would bring" in text
    assert load_trace("trace.json").simulated
    found = data(words, capsys)
    assert found["critical_path"][0]["why"] == "start"
    assert set(found["another_device_s"]) == {"device0", "device1", "device2"}
    out("place plan --graph tree.txt --planner heft --ratio 1 -o placed.json", capsys)
    assert "by heft" in out(
        "place explain --graph tree.txt --placement placed.json --ratio 1", capsys
    )


@pytest.mark.usefixtures("folder")
@pytest.mark.parametrize(
    ("words", "why"),
    [
        ("place plan --graph missing.json", "there is no graph file"),
        ("place plan --graph tree.txt --planner best", "unknown planner"),
        ("place plan --graph tree.txt --devices none", "a list of numbers; got"),
        ("place plan --graph tree.txt --devices 0", "numbers above 0"),
        ("place plan --graph tree.txt --ratio -1", "must be a number from 0"),
        ("place plan --graph tree.txt --objective speed", "unknown objective"),
        ("place plan --graph tree.txt --machine machine.json --devices 2", "not both"),
        ("place plan --graph graph.json", "give --machine"),
        ("place plan --graph tree.txt --tree 7", "no tree number 7"),
        ("place plan --graph graph.json --machine machine.json --tree 1", "has no trees"),
        ("place plan --graph tree.txt --planner heft --policy p.safetensors", "has no policy"),
        ("place plan --graph tree.txt --planner learned --policy tree.txt", "is not a policy"),
        ("place compare --graph tree.txt --planner heft --policy tree.txt", "has no policy"),
        ("place compare --graph tree.txt --planner best", "unknown planner"),
        ("place explain --graph tree.txt --policy p.safetensors", "has no policy"),
        ("bench placement --data nowhere", "no folder"),
    ],
)
def test_mistakes_are_told(words, why, capsys):
    assert why in out(words, capsys, code=1)


@pytest.mark.usefixtures("folder")
def test_bench_has_rows_for_all_planners_and_the_summary(monkeypatch):
    pytest.importorskip("ortools")
    monkeypatch.setattr(bench, "NUM_EPISODES", 40)
    seen: list[tuple[int, int]] = []
    rows, summary = bench.run(
        num_cases=1,
        num_stg=1,
        num_ops=9,
        search_ms=2.0,
        solver_s=0.05,
        no_workers=True,
        progress=lambda *at: seen.append(at),
    )
    assert seen[-1] == (summary["cases"], summary["cases"])
    assert {row["family"] for row in rows} >= {"random tree", "random graph", "branches"}
    assert {row["devices"] for row in rows} >= {2, 3, 5}
    assert {row["planner"] for row in rows} >= {"heft", "peft", "annealing", "portfolio", "cp-sat"}
    assert all(row["over_best"] >= 1 and row["over_bound"] >= 1 - 1e-9 for row in rows)
    assert summary["portfolio_worst_guarded"] <= 1.0
    assert 1 <= summary["stg_portfolio_ratio"] < 1.5
    assert {row["planner"] for row in rows} >= {"learned", "guarded", "guided", "dynpartition"}
    seeds = {row["planner"] for row in rows if row["planner"].startswith("learned")}
    assert {row["devices"] for row in rows if row["held_out_devices"]} >= {5}
    assert len(summary["learned_vs_best_classical_by_seed"]) == len(seeds)
    assert summary["learned_worst_guarded"] <= 1.0
    assert summary["simulator_error"] is None  # not without workers

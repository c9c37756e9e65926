"""Learning from what was served: on-line, in the simulator, and from files of served runs."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from torchweft.errors import PlacementError, WeftError
from torchweft.placement import Problem, check, plan
from torchweft.placement.graph_problem import ServedRun
from torchweft.placement.learn.learner import Learner, Pace, one_thread
from torchweft.placement.learn.policy import Policy, learned
from torchweft.placement.planners.lists import guard, heft
from torchweft.plan.graph import Graph, Op, Value
from torchweft.plan.machine import CostTable, Device, Lane, Link, Machine
from torchweft.plan.sizes import Size
from torchweft.plan.trace import Span, Trace
from torchweft.run.driver.prices import Drift
from torchweft_tools.bench.players.recovery import (
    FrozenPlanner,
    intervals,
    policy_of,
    recovered,
    simulated,
)
from torchweft_tools.cli.app import app
from torchweft_tools.formats.weft_files import load_served, served_problem
from torchweft_tools.train.cases import case, draw_case, problems_in, random_tree

QUICK = Pace(every=4, num_steps=2, num_problems=2, num_tries=4, num_kept=6, limit_s=1e9)


@pytest.fixture(autouse=True)
def quick() -> Iterator[None]:
    with one_thread():
        yield


def spoiled(seed: int = 0, std: float = 10.0) -> Policy:
    """A policy that chooses badly."""
    torch.manual_seed(seed)
    found = Policy()
    torch.nn.init.normal_(found.score.weight, std=std)
    return found


def problems(num: int) -> list[Problem]:
    draw = random.Random(3)
    return [draw_case(draw, num_devices=(2, 3)) for _ in range(num)]


def serve(learner: Learner, given: list[Problem]) -> Learner:
    """Serve these and take the turns that are due."""
    for problem in given:
        learner.served(lambda problem=problem: problem)
        if learner.due:
            learner.turn()
    return learner


def test_the_guard_is_always_on_and_counts_when_it_steps_in() -> None:
    learner = Learner(spoiled())
    for problem in problems(12):
        found = check(problem, plan(problem, learner))
        best_s = guard(problem).score_s
        assert found.score_s == min(best_s, learner.alone(problem).score_s)
    assert learner.num_planned == 12
    assert 0 < learner.num_guarded <= 12
    assert f"stepped in for {learner.num_guarded} of 12 plans" in str(learner)


def test_equal_seeds_learn_equal_policies() -> None:
    given = problems(12)
    one, same, other = (serve(Learner(spoiled(), QUICK, seed=s), given) for s in (0, 0, 1))
    assert (one.num_turns, one.num_steps, one.num_learned) == (3, 6, 12)
    first = torch.nn.utils.parameters_to_vector(one.policy.parameters())
    assert torch.equal(first, torch.nn.utils.parameters_to_vector(same.policy.parameters()))
    assert not torch.equal(first, torch.nn.utils.parameters_to_vector(other.policy.parameters()))


def test_it_learns_from_what_it_serves_and_leaves_the_given_policy_alone() -> None:
    given, policy = problems(4), spoiled()
    before = [learned(problem, policy=policy).score_s for problem in given]
    pace = Pace(every=4, num_steps=4, num_problems=4, num_tries=8, rate=1e-2, limit_s=1e9)
    with torch.inference_mode():  # a server's own modes are not in its way
        learner = serve(Learner(policy, pace), given * 5)
    after = [learner.alone(problem).score_s for problem in given]
    ratios = [now / then for now, then in zip(after, before, strict=True)]
    assert sum(ratios) < len(ratios)
    assert [learned(problem, policy=policy).score_s for problem in given] == before


def test_replayed_inputs_cost_what_they_cost_now_and_the_oldest_are_forgotten() -> None:
    tree, prices, asked = random_tree(9, 0), {"factor": 1.0}, []

    def rebuild(number: int) -> Problem:
        asked.append((number, prices["factor"]))
        return case(tree, (1.0, prices["factor"]), 1.0)

    learner = Learner(Policy(), QUICK)
    for number in range(8):
        learner.served(lambda number=number: rebuild(number))
    assert not asked, "nothing is rebuilt before a turn"
    prices["factor"] = 2.0
    learner.turn()
    assert {number for number, _ in asked} <= set(range(2, 8))
    assert {factor for _, factor in asked} == {2.0}


def test_a_turn_that_takes_too_long_is_cut_and_told() -> None:
    learner = serve(Learner(Policy(), replace(QUICK, num_steps=3, limit_s=0)), problems(4))
    assert (learner.num_steps, learner.num_cut) == (1, 2)
    assert "2 more left out for time" in str(learner)
    with pytest.raises(PlacementError, match="tries: 2"):
        Pace(num_tries=1)
    assert not serve(Learner(Policy(), Pace(every=0)), problems(4)).num_turns


def test_what_was_learned_is_saved_and_loaded(tmp_path: Path) -> None:
    given = problems(5)
    learner = serve(Learner(spoiled(), QUICK), given)
    learner.save(tmp_path / "policy.safetensors")
    again = Learner(Policy.load(tmp_path / "policy.safetensors"))
    for problem in given:
        assert again.alone(problem) == learner.alone(problem)


def test_drift_follows_and_one_late_run_is_not_a_slow_device() -> None:
    drift = Drift()
    for _ in range(40):
        drift.saw(("tree", "fast"), 1.0, 1e-3)
    drift.saw(("tree", "fast"), 1e6, 1e3)
    assert drift["tree", "fast"] == pytest.approx(1.0)
    assert drift.epoch == 0
    drift = Drift()
    for _ in range(40):
        drift.saw(("tree", "fast"), 1.0, 1e-3)
        drift.saw(("leaf", "fast"), 3.0 if drift.get(("leaf", "fast"), 1) < 3 else 1.0, 1e-5)
    assert drift.epoch == 0, "a cell that hardly matters makes no plan stale"
    for _ in range(6):
        drift.saw(("tree", "fast"), 2.0 / drift["tree", "fast"], 2e-3)
    assert drift["tree", "fast"] > 1.6, "what has changed is followed fast"
    for _ in range(30):
        drift.saw(("tree", "fast"), 2.0 / drift["tree", "fast"], 2e-3)
    assert drift["tree", "fast"] == pytest.approx(2.0, rel=0.05)
    assert drift.epoch > 0
    drift.forget("fast")
    assert not drift and not drift.settled and not drift.spent_s and not drift.seen


def test_a_drift_is_recovered_from_in_the_simulator() -> None:
    options = {"num_before": 4, "num_inputs": 12, "num_held_out": 6, "pace": QUICK}
    policy = policy_of("")
    found = simulated(policy=policy, **options)
    assert found == simulated(policy=policy, **options), "the same seed, the same numbers"
    assert found["over_best"]["frozen"] > 1.2, "there is something to win back"
    assert found["recovered"]["table"] > 0.7
    assert found["recovered"]["learned"] > 0.7
    # the guard is right at the prices of the table, which are nearly the true ones
    assert found["recovered"]["learned"] >= found["recovered"]["learned_alone"] - 0.02
    assert (found["served"], found["turns"]) == (16, 4)


def test_recovery_is_the_share_of_the_loss() -> None:
    arms = {"table": 6.0, "learned": 5.0, "before_alone": 10.0, "learned_alone": 12.0}
    assert recovered({"frozen": 10.0, "best": 5.0, **arms}) == {
        "table": 0.8, "learned": 1.0, "before_alone": 0.0, "learned_alone": -0.4
    }  # fmt: skip
    assert set(recovered({"frozen": 5.1, "best": 5.0, **arms}).values()) == {None}


def test_the_interval_of_a_share_is_that_of_its_requests() -> None:
    others = {arm: [8.0, 8.0] for arm in ("before_alone", "learned_alone")}
    seconds = {"frozen": [10.0, 10.0], "best": [5.0, 5.0], "table": [6.0, 10.0], **others}
    found = intervals({**seconds, "learned": [6.0, 6.0]}, 0)
    assert found["learned"] == pytest.approx([0.8, 0.8])
    assert found["table"] == pytest.approx([0.0, 0.8])
    nothing = {**seconds, "frozen": [5.0, 5.0], "learned": [5.0, 5.0]}
    assert intervals(nothing, 0) == {}, "nothing was lost, nothing can be won back"


def test_a_kept_placement_is_timed_anew() -> None:
    kept, first = FrozenPlanner(heft), case(random_tree(15, 0), (1.0, 1.5), 1.0)
    before = plan(first, kept)
    slow = replace(first, seconds=tuple((2 * a, b) for a, b in first.seconds))
    after = plan(slow, kept)
    assert (after.device, after.score_s > before.score_s) == (before.device, True)


# Files of served runs.

DEVICES = (Device("home"), Device("fast", overhead_s=0.5), Device("slow", overhead_s=0.0))
MACHINE = Machine(
    "pair",
    DEVICES,
    (Lane("home", "home", ("io",)), Lane("fast", "fast"), Lane("slow", "slow")),
    tuple(Link(a.name, b.name) for a in DEVICES for b in DEVICES if a != b),
)


def a_run(num_ops: int = 6, slowness: float = 2.0) -> ServedRun:
    """A served run of a small tree: ops of one body, two of which ran on the fast device."""
    values = [Value(f"v{n}", (Size.of(8),), "uint8") for n in range(num_ops)]
    ops = [
        Op(f"op{n}", (f"v{(n - 1) // 2}",) if n else ("x", "w"), (f"v{n}",),
           rows="batch-free", body="tree")
        for n in range(num_ops)
    ]  # fmt: skip
    ops.append(Op("answer", (f"v{num_ops - 1}",), uses="io", rows="batch-free"))
    values += [Value("x", (Size.of(8),), "uint8"), Value("w", (Size.of(8),), "uint8")]
    graph = Graph("run", tuple(values), tuple(ops), ("x", "w"), (f"v{num_ops - 1}",))
    table = CostTable.of({("tree", "fast"): {0: 9.0}, ("tree", "slow"): {0: slowness}})
    at = "compute"
    spans = [
        Span("run", f"op{n}", "fast", "fast", at, f"op{n}", None, n, n + 1 + n, 1 + n)
        for n in (0, 1)
    ]
    copy = Span("copy", "copy v0 to slow", "fast.to.slow", "fast", "io", "", None, 1.0, 2.0, 1.0)
    return ServedRun(graph, MACHINE, table, Trace("run", (*spans, copy)), "home", ("w",))


def test_a_served_run_says_what_ops_took(tmp_path: Path) -> None:
    run = a_run()
    problem = served_problem(run)
    seconds = problem.seconds[problem.ops.index("op3")]
    assert seconds[1:] == (0.5 + 1.5, 2.0), "its spans and a start; the table"
    assert problem.ready_s[0][1] > 0
    run.save(tmp_path / "run.json")
    assert load_served(tmp_path / "run.json") == run
    assert [p.seconds for p in problems_in(tmp_path)] == [problem.seconds]


def test_a_damaged_run_is_told(tmp_path: Path) -> None:
    with pytest.raises(PlacementError, match="no served runs"):
        problems_in(tmp_path)
    path = tmp_path / "run.json"
    a_run().save(path)
    whole = json.loads(path.read_text())
    for key, wrong in (
        ("weft_served", 7), ("graph", {}), ("machine", 3), ("costs", {}), ("costs", [[1]]),
        ("costs", [["tree", "fast", [[0, -1.0]]]]), ("trace", {"version": 0}),
        ("home", None), ("resident", [1]), ("more", 1),
    ):  # fmt: skip
        path.write_text(json.dumps({**whole, key: wrong}))
        with pytest.raises(WeftError, match=r"file|version|trace|costs"):
            load_served(path)
    path.write_text(json.dumps({**whole, "home": "nowhere"}))
    with pytest.raises(WeftError, match="unknown device 'nowhere'"):
        problems_in(tmp_path)


def test_the_command_fine_tunes_on_served_runs(tmp_path: Path) -> None:
    runs, out, start = tmp_path / "runs", tmp_path / "out", tmp_path / "start.safetensors"
    runs.mkdir()
    spoiled().save(start)
    for number in range(6):
        a_run(5 + number, 1.0 + number / 3).save(runs / f"{number}.json")
    words = ["place", "train", "-o", str(out), "--from-traces", str(runs), "--steps", "3"]
    found = CliRunner().invoke(app, [*words, "--policy", str(start), "--json"])
    assert found.exit_code == 0, found.output
    told = json.loads(found.stdout)
    assert [point["stage"] for point in told["curve"]] == ["start", "fine-tuning"]
    assert told["best"]["mean"] == min(point["mean"] for point in told["curve"])
    Policy.load(out / "best.safetensors")
    assert (out / "curve.svg").exists()
    assert CliRunner().invoke(app, [*words, "--resume"]).exit_code == 0
    for wrong in (words, ["place", "train", "-o", str(out), "--policy", str(start)]):
        assert CliRunner().invoke(app, wrong).exit_code != 0

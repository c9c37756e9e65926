"""The learned placer: what it sees, what it puts, how it learns, and what it never does."""

from __future__ import annotations

import json
import random
from dataclasses import replace

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium.utils.env_checker import check_env
from hypothesis import given
from hypothesis import settings as settings_of_laws
from hypothesis import strategies as st

from torchweft.errors import PlacementError
from torchweft.placement import as_plan, check, placed, plan
from torchweft.placement.learn.policy import (
    POLICIES,
    Policy,
    Scorer,
    guarded,
    guided,
    learned,
    orders,
    planner_of,
)
from torchweft.placement.learn.rollout import Rollout, numbers_of
from torchweft.placement.placement import run
from torchweft.placement.planners.lists import heft, peft, single
from torchweft.placement.problem import Edge, Hold, Problem
from torchweft.plan.context import Context
from torchweft.plan.simulator import simulate
from torchweft_tools.bench.peers.dynpartition import Bandit, in_order, train
from torchweft_tools.cli import app as cli
from torchweft_tools.formats.stand_in import stand_in, with_graph
from torchweft_tools.train import training
from torchweft_tools.train.cases import case, draw_case, random_dag, random_tree
from torchweft_tools.train.checkpoint import load_run, picture, save_run
from torchweft_tools.train.environment import FORBIDDEN, PlacementEnv
from torchweft_tools.train.training import Settings, Trainer, fine_tune, held_out


def problems(num, **options):
    draw = random.Random(7)
    return [draw_case(draw, **options) for _ in range(num)]


@pytest.fixture
def policy():
    torch.manual_seed(0)
    found = Policy()
    torch.nn.init.normal_(found.score.weight, std=0.1)  # not the prior alone
    return found


def finished(rollout, scorer, draw=None):
    while rollout.going:
        scores = scorer(rollout, rollout.look())
        noise = draw.gumbel(size=scores.shape) if draw is not None else 0
        rollout.put((scores + noise).argmax(1))
    return rollout


def mirrored(problem: Problem) -> Problem:
    """The same backwards in time: op `o` becomes the `o`-th from the end."""
    last = problem.num_ops - 1
    edges = (
        Edge(last - edge.target, last - edge.source, edge.num_bytes, f"v{number}")
        for number, edge in enumerate(problem.edges)
    )
    return replace(
        problem,
        ops=problem.ops[::-1],
        seconds=problem.seconds[::-1],
        edges=tuple(sorted(edges, key=lambda edge: (edge.source, edge.target))),
        latency_s=tuple(zip(*problem.latency_s, strict=True)),
        byte_s=tuple(zip(*problem.byte_s, strict=True)),
    )


def test_a_rollout_times_as_the_draft_does(policy):
    found = problems(12)
    numbers = numbers_of(found)
    assert 0 < numbers.turned.sum() < len(found)
    rollout = finished(Rollout(numbers, 3), Scorer(policy, numbers), np.random.default_rng(0))
    for number, makespan_s in enumerate(rollout.makespan_s):
        problem = found[number // 3]
        order, devices = orders(rollout, number)
        assert sorted(order) == list(range(problem.num_ops))
        ends_s = max(run(problem, devices, order)[1])
        assert ends_s <= makespan_s * (1 + 1e-4)
        if numbers.turned[number // 3]:  # what a pass from the end times is the mirrored problem
            last = problem.num_ops - 1
            turned = [last - op for op in order[::-1]]
            ends_s = max(run(mirrored(problem), devices[::-1], turned)[1])
        assert makespan_s == pytest.approx(ends_s, rel=1e-4)


@settings_of_laws(max_examples=25, deadline=None)
@given(st.integers(0, 2**40))
def test_law_a_rollout_keeps_the_simulators_time(seed):
    """Whatever is chosen: one clock gives a plan its meaning, and a pass only works it out faster.
    What a pass from the end times is the mirrored problem."""
    problem, generator = draw_case(random.Random(seed)), np.random.default_rng(seed)
    numbers = numbers_of([problem])
    rollout = Rollout(numbers, 2)
    while rollout.going:
        mask = rollout.look().mask.reshape(2, -1)
        rollout.put(np.where(mask, generator.random(mask.shape), -1).argmax(1))
    for number, makespan_s in enumerate(rollout.makespan_s):
        order, devices = orders(rollout, number)
        timed = problem
        if numbers.turned[0]:
            timed, devices = mirrored(problem), devices[::-1]
            order = [problem.num_ops - 1 - op for op in order[::-1]]
        _, machine, costs = stand_in(timed)
        written = as_plan(with_graph(timed), placed(timed, devices, order))
        trace = simulate(written, Context(), machine, costs, contention=False)
        assert makespan_s == pytest.approx(trace.makespan_s, rel=1e-4)


def test_a_graph_that_joins_is_put_from_its_end(policy):
    joins = case(random_tree(31, 3), (1.0, 2.0), 1.0)
    rollouts = [Rollout(numbers_of([problem])) for problem in (joins, mirrored(joins))]
    firsts = [finished(each, Scorer(policy, each.numbers)).order[0] for each in rollouts]
    assert firsts == [joins.num_ops - 1, 0]  # the root, which everything else waits for
    assert [bool(each.numbers.turned[0]) for each in rollouts] == [True, False]


def test_the_work_behind_an_op_is_its_whole_subtree():
    tree = case(random_tree(31, 3), (1.0, 2.0), 1.0)
    numbers = numbers_of([tree])
    assert numbers.turned[0]

    def below(op):
        return sum(numbers.least_s[o] + below(o) for o, _ in tree.preds[op])

    every = [below(op) for op in range(tree.num_ops)]
    np.testing.assert_allclose(numbers.behind_s[: tree.num_ops], every, rtol=1e-5)


def test_work_that_several_ops_lead_to_is_shared_by_them(policy):
    graph = next(p for p in problems(9, num_devices=(2,)) if not numbers_of([p]).turned[0])
    numbers = numbers_of([graph])
    firsts = [op for op, preds in enumerate(graph.preds) if not preds]
    behind = sum(numbers.behind_s[op] + numbers.least_s[op] for op in firsts)
    assert behind == pytest.approx(numbers.least_s.sum(), rel=1e-4)  # nothing counts twice


def test_equal_processors_without_transfers_are_drawn_too():
    def equal(problem):
        free = not any(edge.num_bytes for edge in problem.edges)
        return free and all(len(set(row)) == 1 for row in problem.seconds)

    assert 3 < sum(map(equal, problems(60))) < 20
    assert all(map(equal, problems(4, ratio=0.0)))


def test_for_a_stream_consecutive_ops_share_a_device(policy):
    """A chain on two equal devices: one cut, each device one half."""
    link = ((0.0, 0.1), (0.1, 0.0))
    edges = tuple(Edge(op, op + 1, 1, f"v{op}") for op in range(19))
    names, seconds = tuple(f"n{op}" for op in range(20)), ((1.0, 1.0),) * 20
    chain = Problem("chain", names, ("a", "b"), seconds, edges, link, link, objective="throughput")
    assert learned(chain, policy=policy).score_s == pytest.approx(10.0)


def test_many_followers_take_little_memory():
    """A star of 2,000 ops: the numbers grow with the edges, not with ops times followers."""
    seconds = ((1.0, 2.0),) * 2000
    edges = tuple(Edge(0, op, 8, "v") for op in range(1, 2000))
    link = ((0.0, 1.0), (1.0, 0.0))
    names = tuple(f"n{op}" for op in range(2000))
    star = Problem("star", names, ("a", "b"), seconds, edges, link, link)
    numbers = numbers_of([star])
    assert sum(a.nbytes for a in vars(numbers).values() if isinstance(a, np.ndarray)) < 2_000_000
    check(star, learned(star, policy=Policy()))


def test_a_problem_is_put_alike_alone_and_beside_others(policy):
    found = problems(6)
    together = numbers_of(found)
    beside = finished(Rollout(together), Scorer(policy, together)).makespan_s
    for number, problem in enumerate(found):
        numbers = numbers_of([problem])
        alone = finished(Rollout(numbers), Scorer(policy, numbers)).makespan_s
        assert alone[0] == pytest.approx(beside[number], rel=0.2)  # ties may fall otherwise


def test_a_single_try_is_put_as_one_of_several(policy):
    """They keep what is ready in other ways. Random graphs have no ties."""
    for seed in range(6):
        graph = case(random_dag(40, seed), (1.0, 1.7, 3.1), 1.0)
        for problem in (graph, mirrored(graph)):
            numbers = numbers_of([problem])
            scorer = Scorer(policy, numbers)
            single, double = (finished(Rollout(numbers, num), scorer) for num in (1, 2))
            assert orders(single, 0) == orders(double, 0) == orders(double, 1)


def test_scores_by_numpy_are_those_of_the_network(policy):
    numbers = numbers_of(problems(4))
    rollout, scorer = Rollout(numbers, 2), Scorer(policy, numbers)
    op, device = policy.encode(numbers)
    for _ in range(5):
        seen = rollout.look()
        rows = torch.from_numpy(seen.ops + rollout.static[:, None])
        devices = device[torch.from_numpy(rollout.problem)]
        facts, mask = torch.from_numpy(seen.facts.copy()), torch.from_numpy(seen.mask)
        scores = scorer(rollout, seen)
        torch.testing.assert_close(
            policy(facts, op[rows], devices, mask), torch.from_numpy(scores), rtol=1e-3, atol=1e-3
        )
        rollout.put(scores.argmax(1))


@pytest.mark.parametrize("planner", [learned, guarded, guided])
def test_placements_are_legal_on_any_number_of_devices(planner, policy):
    for problem in problems(4, num_devices=(1, 2, 5)):
        check(problem, plan(problem, planner_of(policy, planner), deadline_s=0.05))


@pytest.mark.parametrize("planner", [guarded, guided])
def test_the_guard_is_never_worse_than_the_classics(planner, policy):
    for problem in problems(8):
        best_s = min(guard(problem).score_s for guard in (single, heft, peft))
        found = planner(problem, policy=policy, deadline_s=0.03)
        assert found.score_s <= best_s * (1 + 1e-9)


def limited(problem: Problem, share: float) -> Problem:
    """The same with weights that do not fit on one device."""
    holds = tuple(Hold(10.0, (op,)) for op in range(problem.num_ops))
    room = 10.0 * problem.num_ops * share
    rooms = (room,) * problem.num_devices
    return replace(problem, holds=holds, room_bytes=rooms, together=((0, 1),))


@pytest.mark.parametrize("planner", [learned, guarded, guided])
def test_memory_limits_and_groups_are_kept(planner, policy):
    for problem in problems(4, num_devices=(3,)):
        tight = limited(problem, 0.45)
        check(tight, planner(tight, policy=policy, deadline_s=0.03))


def test_the_environment_passes_gymnasiums_own_check():
    check_env(PlacementEnv(), skip_render_check=True)


def play(env, seed, choose):
    seen, info = env.reset(seed=seed)
    total, over = 0.0, False
    while not over:
        action = choose(np.flatnonzero(seen["mask"]))
        seen, reward, over, _, info = env.step(action)
        total += reward
    return total, info


def test_equal_seeds_play_equal_games():
    env = PlacementEnv()
    games = [play(env, seed, lambda allowed: allowed[-1]) for seed in (3, 4, 3)]
    assert games[0] == games[2] != games[1]


def test_the_reward_is_relative_to_heft():
    env = PlacementEnv(lambda _: case(random_tree(15, 1), (1.0, 2.0), 0.3))
    total, info = play(env, 0, lambda allowed: allowed[0])
    assert total == pytest.approx(1 - info["score_s"] / heft(env.problem).score_s)
    assert "op" in env.render() or "makespan" in env.render()


def test_pairs_without_room_are_masked_and_forbidden_ones_end_the_game():
    problem = limited(case(random_tree(15, 1), (1.0, 2.0), 0.3), 0.6)
    env = PlacementEnv(lambda _: problem)
    seen, _ = env.reset(seed=0)
    hidden = int(np.flatnonzero(seen["mask"] == 0)[0])
    assert env.step(hidden)[1:3] == (FORBIDDEN, True)
    seen, _ = env.reset(seed=0)
    placed_on = {0: 0, 1: 0}
    over = False
    while not over:
        action = int(np.flatnonzero(seen["mask"])[0])
        placed_on[action % env.max_devices] += 1
        seen, _, over, _, _ = env.step(action)
    assert max(placed_on.values()) <= 0.6 * problem.num_ops


def test_too_many_devices_for_the_environment_are_told():
    env = PlacementEnv(lambda _: problems(1, num_devices=(4,))[0], max_devices=3)
    with pytest.raises(PlacementError, match="4 devices"):
        env.reset(seed=0)


def settings(**options):
    return Settings(num_imitation=2, num_steps=4, num_problems=4, num_tries=4, **options)


def test_training_goes_on_where_it_was_broken_off(tmp_path):
    whole = Trainer(settings())
    for _ in range(6):
        whole.advance()
    broken = Trainer(settings())
    for _ in range(3):
        broken.advance()
    curve = [held_out(settings(), 6).measure(broken.policy, "reinforcement", 3)]
    save_run(tmp_path, broken, curve)
    again, told = load_run(tmp_path, ())
    assert (again.step, told) == (3, curve)
    while again.step < again.num_steps:
        again.advance()
    for one, other in zip(whole.policy.parameters(), again.policy.parameters(), strict=True):
        torch.testing.assert_close(one, other)


def test_training_makes_a_policy_better_on_what_it_trains_on(policy):
    torch.nn.init.zeros_(policy.line.weight)  # a bad start: it knows nothing
    found = problems(4)
    numbers = numbers_of(found)

    def mean():
        return float(finished(Rollout(numbers), Scorer(policy, numbers)).end_s.mean())

    before = mean()
    for _ in fine_tune(policy, found, num_steps=30, rate=1e-2, num_problems=4):
        pass
    assert mean() < before


def test_a_policy_file_is_data_and_a_damaged_one_is_told(tmp_path, policy):
    path = tmp_path / "policy.safetensors"
    policy.save(path, seed=0)
    again = Policy.load(path)
    for one, other in zip(policy.parameters(), again.parameters(), strict=True):
        assert torch.equal(one, other)
    whole = path.read_bytes()
    for wrong in (b"", whole[:100], b"x" * 64, whole.replace(b"weft_policy", b"weft_pilocy")):
        path.write_bytes(wrong)
        with pytest.raises(PlacementError, match="policy"):
            Policy.load(path)
    with pytest.raises(PlacementError):
        Policy.load(tmp_path / "none")


def train_cli(capsys, *words, code=0):
    """What `torchweft place train` says on stdout, or on stderr if it fails."""
    ended = cli.run(["place", "train", *map(str, words)])
    said = capsys.readouterr()
    assert ended == code, said.err
    return said.err if code else said.out


def test_the_command_trains_draws_its_curve_and_goes_on(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(training, "held_out", lambda settings: held_out(settings, 6))
    (tmp_path / "sst").mkdir()
    text = "(3 (2 It) (4 (4 (2 's) (4 (3 (2 a) (4 (3 lovely) (2 film))) (2 one))) (2 .)))"
    (tmp_path / "sst" / "train.txt").write_text(text)
    run, data = tmp_path / "run", ("--data", tmp_path)
    words = ("-o", run, "--steps", 2, "--imitation", 1, "--seed", 5, "--json")
    told = json.loads(train_cli(capsys, *words, *data))
    assert [point["step"] for point in told["curve"]] == [0, 3]
    assert (run / "curve.svg").read_text().startswith("<svg")
    best = Policy.load(run / "best.safetensors")
    problem = case(random_tree(15, 1), (1.0, 2.0), 0.3)
    check(problem, plan(problem, planner_of(best)))

    broken = json.loads((run / "training.json").read_text())
    broken["settings"]["num_steps"] = 4  # as if it had been broken off half-way
    (run / "training.json").write_text(json.dumps(broken))
    told = json.loads(train_cli(capsys, "-o", run, "--resume", "--json", *data))
    assert [point["step"] for point in told["curve"]] == [0, 3, 5]
    for words, why in (
        (("-o", run, *data), "--resume, or choose another folder"),
        (("-o", run, "--resume"), "give the same --data"),
        (("-o", run, "--resume", "--steps", 9, *data), "keeps the settings of the run"),
    ):
        assert why in " ".join(train_cli(capsys, *words, code=1).split())


def test_mistakes_of_training_are_told(tmp_path, capsys):
    (tmp_path / "file").write_text("no folder")
    foreign = tmp_path / "foreign"
    foreign.mkdir()
    (foreign / "training.json").write_text('{"model": "other"}')
    for words, why in (
        (("-o", tmp_path / "run", "--data", tmp_path / "nowhere"), "no trees in"),
        (("-o", tmp_path / "file" / "run", "--steps", 1), "cannot make the folder"),
        (("-o", tmp_path / "run", "--resume"), "there is no training file"),
        (("-o", foreign, "--resume"), "not a training run of version 1"),
    ):
        assert why in " ".join(train_cli(capsys, *words, code=1).split())


def test_the_policies_of_the_package_are_there_and_small():
    for seed in range(3):
        path = POLICIES / f"seed{seed}.safetensors"
        assert path.stat().st_size < 100_000
        assert isinstance(Policy.load(path), Policy)


def test_the_curve_is_a_picture():
    curve = [held_out(settings(), 6).measure(Policy(), "start", 0)]
    assert picture(curve).startswith("<svg") and "polyline" in picture(curve)
    assert picture([]).startswith("<svg")


def test_the_bandit_names_a_device_for_every_op_of_a_tree_and_learns():
    trees = [case(random_tree(9, seed), (1.0, 8.0), 1.0) for seed in range(3)]
    bandit = Bandit(2)
    assert sorted(in_order(trees[0])) == list(range(trees[0].num_ops))
    took = list(train(bandit, trees, 300))
    assert np.mean(took[-50:]) < np.mean(took[:50])
    check(trees[0], bandit.plan(trees[0]))
    with pytest.raises(PlacementError, match="devices"):
        Bandit(3).plan(trees[0])
    dag = problems(8)
    with pytest.raises(PlacementError, match="is not a tree"):
        in_order(next(p for p in dag if any(len(s) > 1 for s in p.succs)))


def test_gymnasium_can_make_it_by_its_class():
    assert isinstance(PlacementEnv(), gymnasium.Env)

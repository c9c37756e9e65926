"""Dynamic models over worker processes: placed, streamed, killed, stopped, joined, drifting."""

from __future__ import annotations

import gc
import os
import signal
import socket
import subprocess
import sys
import time
import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import torchweft as weft
from torchweft.dynamic.model import Dynamic
from torchweft.errors import CaptureError, MachineError, PlacementError, RunError
from torchweft.placement import Problem, placed
from torchweft.placement.learn.learner import Learner, Pace
from torchweft.placement.learn.policy import Policy
from torchweft.plan.plan import Plan
from torchweft.plan.verify import verify
from torchweft.ranks.processes import started_at
from torchweft.run.driver.prices import Drift
from torchweft.run.workers.pool import WorkerPool
from torchweft_tools.bench.dynamic import drawn_trees
from torchweft_tools.bench.models.dynamic_models import BinaryTreeLSTM, RoutedExperts
from torchweft_tools.bench.players.dynamic_placed import ByNodes
from torchweft_tools.bench.players.rehearsal import WatchedPrices
from torchweft_tools.formats.weft_files import load_served, served_problem

TOLERANCE = 1e-5
LOST_S, CALM_S = 8.0, 60.0  # a loaded machine starves workers for seconds
TWO = (weft.Spot("one"), weft.Spot("two", slowness=2.0))


@dataclass
class Calm:
    """A model on two workers that nothing happens to; tests share it, workers start slowly."""

    model: BinaryTreeLSTM
    inputs: list[Any]
    wanted: list[Tensor]
    dynamic: Any


@pytest.fixture(scope="module")
def calm() -> Iterator[Calm]:
    torch.manual_seed(0)
    with torch.no_grad():
        model, inputs, wanted = a_model(30)
        with weft.dynamic(model, workers=TWO, watchdog_s=CALM_S) as dynamic:
            yield Calm(model, inputs, wanted, dynamic)


@pytest.fixture(autouse=True)
def no_grad() -> Iterator[None]:
    torch.manual_seed(0)
    with torch.no_grad():
        yield


def a_model(count: int = 12) -> tuple[BinaryTreeLSTM, list[Any], list[Tensor]]:
    inputs, num_words = drawn_trees(count)
    model = BinaryTreeLSTM(num_words, 24, 16).eval()
    return model, inputs, [model(*each) for each in inputs]


def close(found: Any, wanted: Any) -> bool:
    return all(
        bool(torch.allclose(a, b, atol=TOLERANCE)) for a, b in zip(found, wanted, strict=True)
    )


def until(names: list[str], dynamic: Any) -> bool:
    """Whether these workers are left, soon."""
    ends_s = time.monotonic() + 4 * LOST_S
    while dynamic.pool.names != names and time.monotonic() < ends_s:
        time.sleep(0.02)
    return bool(dynamic.pool.names == names)


def one_by_one(problem: Any, *, deadline_s: float | None, seed: int) -> Any:
    """Ops on the workers in turn: a planner that sends as much as it can."""
    devices = [allowed[number % len(allowed)] for number, allowed in enumerate(problem.allowed)]
    return placed(problem, devices, range(problem.num_ops))


def all_on_one(problem: Any, *, deadline_s: float | None, seed: int) -> Any:
    """Ops on the first worker that takes them."""
    return placed(problem, [min(a) for a in problem.allowed], range(problem.num_ops))


@pytest.mark.parametrize("planner", ["single", "heft", "portfolio", one_by_one])
def test_placed_calls_equal_plain_pytorch(calm: Calm, planner: Any) -> None:
    dynamic, calm.dynamic.placer.planner = calm.dynamic, planner
    assert close(dynamic.map(calm.inputs), calm.wanted)
    assert close([dynamic(*each) for each in calm.inputs[:3]], calm.wanted[:3])
    plan = dynamic.plan()
    assert Plan.parse(str(plan)).bind(plan.graph) == verify(plan)
    ran = {span.op for span in dynamic.trace().spans if span.kind == "run"}
    assert ran == {op.name for op in plan.graph.ops if op.name != "answer"}


class Heads(nn.Module):
    """Makes two values and gives one of them."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor, takes_left: bool) -> Tensor:
        left, right = self.left(x), self.right(x)
        return left if takes_left else right


class Difference(nn.Module):
    """One cell of two values."""

    def __init__(self) -> None:
        super().__init__()
        self.line = nn.Linear(8, 4)

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        found: Tensor = self.line(a) - self.line(2 * b)
        return found


class Asks(nn.Module):
    """May look at a number first: then the two inputs of its cell come in two blocks, not one."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.pair = nn.Linear(8, 1), Difference()

    def forward(self, x: Tensor, asks: bool) -> Tensor:
        if asks and float(self.gate(x)) > 1e9:
            return x
        found: Tensor = self.pair(x, torch.ones(8))
        return found


@pytest.mark.parametrize("kind", [Heads, Asks])
def test_equal_groups_with_other_inputs_or_outputs_share_no_plan(
    kind: type[nn.Module], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Drift, "saw", lambda *seen: None)  # prices are not what plans differ by
    model = kind().eval()
    with weft.dynamic(model, workers=TWO, watchdog_s=CALM_S) as dynamic:
        for flag in (False, True, False, True):
            x = torch.randn(8)
            assert close([dynamic(x, flag)], [model(x, flag)])
        assert dynamic.placer.num_hits, "plans of equal calls are still shared"


def test_value_goes_once_to_each_device(calm: Calm) -> None:
    calm.dynamic.placer.planner = one_by_one
    assert close(calm.dynamic.map(calm.inputs), calm.wanted)
    copies = [span.label for span in calm.dynamic.trace().spans if span.kind == "copy"]
    assert copies, "this planner sends"
    assert len(set(copies)) == len(copies)


def test_equal_structure_is_planned_once(calm: Calm, monkeypatch: pytest.MonkeyPatch) -> None:
    placer = calm.dynamic.placer
    monkeypatch.setattr(placer.executor.prices, "saw", lambda *facts: None)  # prices stand still
    placer.planner = "heft"
    calm.dynamic.map(calm.inputs[:7])
    hits, planned = placer.num_hits, len(placer.scripts)
    for _ in range(2):
        calm.dynamic.map(calm.inputs[:7])
    assert placer.num_hits == hits + 2
    assert len(placer.scripts) == planned


def test_what_a_group_sends_to_a_device_is_one_message(calm: Calm) -> None:
    calm.dynamic.placer.planner = one_by_one
    assert close(calm.dynamic.map(calm.inputs), calm.wanted)
    sent: dict[Any, list[str]] = {}
    for span in calm.dynamic.trace().spans:
        if span.kind == "copy":
            sent.setdefault((span.lane, span.start_s), []).append(span.label)
    assert any(len(labels) == 2 for labels in sent.values()), "both states of a node"


class Either(nn.Module):
    """Computes two values and gives back one of them."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(3, 3), nn.Linear(3, 4)

    def forward(self, x: Tensor, left: bool) -> Tensor:
        both = self.left(x), self.right(x)
        return both[0] if left else both[1]


def test_a_plan_is_not_served_to_a_call_that_wants_other_outputs() -> None:
    model, x = Either().eval(), torch.ones(3)
    with (
        torch.no_grad(),
        weft.dynamic(model, workers=TWO, planner="heft", watchdog_s=CALM_S) as dynamic,
    ):
        dynamic.placer.executor.prices.saw = lambda *facts: None  # prices stand still
        wanted = [model.left(x), model.right(x)]
        for left in (True, False, True):
            assert torch.allclose(dynamic(x, left), wanted[not left], atol=1e-6)
        assert (dynamic.report().num_planned, dynamic.report().num_hits) == (2, 1)


def test_a_rehearsal_begins_sends_and_ends_as_workers_do(
    calm: Calm, monkeypatch: pytest.MonkeyPatch
) -> None:
    dynamic, placer = calm.dynamic, calm.dynamic.placer
    placer.planner = one_by_one
    prices = WatchedPrices(placer.executor.prices)
    monkeypatch.setattr(placer.executor, "prices", prices)
    for _ in range(3):
        dynamic.map(calm.inputs)
        prices.ended(dynamic.job)
    script = dynamic.job.script
    found = prices.rehearse(script)
    assert found == prices.rehearse(script), "the same prices, the same trace"
    real = [span.label for span in dynamic.trace().spans]
    done = {s.label for s in found.spans if s.kind != "wait" and not s.lane.startswith("home.")}
    assert done == {*real, "answer"}, "and inputs, which come with the call"
    runs = [span for span in found.spans if span.kind == "run"]
    num = {name: sum(span.device == name for span in runs) for name in ("one", "two")}
    first = next(step.lane for step in script.plan.steps if step.kind == "run")
    begins_s = prices.begins_s({name: num[name] for name in sorted(num, key=first.__ne__)})
    for span in runs:
        assert span.start_s >= begins_s.get(span.device, 0.0)
    prices.finish_s += 1.0
    assert prices.rehearse(script).makespan_s == pytest.approx(found.makespan_s + 1.0)
    prices.finish_s -= 1.0
    before_s, prices.message_s["two"] = prices.message_s["two"], 1.0
    late = prices.rehearse(script).makespan_s
    prices.message_s["two"] = before_s
    assert late > found.makespan_s + 1.0, "each message holds its device up"


def test_prices_of_the_begin_and_the_end_follow_calls(calm: Calm) -> None:
    prices = WatchedPrices(calm.dynamic.placer.executor.prices)
    assert prices.seconds and prices.links and not prices.drift, "measured, nothing seen"
    assert prices.begins_s({"one": 10, "two": 30}) == {"one": 0.0, "two": 0.0}
    prices.started({"one": (10, 0.02), "two": (30, 0.06)}, {"one": 0.002})  # ten more each: units
    assert prices.begins_s({"one": 10, "two": 30}) == pytest.approx({"one": 0.022, "two": 0.06})
    assert prices.begins_s({"two": 30, "one": 10}) == pytest.approx({"two": 0.04, "one": 0.062})
    prices.follow({"one": (4, 0.008), "two": (0, 0.0)}, 0.1)
    assert (prices.message_s, prices.finish_s) == ({"one": 0.002}, 0.1)
    for _ in range(30):
        prices.follow({"one": (4, 0.004)}, 0.3)
    assert prices.message_s["one"] == pytest.approx(0.001, rel=0.01)
    assert prices.finish_s == pytest.approx(0.3, rel=0.01)


def test_model_that_needs_numbers_runs_on_workers_too() -> None:
    model = RoutedExperts().eval()
    inputs = [torch.randn(3, 12) for _ in range(3)]
    wanted = [model(each) for each in inputs]
    with weft.dynamic(model, workers=TWO[:1], planner="heft", watchdog_s=CALM_S) as dynamic:
        assert close([dynamic(each) for each in inputs], wanted)
        assert close(dynamic.map(inputs), wanted)


def test_stream_answers_in_order_and_uses_both_workers(calm: Calm) -> None:
    answers = list(calm.dynamic.stream(calm.inputs))
    assert close([answer.outputs for answer in answers], calm.wanted)
    assert {device for answer in answers for device in answer.devices} == {"one", "two"}
    batched = list(calm.dynamic.stream(calm.inputs, batch=7))
    assert close([answer.outputs for answer in batched], calm.wanted)
    with torch.enable_grad():  # answers are ordinary tensors, each by itself
        assert batched[0].outputs.add_(torch.ones((), requires_grad=True)).requires_grad
    assert close([answer.outputs for answer in batched[1:]], calm.wanted[1:])


def test_stream_feeds_small_jobs_first_and_no_worker_more_than_its_share(
    calm: Calm, monkeypatch: pytest.MonkeyPatch
) -> None:
    dynamic, sizes = calm.dynamic, []
    whole = dynamic.feed.whole

    def seen(recorded: Any, device: str, num_inputs: int) -> Any:
        sizes.append((device, num_inputs))
        return whole(recorded, device, num_inputs)

    many, wanted = calm.inputs * 4, calm.wanted * 4  # so many that each worker gets several jobs
    while dynamic.feed.lines.keys() != {"one", "two"}:
        list(dynamic.stream(many, batch=8))
    monkeypatch.setattr(dynamic.feed, "whole", seen)
    answers = list(dynamic.stream(many, batch=8))
    assert close([answer.outputs for answer in answers], wanted)
    assert sum(num_inputs for _, num_inputs in sizes) == len(many)
    assert sizes[0][1] <= 2, "a worker that has nothing to do gets a quarter of a job"
    assert max(num_inputs for _, num_inputs in sizes) <= 8
    answers = list(dynamic.stream(iter(many), batch=8))  # nobody knows how many
    assert close([answer.outputs for answer in answers], wanted)


def test_jobs_of_a_stream_are_gone_without_garbage_collection(
    calm: Calm, monkeypatch: pytest.MonkeyPatch
) -> None:
    jobs, whole = [], calm.dynamic.feed.whole

    def seen(*facts: Any) -> Any:
        job = whole(*facts)
        jobs.append(weakref.ref(job))
        return job

    list(calm.dynamic.stream(calm.inputs, batch=8))  # cells are traced, which leaves garbage
    gc.collect()
    gc.disable()
    try:
        with monkeypatch.context() as patched:
            patched.setattr(calm.dynamic.feed, "whole", seen)
            list(calm.dynamic.stream(calm.inputs, batch=8))
        list(calm.dynamic.stream(calm.inputs[:8]))  # the last job is kept for `trace` until then
        assert jobs
        assert not any(job() for job in jobs)
    finally:
        gc.enable()


def test_stream_that_is_left_half_way_does_not_hold_up_the_next(calm: Calm) -> None:
    for _ in range(3):
        next(calm.dynamic.stream(calm.inputs, batch=4))
    found = list(calm.dynamic.stream(calm.inputs, batch=4))
    assert close([answer.outputs for answer in found], calm.wanted)


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_lost_worker_loses_no_input_and_its_name_can_be_used_again(how: int) -> None:
    model, inputs, wanted = a_model(40)
    watchdog_s = LOST_S if how == signal.SIGSTOP else CALM_S
    with weft.dynamic(model, workers=TWO, planner=one_by_one, watchdog_s=watchdog_s) as dynamic:
        list(dynamic.stream(inputs[:8]))
        answers = []
        for answer in dynamic.stream(inputs):
            answers.append(answer)
            if len(answers) == 10:
                os.kill(dynamic.pool.mates["one"].process.pid, how)
        assert all(answer.error is None for answer in answers)
        assert close([answer.outputs for answer in answers], wanted)
        assert until(["two"], dynamic)
        assert {answer.devices for answer in dynamic.stream(inputs)} == {("two",)}
        dynamic.join(TWO[0])
        back = list(dynamic.stream(inputs))
        assert close([answer.outputs for answer in back], wanted)
        assert {device for answer in back for device in answer.devices} == {"one", "two"}


def test_lost_worker_in_a_placed_call_is_planned_around() -> None:
    model, inputs, wanted = a_model()
    with weft.dynamic(model, workers=TWO, planner=one_by_one, watchdog_s=CALM_S) as dynamic:
        dynamic.map(inputs)
        os.kill(dynamic.pool.mates["two"].process.pid, signal.SIGKILL)
        assert close(dynamic.map(inputs), wanted)
        assert until(["one"], dynamic)
        os.kill(dynamic.pool.mates["one"].process.pid, signal.SIGKILL)
        with pytest.raises(RunError, match="no worker is left"):
            dynamic.map(inputs)
        answers = list(dynamic.stream(inputs))
        assert [type(answer.error) for answer in answers] == [RunError] * len(inputs)


def test_memory_limit_is_refused_before_anything_runs() -> None:
    model, inputs, _ = a_model()
    small = [weft.Spot("one", memory_bytes=1000)]
    with weft.dynamic(model, workers=small, planner="heft", watchdog_s=CALM_S) as dynamic:
        with pytest.raises(PlacementError):
            dynamic.map(inputs)
        answers = list(dynamic.stream(inputs[:2]))
        assert all(isinstance(answer.error, PlacementError) for answer in answers)
        assert dynamic.job.spans == []


def test_memory_limit_sends_work_where_there_is_room() -> None:
    model, inputs, wanted = a_model()
    unlike = [weft.Spot("one", memory_bytes=1000), TWO[1]]
    with weft.dynamic(model, workers=unlike, planner="heft", watchdog_s=CALM_S) as dynamic:
        assert close(dynamic.map(inputs), wanted)
        assert {span.device for span in dynamic.trace().spans if span.kind == "run"} == {"two"}


class Two(nn.Module):
    """Two branches with weights of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.left(x), self.right(x)


def right_on_two(problem: Any, *, deadline_s: float | None, seed: int) -> Any:
    """One branch on each worker."""
    devices = [
        problem.devices.index("two" if name.startswith("right") else "one")
        if len(allowed) > 1
        else allowed[0]
        for name, allowed in zip(problem.ops, problem.allowed, strict=True)
    ]
    return placed(problem, devices, range(problem.num_ops))


def test_weights_are_only_where_they_are_needed_and_sent_again_if_they_change() -> None:
    model, x = Two().eval(), torch.randn(8)
    with weft.dynamic(model, workers=TWO, planner=right_on_two, watchdog_s=CALM_S) as dynamic:
        assert close(dynamic(x), model(x))
        held = {name: set(mate.weights) for name, mate in dynamic.pool.mates.items()}
        assert held == {
            "one": {"left.weight", "left.bias"},
            "two": {"right.weight", "right.bias"},
        }
        model.left.weight.mul_(3.0)
        assert close(dynamic(x), model(x))


def test_dynpartition_places_every_node_by_itself(calm: Calm) -> None:
    calm.dynamic.map(calm.inputs[:2])
    way = ByNodes(calm.dynamic, [tree for tree, _ in calm.inputs], num_episodes=40)
    for each, wanted in zip(calm.inputs[:3], calm.wanted, strict=False):
        assert close(way([each]), [wanted])
        num_nodes = len(each[0].nodes())
        ran = [span.op for span in calm.dynamic.trace().spans if span.kind == "run"]
        assert sum(op.startswith("output.") for op in ran) == num_nodes


def test_failing_op_is_one_clean_error_and_the_workers_go_on(calm: Calm) -> None:
    calm.dynamic.placer.planner = "heft"
    tree, words = calm.inputs[0]
    with pytest.raises(RunError, match="failed"):
        calm.dynamic(tree, words + 10_000)
    assert close(calm.dynamic.map(calm.inputs), calm.wanted)


def test_prices_follow_a_worker_that_slows_down(calm: Calm) -> None:
    dynamic, prices = calm.dynamic, calm.dynamic.placer.executor.prices
    dynamic.placer.planner = all_on_one
    dynamic.map(calm.inputs[:6])
    cells = [key for key in prices.seconds if key[0].startswith("composer") and key[1] == "one"]
    before, epoch = {key: prices.drift[key] for key in cells}, prices.drift.epoch
    dynamic.pool.mates["one"].send({"kind": "throttle", "slowness": 60.0})
    for _ in range(6):
        dynamic.map(calm.inputs[:6])
    dynamic.pool.mates["one"].send({"kind": "throttle", "slowness": 1.0})
    assert all(prices.drift[key] > 3 * before[key] for key in cells)
    assert prices.drift.epoch > epoch
    cell = next(c for c in dynamic.placer.executor.cells if c.name == cells[0][0])
    assert prices.of(cell, 1, "one") > 2 * prices.seconds[cells[0]][1] * before[cells[0]]


def test_a_worker_that_nothing_runs_on_is_measured_again(calm: Calm) -> None:
    executor = calm.dynamic.placer.executor
    calm.dynamic.placer.planner = all_on_one
    executor.prices.ran.clear()
    calm.dynamic.map(calm.inputs)
    assert executor.prices.ran == {"one"}
    planned = calm.dynamic.placer.num_planned
    measured = [key for key in executor.prices.seconds if key[1] == "two"]
    before = {key: executor.prices.drift.get(key, 1.0) for key in measured}
    calm.dynamic.pool.mates["two"].send({"kind": "throttle", "slowness": 40.0})
    for _ in range(3):
        executor.prices.ran = {"one"}
        executor.look_around()
    calm.dynamic.pool.mates["two"].send({"kind": "throttle", "slowness": 2.0})
    factors = sorted(executor.prices.drift[key] / before[key] for key in measured)
    assert factors[len(factors) // 2] > 2
    assert not executor.prices.ran
    calm.dynamic.map(calm.inputs)
    assert calm.dynamic.placer.num_planned > planned, "no plan of the old prices is served"


def no_problem() -> Problem:
    raise PlacementError("device: no worker is left.")


def test_a_planner_that_learns_does_so_between_inputs(tmp_path: Path) -> None:
    model, inputs, wanted = a_model()
    pace = Pace(every=3, num_steps=1, num_problems=2, num_tries=2)
    learner = Learner(Policy(), pace)
    with weft.dynamic(model, workers=TWO, planner=learner, watchdog_s=CALM_S) as dynamic:
        dynamic.placer.executor.prices.saw = lambda *facts: None  # prices stand still
        for _ in range(7):
            assert close(dynamic.map(inputs), wanted)
        dynamic.turns.begin()
        assert (learner.num_served, learner.num_learned, learner.num_turns) == (7, 6, 2)
        assert learner.num_planned == 3, "anew after each turn, else from the cache"
        assert "learned from 6 of 7 inputs" in str(weft.report(dynamic))
        run = dynamic.served()
        run.save(tmp_path / "run.json")
        list(dynamic.stream(inputs[:4]))
        assert learner.num_served == 7, "whole inputs are not placed"
        learner.past.extend([no_problem] * 50)
        for _ in range(3):
            assert close(dynamic.map(inputs), wanted)
        assert "1 turns failed" in str(dynamic.report())
    assert load_served(tmp_path / "run.json") == run
    assert served_problem(run).num_ops == len(run.graph.ops)


def test_mistakes_of_workers_are_named() -> None:
    with pytest.raises(MachineError, match="home"):
        weft.Spot("home")
    with pytest.raises(MachineError, match="slowness must be at least 1"):
        weft.Spot("one", slowness=0.5)
    with pytest.raises(MachineError, match="core"):
        weft.Spot("one", cores=(9999,))
    with pytest.raises(MachineError, match="engine that authenticates"):
        weft.Spot("far", address="localhost:1234")
    with pytest.raises(MachineError, match=r"a worker is a weft\.Spot\('name'\); got 'cpu'"):
        weft.dynamic(torch.nn.Linear(2, 2), workers=["cpu", "cpu"])
    with pytest.raises(MachineError, match="needs workers"):
        list(Dynamic(Two()).stream([torch.ones(8)]))


def test_stopped_pool_leaves_no_process() -> None:
    model, inputs, _ = a_model(3)
    dynamic = weft.dynamic(model, workers=TWO[:1], watchdog_s=CALM_S)
    dynamic.map(inputs)
    processes = [mate.process for mate in dynamic.pool.mates.values()]
    dynamic.close()
    assert all(process.poll() is not None for process in processes)


def listening(pid: int) -> set[str]:
    """The sockets on which a process waits for others to come, by number, as /proc knows them."""
    files = [link for link in Path(f"/proc/{pid}/fd").iterdir() if link.is_symlink()]
    held = {str(link.readlink()).removeprefix("socket:[").rstrip("]") for link in files}
    waiting = set()
    for kind, state, number in (("unix", 3, 6), ("tcp", 3, 9), ("tcp6", 3, 9)):
        for line in Path(f"/proc/{pid}/net/{kind}").read_text().splitlines()[1:]:
            words = line.split()
            if words[state] in ("00010000", "0A"):
                waiting.add(words[number])
    return waiting & held


def test_nobody_can_come_in_from_outside() -> None:
    before = listening(os.getpid())  # gloo of other tests keeps its own
    model = nn.Linear(3, 3).eval()
    with weft.dynamic(model, workers=TWO, watchdog_s=CALM_S) as dynamic:
        dynamic(torch.ones(3))
        assert listening(os.getpid()) <= before
        assert not any(listening(mate.process.pid) for mate in dynamic.pool.mates.values())
    with socket.create_server(("localhost", 0)):
        assert listening(os.getpid()) > before, "the probe sees a socket that listens"


LEAVES = """
import os, sys, time
import torch, torchweft as weft
model = torch.nn.Sequential(torch.nn.Linear(4, 4)).eval()
dynamic = weft.dynamic(model, workers=[weft.Spot("one")])
with torch.no_grad():
    dynamic(torch.ones(4))
print(dynamic.pool.mates["one"].process.pid, flush=True)
time.sleep(60 if sys.argv[1:] else 0)
"""


@pytest.mark.parametrize("how", [None, signal.SIGTERM, signal.SIGKILL])
def test_a_process_that_ends_without_close_leaves_nothing(how: int | None, tmp_path: Path) -> None:
    source = os.pathsep.join(path for path in sys.path if path)
    command = [sys.executable, "-c", LEAVES, *(["stay"] if how else [])]
    facts = {**os.environ, "PYTHONPATH": source, "TMPDIR": str(tmp_path)}
    with subprocess.Popen(command, env=facts, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        worker = int(process.stdout.readline())
        if how:
            process.send_signal(how)
        process.wait(timeout=CALM_S)
    ends_s = time.monotonic() + CALM_S
    while (alive := bool(started_at(worker))) and time.monotonic() < ends_s:
        time.sleep(0.05)
    assert not alive, "a worker ends when nobody is left to work for"
    assert not list(tmp_path.glob("weft-*")), "no folder stays behind"


HOSTILE = {
    "garbage": b"\xff" * 64,
    "endless": b"\xff\xff\xff\xff" + (1 << 60).to_bytes(8, "big"),
    "half way": b"\0\0\1\0half",
    "no message": b"\0\0\0\x14" + (4).to_bytes(16, "little") + b"null",
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_process_that_is_no_worker_is_given_up(
    name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    stranger = tmp_path / "stranger.py"
    stranger.write_text(
        "import json, os, sys, time\n"
        f"os.write(json.loads(sys.argv[-1])['ends'][0], {HOSTILE[name]!r})\ntime.sleep(60)\n"
    )
    real = subprocess.Popen

    def start(command: list[str], **facts: Any) -> Any:
        return real([sys.executable, str(stranger), command[-1]], **facts)

    with monkeypatch.context() as patched:
        patched.setattr(sys.modules[WorkerPool.__module__], "START_S", 2.0)
        patched.setattr(subprocess, "Popen", start)
        with pytest.raises(MachineError, match="'one' did not start"):
            WorkerPool(TWO[:1])
    with WorkerPool(TWO[:1]) as pool:
        assert pool.names == ["one"], "the real worker still gets in"


def test_stream_with_all_workers_lost_gives_an_error_for_each_input() -> None:
    model = RoutedExperts().eval()  # it needs numbers while it is recorded
    inputs = [torch.randn(3, 12) for _ in range(5)]
    with weft.dynamic(model, workers=TWO[:1], planner="heft", watchdog_s=CALM_S) as dynamic:
        stream = dynamic.stream(inputs)
        first = next(stream)
        os.kill(dynamic.pool.mates["one"].process.pid, signal.SIGKILL)
        answers = [first, *stream]
        assert len(answers) == len(inputs)
        assert torch.allclose(first.outputs, model(inputs[0]), atol=TOLERANCE)
        assert {type(answer.error) for answer in answers[-2:]} == {RunError}
        assert until([], dynamic)
        again = list(dynamic.stream(inputs, batch=2))
        assert [type(answer.error) for answer in again] == [RunError] * 5


class Keeps(nn.Module):
    """Keeps a value that it does not give back."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.kept = nn.Linear(8, 8), []

    def forward(self, x: Tensor) -> Tensor:
        self.kept.append(self.linear(x))
        return self.linear(self.kept[-1])


def test_value_that_stayed_on_a_worker_says_so() -> None:
    model = Keeps().eval()
    with weft.dynamic(model, workers=TWO[:1], planner="heft", watchdog_s=CALM_S) as dynamic:
        dynamic(torch.ones(8))
        list(dynamic.stream([torch.ones(8)]))
        for kept in model.kept:
            with pytest.raises(CaptureError, match="Return it"):
                kept + 1

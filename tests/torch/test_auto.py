"""`auto`: what is fastest is found by racing, kept, and given up when it is not."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import torchweft as weft
from torchweft.api import session_of
from torchweft.errors import WeftError
from torchweft.plan.strategies import sequential
from torchweft.serve.auto import COMPILED, Auto, kind_of
from torchweft.serve.trials import Choice
from torchweft.serve.tuned import Tuned, folder


@torch.library.custom_op("auto_test::read_rows", mutates_args=())
def read_rows(ids: Tensor) -> Tensor:
    time.sleep(0.03)
    return torch.ones(len(ids), 32)


read_rows.register_fake(lambda ids: torch.empty(len(ids), 32))


class Reader(nn.Module):
    """Waits for a store for 30 ms, and computes for about as long."""

    def __init__(self) -> None:
        super().__init__()
        self.tower = nn.Sequential(
            *(nn.Linear(32, 32) for _ in range(2)), Slow(), nn.Linear(32, 32)
        )
        self.head = nn.Linear(32, 1)

    def forward(self, x: Tensor, ids: Tensor) -> Tensor:
        return self.head(self.tower(x) + read_rows(ids))


class Slow(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.ops.auto_test.work(x)


@torch.library.custom_op("auto_test::work", mutates_args=())
def work(x: Tensor) -> Tensor:
    time.sleep(0.03)
    return x * 2


work.register_fake(torch.empty_like)
IO = [weft.mark_op("read_rows", "read_rows", uses="io")]


@torch.library.custom_op("auto_test::read_each", mutates_args=())
def read_each(x: Tensor) -> Tensor:
    time.sleep(4e-3 + 5e-4 * len(x))
    return x + 1


@torch.library.custom_op("auto_test::work_each", mutates_args=())
def work_each(x: Tensor) -> Tensor:
    time.sleep(5e-4 * len(x))
    return x * 2


for by_row in (read_each, work_each):
    by_row.register_fake(torch.empty_like)


class Pipe(nn.Module):
    """What is read is worked on: nothing overlaps unless the batch is cut. Each part costs 4 ms
    more, and the work of the last one is uncovered: three uneven parts are best."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.ops.auto_test.work_each(torch.ops.auto_test.read_each(x)) + 1


@pytest.fixture(autouse=True)
def fresh() -> None:
    torch._dynamo.reset()


def auto_of(model: Any) -> Auto:
    chooser = session_of(model).auto
    assert isinstance(chooser, Auto)
    return chooser


def settle(model: Any, *args: Any) -> int:
    """Calls until the choice is made."""
    chooser = auto_of(model)
    for number in range(200):
        if chooser.is_settled(args, {}):
            return number
        model(*args)
    raise AssertionError("no choice was made")


def test_the_default_finds_what_overlaps_by_itself() -> None:
    plain = Reader().eval()
    x, ids = torch.randn(4, 32), torch.arange(4)
    with torch.no_grad():
        wanted = plain(x, ids)
        model = weft.compile(plain, rules=IO)
        assert torch.equal(model(x, ids), wanted) and not session_of(model).pieces, "as it is"
        assert torch.equal(model(x, ids), wanted) and session_of(model).pieces, "captured"
        settle(model, x, ids)
        torch.testing.assert_close(model(x, ids), wanted)
    (way,) = auto_of(model).strategies()  # the plan without parts has a lane for io, too
    assert str(way) in str(weft.report(model)) and not weft.report(model).fallbacks


def test_a_model_with_nothing_to_overlap_stays_as_it_is_or_wins() -> None:
    model = weft.compile(nn.Sequential(nn.Linear(8, 8), nn.ReLU()).eval())
    x = torch.randn(4, 8)
    with torch.no_grad():
        settle(model, x)
        ways = auto_of(model).trials.choices[kind_of((x,), {})].speeds
    assert {str(way).partition("(")[0] for way in ways} <= {"None", "sequential"}


def test_a_second_process_needs_no_race() -> None:
    x, ids = torch.randn(4, 32), torch.arange(4)
    with torch.no_grad():
        first = weft.compile(Reader().eval(), rules=IO)
        num_raced = settle(first, x, ids)
        (way,) = auto_of(first).strategies()
        torch._dynamo.reset()
        second = weft.compile(Reader().eval(), rules=IO)
        num_known = settle(second, x, ids)
        torch._dynamo.reset()
        third = weft.compile(Reader().eval(), rules=IO, remember=False)
        num_forgotten = settle(third, x, ids)
    assert num_known <= 5 < num_raced, "one as it is, the plan made and traced"
    assert num_forgotten > 5
    assert auto_of(second).strategies() == [way]


def test_what_is_kept_is_data_and_anything_else_is_as_if_it_were_not_there() -> None:
    graphs = [_graph()]
    tuned, kind = Tuned(graphs, "2 ranks"), ("prefill", 4)
    assert tuned.look_up(kind) is None
    two = weft.overlap(parts=2)
    tuned.keep(kind, Choice(two, {None: 1.0, two: 1.5}))
    (file,) = folder().glob("*.json")
    assert file.stat().st_mode & 0o777 == 0o644 and folder().stat().st_mode & 0o777 == 0o700
    found = Tuned(graphs, "2 ranks").look_up(kind)
    assert found is not None and found.way == two and found.is_guarded and found.rival is None
    assert Tuned(graphs, "4 ranks").look_up(kind) is None, "another machine"
    assert Tuned(graphs, "2 ranks").look_up(("decode", 4)) is None
    data = json.loads(file.read_text())
    told = data["choices"][str(kind)]
    for wrong in (
        "no json", "[]", "{}", json.dumps({**data, "weft_tuned": 2}),
        json.dumps({**data, "choices": 3}), json.dumps({**data, "choices": {str(kind): 3}}),
        json.dumps({**data, "choices": {str(kind): {**told, "way": {"name": "os.system"}}}}),
        json.dumps({**data, "choices": {str(kind): {**told, "speeds": [["x"]]}}}),
        json.dumps({**data, "choices": {str(kind): {"way": told["way"]}}}),
    ):  # fmt: skip
        file.write_text(wrong)
        assert tuned.look_up(kind) is None, wrong


def test_somebodys_own_function_is_not_kept() -> None:
    def mine(s: Any) -> None:
        s.sequential()

    from torchweft.plan.write.strategy import as_strategy

    tuned = Tuned([_graph()], "")
    tuned.keep("kind", Choice(as_strategy(mine), {}))
    assert tuned.look_up("kind") is None


def _graph() -> Any:
    model = weft.compile(nn.Sequential(nn.Linear(8, 8), nn.ReLU()).eval(), "sequential")
    with torch.no_grad():
        model(torch.randn(4, 8))
    return session_of(model).pieces[0].graph


@pytest.mark.filterwarnings("ignore:.*torch.jit.script_method.*:DeprecationWarning")
def test_warm_up_makes_the_choice_with_torch_compile_among_the_ways() -> None:
    model = weft.compile(nn.Sequential(nn.Linear(8, 8), nn.ReLU()).eval())
    x = torch.randn(4, 8)
    wanted = model(x)
    weft.warmup(model, [x])
    with torch.no_grad():
        choice = auto_of(model).trials.choices[kind_of((x,), {})]
        assert COMPILED in choice.speeds
        torch.testing.assert_close(model(x), wanted)


@pytest.mark.filterwarnings("ignore:.*torch.jit.script_method.*:DeprecationWarning")
def test_warm_up_lets_a_searched_plan_take_part_and_keeps_it() -> None:
    rules = [
        weft.mark_op("read_each", "read_each", uses="io", rows="row-wise"),
        weft.row_wise("work_each"),
    ]
    model = weft.compile(Pipe().eval(), rules=rules)
    x = torch.randn(64, 8)
    with torch.no_grad():
        wanted = Pipe()(x)
        weft.warmup(model, [x])
        (choice,) = auto_of(model).trials.choices.values()
        found = next(way for way in choice.speeds if way and way.name == "replay")
        graph = session_of(model).pieces[0].graph
        assert found.options["plan"].count(graph.digest) == 1
        assert torch.equal(model(x), wanted)
        kept = Tuned([graph], "here")
        kept.keep("kind", replace(choice, way=found))
        known = Tuned([graph], "here").look_up("kind")
    assert known is not None and known.way == found
    assert not weft.report(model).fallbacks


def test_a_model_that_torch_compile_cannot_compile_is_not_lost(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from torch._dynamo.exc import BackendCompilerFailed

    def fails(*args: Any) -> Any:
        raise BackendCompilerFailed(fails, ValueError("no such device"), None)

    model = weft.compile(nn.Sequential(nn.Linear(8, 8), nn.ReLU()).eval())
    x = torch.randn(4, 8)
    auto_of(model)._compiled = fails
    with torch.no_grad():
        wanted = model(x)
        assert torch.equal(auto_of(model)._run(COMPILED, (x,), {}), wanted)
    ((reason, _),) = weft.report(model).fallbacks
    assert reason.startswith("torch.compile: BackendCompilerFailed")


def test_a_model_that_cannot_be_captured_runs_as_it_is() -> None:
    model = weft.compile(lambda x: x)
    x = torch.ones(3)
    for _ in range(8):
        assert model(x) is x
    assert "nothing of the model could be captured" in str(weft.report(model))


def test_calls_are_of_one_kind_if_types_are_equal_and_sizes_near() -> None:
    def kind(*args: Any, **kwargs: Any) -> Any:
        return kind_of(args, kwargs)

    x = torch.zeros(16, 4)
    assert kind(x) == kind(torch.zeros(31, 5)) != kind(torch.zeros(32, 4))
    assert kind(x) != kind(x.double()) and kind(x) != kind(x, flag=True)
    assert kind(x, flag=True) != kind(x, flag=False)
    assert kind(x, n=16) == kind(x, n=17) and kind([x, x]) != kind([x])
    assert kind({"a": x}) == kind({"a": torch.zeros(17, 4)})
    with torch.no_grad():
        inside = kind(x)
    assert inside != kind(x)
    with weft.context(phase="decode"):
        decoding = kind(x)
    assert decoding != kind(x)
    hash(kind(x, object()))


def test_trace_and_check_look_at_plans_though_the_model_is_faster_as_it_is() -> None:
    model = weft.compile(nn.Sequential(nn.Linear(8, 8), nn.ReLU()).eval())
    x = torch.randn(4, 8)
    with torch.no_grad():
        settle(model, x)
        assert weft.trace(model, x).spans
        assert weft.check(model, x)
    assert weft.plans(model)


def test_an_error_of_the_model_comes_out_as_it_is() -> None:
    model = weft.compile(nn.Linear(8, 8).eval())
    with torch.no_grad():
        for _ in range(4):
            with pytest.raises(RuntimeError, match="mat1 and mat2"):
                model(torch.randn(4, 9))
        assert model(torch.randn(4, 8)).shape == (4, 8)


def test_a_function_and_a_model_in_training_may_be_compiled_without_a_strategy() -> None:
    double = weft.compile(lambda x: 2 * x)
    x = torch.ones(5)
    assert all(torch.equal(double(x), 2 * x) for _ in range(5))
    model, other = nn.Linear(4, 4), nn.Linear(4, 4)
    other.load_state_dict(model.state_dict())
    weft.compile(model)
    y = torch.randn(6, 4)
    for _ in range(12):
        for each in (model, other):
            each.zero_grad()
            each(y).sum().backward()
        torch.testing.assert_close(model.weight.grad, other.weight.grad)


def test_disable_and_restore_work_under_auto() -> None:
    model = weft.compile(nn.Linear(4, 4).eval())
    x = torch.randn(3, 4)
    with torch.no_grad():
        settle(model, x)
        weft.disable(model)
        wanted = model(x)
        weft.enable(model)
        torch.testing.assert_close(model(x), wanted)
        weft.restore(model)
        assert torch.equal(model(x), wanted)
    with pytest.raises(WeftError):
        session_of(model)


def test_the_strategy_auto_takes_what_is_predicted_to_be_best() -> None:
    from torchweft.plan.context import Context
    from torchweft.plan.improve.predict import auto, candidates, predict
    from torchweft.plan.machine import Costs, cpu
    from torchweft.plan.write.strategy import write
    from torchweft_tools.demo.blueprint import transformer

    graph, context = transformer(num_layers=2), Context(batch=512)
    slow = Costs(cpu(network_bytes_per_s=5e7))
    best = min(predict(way, graph, context, slow) for way in candidates(graph))
    assert predict(auto, graph, context, slow) == best < predict(sequential, graph, context, slow)
    fast = Costs(cpu(network_bytes_per_s=1e15, network_latency_s=0.0))
    assert write(auto, graph, context, fast.machine, costs=fast).num_parts == 1

"""`auto` with code of strangers: odd inputs, errors, threads, gradients, caches that fail."""

from __future__ import annotations

import json
import threading
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import torchweft as weft
from torchweft.api import session_of
from torchweft.errors import WeftError
from torchweft.plan.context import TOLD
from torchweft.plan.strategies import overlap
from torchweft.serve import auto as module
from torchweft.serve.auto import Auto, kind_of
from torchweft.serve.trials import COMPILED
from torchweft.serve.tuned import Tuned, folder


@torch.library.custom_op("strangers::pause", mutates_args=())
def pause(x: Tensor) -> Tensor:
    time.sleep(0.01)
    return x.clone()


pause.register_fake(torch.empty_like)


@pytest.fixture(autouse=True)
def fresh() -> None:
    torch._dynamo.reset()


def auto_of(model: Any) -> Auto:
    chooser = session_of(model).auto
    assert isinstance(chooser, Auto)
    return chooser


def settle(model: Any, *args: Any) -> None:
    for _ in range(200):
        if auto_of(model).is_settled(args, {}):
            return
        model(*args)
    raise AssertionError("no choice was made")


def test_an_error_of_an_op_has_the_type_that_it_has_in_eager_whichever_way_runs() -> None:
    model = weft.compile(nn.Sequential(nn.Embedding(8, 4), nn.Linear(4, 4)).eval())
    good, bad = torch.tensor([1, 2]), torch.tensor([1, 9])
    with torch.no_grad():
        for _ in range(8):
            with pytest.raises(IndexError, match="out of range") as caught:
                model(bad)
            model(good)
    assert caught.value.__cause__ is None and not auto_of(model).retired


def test_the_note_of_an_error_says_where_the_plan_stood() -> None:
    model = weft.compile(nn.Sequential(nn.Embedding(8, 4), nn.Linear(4, 4)).eval())
    with torch.no_grad(), auto_of(model).by_plans():
        model(torch.tensor([1, 2]))
        with pytest.raises(IndexError) as caught:
            model(torch.tensor([1, 9]))
    (note,) = caught.value.__notes__
    assert "lane 'compute' stood at" in note


@torch.library.custom_op("strangers::picky", mutates_args=())
def picky(x: Tensor) -> Tensor:
    if TOLD.get() is not None:
        raise ValueError("not by a plan")
    return x * 2


picky.register_fake(torch.empty_like)


def test_a_way_that_only_raises_leaves_the_race() -> None:
    model, x, num_raised = weft.compile(lambda x: picky(x)), torch.ones(3), 0
    for _ in range(60):
        try:
            assert torch.equal(model(x), x * 2)
        except ValueError:
            num_raised += 1
    assert num_raised <= 10 and auto_of(model).trials.chosen == {kind_of((x,), {}): None}


def test_a_model_that_was_trained_first_is_captured_all_the_same() -> None:
    model, x = weft.compile(nn.Linear(4, 4)), torch.randn(3, 4)
    for _ in range(6):
        model(x).sum().backward()
    with torch.no_grad():
        settle(model, x)
    assert session_of(model).pieces and not auto_of(model).retired


def test_first_calls_of_several_threads_do_not_end_the_race() -> None:
    class Counts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("count", torch.zeros(()))
            self.layer = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            self.count += 1
            return self.layer(pause(x))

    model, x, wrong = weft.compile(Counts().eval()), torch.randn(3, 4), list[int]()
    wanted = model.layer(x).detach()
    begin = threading.Barrier(8)

    def calls() -> None:
        begin.wait()
        with torch.no_grad():
            wrong.extend(n for n in range(5) if not torch.allclose(model(x), wanted, atol=1e-5))

    threads = [threading.Thread(target=calls) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong and not auto_of(model).retired
    with torch.no_grad():
        settle(model, x)
    assert session_of(model).pieces and not weft.report(model).fallbacks


def test_a_call_inside_of_one_that_is_timed_runs_as_it_is_and_is_not_timed() -> None:
    def calls_itself(x: Tensor, depth: int) -> Tensor:
        return model(x, depth - 1) + 1 if depth else x * 2

    model = weft.compile(calls_itself)
    with torch.no_grad(), auto_of(model)._racing:
        for _ in range(6):
            assert torch.equal(model(torch.ones(2), 2), torch.full((2,), 4.0))
    assert not auto_of(model).trials.races and not session_of(model).pieces


def test_names_that_differ_from_call_to_call_do_not_make_kinds_without_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "MAX_KINDS", 6)
    model, x = weft.compile(lambda x, name: x * 2), torch.ones(3)
    for number in range(100):
        assert torch.equal(model(x, f"request {number}"), x * 2)
    trials = auto_of(model).trials
    assert len(trials.races) + len(trials.choices) <= 7 and trials.choices, "told by type"
    for size in range(9):
        model(torch.ones(2**size), "name")
    assert len(trials.races) + len(trials.choices) <= 12
    assert dict(weft.report(model).fallbacks)[module.TOO_MANY] > 0
    assert auto_of(model).is_settled((torch.ones(2**8), "name"), {})


def test_kinds_hold_no_long_texts_and_few_negative_numbers() -> None:
    kinds = {kind_of((-number,), {}) for number in range(4, 1000)}
    assert len(kinds) == 8 and kind_of((5,), {}) not in kinds | {kind_of((-3,), {})}
    assert "secret" not in str(kind_of(("a secret text, longer than a name or a flag is",), {}))


def test_a_report_of_many_kinds_is_short() -> None:
    model = weft.compile(lambda x: x * 2)
    for number in range(40):
        model(torch.ones(4 << number % 8, 4 << number // 8))
    assert len(auto_of(model).lines()) <= 20 and "more kinds" in str(weft.report(model))


def test_a_warm_up_ends_though_no_choice_can_be_made() -> None:
    model, x = weft.compile(nn.Linear(2, 2).eval()), torch.ones(3, 2)
    with weft.context(strategy="sequential"):  # the host has said how all calls run
        weft.warmup(model, [x])
    assert "warmup: no choice was made" in str(weft.report(model))


def test_a_warm_up_of_what_is_not_enabled_or_no_list_is_an_error() -> None:
    model, x = weft.compile(nn.Linear(2, 2).eval()), torch.ones(3, 2)
    for wrong in (x, {"input": x}):
        with pytest.raises(WeftError, match="inputs must be a list"):
            weft.warmup(model, wrong)
    weft.disable(model)
    with pytest.raises(WeftError, match="Enable it"):
        weft.warmup(model, [x])


def test_a_race_waits_while_the_ranks_have_disabled_the_model() -> None:
    model, x = weft.compile(nn.Linear(4, 4).eval()), torch.randn(3, 4)
    with torch.no_grad():
        for _ in range(3):
            model(x)
        session_of(model).speaker.share = 0  # as `disable` has it for a model that talks
        for _ in range(60):
            model(x)
        assert not auto_of(model).trials.choices, "what was timed ran by no plan"
        session_of(model).speaker.share = None
        settle(model, x)


@dataclass
class Result:
    hidden: Tensor
    score: float


class Scores(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Result:
        return Result(self.layer(x).tanh(), float("nan"))


def test_gradients_are_seen_in_results_that_are_objects() -> None:
    model, x = weft.compile(Scores()), torch.randn(3, 4, requires_grad=True)
    for _ in range(4):
        total = model(x).hidden.sum()
        (slope,) = torch.autograd.grad(total, x, create_graph=True)
        slope.square().sum().backward()  # plans have no second derivative
    assert auto_of(model).trains


def test_a_model_whose_weights_begin_to_train_runs_as_it_is_from_then_on() -> None:
    model, x = weft.compile(nn.Linear(4, 4).requires_grad_(False)), torch.randn(3, 4)
    for _ in range(4):
        model(x)
    assert auto_of(model).trains is False
    model.requires_grad_(True)
    with auto_of(model).by_plans():
        model(x).sum().backward()
    assert auto_of(model).trains
    y = torch.randn(3, 4, requires_grad=True)
    (slope,) = torch.autograd.grad(model(y).square().sum(), y, create_graph=True)
    slope.sum().backward()


def test_results_that_are_objects_are_checked() -> None:
    model = weft.compile(Scores().eval(), "sequential")
    verdict = weft.check(model, torch.randn(3, 4))
    assert verdict and verdict.num_tensors > 1


@pytest.mark.filterwarnings("ignore:.*nested tensors.*:UserWarning")
def test_inputs_without_one_shape_are_run() -> None:
    model = weft.compile(nn.Linear(4, 4).eval())
    x = torch.nested.nested_tensor([torch.ones(2, 4), torch.ones(3, 4)])
    with torch.no_grad():
        wanted = model.forward(x)
        for _ in range(6):
            assert all(torch.equal(*pair) for pair in zip(model(x), wanted, strict=True))


def test_a_user_without_a_home_keeps_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_home() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(Path, "home", no_home)
    model, x = weft.compile(nn.Linear(2, 2).eval()), torch.ones(3, 2)
    with torch.no_grad():
        settle(model, x)
    assert not folder().exists()


def test_a_kept_way_that_waits_for_a_compiler_is_taken_in_a_warm_up_alone() -> None:
    tuned, data = Tuned([], "1 ranks"), {"name": "overlap", "options": {"parts": 2}, "inner": None}
    two, quick = overlap(parts=2), replace(overlap(parts=2), inner="inductor")
    folder().mkdir(parents=True, exist_ok=True)

    def kept(way: Any, *others: Any, compiles: bool = False) -> Any:
        told = {"way": way, "speeds": [[None, 1.0], *others]}
        tuned.path.write_text(json.dumps({"weft_tuned": 1, "choices": {"kind": told}}))
        return tuned.look_up("kind", compiles=compiles)

    plain, compiled = [data, 1.3], [{**data, "inner": "inductor"}, 1.6]
    assert kept(data, plain).way == two and kept({**data, "inner": "onednn"}) is not None
    assert kept(compiled[0], plain, compiled).way == two, "no call waits for Inductor"
    assert kept(compiled[0], [data, 1.01], compiled).way is None, "as it is, but for noise"
    assert kept(compiled[0], plain, compiled, compiles=True).way == quick
    assert kept("torch.compile", plain, ["torch.compile", 1.6], compiles=True).way == COMPILED
    assert kept(data, plain, compiles=True) is None, "torch.compile was not tried"
    assert kept(data, plain, compiled).rival is None, "no guard waits for Inductor"
    assert kept({**data, "inner": "evil"}) is None


@pytest.mark.filterwarnings("ignore:.*torch.jit.script_method.*:DeprecationWarning")
def test_what_a_warm_up_has_chosen_is_taken_by_the_next_one() -> None:
    x = torch.randn(4, 8)
    model = weft.compile(nn.Sequential(nn.Linear(8, 8)).eval())
    weft.warmup(model, [x])
    (chosen,) = auto_of(model).trials.choices.values()
    torch._dynamo.reset()
    again, told = weft.compile(nn.Sequential(nn.Linear(8, 8)).eval()), list[int]()
    weft.warmup(again, [x], progress=lambda done, total: told.append(done))
    (known,) = auto_of(again).trials.choices.values()
    assert known.way == chosen.way and len(told) <= 4, "no race"


@pytest.mark.filterwarnings("ignore:.*torch.jit.script_method.*:DeprecationWarning")
def test_a_warm_up_tries_torch_compile_though_an_earlier_process_has_chosen() -> None:
    x = torch.randn(4, 8)
    with torch.no_grad():
        settle(weft.compile(nn.Sequential(nn.Linear(8, 8)).eval()), x)
    torch._dynamo.reset()
    model = weft.compile(nn.Sequential(nn.Linear(8, 8)).eval())
    weft.warmup(model, [x])
    with torch.no_grad():
        assert module.COMPILED in auto_of(model).trials.choices[kind_of((x,), {})].speeds

"""Any failure of ours falls back to the user's own graph, counted, or raises our own error."""

from __future__ import annotations

import copy
import threading

import pytest
import torch
from torch import nn
from torch._dynamo import exc

import torchweft as weft
from torchweft.capture import aten as aten_module
from torchweft.capture import failures, tracing
from torchweft.run.eager import boundary as boundary_module
from torchweft.serve import piece as piece_module
from torchweft.serve import session as session_module

STAGES = {
    "capture": (session_module, "capture"),
    "probe": (session_module, "probe"),
    "level": (session_module, "level_of"),
    "bodies": (piece_module, "compile_bodies"),
    "guards": (piece_module, "guards_of"),
    "runtime": (piece_module, "runtime_of"),
    "trusted": (piece_module, "trusted_inputs"),
    "write": (piece_module, "write"),
    "lower": (piece_module, "lower"),
    "verify": (piece_module, "verify"),
    "program": (piece_module, "compile_program"),
    "dynamic": (tracing, "make_dynamic"),
    "breaks": (tracing, "breaks_since"),
}
ONCE = ("dynamic", "breaks")  # only a call that compiles comes there
TRAINING = {
    "candidates": (aten_module, "candidates"),
    "prepare": (aten_module, "prepare"),
    "analyse": (aten_module, "analyse"),
    "partition": (aten_module, "min_cut_rematerialization_partition"),
    "aot": (aten_module, "aot_autograd"),
    "bodies": (piece_module, "compile_bodies"),
    "lower": (piece_module, "lower"),
}


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x):
        return self.down(self.up(x).relu())


class Layered(nn.Module):
    """Blocks, and a graph break in the middle."""

    def __init__(self):
        super().__init__()
        self.first = nn.ModuleList(Net() for _ in range(2))
        self.last = Net()

    def forward(self, x):
        for net in self.first:
            x = net(x)
        torch._dynamo.graph_break()
        return self.last(x)


def function(x):
    y = x.sin()
    return y * 2, y.sum(-1)


def broken(monkeypatch, place, error):
    def fail(*args, **kwargs):
        raise error

    monkeypatch.setattr(*place, fail)


@pytest.mark.parametrize("stage", STAGES)
def test_a_failure_at_any_stage_runs_the_users_graph(stage, monkeypatch):
    broken(monkeypatch, STAGES[stage], RuntimeError("boom\nand more"))
    model, x = Net().eval(), torch.randn(6, 8)
    with torch.no_grad():
        wanted = model(x)
        weft.compile(model, weft.overlap(parts=2), strict=False)
        for _ in range(3):
            torch.testing.assert_close(model(x), wanted)
    told = {why: n for why, n in weft.report(model).fallbacks if "RuntimeError: boom" in why}
    ((reason, count),) = told.items()
    assert count == (1 if stage in ONCE else 3)
    assert "(at test_failures.py:" in reason and "and more" not in reason


@pytest.mark.parametrize("stage", STAGES)
def test_under_fallback_error_a_failure_is_our_own(stage, monkeypatch):
    broken(monkeypatch, STAGES[stage], KeyError("dim0"))
    run = weft.compile(function, weft.overlap(parts=2), fallback="error", strict=False)
    for _ in range(1 if stage in ONCE else 2):
        with pytest.raises(weft.WeftError, match="KeyError: 'dim0'"):
            run(torch.randn(6, 8))


@pytest.mark.parametrize("stage", TRAINING)
def test_a_failure_in_training_gives_the_gradients_of_eager(stage, monkeypatch):
    broken(monkeypatch, TRAINING[stage], KeyError("dim0"))
    model, plain, x = Net(), Net(), torch.randn(6, 8)
    plain.load_state_dict(model.state_dict())
    weft.compile(model, weft.overlap(parts=2))
    for _ in range(2):
        model(x).square().sum().backward()
        plain(x).square().sum().backward()
    for mine, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad)
    assert any("KeyError: 'dim0'" in why for why, _ in weft.report(model).fallbacks)


def test_a_failure_in_the_backward_graph_alone_is_counted(monkeypatch):
    stock = aten_module.analyse

    def analyse(gm, *args, name, **options):
        if name.endswith("backward"):
            raise KeyError("tangents")
        return stock(gm, *args, name=name, **options)

    monkeypatch.setattr(aten_module, "analyse", analyse)
    model, plain, x = Net(), Net(), torch.randn(6, 8)
    plain.load_state_dict(model.state_dict())
    weft.compile(model, weft.overlap(parts=2))
    for _ in range(2):
        model(x).square().sum().backward()
        plain(x).square().sum().backward()
    for mine, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad)
    (reason, count), *_ = weft.report(model).fallbacks
    assert "KeyError: 'tangents'" in reason and count == 2
    assert [piece.name for piece in weft.report(model).pieces] == ["piece0.forward"]


@pytest.mark.parametrize("stage", ["capture", "bodies", "verify"])
def test_with_blocks_and_graph_breaks_every_piece_falls_back(stage, monkeypatch):
    broken(monkeypatch, STAGES[stage], ZeroDivisionError("no"))
    model, x = Layered().eval(), torch.randn(6, 8)
    with torch.no_grad():
        wanted = model(x)
        weft.compile(model, weft.overlap(parts=2))
        for _ in range(2):
            assert torch.equal(model(x), wanted)
    ((reason, count),) = weft.report(model).fallbacks
    assert "ZeroDivisionError: no" in reason and count == 4


def test_a_capture_that_fails_half_way_leaves_the_graph_as_it_was(monkeypatch):
    stock = session_module.capture

    def capture(gm, *args, **options):
        stock(gm, *args, **options)
        for node in reversed(gm.graph.nodes):
            if node.op == "call_function":
                node.target = torch.sub
        raise KeyError("late")

    monkeypatch.setattr(session_module, "capture", capture)
    run = weft.compile(lambda x, y: torch.add(x, y), weft.overlap(parts=2))
    assert torch.equal(run(torch.ones(4, 2), torch.ones(4, 2)), torch.full((4, 2), 2.0))


def test_a_plan_that_is_broken_for_one_strategy_is_sequential(monkeypatch):
    stock = piece_module.verify

    def verify(plan):
        if plan.num_parts > 1:
            raise KeyError("parts")
        return stock(plan)

    monkeypatch.setattr(piece_module, "verify", verify)
    run, x = weft.compile(function, weft.overlap(parts=2)), torch.randn(6, 8)
    for _ in range(3):
        assert all(map(torch.equal, run(x), function(x)))
    ((reason, count),) = weft.report(run).fallbacks
    assert "KeyError: 'parts'" in reason and count == 3
    assert [plan.num_parts for plan in weft.plans(run)] == [1]


def test_a_trace_that_cannot_be_made_costs_no_call(monkeypatch):
    stock = piece_module.compile_program

    def compile_program(plan, bodies, *, traced=False, jitter=False):
        if traced:
            raise KeyError("traced")
        return stock(plan, bodies, traced=traced, jitter=jitter)

    monkeypatch.setattr(piece_module, "compile_program", compile_program)
    run, x = weft.compile(function, weft.overlap(parts=2)), torch.randn(6, 8)
    for _ in range(4):
        assert all(map(torch.equal, run(x), function(x)))
    ((reason, count),) = weft.report(run).fallbacks
    assert "KeyError: 'traced'" in reason and count == 1
    with pytest.raises(weft.WeftError, match="KeyError: 'traced'"):
        weft.trace(run, x)


@pytest.mark.parametrize("name", ["Piece", "build", "Given"])
def test_boundary_mode_falls_back_too(name, monkeypatch):
    places = {"Given": boundary_module.Arguments, "Piece": session_module}
    where = (places.get(name, boundary_module), "of" if name == "Given" else name)
    broken(monkeypatch, where, KeyError("dim0"))
    run, x = weft.compile(function, weft.overlap(parts=2), capture="boundary"), torch.randn(6, 8)
    for _ in range(3):
        assert all(map(torch.equal, run(x), function(x)))
    ((reason, count),) = weft.report(run).fallbacks
    assert "KeyError: 'dim0'" in reason and count == 3
    strict = weft.compile(function, "overlap", capture="boundary", fallback="error")
    with pytest.raises(weft.WeftError, match="KeyError: 'dim0'"):
        strict(x)


@pytest.mark.parametrize("stage", ["write", "lower", "verify", "program"])
def test_boundary_mode_without_a_plan_runs_the_model_as_it_is(stage, monkeypatch):
    run, x = weft.compile(function, weft.overlap(parts=2), capture="boundary"), torch.randn(6, 8)
    run(x)
    broken(monkeypatch, STAGES[stage], KeyError("dim0"))
    for _ in range(2):
        assert all(map(torch.equal, run(x), function(x)))
    assert any("KeyError: 'dim0'" in why for why, _ in weft.report(run).fallbacks)


@pytest.mark.parametrize("error", [KeyboardInterrupt(), SystemExit(3), MemoryError("full")])
@pytest.mark.parametrize("stage", ["capture", "verify"])
def test_what_is_not_ours_to_catch_is_raised(stage, error, monkeypatch):
    broken(monkeypatch, STAGES[stage], error)
    run = weft.compile(function, weft.overlap(parts=2))
    with pytest.raises((type(error), exc.BackendCompilerFailed)):
        run(torch.randn(6, 8))
    assert weft.report(run).fallbacks == ()


def test_dynamos_own_exceptions_pass_and_failed_compilations_do_not():
    for error in (exc.SkipFrame("x"), exc.RestartAnalysis("x"), exc.RecompileError("x")):
        with pytest.raises(type(error)):
            failures.as_own(error, "capture")
    failed = exc.BackendCompilerFailed(function, ValueError("x"), None)
    assert isinstance(failures.as_own(failed, "capture"), weft.WeftError)
    own = weft.StrategyError("mine: x")
    assert failures.as_own(own, "capture") is own


class Counted(nn.Module):
    """Behind a graph break, something that Dynamo can trace for one number of rows alone."""

    def __init__(self, last):
        super().__init__()
        self.norm, self.last, self.num_calls = nn.BatchNorm1d(3), last, 0

    def forward(self, x):
        x = self.norm(x)
        self.num_calls += 1
        torch._dynamo.graph_break()
        return self.last(x * 1.5) * 2


class Covariance(nn.Module):
    def forward(self, x):
        return torch.cov(x, aweights=x[0].abs()) + torch.cov(x.t(), aweights=x[:, 0].abs()).sum()


LAST = {"its own weights": lambda: nn.LazyConv1d(5, 3), "covariance": Covariance}


@torch.no_grad()
@pytest.mark.parametrize("name", LAST)
def test_what_is_traced_for_one_number_of_rows_runs_once(name):
    torch.manual_seed(0)
    model = weft.compile(Counted(LAST[name]()), weft.overlap(parts=2))
    plain = Counted(model.last)
    for num_rows in (4, 4) if name == "its own weights" else (4, 6, 4):
        x = torch.randn(num_rows, 3)
        assert torch.allclose(model(x), plain(x), atol=1e-5), "the numbers are eager's"
    assert model.num_calls == plain.num_calls, "what stands before the break runs once a call"
    assert model.norm.num_batches_tracked == plain.norm.num_batches_tracked
    assert torch.allclose(model.norm.running_var, plain.norm.running_var)


def test_a_module_that_makes_its_weights_by_the_rows_is_captured():
    torch.manual_seed(0)
    model = weft.compile(Doubled(nn.LazyConv1d(5, 3)), weft.overlap(parts=2))
    x = torch.randn(4, 3)
    made = model(x)
    assert torch.allclose(made, model.inner(x) * 2, atol=1e-6)
    assert weft.report(model).fallbacks, "nothing was cut, and it is said"


class Doubled(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        return self.inner(x) * 2


class Narrow(nn.Module):
    """Counts its calls, and cannot take six rows, nor be traced with weights of any number."""

    def __init__(self, broken: bool) -> None:
        super().__init__()
        self.up, self.broken = nn.Linear(4, 4), broken
        self.register_buffer("num_calls", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.num_calls.add_(1)
        y = self.up(x)
        if self.broken:
            torch._dynamo.graph_break()
        return torch.cov(y.T @ torch.ones(5 if len(x) == 6 else len(x), 4), aweights=x[0].abs())


@torch.no_grad()
@pytest.mark.parametrize("broken", [False, True])
def test_a_mistake_of_the_model_comes_out_as_it_is_and_nothing_runs_twice(broken: bool) -> None:
    model = Narrow(broken)
    own = weft.compile(copy.deepcopy(model), "sequential")
    for number, rows in enumerate((4, 6, 5, 6), 1):
        x = torch.randn(rows, 4)
        if rows == 6:
            with pytest.raises(RuntimeError) as wanted:
                model(x)
            with pytest.raises(RuntimeError) as raised:
                own(x)
            assert raised.type is wanted.type
            assert str(raised.value) == str(wanted.value)
        else:
            assert torch.equal(own(x), model(x))
        assert own.num_calls == number


class Untraceable(nn.Module):
    """Dynamo cannot trace it whatever the rows are; eager can run it."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cov(x.T @ torch.ones(len(x), 4), aweights=x[0].abs())


@pytest.fixture
def untraced(monkeypatch):
    """Every compilation fails, with what is said here; the list has one entry a try."""
    tries: list[str] = []

    def fail(code, *args, **kwargs):
        tries.append(code.co_name)
        raise exc.TorchRuntimeError("no shape fits")

    torch._dynamo.reset()
    monkeypatch.setattr(tracing.convert_frame, tracing.COMPILE, fail)
    return tries


@torch.no_grad()
def test_a_frame_that_is_never_traced_is_tried_ever_less_and_counted_every_time(untraced):
    model, x = weft.compile(Untraceable(), "sequential"), torch.randn(4, 4)
    wanted = Untraceable()(x)
    for _ in range(32):
        assert torch.equal(model(x), wanted)
    ((reason, count),) = weft.report(model).fallbacks
    assert "no shape fits" in reason and count == 32
    assert len(untraced) == 2 * 6, "with a symbol and without, at calls 1, 2, 3, 5, 9 and 17"
    assert not weft.report(model).breaks, "a try that failed was no success for one number of rows"


@torch.no_grad()
def test_a_frame_that_can_be_traced_again_is(untraced, monkeypatch):
    model, x = weft.compile(Doubled(nn.Linear(4, 4)), weft.overlap(parts=2)), torch.randn(4, 4)
    model(x)
    monkeypatch.undo()
    model(x)
    assert weft.plans(model)[0].num_parts == 2


@torch.no_grad()
def test_threads_that_fail_at_once_are_each_counted(untraced):
    model, x = weft.compile(Untraceable(), "sequential"), torch.randn(4, 4)
    gate = threading.Barrier(4)

    def work():
        for _ in range(8):
            gate.wait()
            model(x)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sum(count for _, count in weft.report(model).fallbacks) == 32


@torch.no_grad()
def test_one_frame_for_one_number_of_rows_leaves_the_others_their_batch():
    torch._dynamo.reset()  # models of one class share what was compiled
    model = weft.compile(Counted(Covariance()).eval(), weft.overlap(parts=2))
    for num_rows in (4, 6, 8):
        model(torch.randn(num_rows, 3))
    assert any(plan.num_parts == 2 for plan in weft.plans(model)), "the frame before the break"
    (line,) = [text for text in weft.report(model).breaks if "one number of rows" in text]
    assert "nothing is split" in line


@pytest.mark.parametrize("level", ["torch", "aten"])
def test_nested_tensors_run_as_they_are(level):
    torch._dynamo.reset()
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU()).eval()
    rows = [torch.randn(3, 8), torch.randn(5, 8)]
    with torch.no_grad():
        weft.compile(model, "sequential", level=level)
        for _ in range(2):
            made = model(torch.nested.nested_tensor(rows, layout=torch.jagged))
            for part, row in zip(made.unbind(), rows, strict=True):
                torch.testing.assert_close(part, model.forward(row))
    (reason,) = dict(weft.report(model).fallbacks)
    assert "nested tensors" in reason

"""`weft.compile` as a user meets it: equal to eager, whatever comes in."""

from __future__ import annotations

import functools
import threading
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import torchweft as weft
from torchweft.api import session_of
from torchweft.serve import gate


class Block(nn.Module):
    def __init__(self, wide=32):
        super().__init__()
        self.up, self.down, self.norm = nn.Linear(wide, 64), nn.Linear(64, wide), nn.LayerNorm(wide)

    def forward(self, x, scale=None, *, flag=True):
        y = self.norm(x + self.down(torch.relu(self.up(x))))
        return y if scale is None or not flag else y * scale


@pytest.fixture(autouse=True)
def fresh():
    torch._dynamo.reset()
    torch.manual_seed(0)


def compiled(model=None, strategy=None, **options):
    model = (model or Block()).eval()
    return weft.compile(model, strategy or weft.overlap(parts=2), **options)


def eager(model, *args, **kwargs):
    with torch.compiler.set_stance("force_eager"):
        return model._call_impl(*args, **kwargs)


@pytest.mark.parametrize("rows", [0, 1, 2, 3, 4, 5, 7, 16, 17, 33])
@pytest.mark.parametrize("parts", [2, 4])
def test_any_number_of_rows_is_right(rows, parts):
    model = compiled(strategy=weft.overlap(parts=parts))
    x = torch.randn(rows, 32)
    with torch.no_grad():
        for _ in range(3):
            torch.testing.assert_close(model(x), eager(model, x))


def test_sequential_is_bit_equal():
    model, x = compiled(strategy="sequential"), torch.randn(9, 32)
    with torch.no_grad():
        assert torch.equal(model(x), eager(model, x))


def test_more_parts_than_rows_falls_back_with_a_counted_reason(caplog):
    model = compiled(strategy=weft.overlap(parts=8))
    with torch.no_grad():
        for _ in range(3):
            model(torch.randn(5, 32))
    report = weft.report(model)
    assert report.fallbacks == (
        ("split: 5 rows cannot make 8 parts (" + " ".join(["1/8"] * 8) + ").", 3),
    )
    assert "5 rows cannot make 8 parts" in caplog.text
    assert "fallback 3 x" in str(report)


def test_fallback_error_raises_our_error():
    model = compiled(strategy=weft.overlap(parts=8), fallback="error")
    with torch.no_grad(), pytest.raises(weft.StrategyError, match="cannot make 8 parts"):
        model(torch.randn(5, 32))


def test_compile_is_in_place_and_leaves_the_model_alone():
    model = Block().eval()
    keys = list(model.state_dict())
    assert weft.compile(model, "overlap") is model
    assert list(model.state_dict()) == keys
    assert type(model) is Block


def test_kwargs_none_and_scalars():
    model = compiled()
    x = torch.randn(8, 32)
    with torch.no_grad():
        for args, kwargs in [
            ((x,), {}),
            ((x, None), {}),
            ((x, 2.0), {}),
            ((x, 3), {"flag": False}),
        ]:
            torch.testing.assert_close(model(*args, **kwargs), eager(model, *args, **kwargs))


def test_nested_outputs_with_things_that_are_no_tensors():
    class Nest(nn.Module):
        def forward(self, x, y):
            return {"a": (x + 1, None, 3), "b": [x * y, {"rows": x.shape[0]}], "same": x}

    model = compiled(Nest())
    x, y = torch.randn(6, 4), torch.randn(6, 4)
    found = model(x, y)
    assert found["a"][1:] == (None, 3)
    assert found["b"][1] == {"rows": 6}
    assert found["same"] is x
    assert torch.equal(found["a"][0], x + 1)
    assert torch.equal(found["b"][0], x * y)


def test_no_batch_at_all():
    def scalar(x):
        return x.sin() + 1

    run = weft.compile(scalar, "overlap")
    x = torch.tensor(2.0)
    assert torch.equal(run(x), scalar(x))


def test_a_function_is_wrapped_and_keeps_its_name():
    @torch.no_grad()
    def double(x):
        return x * 2

    run = weft.compile(double, "overlap")
    assert run.__name__ == "double"
    assert torch.equal(run(torch.ones(4, 2)), torch.full((4, 2), 2.0))


def test_nans_and_infinities_stay():
    model, x = compiled(), torch.randn(8, 32)
    x[1], x[6, 3] = float("nan"), float("inf")
    with torch.no_grad():
        torch.testing.assert_close(model(x), eager(model, x), equal_nan=True)


def test_graph_breaks_make_pieces_and_the_report_tells():
    class Broken(nn.Module):
        def forward(self, x):
            y = torch.relu(x) + 1
            torch._dynamo.graph_break()
            return y * 2

    model, x = compiled(Broken()), torch.randn(8, 4)
    torch.testing.assert_close(model(x), eager(model, x))
    report = weft.report(model)
    assert len(report.pieces) == 2
    assert report.num_breaks == 1


def test_recompiles_only_when_dynamo_does():
    model = compiled()
    with torch.no_grad():
        for rows in (4, 6, 8, 16, 23, 64, 100):
            model(torch.randn(rows, 32))
    assert len(weft.report(model).pieces) == 1
    assert weft.report(model).num_breaks == 0


def test_a_strategy_runs_once_a_bucket():
    model = compiled()
    with torch.no_grad():
        for rows in range(64, 128):
            model(torch.randn(rows, 32))
    assert weft.report(model).pieces[0].strategy_runs == 1


def test_a_bucket_is_cut_at_the_strategys_own_threshold():
    model = compiled(strategy=weft.overlap(parts=2, min_tokens=50))
    with torch.no_grad():
        for rows in (70, 99, 100, 127, 71, 101):
            model(torch.randn(rows, 32))
    piece = weft.report(model).pieces[0]
    assert piece.buckets == ("64..99", "100..127")
    assert [plan.num_parts for plan in piece.plans] == [1, 2]


def test_outputs_kept_over_three_calls_stay_unchanged():
    model = compiled()
    kept = []
    with torch.no_grad():
        for number in range(3):
            x = torch.randn(8, 32)
            kept.append((model(x), eager(model, x), number))
    for found, wanted, _ in kept:
        torch.testing.assert_close(found, wanted)


def test_inference_mode_and_autocast_outside():
    model, x = compiled(), torch.randn(8, 32)
    with torch.inference_mode():
        found = model(x)
        assert found.is_inference()
        torch.testing.assert_close(found, eager(model, x))
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16, enabled=False):
        torch.testing.assert_close(model(x), eager(model, x))


def test_calls_from_eight_threads_at_once():
    model = compiled()
    inputs = [torch.randn(8 + number, 32) for number in range(8)]
    with torch.no_grad():
        wanted = [eager(model, x) for x in inputs]
        model(inputs[0])
    wrong = []

    def call(number):
        with torch.no_grad():
            for _ in range(5):
                if not torch.allclose(model(inputs[number]), wanted[number], atol=1e-5):
                    wrong.append(number)

    threads = [threading.Thread(target=call, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_gradients_flow_through_a_split_model():
    model, twin = compiled(Block().train()), Block().train()
    twin.load_state_dict(model.state_dict())
    x = torch.randn(8, 32)
    model(x).square().mean().backward()
    twin(x).square().mean().backward()
    for mine, theirs in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad)


def test_an_op_that_raises_gives_a_run_error_and_the_next_call_works():
    class Picky(nn.Module):
        def forward(self, table, index):
            return table[index] + 1

    model = compiled(Picky())
    table = torch.randn(4, 3)
    good, bad = torch.tensor([0, 1, 2, 3]), torch.tensor([0, 1, 2, 9])
    assert torch.equal(model(table, good), table[good] + 1)
    with pytest.raises(weft.RunError, match="index"):
        model(table, bad)
    assert torch.equal(model(table, good), table[good] + 1)


def test_unknown_names_list_the_choices():
    with pytest.raises(weft.StrategyError, match="overlap"):
        weft.compile(Block(), "overlpa")
    with pytest.raises(weft.StrategyError, match="sequential"):
        weft.compile(Block(), "overlap", fallback="ignore")
    with pytest.raises(weft.StrategyError, match="eager"):
        weft.compile(Block(), "overlap", inner="indcutor")
    with pytest.raises(weft.StrategyError, match="parts"):
        weft.overlap(prats=3)


def test_disable_leaves_the_model_untouched(monkeypatch):
    monkeypatch.setenv("WEFT_DISABLE", "1")
    model = weft.compile(Block(), "overlap")
    assert model._compiled_call_impl is None


def test_report_of_a_model_that_was_not_compiled():
    with pytest.raises(weft.WeftError, match=r"not compiled by weft\.compile"):
        weft.report(Block())


def test_the_backend_is_registered_by_entry_point():
    model, x = Block().eval(), torch.randn(8, 32)
    run = torch.compile(
        model, backend="weft", options={"strategy": weft.overlap(parts=2)}, dynamic=True
    )
    with torch.no_grad():
        torch.testing.assert_close(run(x), model(x))
        with pytest.raises(Exception, match="strategy"):
            torch.compile(Block().eval(), backend="weft", options={"stratgey": "overlap"})(x)


def test_check_says_bit_equal_within_tolerance_or_the_op_that_differs():
    x = torch.randn(9, 32)
    assert weft.check(Block().eval(), x, strategy="sequential").equal == "bit-equal"
    assert weft.check(Block().eval(), x, strategy="overlap")

    def shifts(x):
        y = x * 2
        with weft.mark("wrong", rows="row-wise"):
            z = y.roll(1, 0)
        return z + 1

    verdict = weft.check(shifts, x, strategy="overlap")
    assert verdict.equal == "different"
    assert "wrong" in verdict.first_op


def test_check_names_the_op_that_differs_where_others_write_into_places():
    model = Block().eval()

    def centred(x):
        with weft.mark("wrong", rows="row-wise"):
            y = x - x.mean(0)
        z = model(y)
        return z + z.cumsum(0)

    with torch.no_grad():
        verdict = weft.check(centred, torch.randn(9, 32), strategy="overlap")
    assert verdict.equal == "different"
    assert verdict.first_op.startswith("wrong of piece0")


def test_check_leaves_model_and_inputs_as_they_were():
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Dropout(0.5)).train()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    x = torch.randn(12, 8)
    assert weft.check(model, x, strategy="overlap")
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_shadow_compares_every_nth_call():
    model = compiled(shadow=2)
    with torch.no_grad():
        for _ in range(6):
            model(torch.randn(8, 32))
    report = weft.report(model)
    assert report.num_shadowed == 3
    assert not report.shadow_failures


def test_shadow_keeps_to_its_share_of_the_time(monkeypatch):
    clock = SimpleNamespace(now_s=0.0, perf_counter=lambda: clock.now_s)
    monkeypatch.setattr(gate, "time", clock)
    shadow, compared = gate.Shadow(0.25), []

    def takes(seconds):
        def call(x):
            clock.now_s += seconds
            return x

        return call

    for _ in range(12):
        shadow(takes(1.0), takes(1.0), (torch.ones(2),), {})
        compared.append(shadow.num_compared)
    assert compared == [1, 1, 1, 1, 2, 2, 2, 2, 3, 3, 3, 3], "one second in four"


def test_trace_is_measured_and_saved(tmp_path):
    model, x = compiled(), torch.randn(16, 32)
    with torch.no_grad():
        trace = weft.trace(model, x)
    assert not trace.simulated
    assert {span.parts for span in trace.spans if span.kind == "run"} >= {(0, 1), (1, 2)}
    trace.save(tmp_path / "run.json")
    assert (tmp_path / "run.json").exists()


def test_context_tells_requests_to_the_strategy():
    seen = []

    def by_request(s):
        seen.append((s.context.phase, s.context.tokens_per_request))
        if not s.context.tokens_per_request:
            s.sequential()
            return
        s.split(2, at="requests")
        while ready := s.ready():
            for op, part in ready:
                s.run(op, part)
        s.merge()

    model = compiled(strategy=by_request)
    x = torch.randn(20, 32)
    with torch.no_grad():
        with weft.context(phase="prefill", tokens_per_request=[3, 11, 6]):
            torch.testing.assert_close(model(x), eager(model, x))
        torch.testing.assert_close(model(x), eager(model, x))
    assert ("prefill", (3, 11, 6)) in seen
    plan = weft.plans(model)[0]
    assert plan.cut.bounds(20, (3, 11, 6)) == (0, 14, 20)


def test_the_host_may_want_another_strategy_for_a_call():
    model = compiled(strategy=weft.overlap(parts=2))
    x = torch.randn(20, 32)
    with torch.no_grad():
        wanted = eager(model, x)
        for strategy, parts in ((None, 2), ("sequential", 1), (weft.overlap(parts=4), 4)):
            for _ in range(3):
                with weft.context(strategy=strategy):
                    torch.testing.assert_close(model(x), wanted)
            assert weft.plans(model)[-1].num_parts == parts
        model(x)
    assert [plan.num_parts for plan in weft.plans(model)] == [2, 1, 4]
    with pytest.raises(weft.StrategyError, match="overlapp"), weft.context(strategy="overlapp"):
        pass


def test_jitter_changes_no_bit():
    torch.manual_seed(1)
    plain, jittered = compiled(), compiled(jitter=True)
    jittered.load_state_dict(plain.state_dict())
    x = torch.randn(16, 32)
    with torch.no_grad():
        assert torch.equal(plain(x), jittered(x))


@pytest.mark.parametrize("model", [Block(), nn.Sequential(Block(), nn.Linear(32, 32))])
def test_a_forward_may_be_a_partial(model):
    """As hosts leave it that hook a module: around a method, or around what they put there."""
    model, x = model.eval(), torch.randn(8, 32)
    wanted = model(x)
    model.forward = functools.partial(functools.partial(model.forward))
    weft.compile(model, weft.overlap(parts=2))
    with torch.no_grad():
        torch.testing.assert_close(model(x), wanted)
    assert weft.plans(model)[0].num_parts == 2


def test_threads_of_a_session_end():
    others = {*threading.enumerate()}  # of models of other tests, not yet collected
    model = compiled()
    with torch.no_grad():
        model(torch.randn(8, 32))
    session_of(model).lanes.close()
    assert not [t for t in {*threading.enumerate()} - others if t.name == "weft lane"]


@torch.library.custom_op("weft_test::double", mutates_args=())
def double_rows(x: torch.Tensor) -> torch.Tensor:
    return x * 2


@double_rows.register_fake
def _(x):
    return torch.empty_like(x)


@torch.library.custom_op("weft_test::shift", mutates_args=())
def shift_rows(x: torch.Tensor) -> torch.Tensor:
    return x.roll(1, 0)


@shift_rows.register_fake
def _(x):
    return torch.empty_like(x)


def test_a_custom_op_is_tried_on_rows_only_if_that_is_asked_for():
    def custom(x):
        return double_rows(x.sin()) + 1

    x = torch.randn(9, 4)
    run = weft.compile(custom, weft.overlap(parts=2), strict=False)
    assert torch.equal(run(x), custom(x))
    assert len(weft.report(run).assumed) == 1
    assert "assumed ops: none" not in str(weft.report(run))
    torch._dynamo.reset()
    strict = weft.compile(custom, weft.overlap(parts=2))
    assert torch.equal(strict(x), custom(x))
    assert weft.report(strict).assumed == ()
    ((_, _, reason),) = weft.report(strict).pieces[0].whole_ops
    assert "weft_test.double" in reason and "weft.row_wise" in reason and "strict=False" in reason


@torch.library.custom_op("weft_test::centre_large", mutates_args=())
def centre_large(x: torch.Tensor) -> torch.Tensor:
    return x - x.max(0).values if x.max() > 100 else x * 2


@centre_large.register_fake
def _(x):
    return torch.empty_like(x)


@pytest.mark.parametrize("marked", [False, True])
def test_an_op_that_mixes_rows_on_later_data_is_right_by_default(marked):
    def custom(x):
        if not marked:
            return centre_large(x.sin() * x) + 1
        with weft.mark("centre"):
            y = centre_large(x.sin() * x)
        return y + 1

    run, x = weft.compile(custom, weft.overlap(parts=2)), torch.randn(8, 4)
    for scale in (1, 1, 1, 10_000):
        assert torch.equal(run(x * scale), custom(x * scale))
    assert weft.report(run).assumed == ()


def test_a_declared_custom_op_needs_no_trial():
    def custom(x):
        return double_rows(x.sin()) + 1

    rules = [weft.row_wise(r"weft_test\.double")]
    run = weft.compile(custom, weft.overlap(parts=2), rules=rules, fallback="error")
    assert torch.equal(run(torch.ones(9, 4)), custom(torch.ones(9, 4)))
    assert weft.report(run).pieces[0].whole_ops == () and weft.report(run).assumed == ()


def test_a_custom_op_that_mixes_rows_is_never_split():
    def custom(x):
        return shift_rows(x.sin()) + 1

    x = torch.randn(9, 4)
    run = weft.compile(custom, weft.overlap(parts=2), strict=False)
    assert torch.equal(run(x), custom(x))
    assert weft.report(run).assumed == ()


def test_plain_sequential_modules_of_torch_are_captured_too():
    model = compiled(nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4)))
    x = torch.randn(8, 8)
    with torch.no_grad():
        for _ in range(3):
            torch.testing.assert_close(model(x), eager(model, x))
    report = weft.report(model)
    assert len(report.pieces) == 1
    assert report.pieces[0].head_room == pytest.approx(1.0)
    assert "nothing to overlap" in str(report)


def higher_order(name):
    from torch.utils.checkpoint import checkpoint

    def cond(x):
        return torch.cond(x.sum() > 0, lambda x: x.sin(), lambda x: x.cos(), (x,)) + 1

    def scan(x):
        from torch._higher_order_ops.scan import scan as torch_scan

        def step(carry, row):
            return carry + row, carry * row

        return torch_scan(step, x[0] * 0, x, dim=0)[1] + 1

    def checkpointed(x):
        return checkpoint(lambda y: y.sin().exp(), x, use_reentrant=False) + 1

    return {"cond": cond, "scan": scan, "checkpoint": checkpointed}[name]


@pytest.mark.parametrize("name", ["cond", "scan", "checkpoint"])
def test_higher_order_ops_are_one_op_or_a_reason_with_the_source_line(name):
    function = higher_order(name)
    x = torch.randn(8, 4)
    run = weft.compile(function, weft.overlap(parts=2))
    with torch.no_grad():
        wanted = function(x)
        torch.testing.assert_close(run(x), wanted)
    told = [why for piece in weft.report(run).pieces for _, _, why in piece.whole_ops]
    if name != "checkpoint":
        assert any("test_api.py" in why for why in told), told


def test_new_requests_at_every_step_run_the_strategy_once():
    def by_request(s):
        s.split(2, at="requests")
        while ready := s.ready():
            for op, part in ready:
                s.run(op, part)
        s.merge()

    model = compiled(strategy=by_request)
    with torch.no_grad():
        for first in range(3, 20):
            x = torch.randn(40, 32)
            with weft.context(phase="prefill", tokens_per_request=[first, 30 - first, 10]):
                torch.testing.assert_close(model(x), eager(model, x))
    assert weft.report(model).pieces[0].strategy_runs == 1


def test_inputs_that_overlap_in_memory_are_not_split_when_one_is_written():
    def shifted(x, y):
        y.mul_(2)
        return x + y

    def both():
        base = torch.arange(9.0).view(9, 1)
        return base[1:], base[:-1]

    run = weft.compile(shifted, weft.overlap(parts=2))
    for _ in range(2):
        assert torch.equal(run(*both()), shifted(*both()))
    assert "overlap in memory" in weft.report(run).fallbacks[0][0]
    assert weft.check(shifted, both(), strategy="overlap").equal == "bit-equal"


def test_gradients_turned_on_inside_are_kept():
    def inside(x):
        with torch.enable_grad():
            return x * 2

    x = torch.randn(8, 3, requires_grad=True)
    run = weft.compile(inside, weft.overlap(parts=2))
    with torch.no_grad():
        assert run(x).requires_grad
    assert "turns gradients on" in weft.report(run).fallbacks[0][0]


def test_gradients_turned_on_where_none_can_be_seen_stay_off():
    class BiasAdd(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.last = nn.Linear(3, 4, bias=False), nn.Linear(4, 3)
            self.bias = nn.Parameter(torch.rand(4))

        def forward(self, x):
            y = self.first(x)
            with torch.enable_grad():
                y = y + self.bias
            return self.last(y)

    model, x = BiasAdd(), torch.randn(8, 3)
    with torch.no_grad():
        want = model(x)
        run = weft.compile(model, weft.overlap(parts=2), fallback="error")
        got = run(x)
    torch.testing.assert_close(got, want)
    assert not got.requires_grad and not weft.report(run).fallbacks


def test_compiling_again_takes_the_new_strategy():
    def double(x):
        return x * 2

    once = weft.compile(double, weft.overlap(parts=2))
    twice = weft.compile(once, weft.overlap(parts=3))
    x = torch.ones(9, 2)
    assert torch.equal(twice(x), x * 2)
    assert weft.plans(twice)[0].num_parts == 3


def test_many_models_of_one_class_are_all_captured():
    x = torch.ones(8, 4)
    for _ in range(12):
        model = weft.compile(nn.Sequential(nn.Linear(4, 4)), weft.overlap(parts=2))
        with torch.no_grad():
            model(x)
        assert len(weft.plans(model)) == 1


def test_a_call_of_which_nothing_is_captured_is_told():
    inner = torch.compiler.disable(lambda x: x * 2)
    run = weft.compile(lambda x: inner(x), weft.overlap(parts=2))
    assert torch.equal(run(torch.ones(4)), torch.full((4,), 2.0))
    assert "captured no graph" in weft.report(run).fallbacks[0][0]


def test_only_what_can_be_called_is_compiled():
    with pytest.raises(weft.WeftError, match="neither a model nor a function"):
        weft.compile(3, "overlap")


def test_a_run_error_is_a_runtime_error():
    assert issubclass(weft.RunError, RuntimeError)


def scaled(x):
    return x * 3 + 1


class Marked(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x):
        with weft.mark("inside", uses="memory"):
            y = torch.relu(x)
        return scaled(self.second(self.first(y)))


RULES = {
    "module": (lambda: weft.mark_module(nn.Linear, "layer"), {"layer", "layer.1"}),
    "path": (lambda: weft.mark_path(r"second", "last"), {"last"}),
    "function": (lambda: weft.mark_function(scaled, "scaling"), {"scaling"}),
    "op": (lambda: weft.mark_op(r"relu", "rectify"), {"rectify"}),
}


@pytest.mark.parametrize("form", RULES)
def test_each_mark_form_names_its_op_and_breaks_no_graph(form):
    rule, names = RULES[form]
    model = compiled(Marked(), rules=[rule()])
    x = torch.randn(8, 8)
    with torch.no_grad():
        torch.testing.assert_close(model(x), eager(model, x))
    graph = session_of(model).pieces[0].graph
    assert names <= set(graph.op)
    assert weft.report(model).num_breaks == 0
    if form != "op":
        assert graph.op["inside"].uses == "memory"


@pytest.mark.parametrize(
    "rule",
    [
        lambda: weft.mark_module(nn.Conv2d, "conv"),
        lambda: weft.mark_path(r"third", "third"),
        lambda: weft.mark_function(torch.fft.fft, "fft"),
        lambda: weft.mark_op(r"softmax", "soft"),
    ],
)
def test_a_rule_that_matches_nothing_raises(rule):
    model = compiled(Marked(), rules=[rule()])
    with torch.no_grad(), pytest.raises(weft.CaptureError, match="matched nothing"):
        model(torch.randn(8, 8))


class BreaksAtOnce(nn.Module):
    def forward(self, x):
        torch._dynamo.graph_break()  # no graph before it
        return x + 1


def test_a_break_that_leaves_no_graph_is_in_the_report():
    model = weft.compile(BreaksAtOnce(), "sequential")
    with torch.no_grad():
        model(torch.ones(4, 2))
    (found,) = weft.report(model).breaks
    assert "test_api.py" in found and "graph_break()" in found
    assert found in str(weft.report(model))

"""Boundary mode in one process: equal to eager, torch state by part, faults, changed state."""

from __future__ import annotations

import dataclasses
import gc
import importlib
import threading
import time

import pytest
import torch
from torch import nn

import torchweft as weft
from torchweft.api import session_of
from torchweft.errors import CaptureError, RunError, StrategyError

WIDE = 8


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(WIDE, 2 * WIDE), nn.Linear(2 * WIDE, WIDE)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(x)))


class Net(nn.Module):
    def __init__(self, num_layers=2):
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(num_layers))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


BLOCKS = [weft.mark_module(Block, "block")]


def inputs(rows: int = 8) -> torch.Tensor:
    return torch.arange(rows * float(WIDE)).reshape(rows, WIDE) / 50


def boundary(model, parts=2, **options):
    options = {"rules": BLOCKS, **options}
    return weft.compile(model, weft.overlap(parts=parts), capture="boundary", **options)


@pytest.fixture(autouse=True)
def no_grad():
    torch.manual_seed(0)
    with torch.no_grad():
        yield


def equals_eager(model, *args, num_calls=4, **options):
    """The compiled model, after calls that were all equal to eager; no call fell back."""
    wanted = model(*args)
    boundary(model, **options)
    for _ in range(num_calls):
        torch.testing.assert_close(model(*args), wanted)
    assert weft.report(model).fallbacks == (), weft.report(model)
    return model


@pytest.mark.parametrize("parts", [1, 2, 3, 4])
@pytest.mark.parametrize("jitter", [False, True])
def test_parts_are_equal_to_eager(parts, jitter):
    model = equals_eager(Net().eval(), inputs(), parts=parts, jitter=jitter)
    (plan,) = weft.plans(model)
    assert plan.num_parts == parts and plan.graph.level == "boundary"
    assert [op.name for op in plan.graph.ops] == ["block", "block.1"]


def test_one_plan_serves_batches_of_a_bucket():
    model = equals_eager(Net().eval(), inputs(9))
    for rows in (8, 11, 15):
        torch.testing.assert_close(model(inputs(rows)), Net.forward(model, inputs(rows)))
    (piece,) = session_of(model).pieces
    assert piece.plans.strategy_runs == 1


def test_plan_report_trace_and_check_know_boundary_mode():
    model = equals_eager(Net().eval(), inputs())
    (plan,) = weft.plans(model)
    assert weft.Plan.parse(str(plan)) == plan
    labels = [step.label for step in plan.steps if step.kind == "run"]
    assert labels == ["block[0]", "block[1]", "block.1[0]", "block.1[1]"]
    text = str(weft.report(model))
    assert "boundary level" in text and "nothing to overlap" in text, text
    spans = [span.label for span in weft.trace(model, inputs()).spans if span.kind == "run"]
    assert spans == labels
    assert weft.check(model, inputs(), capture="boundary", rules=BLOCKS)


def test_gradients_flow_through_parts():
    model, x = Net(), inputs()
    with torch.enable_grad():
        model(x).square().mean().backward()
        wanted = [parameter.grad.clone() for parameter in model.parameters()]
        boundary(model)
        for _ in range(3):
            model.zero_grad()
            model(x).square().mean().backward()
    for parameter, grad in zip(model.parameters(), wanted, strict=True):
        torch.testing.assert_close(parameter.grad, grad)
    assert weft.plans(model)[0].num_parts == 2


@dataclasses.dataclass
class Output:
    hidden: torch.Tensor
    more: dict[str, object]
    note: str = "none"


class Rich(nn.Module):
    """Nested modules, keyword arguments, marks in its code, and an output of several kinds."""

    def __init__(self):
        super().__init__()
        self.net = Net()

    def forward(self, x, pair, *, scale, flag=False, table=None):
        with weft.mark("scale"):
            x = x * scale + pair["left"][:, None] + (table.sum() if flag else 0)
        y = self.net(x)
        return Output(y, {"sums": (y.sum(-1), pair["right"]), "none": None, "number": 3})


def test_arguments_and_outputs_of_all_forms():
    model, x = Rich().eval(), inputs()
    pair = {"left": torch.arange(8.0), "right": torch.arange(16).view(8, 2)}
    given = {"scale": 2.0, "flag": True, "table": torch.ones(3)}
    wanted = model(x, pair, **given)
    boundary(model)
    for _ in range(3):
        found = model(x, pair, **given)
        assert type(found) is Output and found.note == "none"
        torch.testing.assert_close(found.hidden, wanted.hidden)
        torch.testing.assert_close(found.more, wanted.more)
    assert weft.report(model).fallbacks == ()
    assert [op.mark for op in weft.plans(model)[0].graph.ops] == ["scale", "block", "block", None]


def test_rows_may_be_in_another_dim():
    class Turned(nn.Module):
        def forward(self, x):
            with weft.mark("turn"):
                y = x * 2
            return (y + 1).transpose(0, 1), y.permute(1, 0)

    equals_eager(Turned(), inputs(6).t().contiguous(), batch=1, rules=[])


def rotate(x):
    return torch.roll(x, 1, -1)


@pytest.mark.parametrize("function", [rotate, torch.relu])
def test_a_function_is_a_boundary(function):
    class Calls(nn.Module):
        def forward(self, x):
            for _ in range(2):
                x = function(x * 2) + 1
            return x

    model = equals_eager(Calls(), inputs(), rules=[weft.mark_function(function, "told")])
    names = [op.name for op in weft.plans(model)[0].graph.ops]
    assert names == ["op", "told", "op.1", "told.1", "op.2"]


def test_a_rule_that_matches_nothing_raises():
    model = boundary(nn.Sequential(nn.Linear(WIDE, WIDE)))
    with pytest.raises(CaptureError, match="matched nothing"):
        model(inputs())
    with pytest.raises(CaptureError, match="boundary mode captures no calls"):
        boundary(Net(), rules=[weft.mark_op("relu", "op")])


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"capture": "bondary"}, "Did you mean 'boundary'. Known: boundary, graph"),
        ({"capture": "boundary", "inner": "inductor"}, "boundary mode has only inner='eager'"),
        ({"capture": "boundary", "level": "aten"}, "boundary mode has only level"),
        ({"capture": "boundary", "graphs": True}, "boundary mode has only graphs"),
        ({"capture": "boundary", "batch": "s0"}, "has no symbols"),
    ],
)
def test_an_option_that_cannot_be_is_refused(options, match):
    with pytest.raises(StrategyError, match=match):
        weft.compile(Net(), **options)


class Told(nn.Module):
    """Tells the torch state of the thread that it runs in."""

    def __init__(self, inside):
        super().__init__()
        self.inside, self.seen = inside, []

    def forward(self, x):
        self.seen.append((self.inside(), threading.current_thread()))
        with weft.mark("one"):
            x = x + 1
        self.seen.append((self.inside(), threading.current_thread()))
        return x * 2


STATES = {
    "grad": (torch.enable_grad, torch.is_grad_enabled),
    "inference": (torch.inference_mode, torch.is_inference_mode_enabled),
    "autocast": (
        lambda: torch.autocast("cpu", dtype=torch.float16),
        lambda: (torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")),
    ),
    "device": (lambda: torch.device("meta"), lambda: str(torch.empty(1).device)),
    "hooks": (
        lambda: torch.utils.flop_counter.FlopCounterMode(display=False),
        lambda: torch.utils._python_dispatch._len_torch_dispatch_stack(),
    ),
}


@pytest.mark.parametrize("name", STATES)
def test_a_part_has_the_torch_state_of_the_caller(name):
    enter, inside = STATES[name]
    model = boundary(Told(inside), rules=[])
    x = inputs()
    with enter():
        wanted = inside()
        for _ in range(3):
            model(x)
    here = threading.current_thread()
    parts = [state for state, thread in model.seen if thread is not here]
    assert parts and set(parts) == {wanted}


def test_the_torch_state_of_a_part_is_its_own():
    class Switches(nn.Module):
        """Half of the rows in inference mode, in float64 by default, and in float16."""

        def __init__(self):
            super().__init__()
            self.dtypes = []

        def forward(self, x):
            mine = bool(x[0, 0] == 0)
            with torch.inference_mode(mine):
                if mine:
                    torch.set_default_dtype(torch.float64)
                with weft.mark("one"):
                    x = x + 1
                self.dtypes.append((mine, torch.empty(1).dtype, torch.is_inference_mode_enabled()))
                with weft.mark("two"):
                    x = x * 2
                self.dtypes.append((mine, torch.empty(1).dtype, torch.is_inference_mode_enabled()))
                if mine:
                    torch.set_default_dtype(torch.float32)
            return x + 0

    model = boundary(Switches(), rules=[])
    model(inputs() + 1)
    model(inputs())  # part 0 is in the modes, part 1 is not
    assert set(model.dtypes[2:]) >= {(True, torch.float64, True), (False, torch.float32, False)}
    assert len(set(model.dtypes)) == 2 and torch.get_default_dtype() is torch.float32


def test_context_variables_are_seen_in_parts():
    from torchweft.plan.context import TOLD

    model = boundary(Told(TOLD.get), rules=[])
    for _ in range(3):
        with weft.context(phase="decode"):
            model(inputs())
    assert {state.phase for state, _ in model.seen} == {"decode"}


class Angry(Net):
    angry = False

    def forward(self, x):
        x = self.layers[0](x)
        if self.angry and x.shape[0] < 8 and float(x.sum()) > self.limit:
            raise ValueError("this part does not like it")
        return self.layers[1](x)


def test_a_part_that_raises_cancels_the_others_and_raises_once():
    model, x = Angry().eval(), inputs()
    equals_eager(model, x, parts=4)
    model.limit, model.angry = float(model.layers[0](x)[2:4].sum()) - 0.01, True
    with pytest.raises(RunError, match=r"\[1\] on lane 'compute' failed: ValueError") as raised:
        model(x)
    assert isinstance(raised.value.__cause__, ValueError)
    assert "stood at" in raised.value.story
    model.angry = False
    torch.testing.assert_close(model(x), Net.forward(model, x))
    assert weft.report(model).fallbacks == ()


def threads():
    return {t for t in threading.enumerate() if t.name == "weft lane"}


def all_end():
    """Whether the threads of models that are gone end, in time."""
    gc.collect()
    until = time.monotonic() + 30
    while threads() and time.monotonic() < until:
        time.sleep(0.01)
    return not threads()


def test_threads_are_used_again_and_end_with_the_model():
    assert all_end()
    model = equals_eager(Net().eval(), inputs(), parts=3)
    first = threads()
    assert len(first) == 3
    for _ in range(5):
        model(inputs())
    assert threads() == first
    del model
    assert all_end()


class Branchy(Net):
    skip = False

    def forward(self, x):
        x = self.layers[0](x)
        return x + 1 if self.skip else self.layers[1](x)


def test_other_boundaries_fall_back_and_are_counted():
    model, x = Branchy().eval(), inputs()
    equals_eager(model, x)
    model.skip = True
    for _ in range(3):
        torch.testing.assert_close(model(x), Branchy.forward(model, x))
    ((reason, count),) = weft.report(model).fallbacks
    assert reason.startswith("sequence: the model came to 'its end' where its first run had")
    assert count == 3


def test_other_boundaries_raise_where_no_fallback_is_wanted():
    model, x = Branchy().eval(), inputs()
    equals_eager(model, x, fallback="error")
    model.skip = True
    for _ in range(2):
        with pytest.raises(StrategyError, match="sequence"):
            model(x)


def test_parts_that_differ_in_their_boundaries_fall_back():
    class ByValue(Net):
        def forward(self, x):
            return self.layers[1](self.layers[0](x)) if x[0, 0] >= self.limit else self.layers[0](x)

    model, x = ByValue().eval(), inputs()
    model.limit = 0.0
    equals_eager(model, x)
    model.limit = 0.1
    torch.testing.assert_close(model(x), model.layers[0](x))
    assert "sequence" in weft.report(model).fallbacks[0][0]


class Centred(Net):
    def forward(self, x):
        x = self.layers[0](x)
        return self.layers[1](x - x.mean(0))


REFUSED = {
    "rows are mixed": (lambda: Centred().eval(), "rows: in parts the model gives other results"),
    "batch norm in training": (
        lambda: nn.Sequential(Block(), nn.BatchNorm1d(WIDE)).train(), "mixing: aten.native_batch_n",
    ),
    "dropout": (lambda: nn.Sequential(Block(), nn.Dropout()).train(), "random: the model draws"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_split_runs_whole(name):
    make, reason = REFUSED[name]
    model, plain = make(), make()
    plain.load_state_dict(model.state_dict())
    boundary(model)
    for number in range(4):
        torch.manual_seed(number)
        wanted = plain(inputs())
        torch.manual_seed(number)
        assert torch.equal(model(inputs()), wanted)
    for name, buffer in plain.named_buffers():
        assert torch.equal(model.get_buffer(name), buffer)
    ((told, _),) = weft.report(model).fallbacks
    assert told.startswith(reason)


def test_an_output_without_rows_runs_whole():
    class Loss(Net):
        def forward(self, x):
            return super().forward(x).mean()

    model = boundary(Loss().eval())
    for _ in range(3):
        torch.testing.assert_close(model(inputs()), Loss.forward(model, inputs()))
    assert weft.report(model).fallbacks[0][0].startswith("output: output 0 of shape []")


def test_an_argument_nobody_knows_runs_whole():
    class Cache:
        pass

    class Holding(Net):
        def forward(self, x, cache):
            return super().forward(x)

    model = boundary(Holding().eval())
    for _ in range(2):
        model(inputs(), Cache())
    assert "nothing tells how a Cache falls into parts" in weft.report(model).fallbacks[0][0]


def test_a_dict_that_the_model_changes_is_the_callers():
    class Keeping(Net):
        def forward(self, x, seen):
            seen["last"] = x + 1
            return super().forward(x)

    model, seen = boundary(Keeping().eval()), {}
    for number in range(4):
        model(inputs() + number, seen)
        assert torch.equal(seen["last"], inputs() + number + 1)
    ((reason, count),) = weft.report(model).fallbacks
    assert "the model changes what it is given" in reason and count == 2


def test_calls_of_ever_new_forms_run_as_they_are(monkeypatch):
    monkeypatch.setattr("torchweft.run.eager.boundary.MAX_FORMS", 2)
    model = boundary(nn.Sequential(Block()).eval())
    for number in range(5):
        x = inputs().view(8, WIDE, *[1] * number).movedim(1, -1)
        torch.testing.assert_close(model(x), nn.Sequential.forward(model, x))
    assert weft.report(model).fallbacks == (("forms: calls come in more than 2 forms", 3),)


class KeyValue(nn.Module):
    """Each row writes into the cache and reads what was written before."""

    def __init__(self):
        super().__init__()
        self.block = Block()

    def forward(self, x, cache, position):
        cache[:, position] = self.block(x)
        return self.block(cache[:, : position + 1].sum(1))


def test_a_cache_that_is_given_is_written_row_by_row():
    model, x = KeyValue().eval(), inputs()
    plain = KeyValue().eval()
    plain.load_state_dict(model.state_dict())
    boundary(model)
    mine, wanted = torch.zeros(8, 6, WIDE), torch.zeros(8, 6, WIDE)
    for position in range(6):
        found = model(x + position, mine, position)
        torch.testing.assert_close(found, plain(x + position, wanted, position))
        torch.testing.assert_close(mine, wanted)
    report = weft.report(model)
    assert report.fallbacks == () and report.assumed == ()
    plan = weft.plans(model)[0]
    assert plan.num_parts == 2 and plan.graph.mutated == {"arg1"}


class Slots(nn.Module):
    """A cache of the model's own, which rows write into by slots; parts keep their order."""

    def __init__(self, num_slots=64):
        super().__init__()
        self.block = Block()
        self.register_buffer("cache", torch.zeros(num_slots, WIDE))

    def forward(self, x, slots):
        y = self.block(x)
        self.cache[slots] = y
        return self.block(self.cache[slots])


@pytest.mark.parametrize("strict", [False, True])
def test_a_buffer_that_all_parts_write_is_written_in_part_order(strict):
    model, x = Slots().eval(), inputs()
    plain = Slots().eval()
    plain.load_state_dict(model.state_dict())
    boundary(model, parts=4, strict=strict)
    for number in range(5):
        slots = torch.randperm(64)[:8]
        torch.testing.assert_close(model(x + number, slots), plain(x + number, slots))
        torch.testing.assert_close(model.cache, plain.cache)
    assert weft.report(model).fallbacks == ()
    (plan,) = weft.plans(model)
    assert plan.num_parts == 4 and plan.graph.mutated == {"held.cache"}
    writers = [op.name for op in plan.graph.ops if op.mutates]
    for name in writers:
        parts = [s.parts for s in plan.steps if s.kind == "run" and s.names == (name,)]
        assert parts == sorted(parts) and len(parts) == 4


def test_a_buffer_whose_rows_nobody_cuts_falls_back_with_everything_put_back():
    class ByRow(nn.Module):
        """Row i of the batch writes row i of the cache: parts would write the same rows."""

        def __init__(self):
            super().__init__()
            self.block = Block()
            self.register_buffer("cache", torch.zeros(8, WIDE))

        def forward(self, x):
            self.cache[: x.shape[0]] += self.block(x)
            return self.block(self.cache[: x.shape[0]] * 1)

    model, plain = ByRow().eval(), ByRow().eval()
    plain.load_state_dict(model.state_dict())
    boundary(model)
    for number in range(4):
        torch.testing.assert_close(model(inputs() + number), plain(inputs() + number))
        torch.testing.assert_close(model.cache, plain.cache)
    assert weft.report(model).fallbacks[0][0].startswith("rows:")


HELD = torch.zeros(64, WIDE)


class Global(Slots):
    def forward(self, x, slots):
        y = self.block(x)
        HELD[slots] = y
        return self.block(HELD[slots])


def test_state_that_nobody_knows_is_split_only_if_that_is_asked_for():
    slots = torch.arange(8)
    model = equals_eager(Global().eval(), inputs(), slots, strict=False)
    assert weft.plans(model)[0].num_parts == 2
    assert weft.report(model).assumed == ("boundary0, which changes held.0",)
    model = boundary(Global().eval())
    for _ in range(2):
        model(inputs(), slots)
    assert weft.report(model).fallbacks[0][0].startswith("strict: boundary0")


def test_modes_of_training_are_told_apart():
    model = nn.Sequential(Block(), nn.Dropout(0.5)).eval()
    equals_eager(model, inputs())
    model[1].train()
    for seed in range(3):
        torch.manual_seed(seed)
        found = model(inputs())
        torch.manual_seed(seed)
        assert torch.equal(found, nn.Sequential.forward(model, inputs()))
    assert weft.report(model).fallbacks[0][0].startswith("random")


def test_io_of_one_part_runs_beside_compute_of_another():
    def load(x):
        time.sleep(0.02)
        return x + 1

    class Loads(Net):
        def forward(self, x):
            return self.layers[1](load(self.layers[0](x)))

    model = boundary(Loads().eval(), rules=[*BLOCKS, weft.mark_function(load, uses="io")], parts=2)
    for _ in range(3):
        torch.testing.assert_close(model(inputs()), Loads.forward(model, inputs()))
    spans = {span.label: span for span in weft.trace(model, inputs()).spans}
    assert spans["load[0]"].lane == "io" and spans["block[1]"].lane == "compute"
    assert spans["block[1]"].start_s < spans["load[0]"].end_s
    assert weft.report(model).fallbacks == ()


def test_a_merged_run_is_refused(monkeypatch):
    module = importlib.import_module(
        "torchweft.plan.write.strategy"
    )  # the name in weft is the decorator
    monkeypatch.setattr(module, "_REGISTRY", dict(module._REGISTRY))

    @weft.strategy
    def merged(s):
        s.split(4)
        while ready := s.ready():
            for op, part in ready:
                if part % 2 == 0:
                    s.run(op, part, part + 1)
        s.merge()

    model = weft.compile(Net().eval(), merged, capture="boundary", rules=BLOCKS)
    for _ in range(2):
        torch.testing.assert_close(model(inputs()), Net.forward(model, inputs()))
    assert "is a merged run" in weft.report(model).fallbacks[0][0]


def test_an_edge_holds_a_part_back():
    def second_first(s):
        s.split(2)
        s.run("block", 1)
        s.run("block", 0, after=[("block", 1)])
        s.run("block.1", 0)
        s.run("block.1", 1, after=[("block.1", 0)])
        s.merge()

    model = Net().eval()
    wanted = model(inputs())
    weft.compile(model, second_first, capture="boundary", rules=BLOCKS, fallback="error")
    for _ in range(3):
        torch.testing.assert_close(model(inputs()), wanted)
    (plan,) = weft.plans(model)
    assert any(step.after for step in plan.steps)


def test_a_function_runs_in_parts_too():
    block = Block().eval()
    compiled = boundary(lambda x: block(x) * 2, rules=[])
    for _ in range(3):
        torch.testing.assert_close(compiled(inputs()), block(inputs()) * 2)
    assert weft.plans(compiled)[0].num_parts == 2


def test_a_compiled_model_inside_of_a_part_runs_as_it_is():
    inner = boundary(Net().eval())
    outer = boundary(nn.Sequential(inner, Block()).eval())
    for _ in range(3):
        torch.testing.assert_close(outer(inputs()), outer[1](Net.forward(inner, inputs())))
    assert [plan.graph.name for plan in weft.plans(inner)] == []
    assert weft.plans(outer)[0].num_parts == 2


def test_compiled_again_the_hooks_of_the_old_are_gone():
    model = equals_eager(Net().eval(), inputs())
    equals_eager(model, inputs())
    assert all(len(block._forward_hooks) == 1 for block in model.layers)
    weft.compile(model, "sequential")
    assert all(len(block._forward_hooks) == 0 for block in model.layers)


def test_calls_may_come_from_several_threads():
    model, x = equals_eager(Net().eval(), inputs()), inputs()
    wanted, found = model(x), []
    callers = [
        threading.Thread(target=torch.no_grad()(lambda: found.append(model(x)))) for _ in range(4)
    ]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    assert len(found) == 4 and all(torch.equal(each, wanted) for each in found)


class Host:
    """What a serving engine keeps beside the arguments: one global context."""

    state: dict[str, torch.Tensor] | None = None


class Attends(Net):
    def forward(self, x):
        for layer in self.layers:
            x = layer(x) + Host.state["bias"][:, None]
        return x * Host.state["scale"]


def test_side_state_is_cut_by_splitters():
    splitters = pytest.importorskip("torchweft.capture.splitters")
    fields = {"bias": splitters.by_rows, "scale": splitters.shared}
    side = splitters.Splitter(
        "forward", "attend", lambda: Host.state, lambda state: setattr(Host, "state", state), fields
    )
    model, x = Attends().eval(), inputs()
    boundary(model, parts=3, splitters=[side])
    for number in range(4):
        Host.state = whole = {"bias": torch.arange(8.0) * number, "scale": torch.tensor(2.0)}
        torch.testing.assert_close(model(x), Attends.forward(model, x))
        assert Host.state is whole
    assert weft.report(model).fallbacks == () and weft.plans(model)[0].num_parts == 3
    Host.state["other"] = torch.zeros(8)
    with pytest.raises(weft.errors.StateError, match="other"):
        model(x)

"""Blocks: repeated modules are captured once, and nobody can tell but by the clock."""

from __future__ import annotations

import copy
import gc
import io
from contextlib import nullcontext
from functools import partial
from itertools import pairwise
from types import MethodType

import pytest
import torch
from torch import nn
from torch._C._dynamo.eval_frame import _debug_get_cache_entry_list

import torchweft as weft
from torchweft.api import session_of
from torchweft.capture.blocks.blocks import Blocks, find_blocks
from torchweft.capture.tracing import Watch, compile_by
from torchweft_tools.bench.models.depth_model import DepthLayer, DepthModel


@pytest.fixture(autouse=True)
def fresh_dynamo():
    """Dynamo remembers by code which functions it gave up, and all stacks here have one code."""
    torch._dynamo.reset()


TOKENS = torch.arange(6 * 8).view(6, 8) % 128


class Block(nn.Module):
    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 16), nn.Linear(16, width)
        self.scale, self.p = 1.0, 0.0

    def inside(self, x):
        return self.down(torch.relu(self.up(x))) * self.scale

    def forward(self, x):
        return x + self.inside(x)


class Stack(nn.Module):
    def __init__(self, kind: type[nn.Module] = Block, num_layers: int = 3) -> None:
        super().__init__()
        self.layers = nn.ModuleList(kind() for _ in range(num_layers))
        self.head = nn.Linear(8, 4)

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def bodies_of(model):
    return [session_of(model).pieces[-1].captured.bodies[op.name] for op in ops_of(model)]


def ops_of(model):
    return session_of(model).pieces[-1].graph.ops


@torch.no_grad()
@pytest.mark.parametrize("strategy", ["sequential", weft.overlap(parts=2)])
def test_layers_are_ops_of_one_graph_that_share_a_body(strategy):
    model = DepthModel(4).eval()
    wanted = model(TOKENS)
    weft.compile(model, strategy)
    torch.testing.assert_close(
        model(TOKENS), wanted, rtol=0, atol=0 if strategy == "sequential" else 1e-5
    )
    layers = [body.code for body in bodies_of(model) if len(body.examples) > 9]
    assert len(layers) == 4
    assert len(set(map(id, layers))) == 1
    assert weft.report(model).unblocked == ""
    assert weft.plans(model)[0].num_parts == (1 if strategy == "sequential" else 2)


@torch.no_grad()
def test_each_block_has_its_own_weights():
    torch.manual_seed(0)
    model, x = Stack(num_layers=5).eval(), torch.randn(4, 8)
    wanted = model(x)
    weft.compile(model, "sequential")
    assert torch.equal(model(x), wanted)
    reads = [set(op.reads) for op in ops_of(model)]
    assert len(reads) == 6
    for first, second in pairwise(reads):
        assert not first & second


CHANGES = {
    "a number": lambda layer: setattr(layer, "scale", 3.0),
    "a weight": lambda layer: setattr(layer.up, "weight", nn.Parameter(torch.ones(16, 8))),
    "numbers in a weight": lambda layer: layer.up.weight.data.fill_(0.5),
    "a module": lambda layer: setattr(layer, "up", nn.Linear(8, 16, bias=False)),
    "another class": lambda layer: setattr(layer, "down", nn.Sequential(layer.down, nn.ReLU())),
}


@torch.no_grad()
@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("which", [0, 1, 2])
def test_a_change_in_any_block_is_noticed(change, which):
    torch.manual_seed(0)
    model, x = Stack().eval(), torch.randn(4, 8)
    weft.compile(model, "sequential")
    before = model(x)
    assert weft.report(model).unblocked == ""
    CHANGES[change](model.layers[which])
    wanted = model.forward(x)
    assert not torch.equal(before, wanted)
    assert torch.equal(model(x), wanted)


@torch.no_grad()
def test_nothing_of_the_model_is_changed():
    model, x = Stack().eval(), torch.randn(4, 8)
    forward, state = Block.forward, list(model.state_dict())
    seen = {name: set(vars(module)) for name, module in model.named_modules()}
    weft.compile(model, "sequential")
    wanted = model(x)
    assert Block.forward is forward
    assert not vars(forward)
    assert list(model.state_dict()) == state
    now = {name: set(vars(module)) for name, module in model.named_modules()}
    assert now == seen | {"": seen[""] | {"_compiled_call_impl"}}
    twin = copy.deepcopy(model)
    assert torch.equal(twin(x), wanted)
    torch.save(model, file := io.BytesIO())
    file.seek(0)
    assert torch.equal(torch.load(file, weights_only=False)(x), wanted)


@torch.no_grad()
def test_a_known_call_is_not_traced_again():
    model = Stack().eval()
    weft.compile(model, "sequential")
    for rows in (4, 5, 6, 4, 7):
        model(torch.randn(rows, 8))
    assert len(session_of(model).pieces) == 1


class Breaks(Block):
    def forward(self, x):
        torch._dynamo.graph_break()
        return x + self.inside(x)


class Writes(Block):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(8))

    def forward(self, x):
        self.seen.add_(1)
        return x + self.inside(x) + self.seen


class Draws(Block):
    def forward(self, x):
        return x + self.inside(torch.nn.functional.dropout(x, 0.5, training=True))


class HandsBack(Block):
    def forward(self, x):
        x.relu_()
        return x.view(-1, 8)


@torch.no_grad()
@pytest.mark.parametrize("kind", [Breaks, HandsBack])
def test_what_cannot_be_a_block_is_captured_without(kind):
    report = weft.report(check_against_a_twin(kind))
    assert report.unblocked
    assert f"captured without blocks: {report.unblocked}" in str(report)


@torch.no_grad()
@pytest.mark.parametrize("kind", [Writes, Draws])
def test_blocks_may_write_and_draw(kind):
    assert weft.report(check_against_a_twin(kind)).unblocked == ""


def check_against_a_twin(kind):
    """The model in parts gives what its copy gives, call after call, and leaves the same state."""
    torch.manual_seed(0)
    model, x = Stack(kind).eval(), torch.randn(4, 8)
    twin = copy.deepcopy(model)
    weft.compile(model, weft.overlap(parts=2))
    for _ in range(3):
        torch.manual_seed(1)
        wanted = twin(x.clone())
        torch.manual_seed(1)
        torch.testing.assert_close(model(x.clone()), wanted)
    for name, buffer in model.named_buffers():
        assert torch.equal(buffer, twin.get_buffer(name))
    return model


@torch.no_grad()
def test_nothing_runs_twice_when_blocks_are_given_up():
    class Counts(Stack):
        num_calls = 0

        def forward(self, x, log):
            log.append(1)
            log[0].add_(1)
            torch._dynamo.graph_break()
            return super().forward(x)

    model, log = Counts(Breaks).eval(), [torch.zeros(1)]
    weft.compile(model, "sequential")
    model(torch.randn(4, 8), log)
    assert float(log[0]) == 1.0
    assert len(log) == 2


def test_gradients_flow_as_ever():
    torch.manual_seed(0)
    model, x = Stack(), torch.randn(4, 8)
    model(x).sum().backward()
    wanted = [parameter.grad.clone() for parameter in model.parameters()]
    model.zero_grad()
    weft.compile(model, "sequential")
    model(x).sum().backward()
    for parameter, grad in zip(model.parameters(), wanted, strict=True):
        torch.testing.assert_close(parameter.grad, grad)
    assert session_of(model).pieces[0].graph.level == "aten"
    assert "gradients are wanted" in weft.report(model).unblocked
    with torch.no_grad():
        model(x)
    assert weft.report(model).unblocked == ""


class Marked(Block):
    def forward(self, x):
        with weft.mark("inside", uses="memory"):
            y = self.inside(x)
        return x + y


RULES = {
    "in the model": (Marked, (), {"inside": 3}),
    "a class": (Block, [weft.mark_module(Block, "block")], {"block": 3}),
    "a class inside": (Block, [weft.mark_module(nn.Linear, "linear")], {"linear": 7}),
    "a path": (Block, [weft.mark_path(r"layers\.\d+\.up", "up")], {"up": 3}),
    "one path": (Block, [weft.mark_path(r"layers\.1\.up", "up")], {"up": 1}),
    "a function": (Block, [weft.mark_function(Block.inside, "inside")], {"inside": 3}),
    "an op": (Block, [weft.mark_op("relu", "relu")], {"relu": 3}),
}


@torch.no_grad()
@pytest.mark.parametrize("rules", RULES)
def test_marks_make_the_same_ops_with_blocks_and_without(rules):
    kind, given, counts = RULES[rules]
    torch.manual_seed(0)
    model, x = Stack(kind).eval(), torch.randn(4, 8)
    wanted = model(x)
    for blocks in (False, True):
        weft.compile(model, "sequential", rules=given, blocks=blocks)
        assert torch.equal(model(x), wanted)
        marks = [op.mark for op in ops_of(model) if op.mark]
        assert {mark: marks.count(mark) for mark in marks} == counts


@torch.no_grad()
def test_a_mark_around_the_stack_makes_one_op():
    class Whole(Stack):
        def forward(self, x):
            with weft.mark("stack"):
                for layer in self.layers:
                    x = layer(x)
            return self.head(x)

    model, x = Whole().eval(), torch.randn(4, 8)
    wanted = model(x)
    weft.compile(model, "sequential")
    assert torch.equal(model(x), wanted)
    without = copy.deepcopy(model)
    weft.compile(without, "sequential", blocks=False)
    without(x)
    assert [op.mark for op in ops_of(model)] == [op.mark for op in ops_of(without)]


@torch.no_grad()
def test_a_mark_on_one_instance_marks_one():
    model, x = Stack().eval(), torch.randn(4, 8)
    wanted = model(x)
    weft.compile(model, "sequential", rules=[weft.mark_module(model.layers[1], "second")])
    assert torch.equal(model(x), wanted)
    assert [op.mark for op in ops_of(model) if op.mark] == ["second"]


@torch.no_grad()
def test_modes_around_the_stack_reach_into_blocks():
    class Autocast(Stack):
        def forward(self, x):
            with torch.autocast("cpu", dtype=torch.float64, enabled=False):
                return super().forward(x)

    model, x = Autocast().eval(), torch.randn(4, 8)
    wanted = model(x)
    weft.compile(model, "sequential")
    assert torch.equal(model(x), wanted)
    assert weft.report(model).unblocked == ""


def test_blocks_are_repeated_modules_of_the_user():
    assert find_blocks(DepthModel(2)) == [DepthLayer]
    assert find_blocks(Stack(num_layers=1)) == []
    assert find_blocks(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))) == []
    wide = nn.ModuleList([Block(8), Block(4)])
    assert find_blocks(wide) == []
    nested = nn.ModuleList([Stack(), Stack()])
    assert find_blocks(nested) == [Stack]
    patched = Stack()
    for layer in patched.layers:
        layer.forward = lambda x: x
    assert find_blocks(patched) == []
    heirs = Stack(type("Heir", (Block,), {}))
    assert find_blocks(heirs) == [Block]


class ByInstance(Blocks):
    """Asks for regions by instance, as one may be tempted to: Dynamo then mixes up the weights."""

    def wrap(self, *, at_start):
        super().wrap(at_start=at_start)
        for owner, plain in self._plain.items():
            region, owner.forward = owner.forward, plain
            for layer in self.model.layers:
                layer.forward = MethodType(region, layer)

    def unwrap(self):
        super().unwrap()
        for layer in self.model.layers:
            vars(layer).pop("forward", None)


@torch.no_grad()
def test_weights_of_another_block_are_refused(monkeypatch):
    monkeypatch.setattr("torchweft.capture.blocks.blocks.ask_for_likeness", nullcontext)
    torch.manual_seed(0)
    model, x = Stack().eval(), torch.randn(4, 8)
    wanted = model(x)
    weft.compile(model, "sequential")
    session = session_of(model)
    session.blocks = ByInstance(model)
    make = partial(compile_by, session.backend, model._call_impl)
    assert torch.equal(Watch(make, model, blocks=session.blocks)((x,), {}), wanted)
    assert "block:" in session.blocks.refused


def guards_of(model, x):
    """How many lines Dynamo's newest guards of a model have."""
    with torch.no_grad():
        model(x)
    entries = _debug_get_cache_entry_list(type(model).forward.__code__)
    return str(entries[0].guard_manager).count("\n")


def test_a_model_has_hardly_more_guards_than_by_torch_compile():
    torch._dynamo.reset()
    model, other, x = Stack(Block, 16).eval(), Stack(Block, 16).eval(), torch.randn(4, 8)
    other.compile(backend="eager", dynamic=True)
    wanted = guards_of(other, x)
    assert guards_of(weft.compile(model, "sequential"), x) < 1.05 * wanted
    model.layers[3].register_forward_hook(lambda module, args, made: made * 2)
    with torch.no_grad():
        assert torch.equal(model(x), model.forward(x))
    assert guards_of(model, x) > 1.2 * wanted, "hooks are guarded now"


def test_what_was_there_before_is_collected_again_behind_a_capture():
    weft.compile(model := Stack().eval(), "sequential")
    with torch.no_grad():
        model(torch.randn(4, 8))
    assert gc.get_freeze_count() == 0

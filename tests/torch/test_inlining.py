"""Blocks that wait for other ranks: traced once, and their ops are those of the model without."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from anatomy import anatomy, num_bodies
from torch import nn
from torch.distributed import _functional_collectives as funcol
from torch.nn import functional as F

import torchweft as weft
from torchweft.api import session_of
from torchweft.capture.blocks import blocks as inlining

WIDE = 8


@pytest.fixture(scope="module", autouse=True)
def group():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture(autouse=True)
def fresh():
    torch._dynamo.reset()
    torch.manual_seed(0)
    with torch.no_grad():
        yield
    torch._dynamo.reset()


def reduced(x):
    return funcol.all_reduce(x, "sum", dist.group.WORLD)


class Layer(nn.Module):
    """Attention and a pair of products, a sum over ranks behind each, as in a parallel Llama."""

    def __init__(self):
        super().__init__()
        self.norm, self.qkv = nn.LayerNorm(WIDE), nn.Linear(WIDE, 3 * WIDE)
        self.out = nn.Linear(WIDE, WIDE)
        self.up, self.down = nn.Linear(WIDE, 2 * WIDE), nn.Linear(2 * WIDE, WIDE)

    def attend(self, x):
        q, k, v = self.qkv(self.norm(x)).chunk(3, -1)
        return self.out(F.scaled_dot_product_attention(q, k, v))

    def grow(self, x):
        return self.down(F.gelu(self.up(x)))

    def forward(self, x):
        x = x + reduced(self.attend(x))
        return x + reduced(self.grow(x))


class InPlace(Layer):
    def forward(self, x):
        mixed = self.attend(x)
        dist.all_reduce(mixed)
        x = x + mixed
        grown = self.grow(x)
        dist.all_reduce(grown)
        return x.add_(grown)


class Gathered(Layer):
    """What comes before the collective belongs to what another layer did behind its own."""

    def forward(self, x):
        every = funcol.all_gather_single(self.norm(x), 1, dist.group.WORLD)
        return x + funcol.reduce_scatter_single(self.grow(every), "sum", 1, dist.group.WORLD)


class Masked(Layer):
    """A mask that needs no row, and an op that mixes rows, in every layer."""

    def forward(self, x):
        mask = torch.ones(x.shape[1], x.shape[1]).tril()
        x = x + reduced(self.attend(x) * mask.sum(-1, keepdim=True))
        return x + reduced(self.grow(x - x.mean(0, keepdim=True)))


class Marked(Layer):
    def forward(self, x):
        with weft.mark("attention", uses="memory"):
            mixed = self.attend(x)
        x = x + reduced(mixed)
        with weft.mark("mlp"):
            grown = self.grow(x)
        return x + reduced(grown)


class Read(Layer):
    """Nobody is talked to, but a mark says that it waits for a disk."""

    def forward(self, x):
        with weft.mark("read", uses="io"):
            y = self.attend(x)
        return x + self.grow(y)


class Forgets(Layer):
    """How many rows are left depends on the data."""

    def forward(self, x):
        kept = x[x.sum((1, 2)) > -1e9]
        return x + reduced(self.attend(x)) + kept.sum()


class Stack(nn.Module):
    def __init__(self, kind, num_layers):
        super().__init__()
        self.layers = nn.ModuleList(kind() for _ in range(num_layers))
        self.head = nn.Linear(WIDE, 4)

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return self.head(x.flatten(1, 1))


class Outside(Stack):
    """The blocks talk to nobody; who calls them does."""

    def forward(self, x):
        for layer in self.layers:
            x = x + reduced(layer.attend(x))
            x = x + reduced(layer(x))
        return self.head(x)


class Whole(Stack):
    """A mark around all of it."""

    def forward(self, x):
        with weft.mark("stack"):
            for layer in self.layers:
                x = layer(x)
        return self.head(x)


class Autocast(Stack):
    """A mode of torch around all of it."""

    def forward(self, x):
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=False):
            return super().forward(x)


class Plain(Layer):
    def forward(self, x):
        return self.grow(self.norm(x))


def compiled(kind, num_layers=3, *, stack=Stack, strategy="sequential", **options):
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = stack(kind, num_layers).eval()
    return weft.compile(model, strategy, **options)


def captured_of(model):
    (piece,) = session_of(model).pieces
    return piece.captured


KINDS = [Layer, InPlace, Gathered, Masked, Marked, Read]
RULES = {
    "none": (),
    "a class": [weft.mark_module(nn.Linear, "linear")],
    "a block": [weft.mark_module(Layer, "layer")],
    "a path": [weft.mark_path(r"layers\.\d+\.up", "up", uses="memory")],
    "a function": [weft.mark_function(Layer.grow, "grow")],
    "an op": [weft.mark_op("gelu", "gelu")],
}
X = torch.linspace(-1, 1, 6 * 5 * WIDE).view(6, 5, WIDE).sin()


def check_same(kind, **options):
    """The same graph with blocks and without, and the same bits."""
    found = {}
    for blocks in (False, True):
        model = compiled(kind, blocks=blocks, **options)
        outputs = [model(X), model(X), model(X[:4])]
        assert weft.report(model).unblocked == ""
        assert weft.report(model).fallbacks == ()
        found[blocks] = (anatomy(captured_of(model)), outputs)
    assert found[True][0] == found[False][0]
    for with_blocks, without in zip(found[True][1], found[False][1], strict=True):
        assert torch.equal(with_blocks, without)


@pytest.mark.parametrize("kind", KINDS)
def test_ops_are_those_of_the_model_without_blocks(kind):
    check_same(kind, strategy=weft.overlap(parts=2))


@pytest.mark.parametrize("rules", RULES)
def test_marks_make_the_same_ops(rules):
    check_same(Layer, rules=RULES[rules])


@pytest.mark.parametrize(("kind", "stack"), [(Plain, Outside), (Layer, Whole), (InPlace, Autocast)])
def test_what_stands_around_blocks_makes_the_same_ops(kind, stack):
    check_same(kind, stack=stack, strategy=weft.overlap(parts=2))


@pytest.mark.parametrize("kind", [Layer, InPlace])
def test_outputs_are_those_of_eager_under_jitter(kind):
    model = compiled(kind, strategy=weft.overlap(parts=3), jitter=True)
    wanted = model.forward(X)
    for _ in range(3):
        torch.testing.assert_close(model(X), wanted)
    assert torch.equal(model(X), model(X))


@pytest.mark.parametrize("kind", [Layer, InPlace, Masked])
def test_deeper_models_have_no_more_bodies(kind):
    counts = []
    for num_layers in (3, 6):
        model = compiled(kind, num_layers)
        model(X)
        counts.append(num_bodies(captured_of(model)))
    assert counts[0] == counts[1]


@pytest.mark.filterwarnings("ignore:.*torch.jit.*is deprecated")  # Inductor's own imports
def test_inductor_compiles_no_more_for_deeper_models():
    counts = []
    for num_layers in (3, 5):
        model = compiled(Layer, num_layers, strategy=weft.overlap(parts=2), inner="inductor")
        torch.testing.assert_close(model(X), model.forward(X), rtol=1e-4, atol=1e-4)
        counts.append(weft.report(model).pieces[0].num_compiled)
    assert counts[0] == counts[1] > 0


@pytest.fixture
def matched(monkeypatch):
    """Of each block that could be known from the first, whether it was like that."""
    found = []
    match = inlining._Twin.match
    monkeypatch.setattr(inlining._Twin, "match", lambda *a: found.append(match(*a)) or found[-1])
    return found


@pytest.mark.parametrize("kind", [Layer, InPlace, Marked])
def test_only_the_first_block_is_looked_at(kind, matched):
    compiled(kind, 5)(X)
    assert matched == [True] * 4


def test_a_block_whose_sizes_hang_on_data_is_looked_at_again(matched):
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        model = compiled(Forgets, 3)
        assert torch.equal(model(X), model.forward(X))
    assert weft.report(model).unblocked == ""
    assert matched == []


def test_ops_end_at_the_borders_of_blocks_far_from_a_collective():
    class Ends(Stack):
        def forward(self, x):
            for layer in self.layers:
                x = layer(x)
            return reduced(self.head(x)) + 1

    model = compiled(Plain, 6, stack=Ends)
    assert torch.equal(model(X), model.forward(X))
    ops = captured_of(model).graph.ops
    assert len(ops) == 5 + 3  # five blocks, the last one with the head, the collective, the sum
    assert len({op.body for op in ops}) == 4


def test_blocks_under_marks_of_their_own_are_captured_each_by_itself():
    class Named(Stack):
        def forward(self, x):
            for number, layer in enumerate(self.layers):
                with weft.mark(f"layer{number}"):
                    x = layer(x)
            return self.head(x)

    model = compiled(Layer, 3, stack=Named)
    assert torch.equal(model(X), model.forward(X))
    marks = [op.mark for op in captured_of(model).graph.ops if op.collective is None]
    assert set(marks) == {"layer0", "layer1", "layer2", None}
    assert weft.report(model).unblocked == ""

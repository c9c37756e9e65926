"""Rewrites in one process: products in pieces, names, strategies that ask, what is refused."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch.distributed import _functional_collectives as funcol
from torch.nn import functional as F

import torchweft as weft
from torchweft.api import session_of
from torchweft.errors import CaptureError, StrategyError
from torchweft.plan.write.strategy import as_strategy

pytestmark = pytest.mark.usefixtures("fresh")
WIDE = 18
X = torch.arange(4 * 3 * WIDE).reshape(4, 3, WIDE).sin()


@pytest.fixture(autouse=True, scope="module")
def alone():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


class Down(torch.nn.Module):
    """A row-parallel product, as in a tensor-parallel model."""

    def __init__(self, wide, bias, in_place):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(WIDE, wide) / wide**0.5)
        self.bias = torch.nn.Parameter(torch.randn(WIDE)) if bias else None
        self.in_place = in_place

    def forward(self, x):
        y = F.linear(x, self.weight, self.bias)
        if self.in_place:
            dist.all_reduce(y)
            return y
        return funcol.all_reduce(y, "sum", dist.group.WORLD)


class Layer(torch.nn.Module):
    """A gated layer, as Llama's."""

    def __init__(self, bias=False, in_place=True):
        super().__init__()
        self.norm = torch.nn.RMSNorm(WIDE)
        self.gate, self.up = (torch.nn.Linear(WIDE, 26, bias=bias) for _ in range(2))
        self.down_proj = Down(26, bias, in_place)

    def forward(self, x):
        h = self.norm(x)
        return x + self.down_proj(F.silu(self.gate(h)) * self.up(h))


class Model(torch.nn.Module):
    def __init__(self, layers=2, **how):
        super().__init__()
        self.layers = torch.nn.ModuleList(Layer(**how) for _ in range(layers))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


class Conv(torch.nn.Module):
    """A product by `addmm`, its weight the other way round, as GPT-2's Conv1D."""

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(WIDE, 10))
        self.bias = torch.nn.Parameter(torch.randn(10))

    def forward(self, x):
        shape = (*x.size()[:-1], 10)
        y = torch.addmm(self.bias, x.view(-1, x.size(-1)), self.weight).view(shape)
        return funcol.all_reduce(y, "sum", dist.group.WORLD).relu()


def ops_of(model):
    """The graph that the first plan of a model is of."""
    return weft.plans(model)[0].graph


def woven(model, *rewrites, strategy="sequential", **options):
    """A compiled model, called three times and compared; with what its first call has shown."""
    model = model.eval() if isinstance(model, torch.nn.Module) else model
    wanted = model(X)
    model = weft.compile(model, strategy, fallback="error", rewrites=rewrites, **options)
    for _ in range(3):
        torch.testing.assert_close(model(X), wanted)
    (piece,) = session_of(model).pieces
    proofs = [each.proof for each in piece.variants.pieces if each.proof.verdict]
    assert [proof.refused for proof in proofs] == [None]
    assert weft.report(model).fallbacks == ()
    return model, proofs[0].verdict


@pytest.mark.parametrize("how", [{}, {"bias": True}, {"in_place": False}])
@pytest.mark.parametrize("blocks", [True, False])
def test_a_product_and_its_collective_are_cut_by_columns(how, blocks):
    model, verdict = woven(Model(3, **how), weft.chunk("down_proj", 4), blocks=blocks)
    graph, plan = ops_of(model), weft.plans(model)[0]
    for layer in range(3):
        for number in range(1, 5):
            product = graph.op[f"layers.{layer}.down_proj.{number}of4"]
            talk = graph.op[f"layers.{layer}.down_proj.all_reduce.{number}of4"]
            assert (product.layer, product.block) == (layer, "Layer")
            assert graph.maker[talk.touched[0]] is product
            assert talk.two_phase and product.rows == talk.rows == "row-wise"
            first = graph.op[f"layers.0.down_proj.{number}of4"]
            assert graph.structure[product.name] == graph.structure[first.name]
    assert verdict
    line = "history rewrite chunk(down_proj, 4 pieces, dim -1): 3 linear and all_reduce"
    assert line in str(plan)
    made = [graph.op[f"layers.0.down_proj.{number}of4"].makes[0] for number in (1, 2, 3, 4)]
    assert [str(graph.value[name].shape[-1]) for name in made] == ["4", "5", "4", "5"]


def test_pieces_of_whole_blocks_of_columns_are_bit_equal():
    model = torch.nn.Sequential(torch.nn.Linear(WIDE, 128, bias=False), torch.nn.Tanh())
    _, verdict = woven(model, weft.chunk("0", 4))
    assert verdict.equal == "bit-equal", verdict


def test_a_collective_is_in_flight_beside_the_next_product():
    model, _ = woven(Model(), weft.chunk("down_proj", 3))
    labels = [step.label for step in weft.plans(model)[0].steps]
    name = "layers.1.down_proj"
    order = [f"issue {name}.all_reduce.1of3", f"{name}.2of3", f"complete {name}.all_reduce.1of3"]
    assert sorted(map(labels.index, order)) == list(map(labels.index, order)), labels


def test_pieces_run_in_parts_too():
    model, _ = woven(Model(), weft.chunk("down_proj", 2), strategy="overlap")
    plan = weft.plans(model)[0]
    assert plan.num_parts == 2
    assert {s.parts for s in plan.steps if "layers.0.down_proj.2of2" in s.names} == {(0, 1), (1, 2)}


def test_rows_are_cut_where_their_number_is_known():
    model, verdict = woven(Model(), weft.chunk("layers.1.down_proj", 2, dim=1))
    graph = ops_of(model)
    assert verdict.equal == "bit-equal", verdict
    assert "layers.1.down_proj.all_reduce.2of2" in graph.op
    assert not [name for name in graph.op if name.startswith("layers.0") and name.endswith("2of2")]


def test_addmm_is_cut():
    model, verdict = woven(torch.nn.Sequential(Conv()), weft.chunk("all_reduce", 4))
    assert sum(op.collective is not None for op in ops_of(model).ops) == 4
    assert verdict


def test_a_product_without_a_collective_is_cut():
    model, verdict = woven(Model(), weft.chunk("layers.*.gate", 3))
    assert verdict and "layers.1.gate.3of3" in ops_of(model).op


def test_layers_that_share_a_weight():
    model = Model(2)
    model.layers[1].down_proj.weight = model.layers[0].down_proj.weight
    woven(model, weft.chunk("down_proj", 4))


@pytest.mark.filterwarnings("ignore:.*torch.jit.script_method.*:DeprecationWarning")
def test_bodies_by_inductor_are_compiled_once_for_equal_layers():
    model, _ = woven(Model(3), weft.chunk("down_proj", 2), inner="inductor")
    graph = ops_of(model)
    same = {graph.structure[f"layers.{layer}.down_proj.2of2"] for layer in range(3)}
    assert len(same) == 1


def test_marks_stay():
    rules = [weft.mark_module(Down, "down")]
    model, _ = woven(Model(), weft.chunk("down", 2), rules=rules)
    marked = [op for op in ops_of(model).ops if op.mark == "down" and op.collective is None]
    first, second = ["down.1of2", "down.2of2", "down"], ["down.1of2.1", "down.2of2.1", "down.1"]
    assert [op.name for op in marked] == first + second  # the last puts them together


@as_strategy
def by_chunks(s, *, pieces=3):
    """What a strategy asks for, it gets before it records anything."""
    talks = [op for op in s.graph.ops if op.collective is not None]
    s.rewrite(weft.chunk(talks, pieces))
    assert len([op for op in s.graph.ops if op.collective]) == pieces * len(talks)
    s.sequential()


def test_a_strategy_asks_for_a_rewrite():
    model, _ = woven(Model(), strategy=by_chunks(pieces=4))
    (piece,) = session_of(model).pieces
    assert len(piece.graph.ops) < len(ops_of(model).ops)  # the graph itself is as it was
    assert "layers.1.down_proj.all_reduce.4of4" in ops_of(model).op
    assert str(weft.plans(model)[0]).count("history rewrite chunk(") == 1
    for rows in (2, 3, 4, 3):
        torch.testing.assert_close(model(X[:rows]), Model.forward(model, X[:rows]))
    assert weft.check(model, X)


def test_a_strategy_rewrites_first():
    def late(s):
        s.split(2)
        s.rewrite(weft.chunk("down_proj", 2))

    model = weft.compile(Model().eval(), late, fallback="error")
    with pytest.raises(StrategyError, match="rewritten first"):
        model(X)


@pytest.mark.parametrize(
    ("rewrite", "message"),
    [
        (weft.chunk("down_prj", 2), "unknown op or module 'down_prj'.*Known: layers"),
        (weft.chunk("norm", 2), "no collective that one feeds, only rms_norm"),
        (weft.chunk("down_proj", 20), "18 entries, fewer than 20 pieces"),
        (weft.chunk("down_proj", 2, dim=0), "another number in each call.*s.split"),
        (weft.chunk("down_proj", 2, dim=5), "has no dim 5"),
    ],
)
def test_what_finds_nothing_to_do_raises(rewrite, message):
    model = weft.compile(Model().eval(), "sequential", rewrites=[rewrite])
    with pytest.raises(CaptureError, match=message):
        model(X)

    def asks(s):
        s.rewrite(rewrite)
        s.sequential()

    model = weft.compile(Model().eval(), asks, fallback="error")
    with pytest.raises(StrategyError, match=message):
        model(X)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: weft.chunk("a", 1), "number of pieces must be 2 to 64"),
        (lambda: weft.chunk("a", 2, dim="rows"), "a dim of the result, such as -1"),
        (lambda: weft.chunk("a b", 2), "neither an op nor a name"),
        (lambda: weft.chunk([], 2), "no op is named"),
        (lambda: weft.compile(Model(), rewrites=["chunk"]), "weft.chunk"),
        (lambda: weft.compile(Model(), rewrites=[weft.chunk("a", 2)], capture="boundary"),
         "boundary mode has no graph"),
    ],
)  # fmt: skip
def test_what_is_no_rewrite_is_refused(make, message):
    with pytest.raises(StrategyError, match=message):
        make()


CALLS = []


@torch.library.custom_op("weft_test::unsteady", mutates_args=())
def unsteady(x: torch.Tensor) -> torch.Tensor:
    """Another number in each call."""
    CALLS.append(1)
    return x + len(CALLS)


@unsteady.register_fake
def _(x):
    return torch.empty_like(x)


def test_a_rewritten_graph_that_differs_is_not_used():
    def model(x):
        return unsteady(F.linear(x, torch.ones(WIDE, WIDE)))

    options = {"rewrites": [weft.chunk("linear", 2)], "strict": True}
    compiled = weft.compile(model, "sequential", **options)
    assert compiled(X).shape == X.shape
    ((why, count),) = weft.report(compiled).fallbacks
    assert "gate: the rewritten graph gives other numbers" in why and count == 1
    compiled(X)
    assert weft.report(compiled).fallbacks[0][1] == 2
    torch._dynamo.reset()
    with pytest.raises(StrategyError, match="gate"):
        weft.compile(model, "sequential", fallback="error", **options)(X)


@torch.library.custom_op("weft_test::growing", mutates_args=())
def growing(x: torch.Tensor) -> torch.Tensor:
    """More in each call."""
    CALLS.append(1)
    return x * len(CALLS)


@growing.register_fake
def _(x):
    return torch.empty_like(x)


@pytest.mark.parametrize("scale", [1.0, 3e-5])
def test_small_numbers_that_differ_are_seen(scale):
    def model(x):
        return growing(F.linear(x, torch.eye(WIDE))) * scale

    compiled = weft.compile(model, "sequential", rewrites=[weft.chunk("linear", 2)], strict=True)
    compiled(X)
    ((why, _),) = weft.report(compiled).fallbacks
    assert "gate: the rewritten graph gives other numbers" in why


def test_a_call_of_zeros_proves_nothing():
    def model(x):
        return growing(F.linear(x, torch.eye(WIDE)))

    compiled = weft.compile(model, "sequential", rewrites=[weft.chunk("linear", 2)], strict=True)
    compiled(torch.zeros_like(X))
    assert weft.report(compiled).fallbacks == ()
    compiled(X)
    ((why, _),) = weft.report(compiled).fallbacks
    assert "gate: the rewritten graph gives other numbers" in why


def test_products_that_read_pieces_or_stand_between_pieces():
    def one_behind_the_other(x):
        y = funcol.all_reduce(F.linear(x, torch.eye(WIDE)), "sum", dist.group.WORLD)
        return funcol.all_reduce(F.linear(y, torch.eye(WIDE)), "sum", dist.group.WORLD)

    def side_by_side(x):
        y, z = F.linear(x, torch.eye(WIDE)), F.linear(x + 1, torch.eye(WIDE))
        y = funcol.all_reduce(y, "sum", dist.group.WORLD)
        return funcol.all_reduce(z, "sum", dist.group.WORLD) + y

    for model in (one_behind_the_other, side_by_side):
        for dim in (-1, 1):
            torch._dynamo.reset()
            woven(model, weft.chunk("all_reduce", 2, dim))


def test_a_squeeze_that_would_drop_a_piece_of_one_column():
    def model(x):
        return F.linear(x[:, :1], torch.eye(WIDE)[:3]).squeeze().relu()

    compiled = weft.compile(model, "sequential", rewrites=[weft.chunk("linear", 3)])
    torch.testing.assert_close(compiled(X), model(X))

    def reduced(x):
        y = F.linear(x[:, :1], torch.eye(WIDE)[:3]).squeeze()
        return funcol.all_reduce(y, "sum", dist.group.WORLD)

    compiled = weft.compile(reduced, "sequential", rewrites=[weft.chunk("linear", 3)])
    with pytest.raises(CaptureError, match="would drop the dim of a piece of one"):
        compiled(X)


def test_caches_are_written_once_by_the_first_call():
    class Cache(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.layer, self.at = Model(1), 0
            self.register_buffer("kept", torch.zeros(4, 3, WIDE))

        def forward(self, x):
            self.kept.add_(self.layer(x))
            return self.kept * 2

    model, plain = Cache().eval(), Cache().eval()
    plain.load_state_dict(model.state_dict())
    weft.compile(model, "sequential", rewrites=[weft.chunk("down_proj", 2)])
    for _ in range(3):
        torch.testing.assert_close(model(X), plain(X))
    assert session_of(model).pieces[0].proof.verdict
    assert weft.report(model).fallbacks == ()


def test_backends_take_rewrites():
    model = Model().eval()
    wanted = model(X)
    options = {"strategy": "sequential", "rewrites": [weft.chunk("down_proj", 2)]}
    compiled = torch.compile(model, backend="weft", options=options)
    torch.testing.assert_close(compiled(X), wanted)


def test_gradients_pass_through_pieces():
    model, plain = Model(in_place=False), Model(in_place=False)
    plain.load_state_dict(model.state_dict())
    weft.compile(model, "overlap", rewrites=[weft.chunk("down_proj", 2)], fallback="error")
    with torch.enable_grad():
        for each in (model, plain):
            each(X).square().sum().backward()
    for one, other in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad)


def test_a_rewritten_graph_whose_call_cannot_be_split_runs_whole():
    """Two rows make no three parts: that call is a fallback, counted, and others are none."""

    def in_three(s):
        s.rewrite(weft.chunk("down_proj", 2))
        s.split([1, 2] if s.context.batch == 3 else 3)
        while ready := s.ready():
            for op, part in ready:
                s.run(op, part)
        s.merge()

    model = Model().eval()
    wanted = model(X)
    weft.compile(model, in_three)
    for rows in (4, 2, 3, 4):
        torch.testing.assert_close(model(X[:rows]), wanted[:rows])
    assert weft.report(model).num_uncaptured == 0


def test_comet_leaves_alone_what_it_cannot_cut():
    model = weft.compile(torch.nn.Sequential(torch.nn.Linear(WIDE, 4)), "comet", fallback="error")
    assert model(X).shape == (4, 3, 4)
    assert "history sequential: no collective to cut" in str(weft.plans(model)[0])
    model = weft.compile(Model().eval(), weft.comet(min_tokens=99), fallback="error")
    model(X)
    assert "fewer than 99" in str(weft.plans(model)[0])

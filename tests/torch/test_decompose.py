"""`decompose` and `fuse` in one process: what moves to shares, what stops it, ops as one."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch.distributed import _functional_collectives as funcol
from torch.nn import functional as F

import torchweft as weft
from torchweft.api import session_of
from torchweft.errors import CaptureError, StrategyError

pytestmark = pytest.mark.usefixtures("fresh")
WIDE = 12
X = torch.arange(5 * 3 * WIDE).reshape(5, 3, WIDE).sin()


@pytest.fixture(autouse=True, scope="module")
def alone():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def reduced(y, how="sum"):
    return funcol.all_reduce(y, how, dist.group.WORLD)


def reduced_in_place(y):
    dist.all_reduce(y)
    return y


class ByHand(torch.nn.Module):
    """An RMS norm as models write it."""

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.linspace(0.5, 1.5, WIDE))

    def forward(self, x):
        y = x.to(torch.float32)
        y = y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + 1e-5)
        return self.weight * y.to(x.dtype)


NORMS = {
    "by hand": ByHand,
    "RMSNorm": lambda: torch.nn.RMSNorm(WIDE),
    "LayerNorm": lambda: torch.nn.LayerNorm(WIDE),
}


class Layer(torch.nn.Module):
    def __init__(self, norm=ByHand, reduce=reduced):
        super().__init__()
        self.norm, self.reduce = norm(), reduce
        self.up, self.down = torch.nn.Linear(WIDE, 20), torch.nn.Linear(20, WIDE, bias=False)

    def forward(self, x):
        return x + self.reduce(self.down(F.silu(self.up(self.norm(x)))))


class Model(torch.nn.Module):
    def __init__(self, layers=2, **how):
        super().__init__()
        self.layers = torch.nn.ModuleList(Layer(**how) for _ in range(layers))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


def kinds_of(graph):
    return [op.collective.kind for op in graph.ops if op.collective is not None]


def woven(model, *rewrites, strategy="sequential", inputs=(X,), **options):
    model = model.eval() if isinstance(model, torch.nn.Module) else model
    wanted = model(*inputs)
    compiled = weft.compile(model, strategy, fallback="error", rewrites=rewrites, **options)
    for _ in range(3):
        torch.testing.assert_close(compiled(*inputs), wanted)
    assert weft.report(compiled).fallbacks == ()
    proofs = [p.proof for piece in session_of(compiled).pieces for p in piece.variants.pieces]
    assert [p.verdict for p in proofs if p.verdict] and not any(p.refused for p in proofs)
    return weft.plans(compiled)[0]


@pytest.mark.parametrize("reduce", [reduced, reduced_in_place])
@pytest.mark.parametrize("norm", NORMS)
def test_the_norm_and_the_residual_stand_between_the_legs(norm, reduce):
    plan = woven(Model(norm=NORMS[norm], reduce=reduce), weft.decompose("down"))
    assert kinds_of(plan.graph) == ["reduce_scatter_tensor", "all_gather_into_tensor"] * 2
    assert "history rewrite decompose(down): 2 all_reduce" in str(plan)
    scatter, gather = [op for op in plan.graph.ops if op.collective][:2]
    assert scatter.name == "layers.0.reduce_scatter_tensor" and scatter.two_phase, plan.graph
    between = plan.graph.maker[gather.reads[0]]
    assert between.path.startswith("layers.1"), plan.graph  # the norm of the next layer
    assert sum("modules_1_modules_norm_parameters_weight" in name for name in between.reads) == 1


def test_averages_and_numbers_of_rows_that_change():
    model = Model(reduce=lambda y: reduced(y, "avg")).eval()
    wants = [model(X[:rows]) for rows in (5, 2, 4)]
    weft.compile(model, "overlap", fallback="error", rewrites=[weft.decompose("all_reduce")])
    for want in wants:
        torch.testing.assert_close(model(X[: len(want)]), want)


@pytest.mark.parametrize(
    ("past", "moved", "line"),
    [
        ("*", True, "decompose(all_reduce):"),
        (["add", "*norm*"], True, "decompose(all_reduce, past add *norm*):"),
        (None, False, "decompose(all_reduce, past nothing):"),
    ],
)
def test_past_says_how_far(past, moved, line):
    def model(x):
        h = x + reduced(F.linear(x, WEIGHT))
        return F.linear(F.layer_norm(h, (WIDE,)), WEIGHT)

    plan = woven(model, weft.decompose("all_reduce", past=past))
    gather = next(op for op in plan.graph.ops if op.collective and "gather" in op.collective.kind)
    assert (plan.graph.maker[gather.reads[0]].collective is None) == moved, plan.graph
    assert line in str(plan)


WEIGHT = torch.nn.Parameter(torch.randn(WIDE, WIDE, generator=torch.Generator().manual_seed(1)))
WEIGHT.requires_grad_(False)


def mean_over_rows(x):
    z = reduced(F.linear(x, WEIGHT))
    return z - z.mean(0)


def mean_over_tokens(x):
    z = reduced(F.linear(x, WEIGHT))
    return z - z.mean(1, keepdim=True)


def positions(x):
    return reduced(F.linear(x, WEIGHT)) * torch.arange(3.0).reshape(3, 1)


def sorted_rows(x):
    return reduced(F.linear(x, WEIGHT)).sort(1).values


def written_later(x):
    z = reduced(F.linear(x, WEIGHT))
    h = z * 2
    z.add_(1)
    return h + z


def counted(x):
    return reduced(F.linear(x, WEIGHT)) * x.size(0)


def dropped(x):
    return F.dropout(reduced(F.linear(x, WEIGHT)), 0.5, training=True)


def an_input_in_place(x):
    dist.all_reduce(x)
    return x.relu()


def seen_by_another_name(x):
    y = F.linear(x, WEIGHT)
    z = y[:, :2]
    dist.all_reduce(y)
    return y.relu().sum(-1) + z.sum((1, 2))[:, None]


def maximum(x):
    return reduced(F.linear(x, WEIGHT), "max").relu()


def last(x):
    return reduced(F.linear(x, WEIGHT))


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (mean_over_rows, "nothing that follows can be done on shares: mean: "),
        (
            mean_over_tokens,
            "nothing that follows can be done on shares: mean: its result has other rows",
        ),
        (positions, "which has other rows"),
        (sorted_rows, "nothing that follows can be done on shares"),
        (written_later, "what it makes is written in place"),
        (an_input_in_place, "reduces an input in place"),
        (seen_by_another_name, "is read by others too"),
        (maximum, "it is max of torch.float32"),
        (last, "nothing that follows can be done on shares"),
    ],
)
def test_what_needs_other_rows_is_refused(model, message):
    compiled = weft.compile(model, "sequential", rewrites=[weft.decompose("all_reduce")])
    with pytest.raises(CaptureError, match=message):
        compiled(X.clone())
    torch._dynamo.reset()
    woven_whole = weft.compile(model, "tokenweave", fallback="error")
    torch.testing.assert_close(woven_whole(X.clone()), model(X.clone()))
    assert "all_reduces are woven whole: rewrite: decompose(" in str(weft.plans(woven_whole)[0])


@pytest.mark.parametrize(
    ("model", "kinds"),
    [(counted, ["all_reduce"]), (dropped, ["all_reduce"])],
)
def test_numbers_of_rows_and_random_numbers_stop_shares(model, kinds):
    compiled = weft.compile(model, "sequential", rewrites=[weft.decompose("all_reduce")])
    with pytest.raises(CaptureError, match="nothing that follows"):
        compiled(X)


def test_what_is_needed_whole_anyway_is_not_put_together_twice():
    def model(x):
        h = x + reduced(F.linear(x, WEIGHT))
        return h, F.linear(F.layer_norm(h, (WIDE,)), WEIGHT)

    plan = woven(model, weft.decompose("all_reduce"))
    assert kinds_of(plan.graph) == ["reduce_scatter_tensor", "all_gather_into_tensor"]


def test_operands_that_ranks_may_not_have_alike_stop_shares():
    def model(x, other):
        h = foreign(x) + reduced(F.linear(x, WEIGHT))
        return F.layer_norm(h, (WIDE,)) + other

    compiled = weft.compile(model, "sequential", rewrites=[weft.decompose("all_reduce")])
    with pytest.raises(CaptureError, match="ranks may not have alike"):
        compiled(X, X)


@torch.library.custom_op("weft_test::foreign", mutates_args=())
def foreign(x: torch.Tensor) -> torch.Tensor:
    """Nobody knows what it does."""
    return x + 1


@foreign.register_fake
def _(x):
    return torch.empty_like(x)


def test_gradients_pass_through_legs():
    model, plain = Model(), Model()
    plain.load_state_dict(model.state_dict())
    weft.compile(model, "overlap", rewrites=[weft.decompose("down")], fallback="error")
    with torch.enable_grad():
        for each in (model, plain):
            each(X).square().sum().backward()
    for one, other in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad)


@pytest.mark.filterwarnings("ignore:.*torch.jit.script_method.*:DeprecationWarning")
def test_legs_by_inductor():
    woven(Model(3), weft.decompose("down"), inner="inductor")


def test_pieces_are_taken_apart_too():
    plan = woven(Model(), weft.chunk("down", 2), weft.decompose("all_reduce"))
    kinds = kinds_of(plan.graph)
    assert kinds == ["reduce_scatter_tensor"] * 2 + ["all_gather_into_tensor"] + kinds[3:], kinds


# fuse


class Gated(torch.nn.Module):
    def __init__(self, reduce=reduced):
        super().__init__()
        self.gate, self.up = torch.nn.Linear(WIDE, 20), torch.nn.Linear(WIDE, 20)
        self.down, self.reduce = torch.nn.Linear(20, WIDE, bias=False), reduce

    def forward(self, x):
        return x + self.reduce(self.down(F.silu(self.gate(x)) * self.up(x)))


RULES = (weft.mark_path(r".*\.gate", "gate"), weft.mark_path(r".*\.up", "up"))


def stack(layers=2, **how):
    return torch.nn.Sequential(*(Gated(**how) for _ in range(layers)))


@pytest.mark.parametrize("strategy", ["sequential", "overlap"])
@pytest.mark.parametrize("blocks", [True, False])
def test_ops_become_one(strategy, blocks):
    plain = woven_plain(stack(), blocks=blocks)
    plan = woven(stack(), weft.fuse(["gate", "up"]), strategy=strategy, rules=RULES, blocks=blocks)
    names = [op.name for op in plan.graph.ops]
    assert "gate" in names and not [name for name in names if name.startswith("up")], names
    assert len(names) < len(plain), names
    assert "history rewrite fuse(gate up): 2 x" in str(plan)
    first, second = (plan.graph.structure[name] for name in ("gate", "gate.1"))
    assert first == second


def woven_plain(model, **options):
    weft.compile(model.eval(), "sequential", rules=RULES, **options)(X)
    return [op.name for op in weft.plans(model)[0].graph.ops]


def test_a_strategy_sees_one_op():
    def fused(s):
        chosen = [op for op in s.graph.ops if op.mark in ("gate", "up")]
        s.rewrite(weft.fuse(chosen))
        assert [op.mark for op in s.graph.ops if op.mark in ("gate", "up")] == ["gate"] * 2
        s.sequential()

    woven(stack(), strategy=fused, rules=RULES)


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("0", "all_reduce is a collective, which is an op by itself"),
        (["gate", "0.down"], "silu stands between them, which mul needs"),
        ("gate", "is one op already"),
        ("nobody", "unknown op or module 'nobody'"),
    ],
)
def test_what_cannot_be_one_op_is_refused(what, message):
    compiled = weft.compile(stack(1).eval(), "sequential", rules=RULES, rewrites=[weft.fuse(what)])
    with pytest.raises(CaptureError, match=message):
        compiled(X)


def test_what_is_written_in_between_keeps_its_place():
    class Written(Gated):
        def forward(self, x):
            a = self.gate(x)
            b = F.silu(a)
            a.add_(1)
            return self.down(b * self.up(x) + a)

    model = torch.nn.Sequential(Written()).eval()
    rewrites = [weft.fuse(["gate", "up"])]
    compiled = weft.compile(model, "sequential", rules=RULES, rewrites=rewrites)
    with pytest.raises(CaptureError, match="keeps its place"):
        compiled(X)


def test_ops_that_treat_rows_unlike_are_not_one():
    def model(x):
        return F.linear(x, WEIGHT).relu() - F.linear(x, WEIGHT).cumsum(0)

    compiled = weft.compile(model, "sequential", rewrites=[weft.fuse(["relu", "cumsum"])])
    with pytest.raises(CaptureError, match=r"is row-wise, .* is mixing"):
        compiled(X)


@pytest.mark.parametrize("make", [lambda: weft.decompose([]), lambda: weft.fuse("a b"),
                                  lambda: weft.decompose("a", past="b c")])  # fmt: skip
def test_what_names_nothing_is_refused(make):
    with pytest.raises(StrategyError, match=r"no op is named|neither an op nor a name"):
        make()

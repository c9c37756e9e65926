"""`decompose` on two and four ranks: the residual stream is dealt from layer to layer, in parts of
any number of rows, every leg in two phases; ranks that are given other inputs are told so."""

from __future__ import annotations

import functools

import pytest
import torch
import torch.distributed as dist
from ranks import check_clean, check_overlap, check_phases, run_once, talks
from torch import nn
from torch.distributed import _functional_collectives as funcol
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn import functional as F

import torchweft as weft
from torchweft.api import session_of
from torchweft.errors import CaptureError, PlanError

HIDDEN, WATCHDOG_S = 8, 20
LEGS = ("reduce_scatter_tensor", "all_gather_into_tensor")


class Rms(nn.Module):
    """A norm as models write it."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(0.5, 1.5, HIDDEN))

    def forward(self, x):
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5) * self.weight


class Fused(Rms):
    def forward(self, x):
        return F.rms_norm(x, (HIDDEN,), self.weight, 1e-5)


class Layer(nn.Module):
    """Two residual sums and two norms, as in any transformer; weights of products are a rank's."""

    def __init__(self, rank, kind, norm):
        super().__init__()
        self.kind, self.norms = kind, nn.ModuleList([norm(), norm()])
        torch.manual_seed(10 + rank)
        self.mix = nn.Linear(HIDDEN, HIDDEN, bias=False)
        self.up, self.down = nn.Linear(HIDDEN, 16), nn.Linear(16, HIDDEN, bias=False)

    def reduce(self, y):
        if self.kind == "in place":
            dist.all_reduce(y)
            return y
        return funcol.all_reduce(y, "sum", dist.group.WORLD)

    def forward(self, x):
        x = x + self.reduce(self.mix(self.norms[0](x)).sigmoid())
        return x + self.reduce(self.down(F.silu(self.up(self.norms[1](x)))))


class Model(nn.Module):
    def __init__(self, rank, kind="functional", norm=Rms, layers=2):
        super().__init__()
        torch.manual_seed(3)
        self.embed = nn.Embedding(64, HIDDEN)
        self.layers = nn.ModuleList(Layer(rank, kind, norm) for _ in range(layers))
        self.last = norm()
        torch.manual_seed(4)
        self.head = nn.Linear(HIDDEN, 5)

    def forward(self, x):
        x = self.embed(x) if x.dtype == torch.int64 else x
        for layer in self.layers:
            x = layer(x)
        return self.head(self.last(x))


def tokens(*shape):
    return torch.arange(torch.Size(shape).numel()).reshape(shape) * 7 % 64


def check(rank, shapes, *, strategy=None, num_talks=8, **how):
    """Equal to eager, and each all_reduce in two legs in each part."""
    model = Model(rank, **how).eval()
    wants = [model(tokens(*shape)) for shape in shapes]
    given = {} if strategy is not None else {"rewrites": [weft.decompose("all_reduce")]}
    strategy = strategy or weft.overlap(parts=2)
    weft.compile(model, strategy, fallback="error", watchdog_s=WATCHDOG_S, **given)
    for shape, want in zip(shapes, wants, strict=True):
        for _ in range(2):
            torch.testing.assert_close(model(tokens(*shape)), want, rtol=1e-5, atol=1e-5)
    check_clean(model)
    for plan in weft.plans(model):
        said = [op.collective.kind for op in plan.graph.ops if op.collective]
        assert said == list(LEGS) * (num_talks // 2), plan.graph
        assert all(op.rows == "row-wise" for op in plan.graph.ops), plan.graph
        check_phases(plan)
    (proof, *_) = [p.proof for p in session_of(model).pieces[0].variants.pieces if p.proof.verdict]
    assert proof.refused is None
    return weft.plans(model)[0]


def flat(rank, **how):
    """[tokens, hidden], whether tokens and parts divide by the ranks or not."""
    check_overlap(check(rank, [(8,), (7,), (9,), (5,), (13,)], **how))


def sequences(rank, **how):
    check(rank, [(4, 6), (5, 6), (3, 6)], **how)
    torch._dynamo.reset()
    check(rank, [(4, 5), (5, 5), (3, 5)], **how)


def one_sequence(rank):
    """Batch 1: no parts, and legs all the same."""
    model = Model(rank).eval()
    want = model(tokens(1, 7))
    options = {"rewrites": [weft.decompose("all_reduce")], "watchdog_s": WATCHDOG_S}
    weft.compile(model, "sequential", fallback="error", **options)
    for _ in range(3):
        torch.testing.assert_close(model(tokens(1, 7)), want, rtol=1e-5, atol=1e-5)
    assert [kind for kind, _ in talks(model)] == list(LEGS) * 4


def three_parts(rank):
    model = Model(rank).eval()
    want = model(tokens(11))
    options = {"rewrites": [weft.decompose("all_reduce")], "watchdog_s": WATCHDOG_S}
    weft.compile(model, weft.overlap(parts=3), fallback="error", **options)
    torch.testing.assert_close(model(tokens(11)), want, rtol=1e-5, atol=1e-5)
    check_phases(weft.plans(model)[0])


def tokenweave(rank, kind):
    """An ordinary tensor-parallel model, without a word about rewrites."""
    plan = check(rank, [(12,), (9,)], strategy=weft.tokenweave(), kind=kind)
    assert "history rewrite decompose(" in str(plan) and "4 all_reduce" in str(plan)
    check_overlap(plan)


def tokenweave_whole(rank):
    model = Model(rank).eval()
    want = model(tokens(8))
    weft.compile(model, weft.tokenweave(decompose=False), fallback="error", watchdog_s=WATCHDOG_S)
    torch.testing.assert_close(model(tokens(8)), want, rtol=1e-5, atol=1e-5)
    assert [kind for kind, _ in talks(model)] == ["all_reduce"] * 4


def jitter(rank):
    given = {"rewrites": [weft.decompose("all_reduce")], "watchdog_s": WATCHDOG_S}
    model = Model(rank).eval()
    quiet = weft.compile(model, weft.overlap(parts=2), fallback="error", **given)(tokens(9))
    weft.restore(model)
    shaken = weft.compile(model, weft.overlap(parts=2), fallback="error", jitter=True, **given)
    for _ in range(2):
        assert torch.equal(shaken(tokens(9)), quiet)


def gradients(rank):
    """Forward in legs, backward as it is."""
    model, plain = Model(rank), Model(rank)
    plain.load_state_dict(model.state_dict())
    given = {"rewrites": [weft.decompose("all_reduce")], "watchdog_s": WATCHDOG_S}
    weft.compile(model, weft.overlap(parts=2), fallback="error", **given)
    with torch.enable_grad():
        for each in (model, plain):
            each(tokens(9)).square().sum().backward()
    for one, other in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad, rtol=1e-4, atol=1e-5)


def unlike(rank, change):
    """A rank computes its rows for all of them: where they have not the same, nobody goes on."""
    model = Model(rank).eval()
    given = {"rewrites": [weft.decompose("all_reduce")], "watchdog_s": WATCHDOG_S}
    weft.compile(model, "sequential", fallback="error", **given)
    x = torch.zeros(6, HIDDEN)
    model(x)  # alike, and all is well
    x = change(model, x)
    with pytest.raises(PlanError, match=r"do not plan the same(.|\n)*weft.decompose"):
        model(x)


def unlike_inputs(rank):
    unlike(rank, lambda model, x: x + rank)


def unlike_in_place(rank):
    unlike(rank, lambda model, x: x.add_(rank))


def unlike_weights(rank):
    def change(model, x):
        with torch.no_grad():
            model.last.weight.add_(rank)
        return x

    unlike(rank, change)


def unlike_code(rank):
    class Scaled(Model):
        def forward(self, x):
            return super().forward(x * (1 + rank))

    model = Scaled(rank).eval()
    given = {"rewrites": [weft.decompose("all_reduce")], "watchdog_s": WATCHDOG_S}
    weft.compile(model, "sequential", **given)
    with pytest.raises(PlanError, match=r"do not plan the same(.|\n)*weft.decompose"):
        model(torch.zeros(6, HIDDEN))


def a_mean_over_rows(rank):
    def model(x):
        z = funcol.all_reduce(x * (1.0 + rank), "sum", dist.group.WORLD)
        return F.layer_norm(z - z.mean(0), (HIDDEN,))

    compiled = weft.compile(model, "sequential", rewrites=[weft.decompose("all_reduce")])
    with pytest.raises(CaptureError, match=r"mean.*other rows"):
        compiled(torch.ones(6, HIDDEN))


def pairs(rank):
    """Legs of one group among several."""
    groups = [dist.new_group(pair) for pair in ([0, 1], [2, 3])]
    group = groups[rank // 2]

    class Paired(Model):
        def __init__(self):
            super().__init__(rank)
            for layer in self.layers:
                layer.reduce = lambda y: funcol.all_reduce(y, "sum", group)

    model = Paired().eval()
    x = torch.arange(7.0 * HIDDEN).reshape(7, HIDDEN).sin() + rank // 2  # pairs may differ
    want = model(x)
    given = {"rewrites": [weft.decompose("all_reduce")], "watchdog_s": WATCHDOG_S}
    weft.compile(model, weft.overlap(parts=2), fallback="error", **given)
    for _ in range(2):
        torch.testing.assert_close(model(x), want, rtol=1e-5, atol=1e-5)


def llama(rank):
    """A Llama of transformers, whose products that end a layer are reduced."""
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "vocab_size": 64}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "use_cache": False}
    torch.manual_seed(5)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, **heads)).eval()
    for layer in model.model.layers:
        for product in (layer.self_attn.o_proj, layer.mlp.down_proj):
            reduced_by(product, rank)
    ids = tokens(3, 7)
    want = model(ids).logits
    weft.compile(model, weft.tokenweave(), fallback="error", watchdog_s=WATCHDOG_S)
    for _ in range(2):
        torch.testing.assert_close(model(ids).logits, want, rtol=1e-4, atol=1e-5)
    plan = weft.plans(model)[0]
    said = [op.collective.kind for op in plan.graph.ops if op.collective]
    assert said == list(LEGS) * 4, plan.graph
    check_overlap(plan)


def reduced_by(product, rank):
    """A row-parallel product: each rank has a share of its own of the sum."""
    product.weight.data *= 0.25 + 0.5 * rank
    plain = product.forward
    product.forward = lambda x: funcol.all_reduce(plain(x), "sum", dist.group.WORLD)


class Mlp(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up = nn.LayerNorm(HIDDEN), nn.Linear(HIDDEN, 16)
        self.down = nn.Linear(16, HIDDEN, bias=False)

    def forward(self, x):
        return x + self.down(F.gelu(self.up(self.norm(x))))


def dtensors(rank):
    """At the aten level, where the collectives of DTensors are seen."""
    torch.manual_seed(1)
    model = nn.Sequential(Mlp(), Mlp()).eval()
    mesh = init_device_mesh("cpu", (2,))
    for layer in model:
        parallelize_module(layer, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    x = torch.arange(4.0 * 3 * HIDDEN).reshape(4, 3, HIDDEN).sin()
    want = model(x)
    given = {"rewrites": [weft.decompose("all_reduce")], "watchdog_s": WATCHDOG_S}
    weft.compile(model, weft.overlap(parts=2), fallback="error", **given)
    for _ in range(2):
        torch.testing.assert_close(model(x), want, rtol=1e-5, atol=1e-5)
    assert [kind for kind, _ in talks(model)] == list(LEGS) * 2
    check_clean(model)


COMMON = {
    "flat": flat,
    "flat in place": functools.partial(flat, kind="in place"),
    "sequences": functools.partial(sequences, norm=Fused),
    "one sequence": one_sequence,
}
TWO = {
    **COMMON,
    "layer norm": functools.partial(flat, norm=functools.partial(nn.LayerNorm, HIDDEN)),
    "sequences in place": functools.partial(sequences, kind="in place"),
    "three parts": three_parts,
    "tokenweave": functools.partial(tokenweave, kind="functional"),
    "tokenweave in place": functools.partial(tokenweave, kind="in place"),
    "tokenweave whole": tokenweave_whole,
    **{
        case.__name__.replace("_", " "): case
        for case in (
            jitter, gradients, dtensors, a_mean_over_rows, llama, unlike_inputs, unlike_in_place,
            unlike_weights, unlike_code,
        )
    },
}  # fmt: skip
FOUR = {**COMMON, "pairs": pairs}


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    return run_once(tmp_path_factory, f"{__name__} two", lambda folder: TWO)


@pytest.fixture(scope="module")
def four(tmp_path_factory):
    return run_once(tmp_path_factory, f"{__name__} four", lambda folder: FOUR, size=4)


@pytest.mark.parametrize("name", TWO)
def test_two_ranks(two, name):
    assert two[name] == "", two[name]


@pytest.mark.parametrize("name", FOUR)
def test_four_ranks(four, name):
    assert four[name] == "", four[name]

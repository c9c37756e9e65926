"""Dealt rows on two, three and four ranks: reduce_scatter - residual - norm - all_gather in parts,
every leg in two phases; what only looks like it runs whole, with the reason."""

from __future__ import annotations

import functools

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from ranks import check_clean, check_overlap, check_phases, run_once, talks
from torch import nn
from torch.distributed import _functional_collectives as funcol

import torchweft as weft
from torchweft.api import session_of
from torchweft.errors import PlanError

HIDDEN = 8
reduce_scatter = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)
all_gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
DEALT = ("reduce_scatter_tensor", "all_gather_into_tensor")


def scatter(x, group):
    return funcol.reduce_scatter_single(x, "sum", 0, group)


def gather(x, group):
    return funcol.all_gather_single(x, 0, group)


def scatter_into(x, group):
    out = x.new_empty(x.shape[0] // dist.get_world_size(group), *x.shape[1:])
    reduce_scatter(out, x, group=group)
    return out


def gather_into(x, group):
    out = x.new_empty(x.shape[0] * dist.get_world_size(group), *x.shape[1:])
    all_gather(out, x, group=group)
    return out


class Norm(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(0.5, 1.5, HIDDEN))  # the same on all ranks

    def forward(self, x):
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5) * self.weight


class Block(nn.Module):
    """The residual stream is dealt from layer to layer; attention and MLP see all rows."""

    def __init__(self, rank, forms, group):
        super().__init__()
        self.scatter, self.gather = (functools.partial(form, group=group) for form in forms)
        self.norms = nn.ModuleList([Norm(), Norm()])
        torch.manual_seed(10 + rank)
        self.mix = nn.Linear(HIDDEN, HIDDEN, bias=False)
        self.up, self.down = nn.Linear(HIDDEN, 16), nn.Linear(16, HIDDEN, bias=False)

    def forward(self, h):
        h = h + self.scatter(self.mix(self.gather(self.norms[0](h))).sigmoid())
        return h + self.scatter(self.down(F.silu(self.up(self.gather(self.norms[1](h))))))


class Model(nn.Module):
    """Embeds tokens, each rank a part of the vocabulary, as sequence parallelism begins."""

    def __init__(self, rank, *, forms=(scatter, gather), group=None, end="gather", layers=2):
        super().__init__()
        group = group or dist.group.WORLD
        self.forms, self.group, self.end = forms, group, end
        torch.manual_seed(5)
        self.last = Norm()
        torch.manual_seed(20 + rank)
        self.embed = nn.Embedding(64, HIDDEN)
        torch.manual_seed(5)
        self.layers = nn.ModuleList([Block(rank, forms, group) for _ in range(layers)])
        self.own = nn.Parameter(torch.full((HIDDEN,), 1.0 + rank))

    def forward(self, tokens):
        h = self.forms[0](self.embed(tokens), self.group)
        for layer in self.layers:
            h = layer(h)
        if self.end == "share":
            return h
        if self.end == "mean":
            h = h - h.mean(0)
        if self.end == "dropout":
            h = F.dropout(h, 0.0) + F.layer_norm(h, (HIDDEN,))
        if self.end == "own":
            h = h * self.own
        if self.end == "code":
            h = h * (1 + dist.get_rank())
        if self.end == "made":
            weight = self.last.weight
            h = h * (weight.outer(weight) @ weight * (1 + dist.get_rank())).softmax(0)
        if self.end == "drawn":
            h = h * torch.rand_like(self.last.weight)
        if self.end == "scattered":
            weight = torch.cat([self.last.weight] * dist.get_world_size(self.group))
            h = h * self.forms[0](weight.cumsum(0), self.group)
        if self.end == "of rows":
            h = h * self.embed(tokens).mean(0)
        if self.end == "reduced":
            h = h * funcol.all_reduce(self.own, "sum", self.group)
        if self.end == "sum":
            return funcol.all_reduce(h, "sum", self.group)
        return self.forms[1](self.last(h), self.group)


def tokens_of(*shape):
    return torch.arange(torch.Size(shape).numel()).reshape(shape) * 7 % 64


def woven(model, **options):
    given = {"parts": 2, **options}
    return weft.compile(model, weft.overlap(**given), watchdog_s=20, fallback="error")


def check_parts(rank, *, rows, model=None, **options):
    """Bits of eager, up to sums in another order; each leg in each part."""
    made = model or Model(rank, **options)
    wants = [made(tokens_of(n)) for n in rows]
    compiled = woven(made)
    for number, want in zip(rows, wants, strict=True):
        torch.testing.assert_close(compiled(tokens_of(number)), want, rtol=1e-5, atol=1e-5)
    said = talks(compiled)
    assert len(said) == 10 and all(rows == "row-wise" for _, rows in said), said
    assert {kind for kind, _ in said} == set(DEALT)
    check_overlap(weft.plans(compiled)[0])
    check_clean(compiled)


def functional(rank):
    size = dist.get_world_size()
    check_parts(rank, rows=[4 * size, 5 * size, 7 * size, 32 * size])


def in_place(rank):
    size = dist.get_world_size()
    check_parts(rank, rows=[6 * size, 9 * size], forms=(scatter_into, gather_into))


def three_parts(rank):
    size = dist.get_world_size()
    model = Model(rank)
    want = model(tokens_of(7 * size))
    got = woven(model, parts=3)(tokens_of(7 * size))
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)


class Flat(Model):
    """Sequences whose tokens are flattened: each row has whole shares in it."""

    def forward(self, tokens):
        return super().forward(tokens.flatten()).unflatten(0, tokens.shape)


def flattened(rank):
    """Parts of one sequence: no multiple of the ranks is needed."""
    model = Flat(rank)
    tokens = tokens_of(3, 4 * dist.get_world_size())
    want = model(tokens)
    compiled = woven(model)
    torch.testing.assert_close(compiled(tokens), want, rtol=1e-5, atol=1e-5)
    assert session_of(compiled).pieces[0].graph.row_unit == 1
    check_overlap(weft.plans(compiled)[0])


def flattened_odd(rank):
    """Sequences of three tokens: shares end within rows, so parts are multiples of the ranks."""
    size = dist.get_world_size()
    model = Flat(rank)
    compiled = woven(model)
    for rows in (3 * size, 4 * size):
        tokens = tokens_of(rows, 3)
        torch.testing.assert_close(compiled(tokens), Flat(rank)(tokens), rtol=1e-5, atol=1e-5)
    assert session_of(compiled).pieces[0].graph.row_unit == size
    check_overlap(weft.plans(compiled)[0])


def whole(rank, end):
    """What needs the shares of the whole batch: eager's numbers, and a reason."""
    model = Model(rank, end=end)
    tokens = tokens_of(8 * dist.get_world_size())
    torch.manual_seed(rank)
    want = model(tokens)
    torch.manual_seed(rank)
    compiled = weft.compile(model, weft.overlap(parts=2), watchdog_s=20)
    torch.testing.assert_close(compiled(tokens), want, rtol=1e-5, atol=1e-5)
    said = {rows for kind, rows in talks(compiled) if kind == DEALT[0]}
    assert said <= {"mixing", "batch-free"} and "mixing" in said, said
    assert "deals out the rows" in str(weft.report(compiled))


def share_handed_out(rank):
    whole(rank, "share")


def looks_across_shares(rank):
    whole(rank, "mean")


def shares_are_summed(rank):
    whole(rank, "sum")


def scattered_weight(rank):
    whole(rank, "scattered")


def drawn_weight(rank):
    whole(rank, "drawn")


def made_of_rows(rank):
    whole(rank, "of rows")


def reduced_weight(rank):
    """A weight that ranks have in common only behind an all_reduce."""
    model = Model(rank, end="reduced")
    tokens = tokens_of(8 * dist.get_world_size())
    want = model(tokens)
    compiled = woven(model)
    torch.testing.assert_close(compiled(tokens), want, rtol=1e-5, atol=1e-5)
    assert ("reduce_scatter_tensor", "row-wise") in talks(compiled)


def unlike(rank, end):
    """Rows go to other ranks in parts; where ranks treat them unlike, nobody gets wrong numbers."""
    compiled = woven(Model(rank, end=end))
    with pytest.raises(PlanError, match="do not plan the same collectives"):
        compiled(tokens_of(8 * dist.get_world_size()))


def unlike_weights(rank):
    unlike(rank, "own")


def unlike_code(rank):
    unlike(rank, "code")


def unlike_code_of_a_weight(rank):
    unlike(rank, "made")


class Scaled(Model):
    def forward(self, tokens, scale):
        return self.forms[1](self.forms[0](self.embed(tokens), self.group) * scale, self.group)


def unlike_arguments(rank):
    """What a call is given beside the batch may differ between ranks from some call on."""
    for scales in ([torch.ones(HIDDEN)] * 4, [3, 4, 5, 6]):
        torch._dynamo.reset()
        model = Scaled(rank)
        tokens = tokens_of(8 * dist.get_world_size())
        wants = [model(tokens, scale) for scale in scales]
        compiled = woven(model)
        for scale, want in zip(scales, wants, strict=True):
            torch.testing.assert_close(compiled(tokens, scale), want, rtol=1e-5, atol=1e-5)
        with pytest.raises(PlanError, match="do not plan the same collectives"):
            compiled(tokens, scales[-1] + 1 + rank)
        torch.testing.assert_close(compiled(tokens, scales[0]), wants[0], rtol=1e-5, atol=1e-5)


def weights_that_come_apart(rank):
    """One rank alone changes a weight: both raise; when the other one follows, all is well."""
    weight = torch.linspace(2.0, 1.0, HIDDEN)
    for change in (
        lambda norm: norm.weight.copy_(weight),
        lambda norm: norm.weight.mul_(2.0),
        lambda norm: setattr(norm.weight, "data", weight.clone()),
        lambda norm: setattr(norm, "weight", nn.Parameter(weight.clone())),
    ):
        model, other = Model(rank), Model(rank)
        tokens = tokens_of(8 * dist.get_world_size())
        compiled = woven(model)
        for _ in range(3):
            torch.testing.assert_close(compiled(tokens), other(tokens), rtol=1e-5, atol=1e-5)
        if rank == 0:
            change(model.last)
        with pytest.raises(PlanError, match="shares meet weights"):
            compiled(tokens)
        if rank == 1:
            change(model.last)
        change(other.last)
        torch.testing.assert_close(compiled(tokens), other(tokens), rtol=1e-5, atol=1e-5)


def weights_of_inference_mode(rank):
    """Nobody counts what is written into them, so they are compared at each call."""
    model = Model(rank)
    with torch.inference_mode():
        model.last.weight = nn.Parameter(model.last.weight.clone(), requires_grad=False)
        tokens = tokens_of(8 * dist.get_world_size())
        want = model(tokens)
        compiled = woven(model)
        for _ in range(3):
            torch.testing.assert_close(compiled(tokens), want, rtol=1e-5, atol=1e-5)
        model.last.weight.add_(rank)
        with pytest.raises(PlanError, match="do not plan the same collectives"):
            compiled(tokens)


def other_group(rank):
    """Shares of one group, on groups that divide the ranks."""
    pairs = [dist.new_group(pair) for pair in ([0, 1], [2, 3])]
    check_parts(rank, rows=[8, 12], group=pairs[rank // 2])


def jitter(rank):
    size = dist.get_world_size()
    model = Model(rank)
    tokens = tokens_of(8 * size)
    want = woven(model)(tokens)
    weft.restore(model)
    shaken = weft.compile(model, weft.overlap(parts=2), watchdog_s=20, jitter=True)
    assert torch.equal(shaken(tokens), want)


def tokenweave(rank):
    model = Model(rank)
    tokens = tokens_of(8 * dist.get_world_size())
    want = model(tokens)
    compiled = weft.compile(model, weft.tokenweave(), watchdog_s=20, fallback="error")
    torch.testing.assert_close(compiled(tokens), want, rtol=1e-5, atol=1e-5)
    check_overlap(weft.plans(compiled)[0])


class BatchSecond(nn.Module):
    """[s, b, h], as Megatron has it: what is reduced in place is cut along its second dim."""

    def __init__(self, rank):
        super().__init__()
        torch.manual_seed(rank)
        self.up, self.down = nn.Linear(HIDDEN, 16), nn.Linear(16, HIDDEN, bias=False)

    def forward(self, x):
        y = self.down(self.up(x).relu())
        dist.all_reduce(y)
        return x + y


class ReducesInput(nn.Module):
    def forward(self, x):
        dist.all_reduce(x)
        return x * 2


def batch_second(rank):
    for make in (lambda: BatchSecond(rank), ReducesInput):
        x = torch.rand(3, 6, HIDDEN)
        given, model = x.clone(), make()
        want = model(given)
        compiled = weft.compile(model, weft.overlap(parts=2), batch=1, watchdog_s=20)
        mine = x.clone()
        torch.testing.assert_close(compiled(mine), want, rtol=1e-5, atol=1e-5)
        assert torch.equal(mine, given)
        assert [rows for _, rows in talks(compiled)] == ["row-wise"], weft.report(compiled)
        check_phases(weft.plans(compiled)[0])
        check_clean(compiled)


COMMON = {
    "functional": functional,
    "in place": in_place,
    "flattened": flattened,
    "flattened odd": flattened_odd,
}
WHOLE = {
    "share handed out": share_handed_out, "looks across shares": looks_across_shares,
    "shares are summed": shares_are_summed, "scattered weight": scattered_weight,
    "drawn weight": drawn_weight, "made of rows": made_of_rows,
}  # fmt: skip
TWO = {
    **COMMON,
    **WHOLE,
    "jitter": jitter,
    "tokenweave": tokenweave,
    "batch second": batch_second,
    "reduced weight": reduced_weight,
    "unlike weights": unlike_weights,
    "unlike code of a weight": unlike_code_of_a_weight,
    "unlike arguments": unlike_arguments,
    "weights that come apart": weights_that_come_apart,
    "weights of inference mode": weights_of_inference_mode,
}
FOUR = {**COMMON, "three parts": three_parts, "other group": other_group, "code": unlike_code}


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

"""Parts of one row: what Dynamo traced for two rows and more is run for each row by itself."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import torchweft as weft
from torchweft.api import session_of

WIDE = 8
pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit.*is deprecated")  # Inductor's imports


class Denoiser(nn.Module):
    """A small U-Net: group norm, convolutions, embeddings of time, attention, resizing."""

    def __init__(self):
        super().__init__()
        self.into, self.out = nn.Conv2d(4, WIDE, 3, padding=1), nn.Conv2d(WIDE, 4, 1)
        self.norm, self.time = nn.GroupNorm(4, WIDE), nn.Linear(WIDE, WIDE)
        self.attention = nn.MultiheadAttention(WIDE, 2, batch_first=True)

    def forward(self, x, time):
        waves = time[:, None].float() * torch.arange(WIDE // 2)
        h = self.into(x)
        h = h + self.time(torch.cat([waves.sin(), waves.cos()], -1))[:, :, None, None]
        h = h + F.silu(self.norm(h))
        flat = h.flatten(2).transpose(1, 2)
        seen = self.attention(flat, flat, flat, need_weights=False)[0]
        h = h + seen.transpose(1, 2).reshape(h.shape)
        return self.out(F.interpolate(F.avg_pool2d(h, 2), scale_factor=2, mode="bilinear"))


class Heads(nn.Linear):
    """The batch goes behind other dims and comes back: with one row, such copies are views."""

    def forward(self, x):
        size = x.shape[0]
        heads = super().forward(x).view(size, 2, WIDE // 2).transpose(0, 1)
        flat = heads.reshape(2 * size, WIDE // 2) * 2
        back = flat.view(2, size, WIDE // 2).transpose(0, 1).reshape(size, WIDE)
        return back.t().contiguous().t()


class Branches(nn.Linear):
    """Takes the way that the whole takes, which has several rows."""

    def forward(self, x):
        return super().forward(x) * (2 if x.shape[0] > 1 else 3)


class Writes(nn.Linear):
    def forward(self, x):
        flat = super().forward(x).t().contiguous()
        flat.add_(1)  # with one row `contiguous` copies nothing, and would share its bytes
        return flat.t() * x


class Squeezes(nn.Linear):
    def forward(self, x):
        return super().forward(x)[:, :1].squeeze(-1)


class Cells(nn.Module):
    """What lies otherwise in memory than it is written."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, WIDE, 3).to(memory_format=torch.channels_last)

    def forward(self, x):
        return self.conv(x.to(memory_format=torch.channels_last)).relu()


MODELS = {
    "denoiser": (Denoiser, lambda: (torch.randn(2, 4, 8, 8), torch.tensor([3, 3]))),
    "heads": (lambda: Heads(WIDE, WIDE), lambda: (torch.randn(2, WIDE),)),
    "branches": (lambda: Branches(WIDE, WIDE), lambda: (torch.randn(2, WIDE),)),
    "writes": (lambda: Writes(WIDE, WIDE), lambda: (torch.randn(2, WIDE),)),
    "squeezes": (lambda: Squeezes(WIDE, WIDE), lambda: (torch.randn(2, WIDE),)),
    "channels last": (Cells, lambda: (torch.randn(2, 3, 6, 6),)),
    "an encoder": (
        lambda: nn.TransformerEncoderLayer(WIDE, 2, 16, 0.0, batch_first=True),
        lambda: (torch.randn(2, 5, WIDE),),
    ),
}


@pytest.mark.parametrize("inner", ["eager", "inductor"])
@pytest.mark.parametrize("name", MODELS)
def test_a_batch_of_two_runs_in_parts_of_one_row(name, inner, fresh):
    build, inputs = MODELS[name]
    plain, args = build().eval(), inputs()
    model = weft.compile(copy.deepcopy(plain), weft.overlap(parts=2), inner=inner)
    wanted = plain(*args)
    for _ in range(2):
        made = model(*args)
        torch.testing.assert_close(made, wanted)
        assert made.stride() == wanted.stride()
    assert [plan.num_parts for plan in weft.plans(model)] == [2]
    assert not weft.report(model).fallbacks


@pytest.mark.parametrize("name", ["denoiser", "heads", "an encoder"])
def test_gradients_come_through_parts_of_one_row(name):
    torch._dynamo.reset()
    torch.manual_seed(0)
    build, inputs = MODELS[name]
    plain, args = build(), inputs()
    twin = copy.deepcopy(plain)
    model = weft.compile(twin, weft.overlap(parts=2), fallback="error")
    wanted, made = plain(*args), model(*args)
    torch.testing.assert_close(made, wanted)
    assert made.stride() == wanted.stride()
    for result in (wanted, made):
        result.square().sum().backward()
    for ours, theirs in zip(twin.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-4, atol=1e-4)
    assert 2 in [plan.num_parts for plan in weft.plans(model)]


def test_a_batch_that_one_row_would_lose_is_not_cut_into_single_rows(fresh):
    def run(x):
        return x[:, :1].squeeze() * 2

    model = weft.compile(run, weft.overlap(parts=2))
    for rows in (2, 4, 3):
        x = torch.randn(rows, WIDE)
        torch.testing.assert_close(model(x), run(x))
    fallbacks = dict(weft.report(model).fallbacks)
    assert list(fallbacks.values()) == [2] and "single row" in next(iter(fallbacks))
    used = {plan.num_parts for plan in weft.plans(model)}
    assert used == {1, 2}


def test_parts_of_one_row_and_of_more_stand_side_by_side(fresh):
    """Kernels that Inductor made for several rows are made anew if one row breaks their guards."""

    @weft.strategy
    def one_row_first(s):
        s.split([1, s.context.batch - 1])
        while ready := s.ready():
            for op, part in ready:
                s.run(op, part)
        s.merge()

    plain = MODELS["heads"][0]()
    model = weft.compile(copy.deepcopy(plain), one_row_first, inner="inductor", fallback="error")
    for rows in (5, 2, 3, 9):
        x = torch.randn(rows, WIDE)
        torch.testing.assert_close(model(x), plain(x))
    assert all(plan.num_parts == 2 for plan in weft.plans(model))
    assert not session_of(model).pieces[0].captured.lone

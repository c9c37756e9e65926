"""Five models of other kinds: models.py NAME-STRATEGY,NAME-STRATEGY-graphs,..."""

import sys

import torch
from torch import nn
from torch.nn import functional

import torchweft as weft
from torchweft_tools.dryrun import mark

WIDTH, ROWS, TOKENS = 32, 8, 6


class Attention(nn.Module):
    """A decoder layer: rotated heads, a causal mask, a gated product."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.out_norm = nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH)
        self.heads, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.gate, self.up, self.down = (nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x):
        q, k, v = (
            each.unflatten(-1, (4, -1)).transpose(1, 2)
            for each in self.heads(self.norm(x)).chunk(3, -1)
        )
        q, k = torch.cat([-q[..., 4:], q[..., :4]], -1), torch.cat([-k[..., 4:], k[..., :4]], -1)
        seen = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(seen.transpose(1, 2).flatten(2))
        y = self.out_norm(x)
        return x + self.down(functional.silu(self.gate(y)) * self.up(y))


class Experts(nn.Module):
    """Tokens weighted over experts, all of which run."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, 4)
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x):
        weights = self.router(x).softmax(-1)
        made = torch.stack([expert(x) for expert in self.experts], -1)
        return (made * weights.unsqueeze(-2)).sum(-1)


class Towers(nn.Module):
    """Two towers that meet at the end, as in retrieval."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(64, WIDTH)
        self.left = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH))
        self.right = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.LayerNorm(WIDTH))

    def forward(self, x):
        with weft.mark("left"):
            left = self.left(x)
        with weft.mark("right"):
            right = self.right(x)
        return functional.normalize(left, dim=-1) * functional.normalize(right, dim=-1)


class Images(nn.Module):
    """Convolutions, pooled, with a norm that has learnt its statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8)
        self.second = nn.Conv2d(8, 8, 3, stride=2, groups=2)

    def forward(self, x):
        return self.second(functional.relu(self.norm(self.first(x)))).mean((2, 3))


class Steps(nn.Module):
    """A gated recurrence, written out in time (Dynamo does not trace torch's own)."""

    def __init__(self) -> None:
        super().__init__()
        self.gates = nn.Linear(2 * WIDTH, 2 * WIDTH)

    def forward(self, x):
        state = torch.zeros_like(x[:, 0])
        for number in range(TOKENS):
            new, keep = self.gates(torch.cat([x[:, number], state], -1)).chunk(2, -1)
            state = torch.lerp(new.tanh(), state, keep.sigmoid())
        return state


MODELS = {
    "attention": Attention,
    "experts": Experts,
    "towers": Towers,
    "images": Images,
    "steps": Steps,
}
STRATEGIES = {
    "sequential": weft.sequential(),
    "overlap": weft.overlap(parts=2, min_tokens=1),
    "branches": weft.branches(),
}
torch.backends.cudnn.enabled = False  # which the dry run does not stand in for
with torch.no_grad():
    for kind in sys.argv[1].split(","):
        name, strategy, *graphs = kind.split("-")
        model = MODELS[name]().eval().cuda()
        machine = weft.accelerator(2)
        weft.compile(
            model, STRATEGIES[strategy], machine=machine, graphs=bool(graphs), fallback="error"
        )
        x = torch.ones(
            (ROWS, 3, 8, 8) if name == "images" else (ROWS, TOKENS, WIDTH), device="cuda"
        )
        for number in range(6):
            if number == 4:
                mark(f"steady {kind}")
            model(x)
        mark(f"end {kind}")

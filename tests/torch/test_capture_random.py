"""Random programs of calls that move, mix and write rows: whole bit-equal, in parts equal."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from torchweft_tools.tracer import Tracer

Call = Callable[..., Any]
ONE: tuple[Call, ...] = (
    lambda x: x.relu() + 1.5,
    lambda x: x.mean(0),
    lambda x: x.mean(-1, keepdim=True),
    lambda x: x.softmax(0),
    lambda x: x.softmax(-1),
    lambda x: x.cumsum(1),
    lambda x: x.sort(0)[0],
    lambda x: x.transpose(0, 1),
    lambda x: x.transpose(1, -1),
    lambda x: x.flatten(0, 1),
    lambda x: x.reshape(x.shape[0], -1),
    lambda x: x.reshape(-1, 6),
    lambda x: x.reshape(x.shape[0], 2, -1),
    lambda x: x.unsqueeze(1),
    lambda x: x[:, 0],
    lambda x: x[1:],
    lambda x: x.flip(1),
    lambda x: x.roll(1, 0),
    lambda x: x.repeat_interleave(2, 0),
    lambda x: x / x.shape[0],
    lambda x: x + torch.arange(x.shape[0]).view(-1, *[1] * (x.dim() - 1)),
    lambda x: x * torch.full((x.shape[0], *[1] * (x.dim() - 1)), 2.0),
    lambda x: x @ x.mT,
    lambda x: F.layer_norm(x, x.shape[-1:]),
    lambda x: x.unsqueeze(0).expand(3, *x.shape),
    lambda x: x.mul_(0.5),
    lambda x: (x[:, 0].mul_(0.5), x)[1],
    lambda x: (x[0].add_(1), x)[1],
    lambda x: x.gather(1, x.argsort(1)),
    lambda x: F.normalize(x, dim=0),
    lambda x: F.group_norm(x, 1),
    lambda x: F.instance_norm(x),
    lambda x: F.scaled_dot_product_attention(x, x, x),
    lambda x: x.permute(*reversed(range(x.dim()))),
    lambda x: x.view(-1).cumsum(0).view(x.shape),
)
TWO: tuple[Call, ...] = (
    lambda x, y: x + y,
    lambda x, y: x @ y,
    lambda x, y: torch.cat([x, y], 0),
    lambda x, y: torch.cat([x, y], 1),
    lambda x, y: torch.stack([x, y], 1),
    lambda x, y: x.add_(y),
    lambda x, y: x.unsqueeze(1) * y.unsqueeze(0),
)
MAX_ENTRIES = 5000


def program(seed: int) -> tuple[Call, list[torch.Tensor]]:
    """A function made of random calls that eager accepts, and its inputs."""
    rng = random.Random(seed)
    shapes = [(6, rng.choice([6, 4]), 4), (6, 6), (6, 4)][: rng.choice([1, 2, 3])]
    inputs = [torch.randn(shape) for shape in shapes]
    steps: list[tuple[Call, list[int]]] = []

    def run(*args: torch.Tensor) -> list[torch.Tensor]:
        live = list(args)
        for call, chosen in steps:
            live.append(call(*[live[number] for number in chosen]))
        return live

    wanted = rng.randrange(3, 10)
    while len(steps) < wanted:
        call = rng.choice(ONE if rng.random() < 0.75 else TWO)
        last = len(inputs) + len(steps) - 1
        num_args = 1 if call in ONE else 2
        chosen = [rng.randint(0, last) if rng.random() < 0.4 else last for _ in range(num_args)]
        steps.append((call, chosen))
        try:
            found = run(*[tensor.clone() for tensor in inputs])[-1]
            fine = 0 < found.numel() < MAX_ENTRIES and bool(found.isfinite().all())
        except (RuntimeError, IndexError, ValueError, TypeError):
            fine = False
        if not fine or float(found.abs().max()) > 1e4:
            steps.pop()
    return lambda *args: tuple(run(*args)[-2:]), inputs


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    torch._dynamo.reset()
    with torch.no_grad():
        yield
    torch._dynamo.reset()


@pytest.mark.parametrize("seed", range(30))
def test_random_programs(seed: int) -> None:
    torch.manual_seed(seed)
    fn, inputs = program(seed)
    theirs = [tensor.clone() for tensor in inputs]
    want = [*fn(*theirs), *theirs]
    tracer = Tracer()
    compiled = tracer.compile(fn)
    ours = [tensor.clone() for tensor in inputs]
    for got, wanted in zip([*compiled(*ours), *ours], want, strict=True):
        assert torch.equal(got, wanted)
    tracer.cut = lambda rows: (0, 1, rows // 2 + 1, rows) if rows > 3 else (0, 1, rows)
    ours = [tensor.clone() for tensor in inputs]
    for got, wanted in zip([*compiled(*ours), *ours], want, strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-4)

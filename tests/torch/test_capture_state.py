"""Writes, aliases, modes and operators of higher order: the graph must keep what eager does."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from torchweft_tools.tracer import Tracer


def unequal(rows: int) -> tuple[int, ...]:
    return (0, 1, rows) if rows < 4 else (0, 1, rows // 2 + 1, rows)


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    torch._dynamo.reset()
    torch.manual_seed(0)
    yield
    torch._dynamo.reset()


def tensors(*things: Any) -> list[torch.Tensor]:
    found: list[torch.Tensor] = []
    for thing in things:
        if isinstance(thing, torch.Tensor):
            found.append(thing)
        elif isinstance(thing, list | tuple):
            found += tensors(*thing)
    return found


def same_bytes(items: list[torch.Tensor]) -> list[list[bool]]:
    numbers = [item.untyped_storage().data_ptr() for item in items]
    return [[a == b for b in numbers] for a in numbers]


def check(fn: Callable[..., Any], make: Callable[[], tuple[Any, ...]]) -> Tracer:
    """Outputs, written inputs and who shares bytes with whom are as in eager, whole and cut."""
    tracer = Tracer()
    compiled = tracer.compile(fn)
    for cut in (None, unequal):
        tracer.cut = cut
        torch.manual_seed(1)
        args = make()
        want = tensors(fn(*args), args)
        torch.manual_seed(1)
        args = make()
        got = tensors(compiled(*args), args)
        assert len(got) == len(want)
        assert same_bytes(got) == same_bytes(want)
        for a, b in zip(got, want, strict=True):
            assert a.requires_grad == b.requires_grad
            torch.testing.assert_close(
                a, b, rtol=0 if cut is None else 1e-5, atol=0 if cut is None else 1e-5
            )
    return tracer


def plain() -> tuple[torch.Tensor]:
    return (torch.randn(6, 4),)


def overlapping() -> tuple[torch.Tensor, torch.Tensor]:
    x = torch.randn(6, 4)
    return x, x[:, :2]


def flat_too() -> tuple[torch.Tensor, torch.Tensor]:
    x = torch.randn(6, 4)
    return x, x.view(-1)


def write_row(x: torch.Tensor) -> Any:
    x[0].add_(1)
    return x * 2


def write_piece_of_flat(x: torch.Tensor) -> Any:
    y = x * 2
    flat = y.view(-1)
    flat[2:5].add_(1)
    first = y[:, 0]
    y.mul_(3)
    return y + 1, first * 1, flat.sum()


def view_before_write(x: torch.Tensor) -> Any:
    y = x * 2
    mean, view = y.mean(0), y[:, :2]
    y.add_(mean)
    return view * 2


def write_transposed(x: torch.Tensor) -> Any:
    turned = x.transpose(0, 1)
    turned.mul_(2)
    return turned.reshape(-1) * 2


def write_copy_that_is_a_view_for_one_row(x: torch.Tensor) -> Any:
    flat = x.view(-1, 2, 2).permute(1, 2, 0).flatten(1, 2)
    flat.add_(1)
    return flat.sum(0)


def write_after_cumsum(x: torch.Tensor) -> Any:
    y = x.cumsum(0)
    view = y.view(-1, 2, 2)
    y[:, 0] = 0
    return view.sum(-1), y


def in_place_chain(x: torch.Tensor) -> Any:
    return x.mul_(2).add_(1).clamp_(0, 2), x.t()


@pytest.mark.parametrize(
    ("fn", "make"),
    [
        (lambda x, v: (v.mul_(2), x + v.sum(1, keepdim=True))[1], overlapping),
        (lambda x, v: (v.mul_(2), x.sub_(x.mean(0)), v + 1)[2], flat_too),
        (write_row, plain),
        (write_piece_of_flat, plain),
        (view_before_write, plain),
        (write_transposed, plain),
        (write_copy_that_is_a_view_for_one_row, plain),
        (write_after_cumsum, plain),
        (in_place_chain, plain),
        (lambda x: (x, x.t(), x[:, 0], (x + 1).t()), plain),
        (lambda x: torch.as_strided((x * 2).t() + 1, (3, 2), (5, 2)) * 2, plain),
        (lambda x: (lambda y: (y[:, :2], y[:, 2:]))(x * 2), plain),
        (lambda x: x.chunk(2, 1), plain),
        (lambda x: (x.detach(), x.contiguous(), x.to(torch.float32)), plain),
    ],
)
def test_writes_and_aliases(fn: Callable[..., Any], make: Callable[[], tuple[Any, ...]]) -> None:
    with torch.no_grad():
        check(fn, make)


@dataclass
class Cache:
    """An object that holds tensors of the batch, as caches of libraries do."""

    layers: list[torch.Tensor]


class Decoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.steps = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))

    def forward(self, x: torch.Tensor, cache: Cache, at: torch.Tensor) -> torch.Tensor:
        for step, kept in zip(self.steps, cache.layers, strict=True):
            kept.index_copy_(1, at, step(x)[:, None])
            x = x + kept[:, :3].sum(1)
        return x


def test_a_cache_inside_an_object_is_split_and_written_by_rows() -> None:
    model = Decoder()
    tracer = Tracer(cut=unequal)
    compiled = tracer.compile(model)
    ours, theirs = (Cache([torch.zeros(6, 5, 4) for _ in range(2)]) for _ in range(2))
    with torch.no_grad():
        for number in range(3):
            x, at = torch.randn(6, 4), torch.tensor([number])
            torch.testing.assert_close(compiled(x, ours, at), model(x, theirs, at))
    torch.testing.assert_close(ours.layers, theirs.layers)
    (op,) = tracer.captures[-1].graph.ops
    assert op.rows == "row-wise" and len(op.mutates) == 2


def autocast_around_a_mean(x: torch.Tensor) -> Any:
    with torch.autocast("cpu", enabled=False):
        y = x * 2
        y = y - y.mean(0)
        z = y + 1
    return z * 3


def transform(x: torch.Tensor) -> Any:
    return torch.func.grad(lambda a: (a**2).sum())(x) + torch.vmap(lambda row: row * row.sum())(x)


def nested_vmap(x: torch.Tensor) -> Any:
    def earlier(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return (a >= b).float()

    inside = torch.vmap(earlier, in_dims=(None, 0))
    return x @ torch.vmap(inside, in_dims=(0, None))(torch.arange(4), torch.arange(4))


@pytest.mark.parametrize(
    "fn",
    [
        autocast_around_a_mean,
        transform,
        nested_vmap,
        lambda x: torch.cond(x.sum() > 0, lambda a: a * 2, lambda a: a - 1, (x,)) + 1,
        nn.TransformerEncoderLayer(4, 2, 8, batch_first=True, dropout=0.0).eval(),
    ],
)
def test_modes_and_higher_order_operators(fn: Callable[..., Any]) -> None:
    with torch.no_grad():
        check(lambda x: fn(x[:, None])[:, 0] if isinstance(fn, nn.Module) else fn(x), plain)


def test_grad_mode_is_kept_and_gradients_flow() -> None:
    layer = nn.Linear(4, 4)

    def fn(x: torch.Tensor) -> Any:
        with torch.no_grad():
            y = layer(x).mean(0)
        return checkpoint(lambda a: F.relu(layer(a)), x, use_reentrant=False) + y, y

    tracer = check(fn, plain)
    x = torch.randn(6, 4)
    want = torch.autograd.grad(fn(x)[0].sum(), layer.weight)
    got = torch.autograd.grad(tracer.compile(fn)(x)[0].sum(), layer.weight)
    torch.testing.assert_close(got, want)


def test_behind_a_graph_break_the_batch_is_still_known() -> None:
    def fn(x: torch.Tensor) -> Any:
        y = x * 2
        torch._dynamo.graph_break()
        return y.softmax(-1) + 1

    with torch.no_grad():
        tracer = check(fn, plain)
    assert len(tracer.captures) == 2
    assert all(captured.graph.batch is not None for captured in tracer.captures)
    assert all(op.rows == "row-wise" for each in tracer.captures for op in each.graph.ops)


def test_sizes_taken_for_one_batch_are_compared_at_each_call() -> None:
    def fn(a: torch.Tensor, b: torch.Tensor) -> Any:
        return a.relu() + 1, b.sigmoid() * 2, a @ b.T

    tracer = Tracer(cut=unequal)
    compiled = tracer.compile(fn)
    with torch.no_grad():
        for rows in (6, 6), (6, 5), (7, 7):
            args = [torch.randn(number, 4) for number in rows]
            torch.testing.assert_close(compiled(*args), fn(*args))
    (captured,) = tracer.captures
    assert len(captured.same) == 1
    batch = captured.graph.batch or ""
    assert captured.splits({batch: 6, captured.same[0]: 6})
    assert not captured.splits({batch: 6, captured.same[0]: 5})


def test_reasons_name_the_call_and_the_source_line() -> None:
    with torch.no_grad():
        tracer = check(view_before_write, plain)
    (reason,) = tracer.captures[0].reasons.values()
    assert "mean over the batch" in reason and "test_capture_state.py" in reason
    assert "view_before_write" in reason

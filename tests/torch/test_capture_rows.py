"""Small modules on which a careless split is wrong: whole and in unequal parts, against eager."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._pytree import tree_leaves, tree_map

from torchweft_tools.tracer import Tracer


@dataclass(frozen=True)
class Case:
    """A function, its arguments, and which calls must be named as not row-wise."""

    name: str
    fn: Callable[..., Any]
    args: Callable[[], tuple[Any, ...]]
    mixing: tuple[str, ...] = ()
    exact: bool = True
    seeded: bool = False
    batch: int | None = None


def rand(*sizes: int) -> torch.Tensor:
    return torch.randn(*sizes)


def cases() -> list[Case]:
    x = lambda: (rand(6, 5, 4),)  # noqa: E731
    square = lambda: (rand(6, 8),)  # noqa: E731
    return [
        Case("pointwise", lambda x: F.gelu(x * 2 + 1), x),
        Case("mean over batch", lambda x: x - x.mean(0), x, ("mean",)),
        Case("mean over rows", lambda x: x - x.mean((1, 2), keepdim=True), x),
        Case("cumsum over batch", lambda x: x.cumsum(0) + x, x, ("cumsum",)),
        Case("cumsum along rows", lambda x: x.cumsum(1), x),
        Case("softmax over batch", lambda x: torch.softmax(x, 0), x, ("softmax",)),
        Case("softmax along rows", lambda x: torch.softmax(x, -1) * 2, x),
        Case("sort over batch", lambda x: x.sort(0).values + 1, x, ("sort",)),
        Case("sort along rows", lambda x: x.sort(1).indices + 1, x),
        Case("batch size as a number", lambda x: x / x.shape[0], x, ("truediv",)),
        Case("batch size in a fill", lambda x: x + torch.full((4,), x.shape[0]), x, ("full",)),
        Case("sequence length as a number", lambda x: x / x.shape[1], x),
        Case(
            "arange of batch", lambda x: x + torch.arange(x.shape[0])[:, None, None], x, ("arange",)
        ),
        Case("zeros of batch", lambda x: x + torch.zeros(x.shape[0], 1, 1), x),
        Case(
            "batch is sequence length",
            lambda x: (x @ x.transpose(1, 2)).softmax(-1),
            lambda: (rand(16, 16, 4),),
        ),
        Case(
            "batch is hidden size",
            lambda x: x.cumsum(1) * x.sum(1, keepdim=True),
            lambda: (rand(16, 16),),
        ),
        Case("transpose", lambda x: x.transpose(0, 1) + 1, x),
        Case("transpose softmax", lambda x: x.transpose(0, 1).softmax(0), x, exact=False),
        Case(
            "transpose softmax over batch", lambda x: x.transpose(0, 1).softmax(1), x, ("softmax",)
        ),
        Case(
            "view batch-major", lambda x: x.view(x.shape[0] * 5, 4).exp().view(x.shape[0], 5, 4), x
        ),
        Case("view sequence-major", lambda x: x.transpose(0, 1).reshape(-1, 4).exp() * 2, x),
        Case(
            "view sequence-major and back",
            lambda x: x.transpose(0, 1).reshape(-1, 4).exp().view(5, -1, 4).sum(0),
            x,
            exact=False,
        ),
        Case("view mixing batch", lambda x: x.view(3, -1, 4).sum(1), x, ("view",)),
        Case("view minus one", lambda x: x.reshape(-1, 2, 2).sum(-1), x),
        Case("flatten all", lambda x: x.flatten() * 2, x),
        Case("expand weights", lambda x: torch.ones(1, 5, 4).expand(x.shape[0], -1, -1) + x, x),
        Case(
            "repeat weights",
            lambda x: torch.arange(20.0).view(1, 5, 4).repeat(x.shape[0], 1, 1) * x,
            x,
        ),
        Case("repeat rows inside", lambda x: x.repeat_interleave(3, 0) * 2, x),
        Case("repeat rows outside", lambda x: x.repeat(3, 1, 1).view(3, -1, 5, 4).sum(0), x),
        Case("cat along batch", lambda x: torch.cat([x, x * 2], 0) + 1, x),
        Case("cat along rows", lambda x: torch.cat([x, x * 2], 1) + 1, x),
        Case("stack", lambda x: torch.stack([x, x * 2], 0).sum(-1), x),
        Case("roll", lambda x: x.roll(1, 0) + x, x, ("roll",)),
        Case("roll along rows", lambda x: x.roll(1, 1) + x, x),
        Case("roll flattened", lambda x: x.roll(1) + x, x, ("roll",)),
        Case("flip", lambda x: x.flip(0) * 2, x, ("flip",)),
        Case(
            "permuted rows",
            lambda x: x.index_select(0, torch.arange(x.shape[0]).flip(0)) + x,
            x,
            ("arange",),
        ),
        Case("first row", lambda x: x + x[0], x, ("getitem",)),
        Case("last row", lambda x: x + x[-1:], x, ("getitem",)),
        Case("half of the batch", lambda x: x[: x.shape[0] // 2] * 2, x, ("getitem",)),
        Case("first token", lambda x: x[:, 0] * 2, x),
        Case("every second row", lambda x: x[::2] * 2, x, ("getitem",)),
        Case("gram", lambda x: x @ x.T, square, ("matmul",), exact=False),
        Case("covariance", lambda x: x.T @ x, square, ("matmul",), exact=False),
        Case("linear", lambda x: F.linear(x, torch.ones(3, 8)) + 1, square, exact=False),
        Case("linear of transposed", lambda x: torch.ones(3, 8) @ x.T, square, exact=False),
        Case(
            "einsum over batch",
            lambda x: torch.einsum("bsh,bth->st", x, x),
            x,
            ("einsum",),
            exact=False,
        ),
        Case("einsum per row", lambda x: torch.einsum("bsh,bth->bst", x, x), x, exact=False),
        Case(
            "einsum sequence first",
            lambda x: torch.einsum("bsh,hk->sbk", x, torch.ones(4, 3)),
            x,
            exact=False,
        ),
        Case("norm over all", lambda x: x / x.norm(), x, ("norm",), exact=False),
        Case("squeeze dim", lambda x: x[:, :1].squeeze(1) * 2, x),
        Case("any over all", lambda x: x * (x > 0).any(), x, ("any",)),
        Case("triangular mask", lambda x: x.masked_fill(torch.ones(5, 4).triu(1).bool(), 0.0), x),
        Case("group norm", lambda x: F.group_norm(x.transpose(1, 2), 2), x, exact=False),
        Case("layer norm", lambda x: F.layer_norm(x, (4,)), x),
        Case("instance norm", lambda x: F.instance_norm(x), x, exact=False),
        Case("conv", lambda x: F.conv1d(x, torch.ones(3, 5, 2)), x, exact=False),
        Case("max pool", lambda x: F.max_pool1d(x, 2), x),
        Case("interpolate", lambda x: F.interpolate(x, scale_factor=2.0), x),
        Case("pad", lambda x: F.pad(x, (1, 1)), x),
        Case("pad batch", lambda x: F.pad(x, (0, 0, 0, 0, 1, 0)), x, ("pad",)),
        Case("unfold", lambda x: x.unfold(1, 2, 1).sum(-1), x),
        Case("fft", lambda x: torch.fft.rfft(x, dim=1).abs(), x, exact=False),
        Case(
            "fft over batch", lambda x: torch.fft.fft(x, dim=0).abs(), x, ("fft_fft",), exact=False
        ),
        Case("dropout", lambda x: F.dropout(x + 1, 0.5) * 2, x, ("dropout",), seeded=True),
        Case("dropout in eval", lambda x: F.dropout(x + 1, 0.5, training=False) * 2, x),
        Case(
            "rand",
            lambda x: x + torch.rand(x.shape[0], 1, 1) * torch.rand_like(x),
            x,
            ("rand",),
            seeded=True,
        ),
        Case(
            "two draws",
            lambda x: (torch.randn(3), x + torch.rand_like(x)),
            x,
            ("randn",),
            seeded=True,
        ),
        Case("masked select", lambda x: x[x > 0] * 2, x),
        Case("where", lambda x: torch.where(x > 0, x, -x), x),
        Case("one hot", lambda x: F.one_hot(x.argmax(-1), 4), x),
        Case("gather", lambda x: x.gather(1, x.argsort(1)), x),
        Case("gather over batch", lambda x: x.gather(0, x.argsort(0)), x, ("argsort",)),
        Case("topk", lambda x: x.topk(2, -1)[0] * 2, x),
        Case("scatter", lambda x: torch.zeros_like(x).scatter(1, x.argsort(1), x), x),
        Case(
            "row numbers as index",
            lambda x: x[torch.arange(x.shape[0]), x[:, :, 0].argmax(1)],
            x,
        ),
        Case("split and chunk", lambda x: sum(x.chunk(2, -1)) + x.split([1, 3], -1)[0], x),
        Case("unbind rows", lambda x: sum(x.unbind(1)), x),
        Case(
            "meshgrid",
            lambda x: (
                torch.meshgrid(torch.arange(x.shape[1]), torch.arange(4), indexing="ij")[0] + x
            ),
            x,
        ),
        Case(
            "embedding",
            lambda i: F.embedding(i, torch.arange(40.0).view(10, 4)),
            lambda: (torch.randint(0, 10, (6, 5)),),
        ),
        Case(
            "embedding bag",
            lambda i: F.embedding_bag(i, torch.arange(40.0).view(10, 4)),
            lambda: (torch.randint(0, 10, (6, 5)),),
        ),
        Case(
            "count",
            lambda i: torch.bincount(i.flatten(), minlength=10),
            lambda: (torch.randint(0, 10, (6, 5)),),
            ("flatten",),
        ),
        Case(
            "attention",
            lambda x: F.scaled_dot_product_attention(
                x[:, None], x[:, None], x[:, None], is_causal=True
            ),
            x,
            exact=False,
        ),
        Case("several outputs", lambda x: {"a": x * 2, "b": (x.sum(1), None, 3), "c": [x]}, x),
        Case("sizes as outputs", lambda x: (x * 2, x.shape[0], x.shape[1] * 2), x),
        Case("no batch at all", lambda: torch.arange(4) + 1, tuple),
        Case(
            "batch second",
            lambda h: (h.reshape(-1, 4) @ torch.ones(4, 4)).view(h.shape).softmax(0),
            lambda: (rand(5, 6, 4),),
            exact=False,
            batch=1,
        ),
        Case(
            "batch second, the same size",
            lambda h: h.flatten(0, 1).exp().view(h.shape).cumsum(0),
            lambda: (rand(6, 6, 4),),
            batch=1,
        ),
    ]


def unequal(rows: int) -> tuple[int, ...]:
    return (0, 1, rows) if rows < 4 else (0, 1, rows // 2 + 1, rows)


def names_of(tracer: Tracer) -> set[str]:
    """What looks across rows; a last call that was only peeled off does not."""
    reasons = [item for captured in tracer.captures for item in captured.reasons.items()]
    return {
        part for name, why in reasons if "is needed whole" not in why for part in name.split(".")
    }


def compare(got: Any, want: Any, *, exact: bool) -> None:
    left, right = tree_leaves(got), tree_leaves(want)
    assert len(left) == len(right), "the same number of outputs"
    for a, b in zip(left, right, strict=True):
        if isinstance(b, torch.Tensor):
            assert a.dtype == b.dtype and a.shape == b.shape
            if exact:
                assert torch.equal(a, b)
            else:
                torch.testing.assert_close(a, b)
        else:
            assert a == b


@pytest.fixture(autouse=True)
def fresh() -> Any:
    torch._dynamo.reset()
    torch.manual_seed(0)
    with torch.no_grad():
        yield
    torch._dynamo.reset()


@pytest.mark.parametrize("case", cases(), ids=lambda case: case.name)
def test_whole_and_split_equal_eager(case: Case) -> None:
    args = case.args()
    fresh_args = lambda: tree_map(lambda a: a.clone() if isinstance(a, torch.Tensor) else a, args)  # noqa: E731
    torch.manual_seed(1)
    want = case.fn(*fresh_args())
    tracer = Tracer(batch=case.batch)
    compiled = tracer.compile(case.fn)
    torch.manual_seed(1)
    compare(compiled(*fresh_args()), want, exact=True)
    tracer.cut = unequal
    torch.manual_seed(1)
    compare(compiled(*fresh_args()), want, exact=case.exact)
    if args:
        assert names_of(tracer) >= set(case.mixing), tracer.captures[0].reasons
        if not case.mixing:
            assert not names_of(tracer), tracer.captures[0].reasons


class Mutating(nn.Module):
    """Writes into its arguments and buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("steps", torch.zeros((), dtype=torch.long))
        self.register_buffer("seen", torch.zeros(4))

    def forward(self, x: torch.Tensor, cache: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
        self.steps += 1
        self.seen.add_(x.sum((0, 1)))
        cache[:, :2] = x[:, :2]
        cache.index_copy_(1, at, x[:, :1])
        y = x * 2
        y.add_(cache[:, : x.shape[1]])
        x.mul_(3)
        return y + x


def test_caches_buffers_and_inputs_are_written_in_place() -> None:
    def arguments() -> tuple[torch.Tensor, ...]:
        torch.manual_seed(3)
        return rand(6, 5, 4), torch.zeros(6, 9, 4), torch.tensor([7])

    for cut in (None, unequal):
        torch._dynamo.reset()
        want_model, got_model = Mutating(), Mutating()
        want_args, got_args = arguments(), arguments()
        tracer = Tracer(cut=cut)
        compiled = tracer.compile(got_model)
        for _ in range(2):
            want = want_model(*want_args)
            got = compiled(*got_args)
            compare(got, want, exact=True)
            compare(got_args, want_args, exact=True)
            compare(list(got_model.buffers()), list(want_model.buffers()), exact=cut is None)
        mutated = {name for op in tracer.captures[0].graph.ops for name in op.mutates}
        assert len(mutated) == 4, mutated


def test_batch_norm_in_training_mixes_and_in_eval_does_not() -> None:
    for training in (True, False):
        torch._dynamo.reset()
        model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.ReLU()).train(training)
        other = copy.deepcopy(model)
        x = rand(6, 4)
        tracer = Tracer(cut=unequal)
        compare(tracer.compile(model)(x), other(x), exact=False)
        compare(dict(model.named_buffers()), dict(other.named_buffers()), exact=False)
        assert ("batch_norm" in names_of(tracer)) is training


class Routed(nn.Module):
    """Sends each token to its best expert, by topk and index_add."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(4, 3)
        self.experts = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        tokens = x.reshape(-1, 4)
        weights, chosen = self.gate(tokens).softmax(-1).topk(2, -1)
        result = torch.zeros_like(tokens)
        for number, expert in enumerate(self.experts):
            token, slot = torch.where(chosen == number)
            result.index_add_(0, token, expert(tokens[token]) * weights[token, slot, None])
        return result.view(x.shape)


def test_routing_by_data_is_right_whatever_breaks() -> None:
    model = Routed()
    x = rand(6, 5, 4)
    want = model(x)
    for cut in (None, unequal):
        torch._dynamo.reset()
        compare(Tracer(cut=cut).compile(model)(x), want, exact=cut is None)


def test_none_and_scalars_and_keyword_arguments() -> None:
    def fn(
        x: torch.Tensor, mask: Any = None, *, scale: float = 1.0, times: int = 2, table: Any = None
    ) -> Any:
        y = x * scale * times
        return (y if mask is None else y * mask), table["w"].sum(), mask

    x, table = rand(6, 4), {"w": rand(3)}
    for mask in (None, rand(6, 1)):
        torch._dynamo.reset()
        tracer = Tracer(cut=unequal)
        compiled = tracer.compile(fn)
        compare(
            compiled(x, mask, scale=0.5, times=3, table=table),
            fn(x, mask, scale=0.5, times=3, table=table),
            exact=True,
        )
        compare(
            compiled(x, mask, scale=0.5, times=4, table=table),
            fn(x, mask, scale=0.5, times=4, table=table),
            exact=True,
        )


def test_other_batches_use_the_same_graph() -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 4))
    tracer = Tracer(cut=unequal)
    compiled = tracer.compile(model)
    for rows in (6, 2, 9):
        x = rand(rows, 4)
        compare(compiled(x), model(x), exact=False)
    assert len(tracer.captures) == 1
    x = rand(1, 4)
    compare(compiled(x), model(x), exact=True)

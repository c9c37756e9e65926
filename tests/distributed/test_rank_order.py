"""Ranks hold each other to the model, the place in its call and the kernels that they talk by.

A swap raises on both ranks and kills nothing; what ranks may do unlike each other goes on.
"""

from __future__ import annotations

import copy
import functools
import gc
import threading
import warnings

import pytest
import torch
import torch.distributed as dist
from ranks import run_once
from torch import nn
from torch.distributed import _functional_collectives as funcol

import torchweft as weft
from torchweft.api import session_of
from torchweft.errors import PlanError, WeftError
from torchweft.ranks.ranks import MAX_AHEAD, is_carried

X = torch.arange(32.0).reshape(4, 8) / 10
WATCHDOG_S = 5


class Model(nn.Module):
    def __init__(self, seed, *, group=None, talks=True):
        super().__init__()
        torch.manual_seed(seed)
        self.linear = nn.Linear(8, 8, bias=False)
        self.group, self.talks = group, talks

    def forward(self, x):
        y = self.linear(x)
        if not self.talks:
            return y
        return funcol.all_reduce(y, "sum", self.group or dist.group.WORLD) * 2


class Other(Model):
    """Another class of the same shapes."""


class Broken(nn.Module):
    """Two pieces of equal shapes; between them one may raise, or take another branch."""

    def __init__(self):
        super().__init__()
        self.raises, self.flag = False, False

    @torch._dynamo.disable
    def between(self):
        if self.raises:
            raise ValueError("between the pieces")

    def forward(self, x):
        x = funcol.all_reduce(x + 1, "sum", dist.group.WORLD)
        self.between()
        x = x * 2 if self.flag else x * 3
        return funcol.all_reduce(x, "sum", dist.group.WORLD)


def woven(model, strategy=None, **options):
    chosen = strategy or weft.overlap(parts=2)
    return weft.compile(model.eval(), chosen, watchdog_s=WATCHDOG_S, fallback="error", **options)


def right(model, x=X):
    wanted = model.linear(x) * 4
    return torch.allclose(model(x), wanted, atol=1e-5)


def check_swap(rank, *models):
    """Both ranks are told, nothing is dead, and the right order goes on."""
    mine = models[rank]
    with pytest.raises(PlanError, match="call different models") as told:
        mine(X)
    assert told.value.rule == "ranks"
    assert "rank 0: call" in str(told.value) and "rank 1: call" in str(told.value)
    assert type(models[0]).__name__ in str(told.value)
    assert all(right(model) for model in models)


def swapped(rank, *, warm, classes=(Model, Model), **options):
    models = [woven(kind(seed), **options) for seed, kind in enumerate(classes)]
    for model in models if warm else ():
        assert right(model) and right(model)
    check_swap(rank, *models)


def second_is_new(rank):
    """One rank calls a model that all know, the other one that is called for the first time."""
    models = [woven(Model(1)), woven(Model(2))]
    assert right(models[0])
    check_swap(rank, *models)


def swapped_under_torch_compile(rank):
    options = {"strategy": weft.overlap(parts=2), "watchdog_s": WATCHDOG_S}
    plain = [Model(1).eval(), Other(2).eval()]
    models = [torch.compile(m, backend="weft", options=options, dynamic=True) for m in plain]
    for model in models:
        model(X)
    with pytest.raises(PlanError, match="call different models"):
        models[rank](X)
    for model, kept in zip(models, plain, strict=True):
        torch.testing.assert_close(model(X), kept.linear(X) * 4)


class Summed(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 1

    @staticmethod
    def backward(ctx, grad):
        return funcol.all_reduce(grad, "sum", dist.group.WORLD)


class Backwards(nn.Module):
    def __init__(self, seed):
        super().__init__()
        torch.manual_seed(seed)
        self.linear = nn.Linear(8, 8, bias=False)

    def forward(self, x):
        return self.linear(Summed.apply(x))


def swapped_backward(rank):
    models = [woven(Backwards(seed)) for seed in (1, 2)]

    def losses():
        inputs = [X.clone().requires_grad_() for _ in models]
        return inputs, [model(x).sum() for model, x in zip(models, inputs, strict=True)]

    with torch.enable_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # Dynamo makes an autograd.Function
        for _ in range(2):
            inputs, made = losses()
            for loss in made:
                loss.backward()
        for x, model in zip(inputs, models, strict=True):
            torch.testing.assert_close(x.grad, 2 * torch.ones(4, 8) @ model.linear.weight)
        _, made = losses()
        with pytest.raises(PlanError, match="call different models"):
            made[rank].backward()


def raises_between_pieces(rank):
    model = woven(Broken(), "sequential")
    model(X)
    model.raises = rank == 0
    with pytest.raises(ValueError if rank == 0 else PlanError, match=r"between|same place"):
        model(X)
    if rank == 0:
        model.raises = False
        with pytest.raises(PlanError, match="same place of a call"):
            model(X)
    torch.testing.assert_close(model(X), 4 * 3 * (X + 1))


# What ranks may do unlike each other.


def other_branches(rank):
    model = woven(Broken(), "sequential")
    for flag in (False, True, False, True):
        model.flag = flag is bool(rank)
        torch.testing.assert_close(model(X), 2 * (2 + 3) * (X + 1))


def extra_local_model(rank):
    """Of the same class, compiled before, called by one rank; it talks to nobody."""
    if rank == 0:
        local = woven(Model(7, talks=False), "sequential")
        local(X)
    models = [woven(Model(1)), woven(Model(2))]
    assert all(right(model) for model in models)
    check_swap(rank, *models)


def copies_of_one_rank(rank):
    """A copy beside the model, and one that takes its place."""
    model = woven(Model(1))
    assert right(model)
    if rank == 1:
        beside = woven(copy.deepcopy(model))
    for _ in range(2):
        assert right(model)
        assert right(beside if rank == 1 else model)
    if rank == 1:
        model = woven(copy.deepcopy(model))
        del beside
        gc.collect()
    assert right(model) and right(model)


def copy_that_is_never_called(rank):
    model = Model(1)
    kept = woven(copy.deepcopy(model)) if rank == 0 else None
    woven(model)
    assert right(model) and right(model)
    del kept


def compiled_again(rank):
    models = [woven(Model(1)), woven(Model(2))]
    assert all(right(model) for model in models)
    if rank == 1:
        torch._dynamo.reset()
        woven(models[1])
    assert all(right(model) for model in models)
    check_swap(rank, *models)


class Sends(nn.Module):
    def forward(self, x):
        return funcol.broadcast(x * 3, 0, dist.group.WORLD)


class Receives(nn.Module):
    def forward(self, x):
        return funcol.broadcast(torch.zeros_like(x), 0, dist.group.WORLD) + 1


def pipeline(rank):
    """Other modules, and another number of them, on every rank."""
    if rank == 1:
        woven(nn.Linear(8, 8))(X)
    stages = [woven(Sends() if rank == 0 else Receives(), "sequential") for _ in range(2)]
    for _ in range(2):
        for stage in stages:
            torch.testing.assert_close(stage(X), 3 * X + rank)
    with pytest.raises(PlanError, match="call different models"):
        stages[rank](X)


def two_threads(rank):
    groups = [dist.new_group([0, 1]) for _ in range(2)]
    models = [woven(Model(seed, group=group)) for seed, group in enumerate(groups)]
    said: list[bool] = []

    @torch.no_grad()
    def work(model):
        said.append(all(right(model) for _ in range(10)))

    threads = [threading.Thread(target=work, args=(model,)) for model in models]
    for thread in threads[:: 1 if rank == 0 else -1]:
        thread.start()
    for thread in threads:
        thread.join()
    assert said == [True, True]


# Kernels.


def summed(x, *, group, scale=1.0):
    y = x * scale
    dist.all_reduce(y, group=group)
    return (y,)


class Summer:
    def __call__(self, x, *, group):
        return summed(x, group=group)

    def method(self, x, *, group):
        return summed(x, group=group)


def replacing(function):
    kernel = weft.kernel(function, talks=["all_reduce"])

    @weft.strategy
    def by_kernel(s):
        s.split(2)
        while ready := s.ready():
            for op, part in ready:
                mine = kernel if op.collective is not None else None
                s.run(op, part, replace=mine, lane="compute" if mine else None)
        s.merge()

    return by_kernel


KERNELS = {
    "function": summed, "object": Summer(), "method": Summer().method,
    "lambda": lambda x, *, group: summed(x, group=group),
    "other lambda": lambda x, *, group: summed(x * 1, group=group),
}  # fmt: skip


def equal_kernels(rank):
    assert right(woven(Model(1), replacing(Summer())))
    bound = functools.partial(summed, scale=1.0 + 0.0 * rank)
    assert right(woven(Model(1), replacing(bound)))


def unlike_kernels(rank):
    for pair in ((None, "function"), ("object", "method"), ("lambda", "other lambda")):
        name = pair[rank]
        model = woven(Model(1), replacing(KERNELS[name]) if name else None)
        with pytest.raises(PlanError, match="do not plan the same collectives"):
            model(X)
    assert right(woven(Model(1)))


def told_by(model):
    """In which calls, from now on, a model of ours runs as it is: looked at call by call."""
    service, flags = session_of(model).service, []
    for _ in range(MAX_AHEAD + 6):
        before = service.num_stock
        assert right(model)
        flags.append(service.num_stock > before)
    return flags


def disabled_by_one(rank, **options):
    """One rank asks for it; both go back at one call, and on again, and numbers stay right."""
    model = woven(Model(1), **options)
    assert right(model) and right(model)
    for asking, share in ((1, 0.0), (0, 1.0), (1, 0.5)):
        if rank == asking:
            weft.enable(model, share)
        flags = told_by(model)
        both = [None, None]
        dist.all_gather_object(both, flags)
        assert both[0] == both[1], "at one call"
        assert flags[0] == (share == 1.0), "not at once"
        late = flags[-4:]
        assert late == {0.0: [True] * 4, 1.0: [False] * 4}.get(share, late)
        assert share != 0.5 or sum(late) == 2


def disabled_and_enabled_at_once(rank):
    """Ranks that want different things do the same: the smaller share first, then what is left."""
    model = woven(Model(1))
    assert right(model) and right(model)
    weft.enable(model, float(rank))
    flags = told_by(model) + told_by(model)
    both = [None, None]
    dist.all_gather_object(both, flags)
    assert both[0] == both[1] and any(flags)


def disabled_too_early(rank):
    model = woven(Model(1))
    with pytest.raises(WeftError, match="it was not called yet"):
        weft.disable(model)
    assert right(model)


CASES = {
    "swapped": functools.partial(swapped, warm=True),
    "swapped at the first call": functools.partial(swapped, warm=False),
    "other classes swapped": functools.partial(swapped, warm=False, classes=(Model, Other)),
    "boundary swapped": functools.partial(swapped, warm=True, capture="boundary"),
    "boundary swapped at the first call": functools.partial(
        swapped, warm=False, capture="boundary"
    ),
    "boundary disabled by one": functools.partial(disabled_by_one, capture="boundary"),
    **{
        case.__name__.replace("_", " "): case
        for case in (
            second_is_new, swapped_under_torch_compile, swapped_backward, raises_between_pieces,
            other_branches, extra_local_model, copies_of_one_rank, copy_that_is_never_called,
            compiled_again, pipeline, two_threads, equal_kernels, unlike_kernels, disabled_by_one,
            disabled_and_enabled_at_once, disabled_too_early,
        )
    },
}  # fmt: skip


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    return run_once(tmp_path_factory, __name__, lambda folder: CASES)


@pytest.mark.parametrize("name", CASES)
def test_case(results, name):
    assert results[name] == "", results[name]


@pytest.mark.parametrize(
    ("config", "carried"),
    [("cpu:gloo", False), ("cpu:gloo,cuda:gloo", False), ("cpu:gloo,cuda:nccl", True),
     ("cuda:nccl", True), ("cpu:gloo,xpu:xccl", True), ("openreg:occl", True), ("cpu:mpi", True)],
)  # fmt: skip
def test_collectives_of_any_backend_but_gloo_stay_on_the_users_group(config, carried):
    assert is_carried(config) == carried

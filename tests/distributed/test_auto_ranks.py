"""`auto` on two ranks: all choose alike, whatever each measures; unlike calls stop nobody."""

from __future__ import annotations

import copy
import time
import warnings

import pytest
import torch
import torch.distributed as dist
from ranks import run_once
from torch import Tensor, nn

import torchweft as weft
from torchweft.api import session_of
from torchweft.serve import budget
from torchweft.serve.auto import kind_of
from torchweft.serve.trials import Choice

WATCHDOG_S = 10


class Layers(nn.Module):
    """Each layer is summed over the ranks."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(3))

    def forward(self, x):
        for layer in self.layers:
            y = layer(x).relu()
            dist.all_reduce(y)
            x = x + y / 2
        return x


class Means(nn.Module):
    """Ranks may have different numbers of rows: what is summed has none."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x):
        y = self.first(x).relu()
        total = y.sum(0)
        dist.all_reduce(total)
        return self.second(y + total)


@torch.library.custom_op("auto_ranks::read_some", mutates_args=())
def read_some(x: Tensor) -> Tensor:
    time.sleep(3e-3 * (1 + dist.get_rank()) + 5e-4 * len(x))
    return x + 1


@torch.library.custom_op("auto_ranks::work_on", mutates_args=())
def work_on(x: Tensor) -> Tensor:
    time.sleep(5e-4 * len(x))
    return x * 2


read_some.register_fake(torch.empty_like)
work_on.register_fake(torch.empty_like)


class Reads(nn.Module):
    """Uneven parts are best: each costs some milliseconds, the work of the last is uncovered."""

    def forward(self, x):
        y = torch.ops.auto_ranks.work_on(torch.ops.auto_ranks.read_some(x))
        total = y.sum(0)
        dist.all_reduce(total)
        return y + total


def told(mine):
    """What all ranks have to say."""
    theirs = [None] * dist.get_world_size()
    dist.all_gather_object(theirs, mine)
    return theirs


def check_together(rank):
    """Each kind of calls is raced, and both ranks keep the same; answers are right all the time."""
    plain = Layers().eval()
    model = weft.compile(copy.deepcopy(plain), watchdog_s=WATCHDOG_S, remember=False)
    auto = session_of(model).auto
    for rows in (8, 3, 8, 16):
        x = torch.randn(rows, 16, generator=torch.Generator().manual_seed(rows))
        wanted = plain(x)
        for _ in range(200):
            torch.testing.assert_close(model(x), wanted)
            if auto.is_settled((x,), {}):
                break
        assert auto.is_settled((x,), {})
    chosen = {str(kind): str(way) for kind, way in auto.trials.chosen.items()}
    first, second = told(chosen)
    assert first == second and len(first) == 3
    assert not weft.report(model).fallbacks, weft.report(model)


def check_sure(rank):
    """Each rank is sure of another way; the slowest rank's time counts, so they agree."""
    plain = Layers().eval()
    model = weft.compile(copy.deepcopy(plain), watchdog_s=WATCHDOG_S, remember=False)
    trials = session_of(model).auto.trials
    agreed = trials.agreed

    def sure(own_s):
        own_s = list(own_s)
        own_s[(1 + rank) % len(own_s)] = 1e-9
        return agreed(own_s)

    trials.agreed = sure
    x = torch.ones(8, 16)
    while not session_of(model).auto.is_settled((x,), {}):
        model(x)
    first, second = told({str(kind): str(way) for kind, way in trials.chosen.items()})
    assert first == second and first


def check_unlike(rank):
    """Ranks whose calls are of different kinds, in races and behind them, get right answers."""
    plain = Means().eval()
    model = weft.compile(copy.deepcopy(plain), watchdog_s=WATCHDOG_S, remember=False)
    for number in range(60):
        rows = 8 if number % 3 or rank else 40
        x = torch.randn(rows, 16, generator=torch.Generator().manual_seed(number))
        torch.testing.assert_close(model(x), plain(x))


def check_unlike_later(rank):
    """One rank's calls change when all is settled, and it has another way for them."""
    plain = Means().eval()
    model = weft.compile(copy.deepcopy(plain), watchdog_s=WATCHDOG_S, remember=False)
    auto = session_of(model).auto
    for rows in (8, 40):
        x = torch.ones(rows, 16)
        while not auto.is_settled((x,), {}):
            model(x)
    small, large = (kind_of((torch.ones(rows, 16),), {}) for rows in (8, 40))
    auto.trials.choices[small] = Choice(weft.sequential)
    auto.trials.choices[large] = Choice(None)
    for number in range(20):
        x = torch.randn(40 if rank and number % 2 else 8, 16)
        torch.testing.assert_close(model(x), plain(x))
    reasons = [reason for reason, _ in weft.report(model).fallbacks]
    assert (rank == 1) or reasons == ["auto: the ranks have calls of different kinds"], reasons


def check_budget(rank):
    """Trials that must wait for seconds of calls are made in the same calls on both ranks."""
    plain = Layers().eval()
    before, budget.SHARE = budget.SHARE, 0.5
    try:
        model = weft.compile(copy.deepcopy(plain), watchdog_s=WATCHDOG_S, remember=False)
        auto, x, numbers = session_of(model).auto, torch.ones(8, 16), []
        auto.budget.costs[True] = 0.02
        for number in range(200):
            time.sleep(0.001 * rank)
            known = auto.num_attempts, dict(auto.trials.races), len(auto.traced)
            torch.testing.assert_close(model(x), plain(x))
            if known != (auto.num_attempts, dict(auto.trials.races), len(auto.traced)):
                numbers.append(number)
    finally:
        budget.SHARE = before
    first, second = told(numbers)
    assert first == second and first, (first, second)
    assert not weft.report(model).fallbacks, weft.report(model)


def check_silent_at_first(rank):
    """Ranks that have heard no collective agree on no capture of one: it runs as it is."""

    def model(x):
        y = x * 2
        if len(y) > 1:
            dist.all_reduce(y)
        return y + 1

    woven = weft.compile(model, watchdog_s=WATCHDOG_S, remember=False)
    for rows in (1, 1, 1, *[8] * 40):
        x = torch.full((rows, 4), float(rank))
        torch.testing.assert_close(woven(x), model(x))
    assert all(not piece.communicators for piece in session_of(woven).pieces)


def check_searched(rank):
    """In a warm-up both ranks search at the same costs, and race the same plan."""
    plain, rules = Reads().eval(), []
    for name, uses in (("read_some", "io"), ("work_on", "compute")):
        rules.append(weft.mark_op(name, name, uses=uses, rows="row-wise"))
    model = weft.compile(copy.deepcopy(plain), rules=rules, watchdog_s=WATCHDOG_S, remember=False)
    x = torch.randn(32, 16, generator=torch.Generator().manual_seed(0))
    wanted = plain(x)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of torch's own modules
        weft.warmup(model, [x])
    (choice,) = session_of(model).auto.trials.choices.values()
    mine = sorted(map(str, choice.speeds))
    first, second = told(mine)
    assert first == second and any("replay(" in way for way in mine), (first, second)
    torch.testing.assert_close(model(x), wanted)
    assert not weft.report(model).fallbacks, weft.report(model)


CASES = {
    "together": check_together, "sure": check_sure, "unlike": check_unlike,
    "unlike later": check_unlike_later, "budget": check_budget,
    "silent at first": check_silent_at_first, "searched": check_searched,
}  # fmt: skip


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    return run_once(tmp_path_factory, __name__, lambda folder: CASES)


@pytest.mark.parametrize("name", CASES)
def test_case(results, name):
    assert results[name] == "", results[name]

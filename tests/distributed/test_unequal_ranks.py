"""Ranks with unequal numbers of rows: who has too few to cut makes all run that call whole."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist
from ranks import run_once
from torch import Tensor, nn
from torch.distributed import _functional_collectives as functional

import torchweft as weft
from torchweft.errors import PlanError, StrategyError

WIDTH = 64
CALLS = ((6, 6), (5, 1), (5, 2), (1, 5), (1, 1), (7, 6), (2, 1), (6, 6))
SEEN: list[int] = []


@torch.library.custom_op("unequal::look", mutates_args=())
def look(x: Tensor) -> Tensor:
    SEEN.append(len(x))
    return x + 0


look.register_fake(torch.empty_like)
RULES = [weft.mark_op("look", "look", uses="compute", rows="row-wise")]


def dispatch(y):
    """Each rank keeps its own rows; how many the other one has does not matter."""
    mine = [len(y), 0] if dist.get_rank() == 0 else [0, len(y)]
    with weft.mark("dispatch", uses="network", rows="row-wise"):
        return functional.all_to_all_single(y, mine, mine, dist.group.WORLD)


class Experts(nn.Module):
    """Rows go through a collective part by part."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        y = self.first(torch.ops.unequal.look(x)).relu()
        return self.second(dispatch(y) + 1) + x


class Sums(nn.Module):
    """What is summed has no rows, so the collective is the same however the batch is cut."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        y = self.first(torch.ops.unequal.look(x)).relu()
        total = y.sum(0)
        dist.all_reduce(total)
        return self.second(y + total)


class Remembers(nn.Module):
    """It writes into a cache before it talks: a call must not be begun twice."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(WIDTH, WIDTH)

    def forward(self, x, cache):
        cache.add_(x)
        return dispatch(self.first(cache).relu()) + 1


class Exchanges(nn.Module):
    """All rows go to the other rank and come back; how many they are is told first."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        y = self.first(x).relu()
        SEEN.append(len(y))
        counts = torch.empty(2, dtype=torch.int64)
        dist.all_gather_single(counts, torch.tensor([len(y)]))
        rank, theirs = dist.get_rank(), int(counts[1 - dist.get_rank()])
        there, back = ([0, len(y)], [0, theirs]) if rank == 0 else ([len(y), 0], [theirs, 0])
        got, own = torch.empty(theirs, WIDTH), torch.empty(len(y), WIDTH)
        dist.all_to_all_single(got, y, back, there)
        dist.all_to_all_single(own, got * 2, there, back)
        return self.second(own) + x


def rows_of(number, rank, many):
    generator = torch.Generator().manual_seed(10 * number + rank)
    return torch.randn(many, WIDTH, generator=generator)


def check_fewer_rows_than_parts(rank):
    """A rank of one row, or of two for three parts: equal results, and the reason is counted."""
    for parts in (2, 3):
        plain = Experts().eval()
        model = weft.compile(copy.deepcopy(plain), weft.overlap(parts=parts), rules=RULES)
        for number, sizes in enumerate(CALLS):
            x = rows_of(number, rank, sizes[rank])
            wanted = plain(x)
            SEEN.clear()
            torch.testing.assert_close(model(x), wanted)
            cut = min(sizes) >= parts
            assert (len(SEEN) == parts) if cut else (SEEN[-1] == sizes[rank]), (sizes, SEEN)
        told = dict(weft.report(model).fallbacks)
        (count,) = [n for why, n in told.items() if "the ranks cut this call differently" in why]
        unlike = [sizes for sizes in CALLS if (min(sizes) < parts) != (max(sizes) < parts)]
        assert count == len(unlike), told


def check_not_in_parts(rank):
    """A rank that cuts and one that cannot say the same where their collectives are the same."""
    plain = Sums().eval()
    model = weft.compile(copy.deepcopy(plain), weft.overlap(parts=2), rules=RULES)
    for number, sizes in enumerate(CALLS):
        x = rows_of(number, rank, sizes[rank])
        wanted = plain(x)
        SEEN.clear()
        torch.testing.assert_close(model(x), wanted)
        assert len(SEEN) == min(2, sizes[rank]), (sizes, SEEN)
    assert not [why for why, _ in weft.report(model).fallbacks if "cut this call" in why]


def check_written_once(rank):
    """What is written before the first collective is written once."""
    plain = Remembers().eval()
    model = weft.compile(copy.deepcopy(plain), weft.overlap(parts=2))
    for number, sizes in enumerate(CALLS):
        x = rows_of(number, rank, sizes[rank])
        cache, own = x * 2, x * 2
        wanted = plain(x, own)
        torch.testing.assert_close(model(x, cache), wanted)
        torch.testing.assert_close(cache, own)


def check_other_choice(rank):
    """A strategy that looks at the number of tokens decides otherwise on each rank."""

    def by_tokens(s):
        if s.context.num_tokens < 8:
            s.sequential("few tokens")
        else:
            weft.overlap(s, parts=2)

    plain = Experts().eval()
    model = weft.compile(copy.deepcopy(plain), by_tokens, rules=RULES)
    for number, sizes in enumerate(((12, 12), (12, 4), (4, 12), (4, 4), (12, 12))):
        x = rows_of(number, rank, sizes[rank])
        torch.testing.assert_close(model(x), plain(x))
    assert [count for _, count in weft.report(model).fallbacks] == [2]


def check_no_rows(rank):
    """In boundary mode a part may have no rows, and takes part in all exchanges of that part."""
    plain = Exchanges().eval()
    for strategy, parts in ((weft.overlap(parts=3), 3), (weft.dual_batch, 2)):
        model = weft.compile(
            copy.deepcopy(plain), strategy, capture="boundary", strict=False, watchdog_s=20
        )
        for number, sizes in enumerate(((6, 6), (6, 6), (5, 1), (1, 5), (2, 4), (1, 1), (6, 6))):
            x = rows_of(number, rank, sizes[rank])
            wanted = plain(x)
            SEEN.clear()
            torch.testing.assert_close(model(x), wanted)
            if number >= 2:  # the first call is recorded, the first one in parts compared
                assert len(SEEN) == parts and sum(SEEN) == sizes[rank], (sizes, SEEN)
        assert not weft.report(model).fallbacks, weft.report(model)


def check_error(rank):
    """Under fallback="error" the call raises on both ranks, and the next one is fine."""
    plain = Experts().eval()
    model = weft.compile(
        copy.deepcopy(plain), weft.overlap(parts=2), rules=RULES, fallback="error", watchdog_s=10
    )
    for number, sizes in enumerate(((6, 6), (5, 1), (6, 6))):
        x = rows_of(number, rank, sizes[rank])
        if 1 in sizes:
            with pytest.raises((PlanError, StrategyError)):
                model(x)
        else:
            torch.testing.assert_close(model(x), plain(x))


def check_auto(rank):
    """`auto` gives right answers whatever the rows are."""
    plain = Experts().eval()
    model = weft.compile(copy.deepcopy(plain), rules=RULES, remember=False, watchdog_s=20)
    for number in range(24):
        sizes = CALLS[number % len(CALLS)]
        x = rows_of(number, rank, sizes[rank])
        torch.testing.assert_close(model(x), plain(x))


CASES = {
    "fewer rows than parts": check_fewer_rows_than_parts, "not in parts": check_not_in_parts,
    "written once": check_written_once, "no rows": check_no_rows,
    "other choice": check_other_choice, "error": check_error, "auto": check_auto,
}  # fmt: skip


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    return run_once(tmp_path_factory, __name__, lambda folder: CASES)


@pytest.mark.parametrize("name", CASES)
def test_case(results, name):
    assert results[name] == "", results[name]

"""Settings for all tests: hypothesis profiles, and the option that writes golden plans anew."""

from __future__ import annotations

import math
import os
import signal
import sys
from collections.abc import Generator, Iterator

import pytest
from hypothesis import HealthCheck, settings

# Machines that run the tests are slow and noisy: time is no part of what the laws say.
settings.register_profile(
    "weft",
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
settings.register_profile("search", settings.get_profile("weft"), derandomize=False)
settings.load_profile("search" if os.environ.get("HYPOTHESIS_SEARCH") else "weft")

# A shell that starts this in the background, or nohup, has it ignore what some tests send.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--write-plans", action="store_true", help="write tests/plans anew")
    parser.addoption("--no-skips", action="store_true", help="a skip is a failure")


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(
    collector: pytest.Collector,
) -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    """A file that skips itself for a missing library fails where all libraries are installed."""
    report = yield
    if report.skipped and collector.config.getoption("--no-skips"):
        report.outcome = "failed"
    return report


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item,
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """As for files, so for tests."""
    report = yield
    if report.skipped and item.config.getoption("--no-skips"):
        report.outcome = "failed"
    return report


@pytest.fixture(autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a test keeps on disk is not there for the next one, nor is what its user has kept."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))


@pytest.fixture(autouse=True)
def trials_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """`auto` tries ways from its second call on, though the calls of tests take no time."""
    if (budget := sys.modules.get("torchweft.serve.budget")) is not None:
        monkeypatch.setattr(budget, "SHARE", math.inf)


@pytest.fixture
def in_time() -> Iterator[None]:
    """Fails a test that takes longer than ten seconds, where hanging is what it looks for."""

    def late(*_: object) -> None:
        raise AssertionError("this took longer than ten seconds")

    before = signal.signal(signal.SIGALRM, late)
    signal.setitimer(signal.ITIMER_REAL, 10)
    yield
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, before)

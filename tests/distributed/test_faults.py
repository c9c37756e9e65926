"""Ranks that are killed, stopped, slow or raising: every other rank gets a `RunError`, in time.

Each case starts two real processes (four for a mesh) on gloo and does to one of them what the case
says. Nobody hangs, aborts or keeps a socket.
"""

from __future__ import annotations

import json
import os
import random
import signal
import socket
import time
from pathlib import Path

import fault_rank
import pytest
from ranks import fork_server

PATIENCE_S = 90.0


class Ranks:
    """Processes of `fault_rank.py`; what each says is one JSON object a line of a file."""

    def __init__(self, folder: Path, case: str, size: int = 2, **options: object) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        self.said = [folder / f"rank{rank}" for rank in range(size)]
        start = fork_server()
        self.processes = []
        for rank, said in enumerate(self.said):
            said.touch()
            told = {"case": case, "said": str(said), "size": size, **options}
            process = start.Process(target=fault_rank.main, args=(rank, port, told))
            process.start()
            self.processes.append(process)

    def lines(self, rank: int) -> list[dict]:
        return [json.loads(line) for line in self.said[rank].read_text().splitlines()]

    def until(self, rank: int, what: str) -> None:
        """Wait until a rank says `what`."""
        until = time.monotonic() + PATIENCE_S
        while not any(line["at"] == what for line in self.lines(rank)):
            assert self.processes[rank].is_alive(), (
                f"it never came to {what!r}: {self.errors(rank)}"
            )
            assert time.monotonic() < until, f"it never came to {what!r}"
            time.sleep(0.01)

    def send(self, rank: int, number: signal.Signals) -> None:
        os.kill(self.processes[rank].pid or 0, number)

    def end(self, rank: int) -> list[dict]:
        """Wait for the end of a rank; what it said."""
        self.processes[rank].join(PATIENCE_S)
        assert not self.processes[rank].is_alive(), f"rank {rank} hangs: {self.lines(rank)}"
        code = self.processes[rank].exitcode
        assert code == 0, f"exit {code}: {self.lines(rank)} {self.errors(rank)}"
        return self.lines(rank)

    def errors(self, rank: int) -> str:
        return Path(f"{self.said[rank]}.errors").read_text()[-2000:]

    def close(self) -> None:
        for process in self.processes:
            process.kill()
            process.join()


@pytest.fixture
def ranks(tmp_path):
    started: list[Ranks] = []

    def start(case, **options):
        started.append(Ranks(tmp_path, case, **options))
        return started[-1]

    yield start
    for pair in started:
        pair.close()


def told(lines):
    """What the survivor said of its failed call and of the one after it."""
    return {line["at"]: line for line in lines}


def assert_lost(lines, *words):
    found = told(lines)
    failed, again = found["failed"], found["again"]
    assert failed["kind"] == "RunError", failed
    text = failed["text"]
    assert "the last collective that all ranks finished: " in text, text
    assert "This rank waited in " in text, text
    for word in words:
        assert word in text, text
    assert again["kind"] == "RunError" and "is dead" in again["text"], again
    assert found["left"]["sockets"] <= 0, found["left"]
    return failed


@pytest.mark.parametrize("moment", range(20))
def test_a_rank_killed_at_a_random_moment_is_noticed(ranks, moment):
    rng = random.Random(moment)
    pair = ranks("loop")
    victim = rng.randrange(2)
    if rng.random() < 0.25:
        pair.until(victim, "compiling")  # the survivor may be at any point of its first call
        time.sleep(rng.random())
    else:
        pair.until(victim, "looping")
        time.sleep(rng.random() * 0.3)
    pair.send(victim, signal.SIGKILL)
    killed = time.time()
    failed = assert_lost(pair.end(1 - victim), "has ended")
    assert failed["when"] - killed < 10, "a kill is seen within 10 s"


def test_a_stopped_rank_is_given_up_after_the_watchdog(ranks):
    pair = ranks("loop", watchdog_s=3)
    pair.until(1, "looping")
    pair.send(1, signal.SIGSTOP)
    assert_lost(pair.end(0), "no answer from rank 1 for 3 s")


@pytest.mark.parametrize("number", [signal.SIGSTOP, signal.SIGKILL])
def test_who_waits_for_a_message_of_a_rank_that_is_gone_is_told(ranks, number):
    pair = ranks("messages", watchdog_s=4)
    pair.until(1, "looping")
    time.sleep(0.5)  # rank 1 is slow: it has told of the call, and not sent its message
    pair.send(1, number)
    failed = told(pair.end(0))["failed"]
    assert failed["kind"] == "RunError", failed
    assert "has ended" in failed["text"] or "rank 1" in failed["text"], failed
    assert failed["took_s"] < 60


@pytest.mark.parametrize("number", [signal.SIGSTOP, signal.SIGKILL])
def test_on_a_mesh_the_rank_that_is_gone_is_blamed_and_no_other(ranks, number):
    group = ranks("mesh", size=4, watchdog_s=4)
    for rank in range(4):
        group.until(rank, "looping")
    group.send(3, number)
    gone = "rank 3 has ended" if number == signal.SIGKILL else "no answer from rank 3 for 4 s"
    for rank, mesh in ((1, "(ranks 1, 3)"), (2, "(ranks 2, 3)")):
        text = told(group.end(rank))["failed"]["text"]
        assert gone in text, text
        assert number == signal.SIGKILL or mesh in text, text
    text = told(group.end(0))["failed"]["text"]
    assert "rank 1 " in text or "rank 2 " in text, text  # whom it waited for ...
    assert gone in text or "3)" in text, text  # ... and whom that one waited for


def test_a_slow_rank_is_given_up_and_both_are_told(ranks):
    pair = ranks("slow", watchdog_s=2)
    assert_lost(pair.end(0), "no answer from rank 1 for 2 s")
    assert told(pair.end(1))["failed"]["kind"] == "RunError"


def test_a_rank_that_raises_takes_its_group_down(ranks):
    pair = ranks("raise")
    assert_lost(pair.end(0), "rank 1 raised: RunError", "this op does not like it")
    found = told(pair.end(1))
    assert "this op does not like it" in found["failed"]["text"]
    assert "is dead" in found["again"]["text"]


def test_a_rank_that_cannot_plan_tells_the_others_and_nothing_is_dead(ranks):
    pair = ranks("refuse")
    mine, other = told(pair.end(1)), told(pair.end(0))
    assert mine["failed"]["kind"] == "StrategyError"
    assert other["failed"]["kind"] == "PlanError"
    assert "rank 1: call 4, cannot do it" in other["failed"]["text"]
    assert mine["recovered"] and other["recovered"]


@pytest.mark.parametrize("other", ["sequential", "parts"])
def test_ranks_with_other_strategies_both_raise_warm_or_cold(ranks, other):
    pair = ranks("disagree", other=other)
    for rank in range(2):
        failed = told(pair.end(rank))["failed"]
        assert failed["kind"] == "PlanError" and failed["rule"] == "ranks", failed
        assert "rank 0: call" in failed["text"] and "rank 1: call" in failed["text"]
        assert failed["took_s"] < 10


def test_a_cold_rank_and_a_warm_one_with_one_strategy_go_on(ranks):
    pair = ranks("cold")
    for rank in range(2):
        found = told(pair.end(rank))
        assert "went on" in found, found


def test_two_callers_on_one_group_are_told(ranks):
    pair = ranks("threads")
    for rank in range(2):
        text = told(pair.end(rank))["second"]["text"]
        assert "one caller at a time" in text


def test_ctrl_c_gets_through_a_wait(ranks):
    pair = ranks("interrupt")
    pair.until(0, "waiting")
    time.sleep(0.5)
    pair.send(0, signal.SIGINT)
    assert told(pair.end(0))["failed"]["kind"] == "KeyboardInterrupt"
    assert_lost(pair.end(1), "rank 0 ")


def test_ctrl_c_gets_through_the_wait_for_a_message(ranks):
    pair = ranks("interrupt_message")
    pair.until(0, "waiting")
    time.sleep(1)
    pair.send(0, signal.SIGINT)
    found = told(pair.end(0))
    assert found["failed"]["kind"] == "KeyboardInterrupt"
    assert found["failed"]["took_s"] < 5, found
    assert found["again"]["kind"] == "RunError" and "is dead" in found["again"]["text"]
    assert told(pair.end(1))["again"]["kind"] == "RunError"

"""Processes: whether another one on this host still lives, and threads that keep out of the way."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TypeVar

NOTICE_S = 1.0
Answer = TypeVar("Answer")


def threads() -> set[int]:
    """The threads of this process, by their numbers."""
    tasks = Path("/proc/self/task")
    return {int(task.name) for task in tasks.iterdir()} if tasks.is_dir() else set()


def be_polite(threads: Iterable[int]) -> None:
    """Keep these threads from taking the core of a compute lane whenever a packet comes.

    Woken for each packet, they would preempt the lanes hundreds of times a call. Scheduled as
    batch work they still get their share.
    """
    for thread in threads:
        with contextlib.suppress(OSError):  # it has ended, or the system has no such policy
            os.sched_setscheduler(thread, os.SCHED_BATCH, os.sched_param(0))


def own_identity() -> str:
    """Host, process namespace, process and its start: what tells whether a rank still lives."""
    try:
        space = str(Path("/proc/self/ns/pid").readlink())
    except OSError:
        space = "?"
    return f"{socket.gethostname()} {space} {os.getpid()} {started_at(os.getpid())}"


def has_ended(identity: str) -> bool:
    """Whether a process of this host is gone; False where it cannot be known."""
    if not identity:
        return False
    *here, process, started = identity.split(" ")
    *mine, _, own = own_identity().split(" ")
    return here == mine and own != "" and started_at(int(process)) != started


def started_at(process: int) -> str:
    """When a process started, in ticks; empty if there is none, or only its remains."""
    try:
        fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return ""
    return "" if fields[0] in "ZX" else fields[19]


def bounded(ask: Callable[[], Answer]) -> Answer | None:
    """What a store answers within a moment; None if it does not, for its host may be the dead."""
    answers: list[Answer] = []

    def run() -> None:
        try:
            answers.append(ask())
        except RuntimeError:
            return

    thread = threading.Thread(target=run, name="weft store", daemon=True)
    thread.start()
    thread.join(NOTICE_S)
    return answers[0] if answers else None

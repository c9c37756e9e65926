"""The `WorkerPool`: the worker processes behind the devices of a machine, and the watch over them.

    pool = WorkerPool([Spot("fast", cores=(0,)), Spot("slow", cores=(1,), slowness=2.0)])
    pool.stop()            (or `with WorkerPool(...) as pool:`)

A worker inherits one end of a pair of sockets, and is handed one for each other worker: no socket
has a name or listens, so nobody can come in from outside, and nothing is left on disk.

A worker that ends, or says nothing for `watchdog_s`, is lost: it is killed, so that it cannot come
back half-way, calls that need it are planned anew, and the others go on. `join` brings a new worker
in at any time.
"""

from __future__ import annotations

import json
import logging
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import InitVar, asdict, dataclass
from itertools import count
from pathlib import Path
from typing import Any, Self

from torch import Tensor

from torchweft.errors import MachineError, RunError, clip
from torchweft.plan.graph import check_name
from torchweft.run.workers.channel import ChannelError, Message, WorkerChannel
from torchweft.run.workers.program import HOME

log = logging.getLogger("torchweft")
START_S = 60.0


@dataclass(frozen=True)
class Spot:
    """One worker to be: a pool of CPU threads on certain cores, or an accelerator.

    slowness: above 1 the worker is throttled (an emulated slow device). memory_bytes: its limit.
    """

    name: str
    num_threads: int = 1
    cores: tuple[int, ...] = ()
    slowness: float = 1.0
    device: str = "cpu"
    memory_bytes: int | None = None
    address: InitVar[str] = ""

    def __post_init__(self, address: str) -> None:
        if address:
            raise MachineError(
                "worker: address= is gone: anybody who reached it could run code. Leave it out; "
                "workers on other boxes come back with an engine that authenticates."
            )
        check_name(self.name, "device", MachineError)
        if self.name == HOME:
            raise MachineError(f"worker: the name {HOME!r} is the caller's own; take another one.")
        if not self.slowness >= 1 or self.num_threads < 1:
            text = f"{self.num_threads} and {self.slowness:g}"
            raise MachineError(
                f"worker: {self.name!r}: num_threads and slowness must be at least 1; got {text}."
            )
        if self.cores and sys.platform != "linux":
            raise MachineError(f"worker: cores= of {self.name!r} needs Linux; leave it out.")
        if self.cores and (extra := set(self.cores) - os.sched_getaffinity(0)):
            raise MachineError(f"worker: {self.name!r} cannot have core {min(extra)}.")

    @property
    def label(self) -> str:
        """What stands in results."""
        throttled = f", throttled {self.slowness:g}x (emulated)" if self.slowness > 1 else ""
        return f"{self.name}: {self.device}, {self.num_threads} thread(s){throttled}"


class Mate:
    """A worker as the driver sees it; `door`: where it is handed its channels to other workers."""

    def __init__(self, spot: Spot) -> None:
        self.spot = spot
        ours, theirs = socket.socketpair()
        self.door, inner = socket.socketpair()
        self.process = _start(spot, theirs, inner)
        self.channel = WorkerChannel(ours.detach())
        self.lock = threading.Lock()
        self.here = threading.Event()  # it has said hello
        self.heard_s = time.monotonic()
        self.lost = ""
        self.cells: set[str] = set()
        self.weights: dict[str, tuple[int, int]] = {}  # the version that it has

    def send(
        self,
        message: Mapping[str, Any],
        tensors: Sequence[Tensor] = (),
        end: socket.socket | None = None,
    ) -> None:
        """Send a message, and the end of a channel; a worker that is gone is left to the watch."""
        with self.lock:
            try:
                if end is not None:
                    socket.send_fds(self.door, [b"."], [end.fileno()])
                self.channel.send(message, tensors)
            except (ChannelError, OSError):
                self.heard_s = -1e9

    def kill(self) -> int:
        """End the process; its exit code."""
        self.process.kill()
        return self.process.wait()

    def close(self) -> None:
        """Close what leads to it."""
        with self.lock:
            self.channel.close()
            self.door.close()


def _start(spot: Spot, channel: socket.socket, door: socket.socket) -> subprocess.Popen[bytes]:
    """A worker process, which inherits these two ends."""
    paths = [str(Path(__file__).parents[3]), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    with channel, door:
        ends = channel.fileno(), door.fileno()
        config = json.dumps({**asdict(spot), "ends": ends})
        command = [sys.executable, "-m", "torchweft.run.workers.worker", config]
        return subprocess.Popen(command, env=environment, pass_fds=ends, start_new_session=True)


class WorkerPool:
    """Worker processes, started and watched. listen: is given the name of a worker and what it
    says, unless that answers an `ask`; on_lost: the name of a worker that is lost."""

    def __init__(
        self,
        spots: Sequence[Spot],
        *,
        watchdog_s: float = 10.0,
        listen: Callable[[str, Message, list[Tensor]], None] = lambda *said: None,
        on_lost: Callable[[str], None] = lambda name: None,
    ) -> None:
        if not spots:
            raise MachineError("pool: it needs at least one worker; got none.")
        if sys.platform == "win32":
            raise MachineError("pool: workers do not run on Windows; leave workers= out.")
        self.watchdog_s = watchdog_s
        self.mates: dict[str, Mate] = {}
        self.listen, self.on_lost = listen, on_lost
        self.answers: dict[int, Future[tuple[Message, list[Tensor]]]] = {}  # by ticket
        self.tickets = count()
        self.stopping = False
        self.join(*spots)
        self.watch = threading.Thread(target=self._watch, name="weft watch", daemon=True)
        self.watch.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.stop()

    @property
    def names(self) -> list[str]:
        """The workers that are alive."""
        return [name for name, mate in self.mates.items() if not mate.lost]

    def join(self, *spots: Spot) -> None:
        """Start workers, all at once; they take part from the next plan on."""
        if wrong := [spot for spot in spots if not isinstance(spot, Spot)]:
            raise MachineError(f"pool: a worker is a weft.Spot('name'); got {clip(wrong[0])}.")
        names = [spot.name for spot in spots]
        if twice := [name for name in names if name in self.names or names.count(name) > 1]:
            raise MachineError(f"pool: there is a worker {twice[0]!r} already.")
        started: list[Mate] = []
        try:
            for spot in spots:
                started.append(mate := Mate(spot))
                threading.Thread(target=self._read, args=(mate,), daemon=True).start()
            self._greet(started)
        except BaseException:
            for mate in started:
                mate.kill()
            raise
        for mate in started:
            for name in self.names:  # it and each of the others get the two ends of a channel
                one, other = socket.socketpair()
                with one, other:
                    mate.send({"kind": "peer", "name": name}, end=one)
                    self.mates[name].send({"kind": "peer", "name": mate.spot.name}, end=other)
            self.mates[mate.spot.name] = mate

    def _greet(self, started: Sequence[Mate]) -> None:
        """Wait until workers have said hello. Raises `MachineError` if one does not."""
        ends_s = time.monotonic() + START_S
        for mate in started:
            while not mate.here.wait(0.05):
                late = time.monotonic() > ends_s
                if late or mate.heard_s < 0 or mate.process.poll() is not None:
                    raise MachineError(
                        f"pool: worker {mate.spot.name!r} did not start (exit code {mate.kill()}); "
                        "what it wrote stands above."
                    )

    def _read(self, mate: Mate) -> None:
        name = mate.spot.name
        try:
            while True:
                message, tensors = mate.channel.receive()
                mate.heard_s = time.monotonic()
                if message["kind"] == "hello":
                    mate.here.set()
                elif "ticket" in message:
                    if (answer := self.answers.pop(message["ticket"], None)) is not None:
                        answer.set_result((message, tensors))
                elif message["kind"] != "alive":
                    self.listen(name, message, tensors)
        except ChannelError as error:
            log.debug("worker %r: %s", name, error)
        except Exception:
            log.exception("what worker %r says cannot be handled", name)
        mate.heard_s = -1e9  # nobody listens to it any more: the watch gives it up
        mate.close()

    def _watch(self) -> None:
        while not self.stopping:
            for name in self.names:
                mate = self.mates[name]
                silent_s = time.monotonic() - mate.heard_s
                code = mate.process.poll()
                if code is not None:
                    self.lose(name, f"worker {name!r} ended (exit code {code})")
                elif silent_s > self.watchdog_s:
                    self.lose(name, f"worker {name!r} said nothing for {self.watchdog_s:g} s")
            time.sleep(min(0.05, self.watchdog_s / 10))

    def lose(self, name: str, reason: str) -> None:
        """Give a worker up, and tell whoever needs it."""
        mate = self.mates[name]
        if mate.lost or self.stopping:
            return
        mate.lost = reason
        log.warning("%s; it is given up, and the others go on without it.", reason)
        mate.kill()  # stopped or stuck: it must not come back half-way
        self.on_lost(name)

    def ask(
        self, name: str, message: Mapping[str, Any], tensors: Sequence[Tensor] = ()
    ) -> tuple[Message, list[Tensor]]:
        """Send a message and wait for its answer. Raises `RunError` if the worker is lost."""
        mate, ticket = self.mates[name], next(self.tickets)
        answer: Future[tuple[Message, list[Tensor]]] = Future()
        self.answers[ticket] = answer
        mate.send({**message, "ticket": ticket}, tensors)
        while not answer.done() and not mate.lost:
            with suppress(TimeoutError):
                answer.exception(timeout=0.1)
        self.answers.pop(ticket, None)
        if not answer.done():
            raise RunError(f"run: {mate.lost}.")
        said, rows = answer.result()
        if said["kind"] == "failed":
            raise RunError(f"run: worker {name!r} failed.", story=said["error"])
        return said, rows

    def stop(self) -> None:
        """Stop all workers, and wait until they have ended."""
        if self.stopping:
            return
        self.stopping = True
        for name in self.names:
            self.mates[name].send({"kind": "stop"})
        for mate in self.mates.values():
            try:
                mate.process.wait(timeout=2.0)
            except subprocess.TimeoutExpired:
                mate.kill()

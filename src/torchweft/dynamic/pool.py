"""The `Pool`: the worker processes behind the devices of a machine, and the watch over them.

    pool = Pool([Spot("fast", num_threads=1, cores=(0,)), Spot("slow", cores=(1,), slowness=2.0)])
    pool.machine           a Machine, its links measured
    pool.stop()            (or `with Pool(...) as pool:`)

A worker that ends, or says nothing for `watchdog_s`, is lost: it is killed, so that it cannot come
back half-way, every call that needs it is told, and the machine goes on without it. `join` brings
a new worker in at any time.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from multiprocessing.connection import Listener
from pathlib import Path
from typing import Any, Self

from torch import Tensor

from torchweft.dynamic.channel import Channel, ChannelError, Message, SocketChannel
from torchweft.dynamic.graphing import HOME
from torchweft.dynamic.rank_channel import DRIVER, RankChannel
from torchweft.errors import MachineError, RunError
from torchweft.graph import check_name

log = logging.getLogger("torchweft")
START_S = 60.0


@dataclass(frozen=True)
class Spot:
    """One worker to be: a pool of CPU threads on certain cores, or an accelerator.

    slowness: above 1 the worker is throttled (an emulated slow device). memory_bytes: its limit.
    address: "HOST:PORT" here that a worker on another box will come to, over torch.distributed;
    start it there with `python -m torchweft.dynamic.worker '{"name": ..., "store": "HOST:PORT"}'`.
    """

    name: str
    num_threads: int = 1
    cores: tuple[int, ...] = ()
    slowness: float = 1.0
    device: str = "cpu"
    memory_bytes: int | None = None
    address: str = ""

    def __post_init__(self) -> None:
        check_name(self.name, "device", MachineError)
        if self.name == HOME:
            raise MachineError(f"worker: {HOME!r} is where the caller is; take another name.")
        if not self.slowness >= 1 or self.num_threads < 1:
            raise MachineError(
                f"worker: {self.name!r} needs a thread, and cannot be {self.slowness} times slower."
            )
        if not self.address and (extra := set(self.cores) - os.sched_getaffinity(0)):
            raise MachineError(f"worker: {self.name!r}: there is no core {min(extra)} here.")

    @property
    def label(self) -> str:
        """What stands in results."""
        throttled = f", throttled {self.slowness:g}x (emulated)" if self.slowness > 1 else ""
        where = f"rank at {self.address}" if self.address else self.device
        return f"{self.name}: {where}, {self.num_threads} thread(s){throttled}"


class Mate:
    """A worker as the driver sees it."""

    def __init__(
        self, spot: Spot, process: subprocess.Popen[bytes] | None, channel: Channel
    ) -> None:
        self.spot, self.process, self.channel = spot, process, channel
        self.lock = threading.Lock()
        self.heard_s = time.monotonic()
        self.lost = ""
        self.cells: set[str] = set()
        self.weights: dict[str, tuple[int, int]] = {}  # the version that it has

    def send(self, message: Mapping[str, Any], tensors: Sequence[Tensor] = ()) -> None:
        """Send; a worker that is gone is left to the watch."""
        with self.lock:
            try:
                self.channel.send(message, tensors)
            except ChannelError:
                self.heard_s = -1e9


Listen = Callable[[str, Message, list[Tensor]], None]


class Pool:
    """Worker processes, started and watched."""

    def __init__(self, spots: Sequence[Spot], *, watchdog_s: float = 10.0) -> None:
        if not spots:
            raise MachineError("pool: there is no worker in it.")
        self.watchdog_s = watchdog_s
        self.folder = Path(tempfile.mkdtemp(prefix="weft-"))
        self.listener = Listener(str(self.folder / "driver"), "AF_UNIX", backlog=16)
        self.mates: dict[str, Mate] = {}
        self.listen: Listen = lambda name, message, tensors: None
        self.on_lost: Callable[[str, str], None] = lambda name, reason: None
        self.answers: dict[int, Any] = {}
        self.news = threading.Condition()
        self.tickets = 0
        self.stopping = False
        self._join(spots)
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

    def join(self, spot: Spot) -> None:
        """Start a worker; it takes part from the next plan on."""
        self._join([spot])

    def _join(self, spots: Sequence[Spot]) -> None:
        """Start workers, all at once."""
        names = [spot.name for spot in spots]
        if twice := [name for name in names if name in self.names or names.count(name) > 1]:
            raise MachineError(f"pool: there is a worker {twice[0]!r} already.")
        started = {spot.name: self._start(spot) for spot in spots if not spot.address}
        channels: dict[str, Channel] = dict(self._accept(started))
        for spot in spots:
            channel = channels[spot.name] if spot.name in channels else self._remote(spot)
            mate = self.mates[spot.name] = Mate(spot, started.get(spot.name), channel)
            threading.Thread(target=self._read, args=(spot.name, mate), daemon=True).start()
        self._introduce()

    def _remote(self, spot: Spot) -> Channel:
        """Wait for a worker that somebody starts on another box."""
        try:
            channel = RankChannel(spot.address, spot.name, DRIVER, wait_s=START_S)
            channel.receive()  # its hello
        except ChannelError as error:
            raise MachineError(f"pool: worker {spot.name!r} did not come: {error}") from None
        return channel

    def _start(self, spot: Spot) -> subprocess.Popen[bytes]:
        """Start a worker on this box."""
        address = self.folder / spot.name
        address.unlink(missing_ok=True)
        config = {**asdict(spot), "driver": str(self.folder / "driver"), "address": str(address)}
        source = str(Path(__file__).parents[2])
        paths = [source, *filter(None, [os.environ.get("PYTHONPATH")])]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
        command = [sys.executable, "-m", "torchweft.dynamic.worker", json.dumps(config)]
        return subprocess.Popen(command, env=environment, start_new_session=True)

    def _accept(self, started: Mapping[str, subprocess.Popen[bytes]]) -> dict[str, SocketChannel]:
        """The channels of workers that have just been started, by the names they come with."""
        found: dict[str, SocketChannel] = {}

        def accept() -> None:
            for _ in started:
                channel = SocketChannel(self.listener.accept())
                found[channel.receive()[0]["name"]] = channel

        thread = threading.Thread(target=accept, daemon=True)
        thread.start()
        ends_s = time.monotonic() + START_S
        while missing := [name for name in started if name not in found]:
            thread.join(timeout=0.05)
            ended = [name for name in missing if started[name].poll() is not None]
            if ended or time.monotonic() > ends_s:
                name = (ended or missing)[0]
                for process in started.values():
                    process.kill()
                raise MachineError(
                    f"pool: worker {name!r} did not start (exit code {started[name].poll()}); "
                    "what it wrote stands above."
                )
        return found

    def _introduce(self) -> None:
        local = [name for name in self.names if not self.mates[name].spot.address]
        peers = {name: str(self.folder / name) for name in local}
        for name in self.names:
            self.mates[name].send({"kind": "peers", "peers": peers})

    def _read(self, name: str, mate: Mate) -> None:
        while True:
            try:
                message, tensors = mate.channel.receive()
            except ChannelError:
                mate.heard_s = -1e9
                return
            mate.heard_s = time.monotonic()
            if message["kind"] == "alive":
                continue
            if "relay" in message:
                self.mates[message.pop("relay")].send(message, tensors)
            elif "ticket" in message:
                with self.news:
                    self.answers[message["ticket"]] = message, tensors
                    self.news.notify_all()
            else:
                try:
                    self.listen(name, message, tensors)
                except Exception:
                    log.exception("what worker %r says cannot be handled", name)
                    mate.heard_s = -1e9  # nobody listens to it any more: the watch gives it up
                    return

    def _watch(self) -> None:
        while not self.stopping:
            for name in self.names:
                mate = self.mates[name]
                silent_s = time.monotonic() - mate.heard_s
                code = mate.process.poll() if mate.process else None
                if code is not None:
                    self.lose(name, f"worker {name!r} ended (exit code {code})")
                elif silent_s > self.watchdog_s:
                    self.lose(name, f"worker {name!r} said nothing for {self.watchdog_s:g} s")
            time.sleep(min(0.05, self.watchdog_s / 10))

    def lose(self, name: str, reason: str) -> None:
        """Give a worker up: whoever needs it is told."""
        mate = self.mates[name]
        if mate.lost or self.stopping:
            return
        mate.lost = reason
        log.warning("%s; it is given up, and the others go on without it.", reason)
        if mate.process is not None:
            mate.process.kill()  # stopped or stuck: it must not come back half-way
            mate.process.wait()
            mate.channel.close()
        self._introduce()
        with self.news:
            self.news.notify_all()
        self.on_lost(name, reason)

    def ask(
        self, name: str, message: Mapping[str, Any], tensors: Sequence[Tensor] = ()
    ) -> tuple[Message, list[Tensor]]:
        """Send a message and wait for its answer. Raises `RunError` if the worker is lost."""
        with self.news:
            self.tickets += 1
            ticket = self.tickets
        mate = self.mates[name]
        mate.send({**message, "ticket": ticket}, tensors)
        with self.news:
            while ticket not in self.answers:
                if mate.lost:
                    raise RunError(f"run: {mate.lost}.")
                self.news.wait(timeout=0.5)
            answer: tuple[Message, list[Tensor]] = self.answers.pop(ticket)
        if answer[0]["kind"] == "failed":
            raise RunError(f"run: worker {name!r} failed.", story=answer[0]["error"])
        return answer

    def stop(self) -> None:
        """Send all workers home, and wait until they are gone."""
        if self.stopping:
            return
        self.stopping = True
        for name in self.names:
            self.mates[name].send({"kind": "stop"})
        for mate in self.mates.values():
            if mate.process is None:
                continue
            try:
                mate.process.wait(timeout=2.0)
            except subprocess.TimeoutExpired:
                mate.process.kill()
                mate.process.wait()
            mate.channel.close()
        self.listener.close()
        shutil.rmtree(self.folder, ignore_errors=True)

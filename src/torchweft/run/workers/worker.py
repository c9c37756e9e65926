"""A worker: the process behind one device. It runs its lanes of plans, one call after another.

    main thread    does the steps of its lanes in their order: runs, waits for rows of others
    readers        one a channel: rows go straight to where they belong
    sender         what is copied leaves beside compute, each value once to each device
    heart          tells the driver ten times a second that this process is alive

The pool starts `python -m torchweft.run.workers.worker CONFIG`; CONFIG is JSON, and names the
two sockets that this process has inherited. Messages are checked before they are acted on.
"""

from __future__ import annotations

import gc
import json
import os
import queue
import socket
import sys
import threading
import time
import traceback
from array import array
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from torchweft.errors import CaptureError, clip, unknown
from torchweft.plan.graph import check_name
from torchweft.run.workers.cell import Cell, reading, spec_named
from torchweft.run.workers.channel import ChannelError, Message, WorkerChannel
from torchweft.run.workers.grouping import Group
from torchweft.run.workers.program import HOME, DevicePart, Task
from torchweft.run.workers.recorded import Prepared, RecordedPart, RecordedRows, RowStore

BEAT_S = 0.1
MAX_ROWS, MAX_REPEATS, MAX_SLOWNESS = 1_000_000, 1_000, 1e6  # of measurements, and of a throttle
FROM_PEERS = ("echo", "rows")
FROM_DRIVER = (
    *FROM_PEERS, "call", "cancel", "cell", "measure", "peer", "recorded", "stop", "throttle"
)  # fmt: skip
IN_TURN = ("call", "cell", "measure", "recorded")  # work of the main thread


@dataclass(eq=False)
class _WorkerCall:
    """A call under way: its part, its rows, what has arrived."""

    number: int
    part: DevicePart
    store: RowStore
    spans: list[tuple[str, str, float, float]] = field(default_factory=list)
    taken_s: list[float] = field(default_factory=list)  # from each group, by messages
    arrived: set[str] = field(default_factory=set)
    cancelled: bool = False


class Worker:
    """One device's process."""

    def __init__(
        self, name: str, device: str, slowness: float, driver: WorkerChannel, door: socket.socket
    ) -> None:
        self.name, self.device = name, torch.device(device)
        self.slowness, self.debt_s = slowness, 0.0  # of an emulated slow device
        self.driver, self.door = driver, door
        self.channels: dict[str, WorkerChannel] = {HOME: driver}
        self.cells: dict[str, Cell] = {}
        self.weights: dict[str, Tensor] = {}
        self.prepared: dict[str, Sequence[Any]] = {}
        self.calls: dict[int, _WorkerCall] = {}
        self.early: dict[int, list[tuple[Message, Sequence[Tensor]]]] = {}
        self.over: set[int] = set()  # calls that have ended, or that nobody waits for
        self.news = threading.Condition()
        self.jobs: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self.outbox: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self.clocks: dict[int, float] = {}  # of the threads of messages: their CPU seconds so far
        self.taken_s = 0.0  # by them, from the last group

    def serve(self) -> None:
        """Work until the driver says stop, or is gone."""
        for target in (self._send, self._beat):
            threading.Thread(target=target, daemon=True).start()
        threading.Thread(target=self.read, args=(HOME, self.driver), daemon=True).start()
        gc.collect()
        gc.freeze()  # to look through all of torch takes as long as several jobs
        while (job := self.jobs.get()) is not None:
            self._handle(*job)

    # Messages.

    def read(self, name: str, channel: WorkerChannel) -> None:
        """Take the messages of a channel until its other side is gone."""
        known = FROM_DRIVER if name == HOME else FROM_PEERS
        while True:
            try:
                message, tensors = channel.receive()
            except ChannelError:
                if name == HOME:
                    os._exit(0)  # nobody is left to work for
                if self.channels.get(name) is channel:
                    del self.channels[name]
                return
            if message["kind"] in known and message["kind"] in IN_TURN:
                self.jobs.put((message, tensors, known))
            else:
                self._handle(message, tensors, known)
            self.clocks[threading.get_ident()] = time.thread_time()

    def _handle(self, message: Message, tensors: Sequence[Tensor], known: Sequence[str]) -> None:
        """Do what a message says; report a failure to the driver."""
        try:
            if (kind := message["kind"]) not in known:
                raise CaptureError(f"message: {unknown('kind', kind, known)}")
            with torch.inference_mode():
                getattr(self, f"on_{kind}")(message, tensors)
        except Exception:
            about: Message = {key: message[key] for key in ("call", "ticket") if key in message}
            self._tell({"kind": "failed", "error": traceback.format_exc(limit=-3), **about})

    def _send(self) -> None:
        while True:
            target, message, tensors = self.outbox.get()
            with suppress(ChannelError, KeyError):  # the driver will notice, and plan anew
                self.channels[target].send(message, tensors)
            self.clocks[threading.get_ident()] = time.thread_time()

    def _beat(self) -> None:
        while True:
            self._tell({"kind": "alive"})
            time.sleep(BEAT_S)

    def _tell(self, message: Message, tensors: Sequence[Tensor] = ()) -> None:
        self.outbox.put((HOME, message, tensors))

    def on_peer(self, message: Message, tensors: Sequence[Tensor]) -> None:
        """Another worker; the end of a channel to it came through the door before."""
        _, (end,), _, _ = socket.recv_fds(self.door, 1, 1)
        name, channel = check_name(message["name"], "worker"), WorkerChannel(end)
        self.channels[name] = channel
        threading.Thread(target=self.read, args=(name, channel), daemon=True).start()

    def on_cell(self, message: Message, tensors: Sequence[Tensor]) -> None:
        """A cell, and those of its weights that are not here yet."""
        cell = Cell.from_data(message["cell"])
        for name, weight in zip(message["weights"], tensors, strict=True):
            self.weights[name] = weight.to(self.device)
        self.cells[cell.name] = cell
        new = set(message["weights"])
        for name in [name for name in self.prepared if new & set(self.cells[name].weights)]:
            del self.prepared[name]

    def on_call(self, message: Message, tensors: Sequence[Tensor]) -> None:
        """A part of a plan to run, with the inputs that come from home."""
        number = message["call"]
        part = DevicePart.from_message(message["part"], tensors, self.cells)
        call = _WorkerCall(number, part, RowStore(self.device))
        call.store.reserve(part.num_rows)
        with self.news:
            self.calls[number] = call
            for name, tensor in zip(message["inputs"], tensors[1:], strict=True):
                self._write(call, name, tensor)
            for early in self.early.pop(number, ()):
                self._arrive(call, *early)
            call.cancelled = number in self.over
        try:
            if not all(self._task(call, task) for task in part.tasks):
                return  # cancelled
        finally:
            with self.news:
                del self.calls[number]
                self.over.add(number)
        facts = {"call": number, "spans": call.spans, "taken_s": call.taken_s}
        self._tell({"kind": "done", **facts})

    def on_recorded(self, message: Message, tensors: Sequence[Tensor]) -> None:
        """A whole recording to group and run here."""
        number, began_s = message["call"], time.perf_counter()
        if number in self.over:
            return
        part = RecordedPart.from_message(message["part"], tensors, self.cells)
        rows, runs = RecordedRows(self.device), array("d")
        with reading("recording"):
            groups = rows.add(part)
        for group in groups:
            if number in self.over:
                return
            since_s = self._group(rows.store, group)
            runs.extend((group.num_rows, since_s, time.perf_counter()))
        busy_s, names = time.perf_counter() - began_s, [group.cell.name for group in groups]
        seen = torch.frombuffer(runs, dtype=torch.float64).view(-1, 3)
        answer = {"kind": "answer", "call": number, "cells": names, "busy_s": busy_s}
        self._tell(answer, [seen, *part.collect(rows)])

    def on_rows(self, message: Message, tensors: Sequence[Tensor]) -> None:
        """Rows that another device made."""
        with self.news:
            call = self.calls.get(message["call"])
            if call is not None:
                self._arrive(call, message, tensors)
                self.news.notify_all()
            elif message["call"] not in self.over:
                self.early.setdefault(message["call"], []).append((message, tensors))

    def on_cancel(self, message: Message, tensors: Sequence[Tensor]) -> None:
        """A call that nobody waits for any more."""
        with self.news:
            self.over.add(message["call"])
            self.early.pop(message["call"], None)
            if (call := self.calls.get(message["call"])) is not None:
                call.cancelled = True
                self.news.notify_all()

    def on_throttle(self, message: Message, tensors: Sequence[Tensor]) -> None:
        """Be slower, or as fast as can be, from now on."""
        self.slowness, self.debt_s = _number(message["slowness"], MAX_SLOWNESS), 0.0

    def on_echo(self, message: Message, tensors: Sequence[Tensor]) -> None:
        """Rows to be sent on, or back: what links are measured with."""
        way = message["way"]
        self.outbox.put((way[0], {**message, "way": way[1:]}, tensors))

    def on_measure(self, message: Message, tensors: Sequence[Tensor]) -> None:
        """Time a cell over some numbers of rows, with weights of zeros."""
        cell = Cell.from_data(message["cell"])
        specs = [spec_named(*each) for each in message["weights"]]
        zeros = [torch.zeros(s.shape, dtype=s.dtype, device=self.device) for s in specs]
        ready = cell.functions[0](self.device, *zeros)
        repeats = int(_number(message["repeats"], MAX_REPEATS))
        sizes = [int(_number(rows, MAX_ROWS)) for rows in message["rows"]]
        seconds = [self._time(cell, ready, rows, repeats) for rows in sizes]
        self._tell({"kind": "measured", "ticket": message["ticket"], "seconds": seconds})

    def on_stop(self, message: Message, tensors: Sequence[Tensor]) -> None:
        """Stop after queued jobs."""
        self.jobs.put(None)

    # Running.

    def _prepare(self, cell: Cell) -> Sequence[Any]:
        """What a cell makes of weights alone, computed once."""
        if cell.name not in self.prepared:
            weights = [self.weights[name] for name in cell.weights]
            self.prepared[cell.name] = cell.functions[0](self.device, *weights)
        return self.prepared[cell.name]

    def _write(self, call: _WorkerCall, value: str, rows: Tensor) -> None:
        spec, start, count = call.part.blocks[value]
        call.store.rows[spec][start : start + count] = rows.view(count, *spec.shape)
        call.arrived.add(value)

    def _arrive(self, call: _WorkerCall, message: Message, tensors: Sequence[Tensor]) -> None:
        where = f"{message['source']}.to.{self.name}", message["sent_s"]
        for value, rows in zip(message["values"], tensors, strict=True):
            self._write(call, value, rows)
            call.spans.append((f"copy {value} to {self.name}", *where, time.perf_counter()))

    def _task(self, call: _WorkerCall, task: Task) -> bool:
        """Run a group when what it needs has arrived, and send what others need; False if the call
        was cancelled."""
        with self.news:
            while not call.cancelled and not call.arrived.issuperset(task.needs):
                self.news.wait()
            if call.cancelled:
                return False
        began_s = self._group(call.store, task.group)
        call.taken_s.append(self.taken_s)
        for target, values in task.messages().items():
            blocks = [call.part.blocks[value] for value in values]
            rows = [call.store.rows[spec][start : start + count] for spec, start, count in blocks]
            facts = {"call": call.number, "values": values, "source": self.name}
            facts |= {"kind": "rows", "sent_s": time.perf_counter()}
            self.outbox.put((target, facts, rows))
        call.spans.append((task.label, self.name, began_s, time.perf_counter()))
        return True

    def _group(self, store: RowStore, group: Group, prepare: Prepared | None = None) -> float:
        """Run a group, as slow as this device is; when it began."""
        messages_s = sum(list(self.clocks.values()))
        began_s, worked_s = time.perf_counter(), self._clock()
        store.run(group, prepare or self._prepare)
        if self.device.type != "cpu":
            torch.accelerator.synchronize(self.device)
        worked_s = self._clock() - worked_s
        messages_s = sum(list(self.clocks.values())) - messages_s
        self.taken_s = max(0.0, min(time.perf_counter() - began_s - worked_s, messages_s))
        self.debt_s += worked_s * (self.slowness - 1)
        if self.debt_s > 0 and self.slowness > 1:
            ended_s = time.perf_counter()
            time.sleep(self.debt_s)
            self.debt_s -= time.perf_counter() - ended_s  # what was overslept counts
        return began_s

    def _clock(self) -> float:
        """Seconds of work: while others have the core, a device that is throttled does not work."""
        return time.thread_time() if self.device.type == "cpu" else time.perf_counter()

    def _time(self, cell: Cell, ready: Sequence[Any], num_rows: int, repeats: int) -> float:
        """Seconds of one run of a cell as a group, the median of several."""
        counts, starts = dict.fromkeys(cell.reads, num_rows), []
        for spec, count in cell.rows_made(num_rows):
            starts.append(counts.get(spec, 0))
            counts[spec] = starts[-1] + count
        read = torch.arange(num_rows).expand(len(cell.reads), num_rows).contiguous()
        group, store = Group(cell, num_rows, read, tuple(starts)), RowStore(self.device)
        store.reserve(counts)
        for rows in store.rows.values():
            rows.zero_()
        times = []
        for _ in range(repeats + 2):
            began_s = self._group(store, group, lambda cell: ready)
            times.append(time.perf_counter() - began_s)
        return sorted(times[2:])[repeats // 2]


def _number(item: Any, most: float) -> float:
    """A number of a message, from 1. Raises `CaptureError` if it is none."""
    if isinstance(item, bool) or not isinstance(item, int | float) or not 1 <= item <= most:
        raise CaptureError(f"message: a number must be from 1 to {most:g}; got {clip(item)}.")
    return item


def main(config: Mapping[str, Any]) -> None:
    """Set the process up as the config says, and serve."""
    if config["cores"]:
        os.sched_setaffinity(0, config["cores"])
    torch.set_num_threads(config["num_threads"])
    channel, door = config["ends"]
    driver = WorkerChannel(channel)
    facts = config["name"], config["device"], config["slowness"]
    worker = Worker(*facts, driver, socket.socket(fileno=door))
    driver.send({"kind": "hello"})
    worker.serve()


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))

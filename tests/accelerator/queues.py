"""Streams that are threads, events, and graphs of what was put on them, for the test device.

Every stream has a vector clock that counts what was put on it; a wait merges clocks. `late` streams
hold back until nothing else can go on: see `device.py`.
"""

from __future__ import annotations

import random
import threading
import time
from collections import deque

import torch


class RuleError(RuntimeError):
    """Something that the device forbids."""


class Tick:
    """One recording of an event: where, and whether the stream has come there."""

    def __init__(self, stream):
        self.stream, self.capture, self.clock = stream, stream.capture, {}
        self.done, self.time = False, 0.0


class Event:
    def __init__(self, owner, timing):
        self.owner, self.timing, self.tick = owner, timing, None

    def elapsed_time(self, other):
        if not (self.timing and other.timing):
            raise RuleError("this event has no time")
        return 1e3 * (other.tick.time - self.tick.time)

    def synchronize(self):
        self.owner.host_waits(lambda: self.tick.done)


class Stream:
    """An ordered queue with a thread: ("run", function), ("record", tick), ("wait", tick)."""

    def __init__(self, owner, name, priority=0, num_sms=None):
        self.owner, self.name, self.priority, self.num_sms = owner, name, priority, num_sms
        self.queue, self.busy, self.capture = deque(), False, None
        self.clock = {self: 0}
        self.thread = threading.Thread(target=self.work, name=f"stream {name}", daemon=True)
        self.thread.start()

    def put(self, kind, what, *, counts=True):
        self.clock[self] += counts
        if self.capture is not None:
            self.capture.items.append((self, kind, what))
            return
        with self.owner.moved:
            self.queue.append((kind, what))
            self.owner.moved.notify_all()

    def record_event(self, event=None):
        event = event or Event(self.owner, False)
        event.tick = Tick(self)
        self.put("record", event.tick)
        event.tick.clock = dict(self.clock)
        return event

    def wait_event(self, event):
        tick = event.tick
        if tick is None:
            return  # never recorded: nothing to wait for
        if self.capture is not None and tick.capture is not self.capture:
            raise RuleError("capture: the event was recorded outside the capture")
        if self.capture is None and tick.capture is not None:
            if tick.capture is not self.owner.capturing:
                raise RuleError("capture: the event was recorded in a capture that has ended")
            self.capture = tick.capture  # forked
            self.capture.streams.append(self)
        for stream, count in tick.clock.items():
            self.clock[stream] = max(self.clock.get(stream, 0), count)
        self.put("wait", tick)

    def wait_stream(self, other):
        self.wait_event(other.record_event())

    def synchronize(self):
        self.owner.host_waits(self.query)
        self.owner.hear(self)

    def query(self):
        return not self.queue and not self.busy

    def ready(self):
        return bool(self.queue) and not (self.queue[0][0] == "wait" and not self.queue[0][1].done)

    def take(self):
        return self.queue.popleft()

    def may_go(self):
        owner = self.owner
        if not self.ready():
            return False
        if owner.late is not self:
            return True
        others = [stream for stream in owner.streams if stream is not self]
        return owner.host_is_stuck() and not any(s.busy or s.ready() for s in others)

    def work(self):
        owner = self.owner
        while True:
            with owner.moved:
                while not self.may_go():
                    if owner.closed:
                        return
                    owner.moved.wait()
                kind, what = self.take()
                self.busy = True
            if owner.delays:
                time.sleep(random.random() * owner.delays)
            try:
                if kind == "run":
                    with torch.inference_mode():  # a kernel writes wherever it is told to
                        what()
            except Exception as error:
                owner.errors.append(error)
            with owner.moved:
                if kind == "record":
                    what.done, what.time = True, time.perf_counter()
                self.busy = False
                del what
                owner.moved.notify_all()


class Reuse(Stream):
    """Writes over bytes that were given back, each as soon as the ticks it waits for have come."""

    def ready(self):
        return any(all(tick.done for tick in ticks) for ticks, _ in self.queue)

    def take(self):
        found = next(item for item in self.queue if all(tick.done for tick in item[0]))
        self.queue.remove(found)
        return "run", found[1]


class Graph:
    """A captured graph: items of the streams that were forked from the first and joined again."""

    def __init__(self, owner, pool=None):
        self.owner, self.pool_id = owner, pool or (id(self), 0)
        self.items, self.streams, self.lanes = [], [], {}

    def capture_begin(self, pool=None, capture_error_mode="global"):
        owner, stream = self.owner, self.owner.current
        if stream is owner.default:
            raise RuleError("capture: the default stream cannot be captured")
        if owner.capturing is not None:
            raise RuleError("capture: another capture is underway")
        self.pool_id = pool or self.pool_id
        self.thread = threading.get_ident()
        owner.capturing = stream.capture = self
        self.streams = [stream]

    def capture_end(self):
        owner, first = self.owner, self.streams[0]
        if owner.current is not first:
            raise RuleError("capture: ends on another stream than it began on")
        left = [s.name for s in self.streams if first.clock.get(s, 0) < s.clock[s]]
        for stream in self.streams:
            stream.capture = None
        owner.capturing = None
        if left:
            raise RuleError(f"capture: unjoined stream {', '.join(left)}")
        if owner.broken:
            raise RuleError(owner.broken.pop())

    def replay(self):
        current, ticks = self.owner.current, {}
        began = Event(self.owner, False)
        current.record_event(began)
        lanes = {self.streams[0]: current}
        for number, stream in enumerate(self.streams[1:]):
            lane = self.lanes.get(stream) or self.owner.new_stream(f"graph lane {number}")
            self.lanes[stream] = lanes[stream] = lane
            lane.wait_event(began)
        for stream, kind, what in self.items:
            if kind == "record":
                ticks[what] = Tick(lanes[stream])
                what = ticks[what]
            elif kind == "wait":
                what = ticks[what]
            lanes[stream].put(kind, what)
        for lane in list(lanes.values())[1:]:
            current.wait_stream(lane)  # the launch ends when all of it has

    def pool(self):
        return self.pool_id

    def reset(self):
        self.items = []

"""A small asynchronous device for tests: streams are threads, and missing events are punished.

    device = TestDevice()                    double.torch_like(device) has the shape of torch
    with device:                             factories on `device.device` make tensors of its own
        y = device.put(torch.randn(3)) + 1   y has its shape at once, its numbers when the stream
        y.cpu()                              has come there; this waits for the current stream

Every tensor has real bytes on the CPU. A call allocates its result and puts the computation on the
current stream. What makes it merciless is that each order that is legal is played:

    late=stream   this stream does nothing as long as any other can do something
    delays        each stream sleeps at random before every item
    bytes         poison is written by a stream when it gets bytes and when they are given back, as
                  the caching allocator may have it: before that, older work of that stream uses
                  them, behind that, newer work. `record_stream` puts it off, as it does there.

A capture raises `RuleError` for what a CUDA capture forbids. With `judge`, vector clocks tell which
conflicts nothing orders: `device.races`. This does not look at numbers; the two must agree.
"""

from __future__ import annotations

import threading

import torch
from queues import Reuse, RuleError, Stream, Tick
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

KIND = "meta"  # the one type of device that this build of torch can guard and does not run


class Block:
    """Bytes: the stream that asked for them, who uses them, and who was noted to."""

    def __init__(self, owner, base, stream):
        self.owner, self.base, self.stream = owner, base, stream
        self.capture, self.noted, self.uses = stream.capture, set(), {}
        self.accesses = []

    def __del__(self):
        if not self.owner.closed:
            self.owner.freed(self)


class DeviceTensor(torch.Tensor):
    """Metadata on the host, numbers in `held` when the stream has come there."""

    @staticmethod
    def __new__(cls, real, block):
        made = torch.Tensor._make_wrapper_subclass(
            cls, real.shape, strides=real.stride(), storage_offset=real.storage_offset(),
            dtype=real.dtype, device=torch.device(KIND),
        )  # fmt: skip
        made.held, made.block = real, block
        return made

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        owner = next(t for t in tree_leaves((args, kwargs)) if isinstance(t, cls)).block.owner
        return owner.call(func, args, kwargs or {})

    def record_stream(self, stream):
        self.block.noted.add(stream)

    def data_ptr(self):
        return self.held.data_ptr()

    def __repr__(self):
        return f"DeviceTensor({tuple(self.shape)})"


class TestDevice(TorchDispatchMode):
    """The device. Use it as a context manager around everything that touches its tensors."""

    __test__ = False

    def __init__(self, *, delays=0.0, judge=False):
        super().__init__()
        self.device = torch.device(KIND)
        self.moved = threading.Condition(threading.RLock())
        self.streams, self.errors, self.races, self.broken = [], [], [], []
        self.delays, self.judge, self.late = delays, judge, None
        self.waiting, self.closed, self.capturing = [], False, None
        self.heard, self.local = {}, threading.local()
        self.default = self.new_stream("default")
        self.reuse = Reuse(self, "reuse")
        self.streams.append(self.reuse)

    def new_stream(self, name=None, priority=0, num_sms=None):
        with self.moved:
            self.streams.append(Stream(self, name or str(len(self.streams)), priority, num_sms))
            return self.streams[-1]

    @property
    def current(self):
        return getattr(self.local, "current", self.default)

    @current.setter
    def current(self, stream):
        self.local.current = stream

    def close(self):
        """End all threads."""
        with self.moved:
            self.closed = True
            self.moved.notify_all()
        for stream in self.streams:
            stream.thread.join()

    def host_waits(self, done):
        """Block the host until something holds; forbidden in a capture of its own."""
        if self.captures_here():
            raise RuleError("capture: the host waits for the device")
        with self.moved:
            self.waiting.append(done)
            self.moved.notify_all()
            while not done():
                self.moved.wait()
            self.waiting.remove(done)
        if self.errors:
            raise self.errors.pop()

    def captures_here(self):
        """Whether this thread is in a capture."""
        return self.capturing is not None and self.capturing.thread == threading.get_ident()

    def host_is_stuck(self):
        """Whether the host waits, and for something that has not come yet."""
        return bool(self.waiting) and not any(done() for done in self.waiting)

    def synchronize(self, device=None):
        self.host_waits(lambda: all(s.query() for s in self.streams))
        for stream in self.streams:
            self.hear(stream)

    def hear(self, stream):
        """What a stream has done is over for the host, and for all that it issues from now on."""
        for other, count in stream.clock.items():
            self.heard[other] = max(self.heard.get(other, 0), count)

    def knows(self, stream, other, count):
        """Whether what `other` did up to `count` is over for the next item of a stream."""
        return max(stream.clock.get(other, 0), self.heard.get(other, 0)) >= count

    # Tensors.

    def put(self, tensor):
        """A tensor of the device with these numbers, copied by the current stream."""
        kept = tensor.clone()
        return self.computed(kept, lambda: kept, [])

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        ours = any(isinstance(leaf, DeviceTensor) for leaf in tree_leaves((args, kwargs)))
        made_here = getattr(kwargs.get("device"), "type", None) == KIND
        return self.call(func, args, kwargs) if ours or made_here else func(*args, **kwargs)

    def call(self, func, args, kwargs):
        """One call of an operator: a view now, everything else on the current stream."""
        real_args, real_kwargs = self.as_real(args), self.as_real(kwargs)
        given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, DeviceTensor)]
        to_host = kwargs.get("device") is not None and kwargs["device"].type == "cpu"
        if to_host or not any(isinstance(r.type, torch.TensorType) for r in func._schema.returns):
            self.note(given, [])
            self.current.put("run", lambda: None)  # the copy to the host
            self.current.synchronize()
            found = func(*real_args, **real_kwargs)
            return found.clone() if isinstance(found, torch.Tensor) else found
        if func.is_view:
            found = func(*real_args, **real_kwargs)
            return tree_map(lambda real: DeviceTensor(real, given[0].block), found)
        specs = func._schema.arguments
        named = {**dict(zip((spec.name for spec in specs), args, strict=False)), **kwargs}
        written = [
            leaf
            for spec in specs
            if spec.alias_info is not None and spec.alias_info.is_write
            for leaf in tree_leaves(named[spec.name])
        ]
        if not all(isinstance(leaf, DeviceTensor) for leaf in written):
            raise RuleError(f"{func} of tensors of the device writes into one of the host")
        if written:
            self.note(given, written)
            self.current.put("run", lambda: func(*real_args, **real_kwargs))
            return written[0] if len(written) == 1 else tuple(written)
        metas = tree_map(_as_meta, (args, kwargs))
        shaped = func(*metas[0], **metas[1])
        return self.computed(shaped, lambda: func(*real_args, **real_kwargs), given)

    def computed(self, shaped, compute, reads):
        """New tensors of these shapes, filled by the current stream."""
        stream = self.current
        if self.captures_here() and stream.capture is None:
            raise RuleError("capture: allocation outside the pool, on an unforked stream")

        def room(meta):
            if not isinstance(meta, torch.Tensor):
                return meta
            real = torch.empty_strided(meta.shape, meta.stride(), dtype=meta.dtype)
            base = real.new_empty(0).set_(real.untyped_storage())
            _poison(base)  # or the right numbers of an earlier call might still be there
            made = DeviceTensor(real, Block(self, base, stream))
            self.note([], [made])
            stream.put("run", lambda: _poison(base))
            return made

        made = tree_map(room, shaped)
        rooms = [leaf for leaf in tree_leaves(made) if isinstance(leaf, DeviceTensor)]
        targets = [leaf.held for leaf in rooms]

        def run():
            found = [leaf for leaf in tree_leaves(compute()) if isinstance(leaf, torch.Tensor)]
            for target, result in zip(targets, found, strict=True):
                target.copy_(result)

        self.note(reads, rooms)
        stream.put("run", run)
        return made

    def as_real(self, tree):
        def real(leaf):
            if isinstance(leaf, DeviceTensor):
                return leaf.held
            if isinstance(leaf, torch.device) and leaf.type == KIND:
                return torch.device("cpu")
            return leaf.clone() if isinstance(leaf, torch.Tensor) else leaf

        return tree_map(real, tree)

    # Bytes: who uses them, and when they are given to others.

    def note(self, reads, writes):
        """Remember an access of the current stream; tell if nothing orders it behind another."""
        stream, number = self.current, self.current.clock[self.current] + 1
        for tensor in dict.fromkeys([*reads, *writes]):
            writing = any(tensor is other for other in writes)
            tensor.block.uses[stream] = number
            if self.judge:
                self.access(tensor.block, stream, number, _bytes(tensor.held), writing)

    def access(self, block, stream, number, touched, writing, noted=()):
        for other, count, theirs, wrote in block.accesses:
            ordered = any(s is other or self.knows(s, other, count) for s in (stream, *noted))
            if not ordered and (writing or wrote) and touched & theirs:
                self.races.append((other.name, stream.name))
        block.accesses.append((stream, number, touched, writing))

    def freed(self, block):
        """Nobody holds these bytes any more: newer work of their stream may write over them."""
        stream, base = block.stream, block.base
        if block.capture is not None and block.capture is not self.capturing:
            return  # in the pool of a graph, which nothing but graphs writes to
        told = (stream, *block.noted)
        late = [
            other.name
            for other, count in block.uses.items()
            if not any(s is other or self.knows(s, other, count) for s in told)
        ]
        if late and block.capture is not None:
            names = ", ".join(sorted(late))
            self.broken.append(f"capture: bytes of {stream.name} are freed while {names} uses them")
        if self.judge:
            self.access(block, stream, stream.clock[stream], _bytes(base), True, block.noted)
        if not block.noted:
            stream.put("run", lambda: _poison(base), counts=False)
        elif block.capture is None:
            ticks = [Tick(each) for each in told]
            for each, tick in zip(told, ticks, strict=True):
                each.put("record", tick, counts=False)
            self.reuse.put(ticks, lambda: _poison(base))


def _poison(base):
    if base.dtype.is_floating_point or base.dtype.is_complex:
        base.fill_(float("nan"))
    else:
        base.fill_(1 if base.dtype is torch.bool else 77)


def _bytes(real):
    count = real.untyped_storage().nbytes() // real.element_size()
    numbers = torch.arange(count).as_strided(real.shape, real.stride(), real.storage_offset())
    return frozenset(numbers.flatten().tolist())


def _as_meta(leaf):
    if isinstance(leaf, DeviceTensor):
        real = leaf.held
        return torch.empty_strided(real.shape, real.stride(), dtype=real.dtype, device="meta")
    if isinstance(leaf, torch.device) and leaf.type == KIND:
        return torch.device("meta")
    return leaf.to("meta") if isinstance(leaf, torch.Tensor) and leaf.dim() else leaf

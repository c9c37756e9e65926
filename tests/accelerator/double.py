"""A double of torch, as far as the accelerator runtime calls it, over the test device.

`test_double.py` holds it against torch's own signatures.
"""

from __future__ import annotations

from contextlib import contextmanager
from types import SimpleNamespace

from queues import Event, Graph

NUM_SMS = 8


def torch_like(owner):
    """What the runtime calls of torch, by the same names and arguments."""

    @contextmanager
    def device_index(index):
        yield

    def set_stream(stream):
        owner.current = stream

    def create(*, num_sms=None, workqueue_scope=None, workqueue_concurrency_limit=None,
               device_id=None):  # fmt: skip
        owner.contexts = [*getattr(owner, "contexts", ()), num_sms]
        return SimpleNamespace(Stream=lambda: owner.new_stream("green", num_sms=num_sms))

    accelerator = SimpleNamespace(
        current_stream=lambda device=None: owner.current,
        set_stream=set_stream,
        device_index=device_index,
        synchronize=owner.synchronize,
        Graph=lambda keep_graph=False, *, pool=None, capture_error_mode="default": Graph(
            owner, pool
        ),
    )
    contexts = SimpleNamespace(GreenContext=SimpleNamespace(create=create))
    cuda = SimpleNamespace(
        is_current_stream_capturing=owner.captures_here,
        CUDAGraph=lambda keep_graph=False: Graph(owner),
        green_contexts=contexts,
        get_device_properties=lambda device: SimpleNamespace(multi_processor_count=NUM_SMS),
    )
    return SimpleNamespace(
        Stream=lambda device=None, *, priority=0: owner.new_stream(priority=priority),
        Event=lambda device=None, *, enable_timing=False, blocking=False, interprocess=False: Event(
            owner, enable_timing
        ),
        accelerator=accelerator,
        cuda=cuda,
        empty=lambda size, *, device: SimpleNamespace(record_stream=lambda stream: None),
    )

"""CUDA's extras: streams with an SM budget, and device graphs with a pool of their own.

    Cuda(device)    an `Accelerator` whose lanes may have a budget

An SM budget is a green context: a set of multiprocessors that the kernels of its stream stay on.
Each lane has one of its own; the driver rounds a budget up to what the device can cut.
Capture errors are told for this thread only: other threads of the process go on using CUDA.
"""

from __future__ import annotations

from typing import Any

import torch

from torchweft.errors import RunError, clip
from torchweft.plan.machine import Lane
from torchweft.run.accelerator.accelerator import Accelerator


class Cuda(Accelerator):
    """A CUDA device."""

    def __init__(self, device: torch.device, api: Any = torch) -> None:
        super().__init__(device, api)
        self.contexts: dict[int, Any] = {}  # by budget; a stream does not keep its context alive

    def stream(self, lane: Lane) -> Any:
        """A new stream: with a priority, or within a budget, which all lanes that have one share.

        Raises `RunError` for a budget that the device does not have, beside another one, or beside
        a priority.
        """
        wanted = lane.num_sms
        if wanted is None:
            return super().stream(lane)
        if lane.priority:
            raise RunError(
                f"run: lane {lane.name!r} has a priority and a budget of multiprocessors; the "
                "streams of a green context have no priority. Give the lane one of the two."
            )
        there = self.api.cuda.get_device_properties(self.device).multi_processor_count
        if wanted > there:
            raise RunError(
                f"run: lane {lane.name!r} has a budget of {wanted} multiprocessors; "
                f"{self.device} has {there}."
            )
        with self.lock:
            if wanted not in self.contexts and self.contexts:
                raise RunError(
                    f"run: lane {lane.name!r} has a budget of {wanted} multiprocessors, another "
                    f"lane of this process one of {min(self.contexts)}; torch would take both from "
                    "the same ones. Give all lanes with a budget the same: they share it."
                )
            if wanted not in self.contexts:
                create = self.api.cuda.green_contexts.GreenContext.create
                try:
                    self.contexts[wanted] = create(num_sms=wanted, device_id=self.device.index)
                except RuntimeError as error:  # not in this build, or with this driver
                    raise RunError(
                        f"run: lane {lane.name!r} has a budget of {wanted} multiprocessors, but "
                        f"torch makes no green context here: {clip(error)}. Give it no budget."
                    ) from error
        return self.contexts[wanted].Stream()

    no_graphs = one_stream = no_times = ""

    def is_capturing(self) -> bool:
        """Whether somebody else, such as a host, captures what is put on the current stream."""
        return bool(self.api.cuda.is_current_stream_capturing())

    def begin_capture(self) -> Any:
        """A new graph that takes what is put on the current stream and those forked from it.

        `torch.accelerator.Graph` has no CUDA behind it yet, so this is CUDA's own.
        """
        graph = self.api.cuda.CUDAGraph()
        graph.capture_begin(pool=self.pool, capture_error_mode="thread_local")
        return graph

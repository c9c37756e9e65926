"""The double of torch offers what torch offers, by the same names, and nothing that it does not."""

from __future__ import annotations

import inspect

import pytest
import torch
from device import TestDevice
from double import torch_like
from queues import Event, Graph, Stream


@pytest.fixture
def api():
    device = TestDevice()
    yield torch_like(device)
    device.close()


def same(double, real):
    """Whether a function of the double has the parameters of torch's, with their defaults."""
    ours, theirs = (inspect.signature(item).parameters for item in (double, real))
    theirs = {name: p for name, p in theirs.items() if name not in ("self", "cls")}
    return [(n, p.default) for n, p in ours.items()] == [(n, p.default) for n, p in theirs.items()]


def test_names_of_torch_accelerator(api):
    for name in vars(api.accelerator):
        assert hasattr(torch.accelerator, name)
    assert same(api.accelerator.current_stream, torch.accelerator.current_stream)
    assert same(api.accelerator.set_stream, torch.accelerator.set_stream)
    assert same(api.accelerator.synchronize, torch.accelerator.synchronize)
    assert same(api.accelerator.Graph, torch.accelerator.Graph.__init__)


def test_names_of_torch_cuda(api):
    for name in vars(api.cuda):
        assert hasattr(torch.cuda, name)
    contexts = torch.cuda.green_contexts
    ours, theirs = api.cuda.green_contexts.GreenContext.create, contexts.GreenContext.create
    ours, theirs = (dict(inspect.signature(item).parameters) for item in (ours, theirs))
    theirs.pop("sm_partition", None)  # of torch 2.15
    assert list(ours) == list(theirs)
    assert hasattr(contexts.GreenContext, "Stream")
    known = set(inspect.signature(torch.cuda.CUDAGraph.capture_begin).parameters)
    assert set(inspect.signature(Graph.capture_begin).parameters) <= known


@pytest.mark.parametrize(
    ("ours", "theirs", "names"),
    [
        (Stream, torch.Stream, ("record_event", "wait_event", "wait_stream", "synchronize")),
        (Event, torch.Event, ("elapsed_time", "synchronize")),
        (Graph, torch.cuda.CUDAGraph, ("capture_begin", "capture_end", "replay", "pool", "reset")),
        (Graph, torch.accelerator.Graph, ("capture_begin", "capture_end", "replay", "pool")),
    ],
)
def test_methods(ours, theirs, names):
    for name in names:
        assert hasattr(ours, name)
        assert hasattr(theirs, name)


def test_streams_and_events_take_what_torch_takes(api):
    for double, real in ((api.Stream, torch.Stream), (api.Event, torch.Event)):
        words = set(inspect.signature(double).parameters) - {"device"}
        assert all(word in STUBS[real] for word in words)


# torch.Stream and torch.Event are written in C; these are the keywords of their stubs.
STUBS = {
    torch.Stream: {"priority"},
    torch.Event: {"enable_timing", "blocking", "interprocess"},
}

"""Programs for one device, each with a bug and in its mended form: streams.py KIND,... bug|mended.

The line that a finding must name says "here".
"""

import sys
import threading

import torch

from torchweft.run.modes import Modes

kinds, is_bug = sys.argv[1].split(","), sys.argv[2] == "bug"
torch.cuda.init()
main, side = torch.cuda.current_stream(), torch.cuda.Stream()
x = torch.ones(64, 64, device="cuda")
side.wait_stream(main)


def integers() -> None:
    """Small integers are really computed, and once: in a thread that took over our modes, too."""
    counts, modes = [], Modes()

    def count() -> None:
        with modes:
            numbers = torch.arange(4, device="cuda")
            numbers.add_(1)
            counts.append(numbers.sum().item())

    thread = threading.Thread(target=count)
    thread.start()
    thread.join()
    count()
    assert counts == [10, 10], counts


def race() -> None:
    """A side stream reads what the main stream has just made."""
    y = x + 1
    if not is_bug:
        side.wait_stream(main)
    with torch.cuda.stream(side):
        z = y * 2  # here: reads y
    main.wait_stream(side)
    z.sum()


def inference() -> None:
    """In inference mode torch does not take `contiguous` apart: it copies all the same."""
    with torch.inference_mode():
        y = x.mT.contiguous()
        if not is_bug:
            side.wait_stream(main)
        with torch.cuda.stream(side):
            z = y * 2  # here: reads y
        main.wait_stream(side)
        z.sum()


def checkpoint() -> None:
    """Checkpoints end their second forward by an exception, on whose way up tensors die."""
    from torch.utils.checkpoint import checkpoint as again

    layer = torch.nn.Linear(64, 64, device="cuda")
    net = torch.nn.Sequential(layer, torch.nn.GELU(), torch.nn.Dropout())
    for _ in range(2):
        again(net, x, use_reentrant=False).sum().backward()


def overwrite() -> None:
    """A buffer is filled anew while a side stream still reads it."""
    with torch.cuda.stream(side):
        z = x * 2
    if not is_bug:
        main.wait_stream(side)
    x.fill_(3)  # here: writes x
    main.wait_stream(side)
    z.sum()


def early_free() -> None:
    """A value dies while a side stream reads it (as a scale used after its free)."""
    y = x + 1
    side.wait_stream(main)
    with torch.cuda.stream(side):
        z = y * 2
    if not is_bug:
        y.record_stream(side)
    del y  # here: freed
    torch.ones(64, 64, device="cuda")
    main.wait_stream(side)
    z.sum()


def late_event() -> None:
    """The wait is issued before the record, so it waits for nothing."""
    event = torch.cuda.Event()
    y = x + 1
    if not is_bug:
        event.record(main)
    side.wait_event(event)
    if is_bug:
        event.record(main)
    with torch.cuda.stream(side):
        z = y * 2  # here: reads y
    main.wait_stream(side)
    z.sum()


def late_record() -> None:
    """The event is recorded behind work that nobody waits for: the overlap is lost."""
    event = torch.cuda.Event()
    y = x + 1
    if not is_bug:
        event.record(main)
    w = (x @ x) @ x
    if is_bug:
        event.record(main)
    side.wait_event(event)
    with torch.cuda.stream(side):
        z = y * 2  # here: needs y alone
    main.wait_stream(side)
    (z + w).sum()


def hidden_sync() -> None:
    """A value of the device decides in Python."""
    y = x.sum()
    if is_bug and y.item() > 0:  # here: the host waits
        y.add_(1)


def unjoined() -> None:
    """A capture ends while a forked stream is not joined (CUDA's error 904)."""
    graph, capture = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    capture.wait_stream(main)
    with torch.cuda.stream(capture):
        graph.capture_begin()
        y = x + 1
        side.wait_stream(capture)
        with torch.cuda.stream(side):
            y.mul_(2)
        if not is_bug:
            capture.wait_stream(side)
        graph.capture_end()  # here: refused
    graph.replay()


def sync_in_capture() -> None:
    """The host waits inside a capture (CUDA's error 900)."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = x + 1
        if is_bug:
            torch.cuda.current_stream().synchronize()  # here: refused
    graph.replay()
    del y


def graph_race() -> None:
    """A captured value is read on a side stream that does not wait for the replay."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = x + 1
    graph.replay()
    if not is_bug:
        side.wait_stream(main)
    with torch.cuda.stream(side):
        z = y * 2  # here: reads y
    main.wait_stream(side)
    z.sum()


def replay() -> None:
    """A replay writes over what a side stream still reads of the one before."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = x + 1
    graph.replay()
    side.wait_stream(main)
    with torch.cuda.stream(side):
        z = y * 2  # here: reads y
    if not is_bug:
        main.wait_stream(side)
    graph.replay()
    main.wait_stream(side)
    z.sum()


for kind in kinds:
    globals()[kind]()
    torch.cuda.synchronize()

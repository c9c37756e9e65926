"""Weft as a guest: many graphs in one process (`pieces`), and inside a capture of the host's."""

import sys

import torch

import torchweft as weft
from torchweft_tools.dryrun import mark
from torchweft_tools.selftest.rig import Branches


def woven(graphs: bool = False) -> torch.nn.Module:
    model = Branches().cuda()
    machine = weft.accelerator(2)
    return weft.compile(model, weft.branches(), machine=machine, graphs=graphs, fallback="error")


def pieces() -> None:
    """More models than torch has streams of one priority."""
    models = [woven() for _ in range(20)]
    x = torch.ones(32, 64, device="cuda")
    for number in range(3):
        if number == 2:
            mark("steady pieces")
        for model in models:
            model(x)
    mark("end pieces")


def captured(graphs: bool) -> None:
    """A host that captures its step: at the first call that would be traced, and later ones."""
    model = woven(graphs)
    x = torch.ones(32, 64, device="cuda")
    model(x)  # compiled, as hosts warm up
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    mark("steady captured")
    with torch.cuda.graph(graph):
        for _ in range(3):
            model(x)
    graph.replay()
    mark("end captured")


with torch.no_grad():
    {
        "pieces": pieces,
        "captured": lambda: captured(graphs=False),
        "captured-graphs": lambda: captured(graphs=True),
    }[sys.argv[1]]()

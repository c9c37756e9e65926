"""Programs whose ops need libraries that cannot run in a dry run: libraries.py KIND,...

`refused` and `compiled` end with an error; the line that it must name says "here".
"""

import sys

import torch
from torch import nn


def convolution() -> None:
    """cuDNN stays off, also where a program switches it on."""
    torch.backends.cudnn.enabled = True
    net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Flatten()).cuda()
    with torch.backends.cudnn.flags(enabled=True, benchmark=True):
        net(torch.randn(2, 3, 8, 8, device="cuda")).sum().backward()
        nn.LSTM(8, 8, 2).cuda()(torch.randn(5, 2, 8, device="cuda"))[0].sum().backward()


def solvers() -> None:
    """Each is one kernel, with results of the right shape."""
    x = torch.randn(8, 8, device="cuda", requires_grad=True)
    torch.linalg.qr(x)[0].sum().backward()
    assert torch.linalg.svd(x)[1].shape == (8,)
    assert torch.fft.rfft(x).shape == (8, 5)
    torch.fft.rfft(x).abs().sum().backward()
    assert nn.init.orthogonal_(torch.empty(4, 8, device="cuda")).shape == (4, 8)
    assert torch.empty(3, device="cuda").copy_(torch.ones(3)).lgamma_().shape == (3,)


def outer() -> None:
    """Torch has a Triton kernel of its own for this product, and its ATen form."""
    x = torch.randn(2, 4, 1, device="cuda")
    assert torch.bmm(x, x.mT).shape == (2, 4, 4)


def sizes() -> None:
    """Sizes that small integers decide are those of a device; other small integers are 0."""
    repeats = torch.tensor([2, 0, 3], device="cuda")
    assert torch.arange(3, device="cuda").repeat_interleave(repeats).tolist() == [0, 0, 2, 2, 2]
    assert torch.ones(3, 4, device="cuda").repeat_interleave(repeats, 0).shape == (5, 4)
    assert (repeats > 0).nonzero().tolist() == [[0], [2]]
    assert repeats[repeats > 0].tolist() == [2, 3]
    scores, before = torch.randn(512, 4, device="cuda"), torch.full((512,), 7).cuda()
    del before
    assert set(scores.argmax(1).tolist()) == {0}, "not what lay there before"


def refused() -> None:
    x = torch.randn(8, 8, device="cuda")
    torch.linalg.lstsq(x, x)  # here: torch has no meta kernel of it


def compiled() -> None:
    torch.compile(torch.sin)(torch.ones(8, device="cuda"))


for kind in sys.argv[1].split(","):
    globals()[kind]()
    torch.cuda.synchronize()

"""What the server of `ranks.fork_server` loads before it forks: torch, Weft, and all that a first
compile loads and makes. It starts no thread, for a fork would lose it."""

from __future__ import annotations

import torch

import torchweft as weft

torch.set_num_threads(1)
with torch.no_grad():
    weft.compile(torch.nn.Linear(2, 2).eval(), weft.overlap(parts=2))(torch.ones(4, 2))
torch._dynamo.reset()

"""The expert's loop with oneDNN's matrix products: the comparison at equal kernels.

call = by_hand_onednn(model, num_parts=4)
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from torchweft_tools.bench.peers import models
from torchweft_tools.bench.peers.overlap_by_hand import by_hand


class Kernels:
    """`torch.nn.functional`, but for `linear`."""

    def __getattr__(self, name: str) -> Any:
        return getattr(F, name)

    @staticmethod
    def linear(x: Tensor, weight: Tensor) -> Tensor:
        return torch.ops.mkldnn._linear_pointwise(x, weight, None, "none", [], "")


def by_hand_onednn(model: nn.Module, num_parts: int) -> Callable[[Tensor], Tensor]:
    """The loop of `overlap_by_hand`, unchanged, over models that see other kernels meanwhile."""
    call, kernels = by_hand(model, num_parts), Kernels()

    def swapped(x: Tensor) -> Tensor:
        models.F = kernels
        try:
            return call(x)
        finally:
            models.F = F

    return swapped

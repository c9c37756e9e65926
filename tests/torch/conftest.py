"""What tests that need torch share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture
def fresh() -> Iterator[None]:
    """Nothing that Dynamo remembers of other tests, equal random numbers, no gradients."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    with torch.no_grad():
        yield

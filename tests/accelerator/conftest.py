"""The test device, open for one test."""

from __future__ import annotations

import pytest
import torch
from device import TestDevice


@pytest.fixture
def device():
    held = TestDevice()
    with held, torch.no_grad():
        yield held
    held.close()

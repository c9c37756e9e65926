"""Who carries out which kind of `Rewrite`."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from torchweft.capture.rewrites.chunk import chunk
from torchweft.capture.rewrites.decompose import decompose
from torchweft.capture.rewrites.fuse import fuse
from torchweft.capture.rewrites.heads import heads
from torchweft.capture.rewrites.rewriting import Rewriter

KINDS: Mapping[str, Rewriter] = MappingProxyType(
    {"chunk": chunk, "decompose": decompose, "fuse": fuse, "heads": heads}
)

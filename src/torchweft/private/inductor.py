"""Private parts of PyTorch: Inductor."""

from torch import __version__
from torch._inductor import config
from torch._inductor.compile_fx import compile_fx, compile_fx_inner
from torch._inductor.decomposition import select_decomp_table
from torch._inductor.lowering import fallbacks, lowerings

READS_SHAPES = __version__ < "2.14"
"""Whether its code takes a symbol from the shape of a tensor; else a symbol is an argument."""

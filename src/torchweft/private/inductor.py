"""Private parts of PyTorch: Inductor."""

from torch._inductor import config
from torch._inductor.compile_fx import compile_fx, compile_fx_inner
from torch._inductor.decomposition import select_decomp_table
from torch._inductor.lowering import fallbacks, lowerings

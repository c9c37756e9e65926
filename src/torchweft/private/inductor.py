"""Private parts of PyTorch: Inductor."""

from torch._inductor import (
    config,
)
from torch._inductor.compile_fx import (
    compile_fx,
    compile_fx_inner,
)
from torch._inductor.custom_graph_pass import (
    CustomGraphPass,
    get_custom_graph_passes,
    get_hash_for_files,
)
from torch._inductor.decomposition import (
    select_decomp_table,
)
from torch._inductor.lowering import (
    fallbacks,
    lowerings,
)

__all__ = [
    "CustomGraphPass",
    "compile_fx",
    "compile_fx_inner",
    "config",
    "fallbacks",
    "get_custom_graph_passes",
    "get_hash_for_files",
    "lowerings",
    "select_decomp_table",
]

"""Private parts of PyTorch: graph passes of Inductor, without the compiler itself."""

from torch._inductor.custom_graph_pass import (
    CustomGraphPass,
    get_custom_graph_passes,
    get_hash_for_files,
)

"""Private parts of PyTorch: operators, fake tensors, dispatch, nests and sizes."""

from torch._C import DispatchKey, _dispatch_keyset_full_after
from torch._C import _dispatch_get_all_op_names as all_op_names
from torch._C import _has_mkldnn as has_mkldnn
from torch._C import _set_grad_enabled as set_grad_enabled_
from torch._C._distributed_c10d import AllgatherOptions, _resolve_process_group
from torch._C._functorch import is_batchedtensor
from torch._C._nn import linear as c_linear
from torch._C._profiler import _RecordFunctionFast as RecordFunctionFast
from torch._decomp import decomposition_table
from torch._dispatch.python import enable_python_dispatcher
from torch._ops import HigherOrderOperator, OpOverload, OpOverloadPacket
from torch._prims_common import suggest_memory_format
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, is_fake
from torch.amp.autocast_mode import _exit_autocast as exit_autocast
from torch.fx._lazy_graph_module import _LazyGraphModule
from torch.nn.utils.stateless import _reparametrize_module
from torch.utils import _python_dispatch as dispatch
from torch.utils import _pytree as pytree
from torch.utils._mode_utils import no_dispatch
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_unflatten
from torch.utils._sympy.functions import FloorDiv, Mod
from torch.utils._sympy.numbers import int_oo
from torch.utils._sympy.printers import PythonPrinter

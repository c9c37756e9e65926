"""Private parts of PyTorch: Dynamo, its guards, sources and regions."""

from torch._C._dynamo.eval_frame import _FrameAction as FrameAction
from torch._C._dynamo.eval_frame import _FrameExecStrategy as FrameExecStrategy
from torch._C._dynamo.eval_frame import set_code_exec_strategy
from torch._C._dynamo.guards import GlobalStateGuard, TensorGuards
from torch._dynamo import config as dynamo_config
from torch._dynamo import convert_frame, trace_rules
from torch._dynamo.callback import CallbackArgs, callback_handler
from torch._dynamo.exc import (
    BackendCompilerFailed,
    FailOnRecompileLimitHit,
    InternalTorchDynamoError,
    TorchDynamoException,
    TorchRuntimeError,
    Unsupported,
    UserError,
)
from torch._dynamo.external_utils import wrap_inline
from torch._dynamo.source import (
    AttrSource,
    ConstantSource,
    GlobalSource,
    NNModuleSource,
    TypeSource,
    is_from_local_source,
)
from torch._dynamo.symbolic_convert import InstructionTranslator
from torch._dynamo.utils import graph_break_reasons
from torch._dynamo.variables import higher_order_ops, invoke_subgraph
from torch._dynamo.variables.base import AttributeMutationNew
from torch._dynamo.variables.builder import VariableBuilder
from torch._dynamo.variables.invoke_subgraph import InputFingerprint, InputTag
from torch._guards import (
    ChainedSource,
    CompileContext,
    Guard,
    GuardsSet,
    InvokeSubgraphReuseCondition,
    Source,
    TracingContext,
    tracing,
)
from torch._higher_order_ops.invoke_subgraph import invoke_subgraph_placeholder
from torch.fx.experimental import _config as fx_config

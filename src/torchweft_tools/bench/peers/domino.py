"""DeepSpeed Domino's own transformer at the sizes of `Dense`: two halves of the batch in turn.

    call = domino(sizes, num_sequences=8, num_positions=128)

It runs as DeepSpeed ships it, so it is LayerNorm and GELU instead of RMS norm and SwiGLU; the inner
size is chosen so that its matmuls have as many weights, and its collectives are of the same size.
Weights are its own: its time can be compared, its output cannot.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from types import SimpleNamespace

import torch
import torch.distributed as dist
from torch import Tensor

from torchweft_tools.bench.peers.models import Sizes, rotary


class Ranks:
    """What Domino asks of Megatron's parallel state."""

    def get_tensor_model_parallel_world_size(self) -> int:
        return dist.get_world_size()

    def get_tensor_model_parallel_rank(self) -> int:
        return dist.get_rank()

    def get_tensor_model_parallel_group(self) -> dist.ProcessGroup:
        return dist.group.WORLD


def rotate(x: Tensor, angles: tuple[Tensor, Tensor]) -> Tensor:
    """The same rotary positions as in `Dense`."""
    cos, sin = angles
    left, right = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-right, left), dim=-1) * sin


def settings(sizes: Sizes, *, intra: bool) -> SimpleNamespace:
    """Domino's configuration."""

    def start(values: Tensor) -> None:
        torch.nn.init.normal_(values, std=values.shape[1] ** -0.5)

    num_heads = sizes.hidden // sizes.head
    return SimpleNamespace(
        num_layers=sizes.num_layers,
        hidden_size=sizes.hidden,
        ffn_hidden_size=sizes.wide * 3 // 2,  # two matrices weigh what SwiGLU's three do
        num_attention_heads=num_heads,
        kv_channels=sizes.head,
        params_dtype=torch.float32,
        add_bias_linear=False,
        gated_linear_unit=False,
        layernorm_epsilon=1e-5,
        apply_residual_connection_post_layernorm=False,
        attention_dropout=0.0,
        hidden_dropout=0.0,
        init_method=start,
        output_layer_init_method=start,
        perform_initialization=True,
        domino_intra_layer_overlap=intra,
    )


def domino(
    sizes: Sizes, *, num_sequences: int, num_positions: int, intra: bool = False
) -> Callable[[Tensor], Tensor]:
    """Domino's forward on a batch of its own layout, [positions, sequences, hidden]."""
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    import deepspeed
    from deepspeed.runtime.domino.transformer import DominoTransformer, ModelType

    deepspeed.init_distributed(dist_backend="gloo", verbose=False)
    torch.manual_seed(1 + dist.get_rank())
    model = DominoTransformer(
        settings(sizes, intra=intra),
        Ranks(),
        rotate,
        ModelType.encoder_or_decoder,
        post_layer_norm=False,
    ).eval()
    cos, sin = rotary(num_positions, sizes.head)
    angles = ((cos, sin), (cos, sin))
    generator = torch.Generator().manual_seed(7)
    own = torch.randn(num_positions, num_sequences, sizes.hidden, generator=generator)

    def call(x: Tensor) -> Tensor:
        return model(own, None, rotary_pos_emb=angles)

    return call

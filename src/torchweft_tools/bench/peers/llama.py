"""A Llama of Transformers on several ranks, with the library's own tensor parallelism.

ids [sequences, positions] -> logits [sequences, positions, vocabulary]
"""

from __future__ import annotations

import logging
import tempfile
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn


class Logits(nn.Module):
    """Only the logits of a causal model."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.causal = model

    def forward(self, ids: Tensor) -> Tensor:
        logits: Tensor = self.causal(ids, use_cache=False).logits
        return logits


def llama(sizes: Any, *, seed: int) -> Logits:
    """The model on this rank; weights are drawn from the seed, and each rank keeps its share."""
    from transformers import AutoModelForCausalLM, DistributedConfig, LlamaConfig, LlamaForCausalLM
    from transformers.utils import logging as chatter

    logging.disable(logging.WARNING)
    chatter.disable_progress_bar()
    config = LlamaConfig(
        hidden_size=sizes.hidden, intermediate_size=2 * sizes.wide, vocab_size=256,
        num_hidden_layers=sizes.num_layers, num_attention_heads=sizes.hidden // sizes.head,
        max_position_embeddings=sizes.num_positions, initializer_range=0.02,
    )  # fmt: skip
    torch.manual_seed(seed)
    with tempfile.TemporaryDirectory() as mine:
        folders = [mine]
        if dist.get_rank() == 0:  # the only rank on which Transformers writes
            LlamaForCausalLM(config).save_pretrained(mine)
        dist.broadcast_object_list(folders)
        model = AutoModelForCausalLM.from_pretrained(
            folders[0], dtype=torch.float32, distributed_config=DistributedConfig(tp_plan="auto")
        )
        dist.barrier()
    return Logits(model).eval()


def ids(num_sequences: int, num_positions: int) -> Tensor:
    """Some text, the same on every rank."""
    count = num_sequences * num_positions
    return (torch.arange(count) * 7919 % 251).view(num_sequences, num_positions)

"""The zoo: tiny random models of many architectures, each one line, with inputs to call them.

A transformers line is (config class, model class, sizes); another architecture is another line.
Weights are drawn wide, so that a wrong mask or a swapped row shows in the outputs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

ROWS = 5
TOKENS = 7
Inputs = dict[str, Any]


@dataclass(frozen=True)
class ZooModel:
    """How to build one model and its inputs; `library` is what must be installed."""

    name: str
    library: str
    build: Callable[[], torch.nn.Module]
    inputs: Callable[[], Inputs]
    batch: int | str | tuple[str, ...] | None = None


SMALL = {
    "vocab_size": 97, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "initializer_range": 0.15,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
MOE = {
    "num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24
}  # fmt: skip
DEEPSEEK = {
    "n_routed_experts": 4, "n_shared_experts": 1, "n_group": 2, "topk_group": 1,
    "num_experts_per_tok": 2, "moe_intermediate_size": 24, "first_k_dense_replace": 1,
    "q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8,
    "v_head_dim": 8, "num_key_value_heads": 4,
}  # fmt: skip
GPT2 = {
    "vocab_size": 97, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64,
    "initializer_range": 0.15, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
T5 = {
    "vocab_size": 97, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4,
    "decoder_start_token_id": 0, "pad_token_id": 0, "eos_token_id": 1,
}  # fmt: skip
WHISPER = {
    "vocab_size": 97, "d_model": 32, "encoder_layers": 2, "decoder_layers": 2,
    "encoder_attention_heads": 4, "decoder_attention_heads": 4, "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 48, "num_mel_bins": 8, "max_source_positions": 16,
    "max_target_positions": 32, "init_std": 0.15, "pad_token_id": 0, "bos_token_id": 1,
    "eos_token_id": 2, "decoder_start_token_id": 1,
}  # fmt: skip
VIT = {
    "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48,
    "image_size": 16, "patch_size": 4, "initializer_range": 0.15,
}  # fmt: skip
CLIP = {
    "text_config": {**SMALL, "max_position_embeddings": 16}, "vision_config": VIT,
    "projection_dim": 16,
}  # fmt: skip
MAMBA = {
    "vocab_size": 97, "hidden_size": 32, "num_hidden_layers": 2, "num_heads": 8, "head_dim": 8,
    "state_size": 8, "n_groups": 2, "chunk_size": 4, "initializer_range": 0.15,
}  # fmt: skip
WAN = {
    "patch_size": (1, 2, 2), "num_attention_heads": 2, "attention_head_dim": 12, "in_channels": 4,
    "out_channels": 4, "text_dim": 16, "freq_dim": 16, "ffn_dim": 32, "num_layers": 2,
    "cross_attn_norm": True, "qk_norm": "rms_norm_across_heads", "rope_max_seq_len": 32,
}  # fmt: skip
FLUX = {
    "patch_size": 1, "in_channels": 4, "num_layers": 1, "num_single_layers": 1,
    "attention_head_dim": 16, "num_attention_heads": 2, "joint_attention_dim": 32,
    "pooled_projection_dim": 32, "axes_dims_rope": [4, 4, 8],
}  # fmt: skip
UNET = {
    "block_out_channels": (8, 16), "layers_per_block": 1, "sample_size": 8, "in_channels": 4,
    "out_channels": 4, "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D"),
    "up_block_types": ("CrossAttnUpBlock2D", "UpBlock2D"), "cross_attention_dim": 16,
    "attention_head_dim": 2, "norm_num_groups": 4,
}  # fmt: skip


def tokens() -> Inputs:
    ids = torch.randint(3, 97, (ROWS, TOKENS))
    mask = torch.ones(ROWS, TOKENS, dtype=torch.long)
    mask[1, :2] = 0
    return {"input_ids": ids, "attention_mask": mask}


def only_tokens() -> Inputs:
    return {"input_ids": torch.randint(3, 97, (ROWS, TOKENS))}


def two_texts() -> Inputs:
    return {**tokens(), "decoder_input_ids": torch.randint(3, 97, (ROWS, 4))}


def speech() -> Inputs:
    return {
        "input_features": torch.randn(ROWS, 8, 32),
        "decoder_input_ids": torch.randint(3, 97, (ROWS, 4)),
    }


def picture() -> Inputs:
    return {"pixel_values": torch.randn(ROWS, 3, 16, 16)}


def text_and_picture() -> Inputs:
    return {**tokens(), **picture()}


def transformer(config: str, model: str, sizes: Mapping[str, Any]) -> Callable[[], torch.nn.Module]:
    """A builder of a transformers model from the names of its classes."""

    def build() -> torch.nn.Module:
        import transformers

        made = getattr(transformers, config)(**sizes)
        built: torch.nn.Module = getattr(transformers, model)(made)
        return built

    return build


def diffusion(model: str, sizes: Mapping[str, Any]) -> Callable[[], torch.nn.Module]:
    """A builder of a diffusers model from the name of its class."""

    def build() -> torch.nn.Module:
        import diffusers

        built: torch.nn.Module = getattr(diffusers, model)(**sizes)
        return built

    return build


def video() -> Inputs:
    return {
        "hidden_states": torch.randn(ROWS, 4, 2, 8, 8),
        "timestep": torch.randint(0, 1000, (ROWS,)),
        "encoder_hidden_states": torch.randn(ROWS, 6, 16),
        "return_dict": False,
    }


def flux() -> Inputs:
    return {
        "hidden_states": torch.randn(ROWS, 16, 4),
        "encoder_hidden_states": torch.randn(ROWS, 6, 32),
        "pooled_projections": torch.randn(ROWS, 32),
        "timestep": torch.rand(ROWS),
        "img_ids": torch.randn(16, 3),
        "txt_ids": torch.zeros(6, 3),
        "return_dict": False,
    }


def noise() -> Inputs:
    return {
        "sample": torch.randn(ROWS, 4, 8, 8),
        "timestep": torch.randint(0, 1000, (ROWS,)),
        "encoder_hidden_states": torch.randn(ROWS, 6, 16),
        "return_dict": False,
    }


def _hf(
    name: str,
    config: str,
    model: str,
    sizes: Mapping[str, Any],
    inputs: Callable[[], Inputs] = tokens,
) -> ZooModel:
    return ZooModel(name, "transformers", transformer(config, model, sizes), inputs)


def _df(name: str, model: str, sizes: Mapping[str, Any], inputs: Callable[[], Inputs]) -> ZooModel:
    return ZooModel(name, "diffusers", diffusion(model, sizes), inputs)


MODELS: tuple[ZooModel, ...] = (
    _hf("llama", "LlamaConfig", "LlamaForCausalLM", SMALL),
    _hf("qwen3", "Qwen3Config", "Qwen3ForCausalLM", SMALL),
    _hf("mistral", "MistralConfig", "MistralForCausalLM", SMALL),
    _hf("gemma3", "Gemma3TextConfig", "Gemma3ForCausalLM", {**SMALL, "sliding_window": 4}),
    _hf("gpt2", "GPT2Config", "GPT2LMHeadModel", GPT2),
    _hf("bert", "BertConfig", "BertModel", SMALL),
    _hf("t5", "T5Config", "T5ForConditionalGeneration", T5, two_texts),
    _hf("mixtral", "MixtralConfig", "MixtralForCausalLM", {**SMALL, **MOE}),
    _hf("deepseek_v3", "DeepseekV3Config", "DeepseekV3ForCausalLM", {**SMALL, **DEEPSEEK}),
    _hf("qwen3_moe", "Qwen3MoeConfig", "Qwen3MoeForCausalLM", {**SMALL, **MOE}),
    _hf("whisper", "WhisperConfig", "WhisperForConditionalGeneration", WHISPER, speech),
    _hf("vit", "ViTConfig", "ViTModel", VIT, picture),
    _hf("clip", "CLIPConfig", "CLIPModel", CLIP, text_and_picture),
    _hf("mamba2", "Mamba2Config", "Mamba2ForCausalLM", MAMBA, only_tokens),
    _df("wan", "WanTransformer3DModel", WAN, video),
    _df("flux", "FluxTransformer2DModel", FLUX, flux),
    _df("unet", "UNet2DConditionModel", UNET, noise),
)


def outputs_of(value: Any) -> Any:
    """Outputs as nested lists: mappings and caches become what they hold."""
    if isinstance(value, torch.Tensor) or value is None:
        return value
    if isinstance(value, Mapping):
        return [outputs_of(item) for item in value.values()]
    if isinstance(value, list | tuple):
        return [outputs_of(item) for item in value]
    if hasattr(value, "layers"):
        return [
            [getattr(layer, "keys", None), getattr(layer, "values", None)] for layer in value.layers
        ]
    return None

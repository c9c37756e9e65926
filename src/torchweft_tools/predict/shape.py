"""The `ModelShape`: the dimensions of a decoder, read from the `config.json` of a checkpoint.

    {"hidden_size": 4096, "num_hidden_layers": 32, ...} --read_shape--> ModelShape

Dense and mixture-of-experts decoders, grouped and latent attention (MLA). Fields that say nothing
of sizes are left alone; a missing one that does raises `ConfigError` by its name.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

from torchweft.errors import WeftError, clip, unknown
from torchweft_tools.formats.reader import read_json

DTYPES: Mapping[str, tuple[float, str]] = {
    "float32": (4, "float32"),
    "float16": (2, "float16"),
    "bfloat16": (2, "bfloat16"),
    "fp8": (1, "float8_e4m3fn"),
    "int8": (1, "int8"),
    "int4": (0.5, "bfloat16"),
}
"""Bytes of a weight, and the dtype that products are made in."""
PLAIN_MLP = (
    "gpt2",
    "opt",
    "gpt_neox",
    "bloom",
    "falcon",
    "phi",
    "gptj",
    "gpt_bigcode",
    "starcoder2",
    "mpt",
    "gpt_neo",
    "nemotron",
)
"""Model types whose MLPs have no gate: two products instead of three."""
MOST = 10**7


class ConfigError(WeftError):
    """A model's config lacks a dimension, or has one that cannot be."""


@dataclass(frozen=True)
class Latent:
    """Latent attention: ranks of its projections (q_rank 0: none), and the widths of a head."""

    q_rank: int
    kv_rank: int
    nope: int
    rope: int
    value: int


@dataclass(frozen=True)
class ExpertShape:
    """The experts of a layer: how many, how many a token goes to, how wide; shared: the width of
    those that all tokens go to; groups: how many nodes at most a token goes to (0: any)."""

    num_experts: int
    top_k: int
    width: int
    shared: int = 0
    groups: int = 0


@dataclass(frozen=True)
class ModelShape:
    """A decoder. num_dense: of its layers, how many have an MLP in place of experts.

    kv_heads is how many heads a cache has; latent attention caches one row for all heads.
    """

    name: str
    hidden: int
    num_layers: int
    heads: int
    kv_heads: int
    head_dim: int
    mlp: int
    vocab: int
    gated: bool = True
    latent: Latent | None = None
    experts: ExpertShape | None = None
    num_dense: int = 0
    dtype: str = "bfloat16"

    @property
    def weight_bytes(self) -> float:
        """Bytes of one weight."""
        return DTYPES[self.dtype][0]

    @property
    def product_dtype(self) -> str:
        """What products are made in."""
        return DTYPES[self.dtype][1]


def known_configs() -> list[str]:
    """The names of the configs that come with the package."""
    folder = files("torchweft_tools.predict") / "configs"
    return sorted(
        each.name.removesuffix(".json") for each in folder.iterdir() if each.name.endswith(".json")
    )


def load_shape(config: str | Path, dtype: str | None = None) -> ModelShape:
    """The shape of a config file, or of one that comes with the package, by its name."""
    path = Path(config)
    if not path.is_file():
        if path.suffix == ".json" or len(path.parts) > 1:
            raise ConfigError(f"config: there is no file {clip(str(config))}.")
        if str(config) not in known_configs():
            raise ConfigError(f"config: {unknown('config', str(config), known_configs())}")
        path = Path(str(files("torchweft_tools.predict") / "configs" / f"{config}.json"))
    name = path.parent.name if path.name == "config.json" else path.stem
    return read_shape(read_json(path, ConfigError, "config"), name or "model", dtype)


def read_shape(data: object, name: str = "model", dtype: str | None = None) -> ModelShape:
    """The shape in the data of a `config.json`. Raises `ConfigError`."""
    if not isinstance(data, dict):
        raise ConfigError(f"config: {name}: this is {clip(data)}, not an object.")
    inner = data.get("text_config")
    if isinstance(inner, dict) and "hidden_size" not in data:
        data = {**inner, **{k: data[k] for k in ("quantization_config",) if k in data}}
    read = _Config(data, name)
    hidden = read.number("hidden_size", "n_embd", "d_model")
    heads = read.number("num_attention_heads", "n_head", "n_heads")
    latent = _latent(read)
    kind = str(data.get("model_type", ""))
    if latent is None and not data.get("head_dim") and hidden % heads:
        raise read.fail(f"{heads} heads do not divide a hidden size of {hidden}; give head_dim.")
    layers = read.number("num_hidden_layers", "n_layer", "n_layers", "num_layers")
    experts = _experts(read)
    plain = 4 * hidden if kind in PLAIN_MLP else None
    if experts is not None and "intermediate_size" not in data:
        plain = experts.width
    return ModelShape(
        name=name,
        hidden=hidden,
        num_layers=layers,
        heads=heads,
        kv_heads=read.number("num_key_value_heads", "num_kv_heads", default=heads),
        head_dim=read.number("head_dim", default=max(1, hidden // heads)),
        mlp=read.number(
            "intermediate_size_mlp",
            "intermediate_size",
            "n_inner",
            "ffn_dim",
            "ffn_hidden_size",
            default=plain,
        ),
        vocab=read.number("vocab_size"),
        gated=kind not in PLAIN_MLP,
        latent=latent,
        experts=experts,
        num_dense=_num_dense(read, layers) if experts else layers,
        dtype=_dtype(read, dtype),
    )


class _Config:
    """Whole numbers of a config, by any of their names."""

    def __init__(self, data: Mapping[str, Any], name: str) -> None:
        self.data, self.name = data, name

    def fail(self, why: str) -> ConfigError:
        return ConfigError(f"config: {self.name}: {why}", rule="config")

    def number(self, *names: str, default: int | None = None, least: int = 1) -> int:
        for name in names:
            value = self.data.get(name)
            if value is None:
                continue
            if type(value) is not int or not least <= value <= MOST:
                raise self.fail(
                    f"{name!r} must be a whole number from {least} on; got {clip(value)}."
                )
            return value
        if default is None:
            others = f" (or {', '.join(map(repr, names[1:]))})" if names[1:] else ""
            raise self.fail(
                f"the field {names[0]!r}{others} is missing. Give the config.json of a decoder, "
                "as it lies beside the weights."
            )
        return default


def _latent(read: _Config) -> Latent | None:
    if not read.data.get("kv_lora_rank"):
        return None
    return Latent(
        read.number("q_lora_rank", default=0, least=0),
        read.number("kv_lora_rank"),
        read.number("qk_nope_head_dim"),
        read.number("qk_rope_head_dim"),
        read.number("v_head_dim"),
    )


def _experts(read: _Config) -> ExpertShape | None:
    names = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
    count = read.number(*names, default=0, least=0)
    if count < 2:
        return None
    width = read.number("moe_intermediate_size", "intermediate_size")
    top_k = read.number("num_experts_per_tok", "num_experts_per_token", "moe_k", "moe_top_k")
    if top_k > count:
        raise read.fail(f"a token cannot go to {top_k} of {count} experts.")
    shared = read.number("shared_expert_intermediate_size", default=0, least=0)
    shared = shared or width * read.number("n_shared_experts", default=0, least=0)
    return ExpertShape(count, top_k, width, shared, read.number("topk_group", default=0, least=0))


def _num_dense(read: _Config, layers: int) -> int:
    """How many layers of a model with experts have none."""
    first = read.number("first_k_dense_replace", default=0, least=0)
    step = read.number(
        "decoder_sparse_step", "moe_layer_freq", "interleave_moe_layer_step", default=1
    )
    only = read.data.get("mlp_only_layers") or []
    return min(layers, first + (layers - first) * (step - 1) // step + len(only))


def _dtype(read: _Config, wanted: str | None) -> str:
    """The dtype of the weights: as asked for, as quantised, or as stored."""
    if wanted is None:
        quantised = read.data.get("quantization_config")
        text = str(quantised).lower() if isinstance(quantised, dict) else ""
        stored = str(read.data.get("torch_dtype") or read.data.get("dtype") or "bfloat16")
        stored = stored.removeprefix("torch.")
        if any(word in text for word in ("fp8", "float8", "e4m3")):
            stored = "fp8"
        elif any(word in text for word in ("awq", "gptq", "int4", "4bit", "mxfp4", "nvfp4")):
            stored = "int4"
        elif "int8" in text or "smoothquant" in text:
            stored = "int8"
        wanted = stored if stored in DTYPES else "bfloat16"
    if wanted not in DTYPES:
        raise ConfigError(f"config: {unknown('dtype', wanted, DTYPES)}")
    return wanted

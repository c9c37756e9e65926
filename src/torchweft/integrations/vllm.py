"""vLLM: each step of the engine runs by plans, its batch cut by tokens, also inside of a request.

    vllm serve MODEL --tensor-parallel-size 2 --additional-config '{"weft": {}}'
    LLM(MODEL, tensor_parallel_size=2, additional_config={"weft": {"decode": "stock"}})

Nothing happens without "weft" there. With it, the one graph that vLLM captures of the model comes
to us, and its all_reduces become collectives in two phases. Prefill, decode and mixed steps, by
powers of two of tokens, are kinds of calls with a strategy each. Options, none of them needed:

    "prefill", "decode", "mixed"    "auto" (vLLM's own way and parts are tried, the fastest stays),
                                    "stock", a strategy, or several: {"overlap": {"parts": 4}}
    and those of `weft.compile`, such as "watchdog_s"

A part has attention metadata of its own, made by vLLM's builder from its rows, in a forward context
of its own. `llm.collective_rpc("weft_report")` tells what became of it, rank by rank.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from types import MappingProxyType
from typing import Any

from torch import fx

from torchweft.backend import check_options
from torchweft.capture.foreign import reduce_by_torch
from torchweft.context import phase_of
from torchweft.errors import RefusedError, WeftError
from torchweft.marks import row_wise
from torchweft.reporting import report_of
from torchweft.session import Session, context
from torchweft.splitters import Parts, Splitter, blocks_touched, by_rows, shared
from torchweft.strategies import overlap
from torchweft.trials import Trials, Wanted, wanted_by

KEY = "weft"
PARTS = (None, overlap(parts=2), overlap(parts=4))
AUTO = MappingProxyType({"prefill": PARTS, "mixed": PARTS, "decode": PARTS[:2]})
OURS = {"strategy", "rules", "splitters", "blocks", "batch", "machine"}
REDUCES = MappingProxyType({"vllm.all_reduce": 0, "_C.shm_allreduce": 1})
ROWS = row_wise(
    r"^(_C\.(onednn_\w*mm|rms_norm|fused_add_rms_norm|rotary_embedding|\w+_and_mul|gelu\w*)"
    r"|vllm\.unified_(kv_cache_update|attention_with_output))(\.|$)"
)
SHARED = """no_compile_layers dp_metadata cudagraph_runtime_mode batch_descriptor ubatch_slices
    skip_compiled all_moe_layers moe_layer_index additional_kwargs"""


def register() -> None:
    """What vLLM calls in each of its processes: ask every configuration whether it wants us."""
    from vllm.platforms import current_platform

    stock = current_platform.apply_config_platform_defaults

    def ask_weft(config: Any) -> None:
        stock(config)
        adopt(config)

    if getattr(stock, "__name__", "") != ask_weft.__name__:
        current_platform.apply_config_platform_defaults = ask_weft


def adopt(config: Any) -> None:
    """Let vLLM hand its graph to us, if its configuration says so.

    Raises `WeftError` for options that we do not have, or where there will be no graph.
    """
    from vllm.config import CompilationMode

    extra, compilation = config.additional_config, config.compilation_config
    if not isinstance(extra, dict) or KEY not in extra:
        return
    options_of(extra[KEY])
    if compilation.mode == CompilationMode.NONE:
        raise WeftError("vllm: weft needs the graph of the model: drop enforce_eager.")
    os.environ["VLLM_USE_AOT_COMPILE"] = "0"  # plans are not saved as compiled artefacts
    compilation.mode = CompilationMode.DYNAMO_TRACE_ONCE
    compilation.backend = f"{__name__}.backend"
    if not config.parallel_config.worker_extension_cls:
        config.parallel_config.worker_extension_cls = f"{__name__}.Reports"


def options_of(given: Any) -> tuple[dict[str, tuple[Wanted, ...]], dict[str, Any]]:
    """The strategies of each phase, and the options of the session. Raises `WeftError`."""
    if not isinstance(given, Mapping):
        raise WeftError(f'vllm: {given!r} is no set of options: {{"weft": {{}}}}.', rule="option")
    check_options(given, {*AUTO, *inspect.signature(Session).parameters} - OURS)
    strategies = {phase: wanted_by(given.get(phase, "auto"), AUTO[phase]) for phase in AUTO}
    return strategies, {name: value for name, value in given.items() if name not in AUTO}


def __getattr__(name: str) -> Any:
    """`backend`: what vLLM hands its graph to; made where its configuration is known."""
    if name != "backend":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from vllm.config import get_current_vllm_config

    config = get_current_vllm_config()
    if getattr(config, KEY, None) is None:
        object.__setattr__(config, KEY, Weft(config))
    return getattr(config, KEY).backend


class Weft:
    """What one worker knows of us: a session, and what was found to be fastest."""

    def __init__(self, config: Any) -> None:
        from vllm import forward_context

        strategies, options = options_of(config.additional_config[KEY])
        rules: dict[str, Any] = dict.fromkeys(SHARED.split(), shared)
        rules |= {"slot_mapping": by_rows, "is_padding": by_rows, "attn_metadata": self.attention}
        touched = self.touched if config.cache_config.enable_prefix_caching else None
        calls, state = r"^vllm\.unified_", (self.current, self.enforce)
        forward = Splitter("forward", calls, *state, rules, touched, by="layer_name")
        self.config, self.host, self.entered = config, forward_context, ExitStack()
        self.builders: dict[str, Any] = {}
        self.session = Session(rules=[ROWS], splitters=[forward], **options)
        self.trials = {name: Trials(self.session, each) for name, each in strategies.items()}

    def backend(self, gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        """What runs in the place of vLLM's graph."""
        from vllm.distributed import get_tp_group

        mine = reduce_by_torch(gm, REDUCES, get_tp_group().device_group.group_name)
        by_plans = self.session.backend(mine, example_inputs)

        def step(*inputs: Any) -> Any:
            state = self.current()
            if state is None:  # expected, so no fallback that is warned of or forbidden
                self.session.fallbacks["warm-up: no request is in this call"] += 1
                return gm.forward(*inputs)
            tokens = next(iter(state.attn_metadata.values())).query_start_loc.diff().tolist()
            phase = phase_of(tokens)
            with (
                self.trials[phase].turn((phase, sum(tokens).bit_length())) as strategy,
                context(phase=phase, tokens_per_request=tokens, strategy=strategy),
            ):
                return (gm.forward if strategy is None else by_plans)(*inputs)

        return step

    def current(self) -> Any:
        """The forward context, if it has attention metadata."""
        there = self.host.is_forward_context_available()
        found = self.host.get_forward_context() if there else None
        return found if found is not None and found.attn_metadata else None

    def enforce(self, state: Any) -> None:
        """Put a forward context in force, and take back the one that was."""
        self.entered.close()
        if self.host.get_forward_context() is not state:
            self.entered.enter_context(self.host.override_forward_context(state))

    def attention(self, metadata: Any, parts: Parts) -> list[dict[str, Any]]:
        """The attention metadata of each part, layer by layer."""
        if not isinstance(metadata, Mapping):
            raise RefusedError("attention: the host has cut its batch itself")
        made = {id(whole): self._cut(layer, whole, parts) for layer, whole in _groups(metadata)}
        by_layer = {layer: made[id(whole)] for layer, whole in metadata.items()}
        return [
            dict(zip(by_layer, each, strict=True)) for each in zip(*by_layer.values(), strict=True)
        ]

    def _cut(self, layer: str, whole: Any, parts: Parts) -> list[Any]:
        from vllm.v1.attention.backend import CommonAttentionMetadata
        from vllm.v1.worker.ubatch_utils import UBatchSlice, split_attn_metadata

        if getattr(whole, "causal", None) is not True or not hasattr(whole, "block_table"):
            raise RefusedError(f"attention: {type(whole).__name__} cannot be made for a part")
        common = CommonAttentionMetadata(
            query_start_loc=whole.query_start_loc, query_start_loc_cpu=whole.query_start_loc,
            seq_lens=whole.seq_lens, seq_lens_cpu_upper_bound=whole.seq_lens,
            num_reqs=len(whole.seq_lens), num_actual_tokens=whole.num_actual_tokens,
            max_query_len=whole.max_query_len, max_seq_len=whole.max_seq_len,
            block_table_tensor=whole.block_table, slot_mapping=whole.slot_mapping,
        )  # fmt: skip
        cuts = zip(parts.requests, parts.rows, strict=True)
        slices = [UBatchSlice(slice(*requests), slice(*rows)) for requests, rows in cuts]
        build = self._builder(layer).build
        return [build(0, each) for each in split_attn_metadata(slices, common)]

    def _builder(self, layer: str) -> Any:
        """vLLM's own maker of attention metadata for the layers that share that of this one."""
        if layer not in self.builders:
            metadata = self.current().attn_metadata
            layers = [name for name, each in metadata.items() if each is metadata[layer]]
            attention = self.config.compilation_config.static_forward_context[layer]
            make, spec = attention.get_attn_backend().get_builder_cls(), attention.get_kv_cache_spec
            given = (spec(self.config), layers, self.config, self.config.device_config.device)
            self.builders[layer] = make(*given)
        return self.builders[layer]

    def touched(self, state: Any, parts: Parts) -> list[tuple[set[int], set[int]]]:
        """The blocks of the KV cache that each part finds filled, and those that it writes."""
        found: list[tuple[set[int], set[int]]] = [(set(), set()) for _ in parts.rows]
        for layer, whole in _groups(state.attn_metadata):
            known = (whole.block_table.tolist(), whole.seq_lens.tolist())
            more = blocks_touched(*known, self._builder(layer).block_size, parts)
            found = [(r | mr, w | mw) for (r, w), (mr, mw) in zip(found, more, strict=True)]
        return found


def _groups(metadata: Mapping[str, Any]) -> list[tuple[str, Any]]:
    """Each metadata once, with a layer that has it."""
    return list({id(whole): (layer, whole) for layer, whole in metadata.items()}.values())


class Reports:
    """What workers can be asked by `collective_rpc`."""

    def weft_report(self) -> dict[str, Any]:
        """What became of this rank's steps: the report, reasons by count, what was chosen."""
        weft = self.vllm_config.weft  # type: ignore[attr-defined]
        report = report_of(weft.session)
        chosen = {str(k): str(v) for each in weft.trials.values() for k, v in each.chosen.items()}
        return {"report": str(report), "fallbacks": dict(report.fallbacks), "chosen": chosen}

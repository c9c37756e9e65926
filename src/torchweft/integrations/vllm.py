"""vLLM: each step of the engine runs by plans, its batch cut by tokens, also inside of a request.

    vllm serve MODEL --tensor-parallel-size 2 --additional-config '{"weft": {}}'
    LLM(MODEL, tensor_parallel_size=2, additional_config={"weft": {"decode": "stock"}})

Nothing happens without "weft" there, or with WEFT_DISABLE=1. Else the one graph that vLLM captures
of the model comes to us, and its all_reduces become collectives in two phases; with "capture":
"boundary" there is no graph, and the eager model runs once a part. Prefill, decode and mixed steps,
by powers of two of tokens, are kinds of calls with a strategy each. Options, none of them needed:

    "prefill", "decode", "mixed"    "auto" (vLLM's own way and parts are tried, the fastest stays),
                                    "stock", a strategy, or several: {"overlap": {"parts": 4}}
    and those of `weft.compile`, such as "watchdog_s"

A part has attention metadata of its own, made by vLLM's builder from its rows, in a forward context
of its own. `llm.collective_rpc("weft_report")` tells what became of it, rank by rank.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from copy import copy
from types import MappingProxyType
from typing import Any

from torch import distributed, fx, nn

from torchweft.capture import splitters
from torchweft.capture.marks import row_wise
from torchweft.capture.ops.collectives import reduce_in_phases
from torchweft.capture.splitters import Parts, Splitter, by_rows
from torchweft.errors import RefusedError, WeftError
from torchweft.options import Options, check_names, is_disabled
from torchweft.plan.strategies import overlap
from torchweft.serve.session import Report, Session
from torchweft.serve.trials import Phases, wanted_by

KEY = "weft"
PARTS = (None, overlap(parts=2), overlap(parts=4))
AUTO = MappingProxyType({"prefill": PARTS, "mixed": PARTS, "decode": PARTS[:2]})
OURS = {"strategy", "rules", "splitters", "blocks", "batch", "machine", "shadow"}
REDUCES = MappingProxyType({"vllm.all_reduce": 0, "_C.shm_allreduce": 1})
ROWS = row_wise(
    r"^(_C\.(onednn_\w*mm|rms_norm|fused_add_rms_norm|rotary_embedding|\w+_and_mul|gelu\w*)"
    r"|vllm\.unified_(kv_cache_update|attention_with_output))(\.|$)"
)
SHARED = """no_compile_layers dp_metadata cudagraph_runtime_mode batch_descriptor ubatch_slices
    skip_compiled all_moe_layers moe_layer_index additional_kwargs"""
MAKERS = """utils:AttentionGroup.build_metadata block_table:BlockTable.get_device_tensor
    utils:AttentionGroup.build_metadata_for_cudagraph_capture"""


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
    """Let vLLM hand us its graph, or its model where there is to be none, if it is told to.

    Raises `WeftError` for options that we do not have, or cannot have here.
    """
    from vllm.config import CompilationMode

    extra, compilation = config.additional_config, config.compilation_config
    if not isinstance(extra, dict) or KEY not in extra or is_disabled():
        return
    parallel, wanted = config.parallel_config, phases_of(extra[KEY])
    if wanted.session.options.capture == "boundary":
        here, mine = (config.device_config.device_type, parallel.worker_cls), f"{__name__}.Worker"
        if here not in (("cpu", "auto"), ("cpu", mine)) or parallel.tensor_parallel_size == 1:
            raise WeftError('vllm: "boundary" needs several CPU ranks and the worker of Weft.')
        compilation.mode, parallel.worker_cls = CompilationMode.NONE, mine
        return
    if compilation.mode == CompilationMode.NONE:
        raise WeftError('vllm: drop enforce_eager, or give "capture": "boundary".')
    os.environ["VLLM_USE_AOT_COMPILE"] = "0"  # plans are not saved as compiled artefacts
    compilation.mode = CompilationMode.DYNAMO_TRACE_ONCE
    compilation.backend = f"{__name__}.backend"
    parallel.worker_extension_cls = parallel.worker_extension_cls or f"{__name__}.Reports"


def phases_of(given: Any, **more: Any) -> Phases:
    """A session with these options, and the strategies of each phase. Raises `WeftError`."""
    if not isinstance(given, Mapping):
        raise WeftError(f"vllm: the options must be a mapping; got {given!r}.", rule="option")
    check_names(given, {*AUTO, *Options.names()} - OURS)
    strategies = {phase: wanted_by(given.get(phase, "auto"), AUTO[phase]) for phase in AUTO}
    # What boundary mode cannot put back is the KV cache, of which each part writes its own slots.
    options = {"strict": False, "strategy": "sequential"}
    options |= {n: value for n, value in given.items() if n not in AUTO}
    return Phases(Session(Options.of(**options, **more)), strategies)


def __getattr__(name: str) -> Any:
    """`backend` and `Worker`, which vLLM knows by name: made where it runs."""
    if name == "backend":
        from vllm.config import get_current_vllm_config

        return weft_of(get_current_vllm_config()).backend
    if name == "Worker":
        from vllm.v1.worker.cpu_worker import CPUWorker

        return type(name, (WovenWorker, CPUWorker), {})
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def weft_of(config: Any) -> Weft:
    """What the worker that has this configuration knows of us."""
    if not hasattr(config, KEY):
        object.__setattr__(config, KEY, Weft(config))
    return getattr(config, KEY)  # type: ignore[no-any-return]


class Weft:
    """What one worker knows of us: a session, and what was found to be fastest."""

    def __init__(self, config: Any) -> None:
        from vllm import forward_context
        from vllm.distributed import get_tp_group

        for maker in MAKERS.split():  # from what they made we come to vLLM's copies on the CPU
            splitters.keep_source(f"vllm.v1.worker.{maker}")
        rules: dict[str, Any] = dict.fromkeys(SHARED.split(), splitters.shared)
        rules |= {"slot_mapping": by_rows, "is_padding": by_rows}
        rules["attn_metadata"] = splitters.each_value(self._cut)
        touched = self.touched if config.cache_config.enable_prefix_caching else None
        enforce = splitters.entering(self.current, forward_context.override_forward_context)
        state = (r"^vllm\.unified_", self.current, enforce)
        forward = Splitter("forward", *state, rules, touched, "layer_name", may_be_absent=True)
        self.config, self.host, self.group = config, forward_context, get_tp_group()
        self.group_of = functools.cache(self._group_of)
        self.phases = phases_of(config.additional_config[KEY], rules=[ROWS], splitters=[forward])
        self.session = self.phases.session

    def backend(self, gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        """What runs in the place of vLLM's graph."""
        mine = reduce_in_phases(gm, REDUCES, self.group.device_group.group_name)
        by_plans = self.session.backend(mine, example_inputs)
        return functools.partial(self.step, gm.forward, by_plans)

    def weave(self, model: nn.Module) -> None:
        """Let an eager model run by plans, in place."""
        boundary = self.session.boundary(model._call_impl, model)
        talks = self.group.device_communicator

        def by_plans(*args: Any, **kwargs: Any) -> Any:
            with ExitStack() as after:
                after.callback(setattr, talks, "dist_module", talks.dist_module)
                talks.dist_module = distributed  # whose collectives are caught
                return boundary(*args, **kwargs)

        model._compiled_call_impl = functools.partial(self.step, model._call_impl, by_plans)

    def step(self, stock: Callable[..., Any], by_plans: Any, *args: Any, **kwargs: Any) -> Any:
        """One step of the engine, by the strategy for its kind."""
        state = self.current()
        metadata = state.attn_metadata.values() if state is not None else ()
        batch = next(filter(None, (splitters.source_of(each)[1] for each in metadata)), None)
        tokens = batch.query_start_loc_cpu.diff().tolist() if batch is not None else ()
        return self.phases.call(tokens, stock, by_plans, args, kwargs)

    def current(self) -> Any:
        """The forward context, if it has attention metadata."""
        there = self.host.is_forward_context_available()
        state = self.host.get_forward_context() if there else None
        return state if state is not None and state.attn_metadata else None

    def _cut(self, layer: str, whole: Any, parts: Parts) -> list[Any]:
        from vllm.v1.worker.ubatch_utils import UBatchSlice, split_attn_metadata

        _, batch = splitters.source_of(whole)
        if batch is None or batch.causal is not True:
            raise RefusedError(f"attention: {type(whole).__name__} cannot be made for a part")
        cuts = zip(parts.requests, parts.rows, strict=True)
        slices = [UBatchSlice(slice(*requests), slice(*rows)) for requests, rows in cuts]
        build = self.group_of(layer, len(slices)).build_metadata
        return [build(each, n) for n, each in enumerate(split_attn_metadata(slices, batch))]

    def _group_of(self, layer: str, num_parts: int) -> Any:
        """vLLM's own makers of attention metadata, with buffers of their own for each part."""
        group, _ = splitters.source_of(self.current().attn_metadata[layer])
        mine, spec = copy(group), group.get_metadata_builder().kv_cache_spec
        device = self.config.device_config.device
        mine.create_metadata_builders(self.config, device, spec.block_size, num_parts)
        return mine

    def touched(self, state: Any, parts: Parts) -> list[tuple[set[int], set[int]]]:
        """The blocks of the KV cache that each part finds filled, and those that it writes."""
        made = [splitters.source_of(each) for _, each in splitters.distinct(state.attn_metadata)]
        return splitters.blocks_touched([self._cache(*each) for each in made], parts)

    def _cache(self, group: Any, batch: Any) -> tuple[Any, Any, int]:
        table, num_requests = splitters.source_of(batch.block_table_tensor)
        if table is None:
            raise RefusedError("attention: vLLM keeps no copy of the block table on the CPU")
        blocks, lengths = table.get_cpu_tensor()[:num_requests], batch.seq_lens_cpu_upper_bound
        return blocks.tolist(), lengths.tolist(), group.kv_cache_spec.block_size


class Reports:
    """What workers can be asked by `collective_rpc`."""

    def weft_report(self) -> dict[str, Any]:
        """What became of this rank's steps: the report, reasons by count, what was chosen."""
        weft = weft_of(self.vllm_config)  # type: ignore[attr-defined]
        facts = {"fallbacks": dict(weft.session.fallbacks), "chosen": weft.phases.chosen}
        return {"report": str(Report(weft.session)), **facts}


class WovenWorker(Reports):
    """What makes a worker of vLLM one whose eager model runs by plans."""

    def load_model(self, **options: Any) -> None:
        """Load the model, then weave it."""
        super().load_model(**options)  # type: ignore[misc]
        weft_of(self.vllm_config).weave(self.get_model())  # type: ignore[attr-defined]

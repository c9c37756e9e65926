"""The hosts bench for vLLM: a spec comes in as an argument, results go out.

    python -m torchweft_tools.bench.players.host_vllm '{"workload": "serving", "links": [...], ...}'

An engine with two ranks on gloo runs a Llama-like checkpoint with random weights. It alternates
between vLLM's graph as it is, run operator by operator, and plans: the same engine, the same
requests, the same transport. Over each link it chooses its strategies again before it is timed. A
second engine is vLLM by default, without our option: it compiles its graph with Inductor.

    serving     requests arrive while others are under way, lengths as in chats (log-normal)
    prefill     long prompts, one new token each

Both count tokens of prompts and new tokens.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from random import Random
from typing import Any

import torch
import vllm
from transformers import LlamaConfig, LlamaForCausalLM
from vllm import LLM, SamplingParams
from vllm.distributed.device_communicators.cpu_communicator import CpuCommunicator
from vllm.platforms import current_platform
from vllm.v1.worker.cpu_worker import CPUWorker

from torchweft import lab
from torchweft.serve.trials import Trials
from torchweft_tools.bench.measure.messages import leaving, say

SIZES = {
    "full": {"hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": 4},
    "tiny": {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2},
}
COMMON = {
    "num_attention_heads": 8, "num_key_value_heads": 4, "vocab_size": 2048,
    "max_position_embeddings": 1024, "initializer_range": 0.15, "tie_word_embeddings": False,
}  # fmt: skip
ENVIRONMENT = {
    "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "0|1", "VLLM_NO_USAGE_STATS": "1",
    "VLLM_ALLOW_INSECURE_SERIALIZATION": "1", "GLOO_SOCKET_IFNAME": "lo",
    "VLLM_LOGGING_LEVEL": "ERROR",
}  # fmt: skip
MAX_WARM_RUNS = 30
REST_S = 1.2
"""Workers of vLLM poll for work for a second, on their core, before they sleep."""
Request = tuple[int, list[int], int]
"""The step at which it arrives, its prompt, how many new tokens it wants."""


class GlooCommunicator(CpuCommunicator):  # type: ignore[misc]
    """vLLM's communicator as it is between nodes: without shared memory."""

    def _all_group_ranks_share_shm_group_name(self) -> bool:
        return False


class TimedWorker(CPUWorker):  # type: ignore[misc]
    """vLLM's worker, with the transport that it has between nodes."""

    def init_device(self) -> None:
        own = f"{GlooCommunicator.__module__}.{GlooCommunicator.__qualname__}"
        current_platform.get_device_communicator_cls = lambda: own
        super().init_device()


def main(text: str) -> None:
    """Race one workload and print its results."""
    spec = json.loads(text)
    with leaving(), tempfile.TemporaryDirectory() as folder:
        save(spec, folder)
        compiled = engine(folder)  # before our option has set anything in this process
        for result in measure(spec, engine(folder, additional_config={"weft": {}}), compiled):
            say("result", result)


def engine(folder: str, **more: Any) -> LLM:
    """An engine with two ranks."""
    options = {"worker_cls": f"{__spec__.name}.{TimedWorker.__name__}", **more}
    return LLM(
        folder, skip_tokenizer_init=True, dtype="float32", max_model_len=1024,
        tensor_parallel_size=2, max_num_batched_tokens=1024, max_num_seqs=32,
        enable_prefix_caching=False, **options,
    )  # fmt: skip


def save(spec: Mapping[str, Any], folder: str) -> None:
    """Write the checkpoint."""
    torch.manual_seed(spec["seed"])
    sizes: dict[str, Any] = {**SIZES[spec["size"]], **COMMON}
    model: Any = LlamaForCausalLM
    model(LlamaConfig(**sizes)).save_pretrained(folder)


def measure(spec: Mapping[str, Any], woven: LLM, compiled: LLM) -> Iterator[dict[str, Any]]:
    """The results of the race, link by link."""
    asked = requests(spec)
    links = spec["links"] if lab.is_limited() else [lab.LabLink().label]
    order, done, total = Random(spec["seed"]), 0, len(links) * (spec["num_pairs"] + 1)
    for link in links:
        if lab.is_limited():
            lab.set_rate(link)
        theirs = serve(compiled, asked)
        time.sleep(REST_S)
        wanted, chosen = settle(woven, asked)
        woven.collective_rpc(choose, args=("stock",))
        equal = serve(woven, asked) == wanted
        times: dict[str, list[float]] = {"stock": [], "again": [], "weft": [], "compiled": []}
        for _ in range(spec["num_pairs"]):
            for name in order.sample(list(times), len(times)):
                if name == "compiled":
                    time.sleep(REST_S)
                    times[name].append(timed(compiled, asked)[0])
                    time.sleep(REST_S)
                    continue
                woven.collective_rpc(choose, args=("weft" if name == "weft" else "stock",))
                taken_s, tokens = timed(woven, asked)
                equal = equal and tokens == wanted
                times[name].append(taken_s)
            done += 1
            say("progress", [done, total])
        yield {
            "version": vllm.__version__,
            "strategy": "; ".join(f"{kind}: {each}" for kind, each in sorted(chosen.items())),
            "link": link,
            "unit": "tokens/s",
            "work": sum(len(prompt) + new for _, prompt, new in asked),
            "times": times,
            "equal": equal,
            "notes": {
                "fallbacks": woven.collective_rpc("weft_report")[0]["fallbacks"],
                "compiled_by": compiled.llm_engine.vllm_config.compilation_config.backend,
                "compiled_equal": theirs == wanted,
            },
        }


def settle(woven: LLM, asked: list[Request]) -> tuple[list[list[int]], dict[str, str]]:
    """Let an engine choose its strategies again: all new tokens, and the choices."""
    woven.collective_rpc(choose, args=("again",))
    chosen: dict[str, str] = {}
    for _ in range(MAX_WARM_RUNS):
        tokens = serve(woven, asked)
        before, chosen = chosen, woven.collective_rpc("weft_report")[0]["chosen"]
        if chosen == before and chosen and not woven.collective_rpc(is_open)[0]:
            break
    return tokens, chosen


def timed(llm: LLM, asked: list[Request]) -> tuple[float, list[list[int]]]:
    """One run: how long it took, and all new tokens."""
    start = time.perf_counter()
    tokens = serve(llm, asked)
    return time.perf_counter() - start, tokens


def serve(llm: LLM, asked: list[Request]) -> list[list[int]]:
    """One run, in which requests arrive at their steps; all new tokens."""
    engine, tokens, step = llm.llm_engine, dict[str, list[int]](), 0
    while len(tokens) < len(asked):
        for number, (arrival, prompt, new) in enumerate(asked):
            if arrival == step:
                params = SamplingParams(
                    max_tokens=new, ignore_eos=True, detokenize=False, temperature=0
                )
                engine.add_request(str(number), {"prompt_token_ids": prompt}, params)
        for output in engine.step():
            if output.finished:
                tokens[output.request_id] = list(output.outputs[0].token_ids)
        step += 1
    return [tokens[str(number)] for number in range(len(asked))]


def requests(spec: Mapping[str, Any]) -> list[Request]:
    """The requests of a run, drawn alike each time."""
    draw, tiny = Random(spec["seed"]), spec["size"] == "tiny"
    drawn: list[Request] = []
    for number in range(4 if spec["workload"] == "prefill" else 10):
        if spec["workload"] == "prefill":
            length, new, arrival = (32 if tiny else 256), 1, 0
        else:
            length = max(4, min(512, int(draw.lognormvariate(3.0 if tiny else 4.5, 0.8))))
            new = max(2, min(24, int(draw.lognormvariate(1.0 if tiny else 2.0, 0.6))))
            arrival = number // 2
        drawn.append((arrival, [draw.randrange(3, 2000) for _ in range(length)], new))
    return drawn


def choose(worker: Any, way: str) -> None:
    """In a worker: run vLLM's own way, or what was fastest, or search again for the fastest."""
    phases = worker.vllm_config.weft.phases
    if not hasattr(phases, "searched"):
        phases.searched = phases.trials
        phases.own = {
            phase: Trials(phases.session, (None,), num_rounds=1) for phase in phases.trials
        }
    if way == "again":
        for trials in phases.searched.values():
            trials.forget()
    phases.trials = phases.own if way == "stock" else phases.searched


def is_open(worker: Any) -> bool:
    """In a worker: whether a kind of step has been seen and not yet decided."""
    searched = worker.vllm_config.weft.phases.searched.values()
    return any(trials.races for trials in searched)


if __name__ == "__main__":
    os.environ |= ENVIRONMENT
    main(sys.argv[1])

"""One rank of the hosts bench for Transformers: a spec comes in as an argument, results go out.

    python -m torchweft_tools.bench.players.host_transformers '{"workload": "prefill", ...}'

A Llama-like checkpoint with random weights is saved, then loaded twice with the library's own
tensor parallelism: stock, and with `weave`. Both run on gloo, a thread a rank. Over each link the
woven model makes its choices again, as in a deployment over that link, before it is timed.

    prefill     one forward of all prompts, in tokens of the prompts a second
    generate    greedy `generate()`, prompts of unlike lengths, in new tokens a second
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from random import Random
from typing import Any

import torch
import torch.distributed as dist
import transformers
from torch import Tensor
from transformers import AutoModelForCausalLM, DistributedConfig, LlamaConfig, LlamaForCausalLM

from torchweft import lab
from torchweft.api import report
from torchweft.integrations.transformers import weave
from torchweft.run.compare import compare
from torchweft.serve.trials import Trials
from torchweft_tools.bench.measure.messages import leaving, say
from torchweft_tools.bench.players.overlap_race import calls_of_a_run, race
from torchweft_tools.bench.players.overlap_rank import TIMEOUT, all_max, num_graphs, pin, quiet

SIZES = {
    "full": {"hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": 4},
    "tiny": {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2},
}
COMMON = {
    "num_attention_heads": 8, "num_key_value_heads": 4, "vocab_size": 2048,
    "max_position_embeddings": 256, "initializer_range": 0.15,
}  # fmt: skip
PROMPTS = {"full": (16, 32), "tiny": (16, 8)}
"""Rows and the longest prompt."""
NUM_NEW = {"full": 16, "tiny": 4}
Call = Callable[[], Tensor]


def main(text: str) -> None:
    """Race one workload and print its results."""
    spec = json.loads(text)
    quiet()
    pin(int(os.environ["RANK"]))
    torch.set_num_threads(1)
    with leaving(), tempfile.TemporaryDirectory() as folder, torch.no_grad():
        save(spec, folder)
        dist.init_process_group("gloo", timeout=TIMEOUT)
        side = dist.new_group(backend="gloo", timeout=TIMEOUT)
        for result in measure(spec, load(folder), weave(load(folder)), side):
            if dist.get_rank() == 0:
                say("result", result)
        dist.barrier(group=side)


def measure(
    spec: Mapping[str, Any], stock: Any, woven: Any, side: dist.ProcessGroup
) -> Iterator[dict[str, Any]]:
    """The results of the race, link by link."""
    trials: Trials = woven._compiled_call_impl.trials
    plain, mine = _call(stock, spec), _call(woven, spec)
    rows, length = PROMPTS[spec["size"]]
    work = rows * (length if spec["workload"] == "prefill" else NUM_NEW[spec["size"]])
    links = spec["links"] if lab.is_limited() else [lab.LabLink().label]
    order, done, total = Random(spec["seed"]), 0, len(links) * (spec["num_pairs"] + 1)

    def step() -> None:
        nonlocal done
        done += 1
        if dist.get_rank() == 0:
            say("progress", [done, total])

    for link in links:
        if lab.is_limited():
            lab.set_rate(link)
        trials.forget()
        for _ in range(trials.num_calls + 1):
            output = mine()
        step()
        verdict = compare(plain(), output)
        compiled = num_graphs()
        times = race(
            {"stock": plain, "again": plain, "weft": mine},
            order=order,
            num_rounds=spec["num_pairs"],
            num_calls=calls_of_a_run(plain, side),
            group=side,
            on_round=step,
        )
        yield {
            "version": transformers.__version__,
            "strategy": "; ".join(f"{kind}: {each}" for kind, each in trials.chosen.items()),
            "link": link,
            "unit": "tokens/s",
            "work": work,
            "times": times,
            "equal": not all_max(float(not verdict), side),
            "notes": {
                "verdict": str(verdict),
                "tried": trials.lines(),
                "late_compiles": num_graphs() - compiled,
                "graphs": len(report(woven).pieces),
                "fallbacks": [str(each) for each in report(woven).fallbacks],
            },
        }


def save(spec: Mapping[str, Any], folder: str) -> None:
    """Write the checkpoint. Every rank does so for itself, before it knows of the others."""
    torch.manual_seed(spec["seed"])
    sizes: dict[str, Any] = {**SIZES[spec["size"]], **COMMON}
    model: Any = LlamaForCausalLM
    model(LlamaConfig(**sizes)).save_pretrained(folder)


def load(folder: str) -> Any:
    """The model as a user loads it."""
    parallel = DistributedConfig(tp_plan="auto")
    return AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, distributed_config=parallel
    )


def _call(model: Any, spec: Mapping[str, Any]) -> Call:
    """One run of the workload."""
    ids, mask = prompts(spec)
    if spec["workload"] == "prefill":
        return lambda: model(ids, attention_mask=mask, logits_to_keep=1).logits
    new = NUM_NEW[spec["size"]]
    options = {"max_new_tokens": new, "min_new_tokens": new, "do_sample": False, "pad_token_id": 0}
    return lambda: model.generate(ids, attention_mask=mask, **options)


def prompts(spec: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
    """Prompts padded on the left, with their mask; for prefill all are full, so all rows work."""
    rows, longest = PROMPTS[spec["size"]]
    draw = torch.Generator().manual_seed(spec["seed"])
    ids = torch.randint(3, int(COMMON["vocab_size"]), (rows, longest), generator=draw)
    mask = torch.ones_like(ids)
    if spec["workload"] == "generate":
        for row in range(rows):
            mask[row, : (7 * row) % (longest - 2)] = 0
    return ids * mask, mask


if __name__ == "__main__":
    main(sys.argv[1])

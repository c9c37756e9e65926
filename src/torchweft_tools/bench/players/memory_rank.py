"""One rank of the memory bench: the two-rank models, each measured on every rank.

    python -m torchweft_tools.bench.players.memory_rank '["dense", "llama_tp"]' eager FOLDER

Each rank writes its rows to FOLDER/rank0.json, FOLDER/rank1.json. The models are those of
`peers/models.py`, and tiny checkpoints that Transformers loads with `tp_plan="auto"`.
"""

from __future__ import annotations

import json
import sys
import warnings
from collections.abc import Callable
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from torchweft_tools.bench.measure.messages import brief, leaving
from torchweft_tools.bench.memory import PARTS, MemoryRow, measure
from torchweft_tools.bench.peers import models
from torchweft_tools.bench.players.overlap_rank import SIZES

TIMEOUT = timedelta(minutes=2)
NUM_ROWS, NUM_POSITIONS = 10, 16
SMALL = {
    "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "vocab_size": 256,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64,
    "initializer_range": 0.15,
}  # fmt: skip
EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
Built = tuple[torch.nn.Module, Callable[[], Any]]


def main(names: list[str], inner: str, folder: Path) -> None:
    """Measure the models and write the rows."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    with leaving():
        dist.init_process_group("gloo", timeout=TIMEOUT)
        rows = []
        for name in names:
            for parts in PARTS:
                row = MemoryRow(name, dist.get_world_size(), parts)
                try:
                    measure(row, *build(name, folder), inner)
                except Exception as error:  # the other rank fails at the same place, and continues
                    row.error = brief(error)
                rows.append(asdict(row))
        path = folder / f"rank{dist.get_rank()}.json"
        path.write_text(json.dumps(rows), encoding="utf-8")
        dist.barrier()


def build(name: str, folder: Path) -> Built:
    """A model on this rank, and a call of it."""
    return _transformer(name, folder) if name.endswith("_tp") else _plain(name)


def _plain(name: str) -> Built:
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    sizes = models.Sizes(**SIZES["tiny"][name])
    make = {"dense": models.Dense, "experts": models.MoE}[name]
    model = make(sizes, rank=rank, num_ranks=num_ranks).eval()
    x = models.inputs(model, NUM_ROWS, NUM_POSITIONS, sizes.hidden, rank=rank)
    return model, lambda: model(x)


def _transformer(name: str, folder: Path) -> Built:
    import transformers
    from transformers.utils import logging

    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    where = folder / name
    if dist.get_rank() == 0 and not where.exists():
        kind = "Mixtral" if name.startswith("mixtral") else "Llama"
        sizes = {**SMALL, **(EXPERTS if kind == "Mixtral" else {})}
        config = getattr(transformers, f"{kind}Config")(**sizes)
        torch.manual_seed(0)
        getattr(transformers, f"{kind}ForCausalLM")(config).save_pretrained(where)
    dist.barrier()
    parallel = transformers.DistributedConfig(tp_plan="auto")
    load = transformers.AutoModelForCausalLM.from_pretrained
    model = load(where, dtype=torch.float32, distributed_config=parallel)
    ids = torch.arange(NUM_ROWS * NUM_POSITIONS).view(NUM_ROWS, NUM_POSITIONS) % 250
    return model, lambda: model(ids, use_cache=False).logits


if __name__ == "__main__":
    main(json.loads(sys.argv[1]), sys.argv[2], Path(sys.argv[3]))

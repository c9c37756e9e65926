"""Layers that wait for other ranks are traced once, on two ranks, and nobody can tell.

With blocks and without: the same ops on the same values, the same order of collectives, the same
bits, also under jitter; and no more bodies the deeper the model is.
"""

from __future__ import annotations

import functools
import os
import warnings

import pytest
import torch
from anatomy import anatomy, num_bodies
from ranks import check_clean, check_overlap, run_once

import torchweft as weft
from torchweft.api import session_of
from torchweft_tools.bench.peers import models

DEPTHS = (3, 5)


def check(build, calls, depths=DEPTHS, *, outputs=lambda found: found):
    """The same with blocks and without; and with them as many bodies at every depth."""
    counts = []
    for depth in depths:
        captured, found = {}, {}
        for blocks in (False, True) if depth == DEPTHS[0] else (True,):
            torch._dynamo.reset()
            model = weft.compile(build(depth), weft.overlap(parts=2), jitter=True, blocks=blocks)
            found[blocks] = [outputs(model(*args, **named)) for args, named in calls * 2]
            check_clean(model)
            assert weft.report(model).unblocked == "", weft.report(model)
            for plan in weft.plans(model):
                check_overlap(plan)
            captured[blocks] = [piece.captured for piece in session_of(model).pieces]
        counts.append(list(map(num_bodies, captured[True])))
        if False in found:
            assert list(map(anatomy, captured[True])) == list(map(anatomy, captured[False]))
            for with_blocks, without in zip(found[True], found[False], strict=True):
                assert torch.equal(with_blocks, without)
    assert counts[0] == counts[-1], counts


def check_bench(rank, *, kind):
    """The models that the bench races."""
    sizes = {"hidden": 32, "wide": 16, "head": 16, "num_experts": 4, "num_positions": 16}

    def build(depth):
        chosen = models.Sizes(num_layers=depth, **sizes)
        return getattr(models, kind)(chosen, rank=rank, num_ranks=2).eval()

    inputs = [models.inputs(build(1), rows, 6, 32, rank=rank) for rows in (6, 8)]
    check(build, [((x,), {}) for x in inputs])


def check_transformers(rank, *, folder):
    """A checkpoint, loaded with `tp_plan="auto"`."""
    from transformers import AutoModelForCausalLM, DistributedConfig
    from transformers.utils import logging

    warnings.simplefilter("ignore")
    logging.disable_progress_bar()
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="2")

    def build(depth):
        parallel = DistributedConfig(tp_plan="auto")
        load = AutoModelForCausalLM.from_pretrained
        path = f"{folder}/{depth}"
        return load(path, dtype=torch.float32, distributed_config=parallel)

    ids = torch.arange(6 * 16).view(6, 16) % 250
    calls = [((ids,), {"use_cache": False})]
    check(build, calls, DEPTHS[:1], outputs=lambda found: found.logits)


def save_model(folder):
    """A tiny random checkpoint."""
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {
        "hidden_size": 32, "intermediate_size": 64, "vocab_size": 256, "initializer_range": 0.15,
        "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64,
    }  # fmt: skip
    torch.manual_seed(0)
    llama = LlamaConfig(**sizes, num_hidden_layers=DEPTHS[0])
    LlamaForCausalLM(llama).save_pretrained(folder / f"llama/{DEPTHS[0]}")


def cases(folder):
    found = {kind: functools.partial(check_bench, kind=kind) for kind in ("Dense", "MoE")}
    save_model(folder)
    found["llama"] = functools.partial(check_transformers, folder=str(folder / "llama"))
    return found


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    return run_once(tmp_path_factory, __name__, cases)


@pytest.mark.parametrize("name", ["Dense", "MoE", "llama"])
def test_model(results, name):
    assert results[name] == "", results[name]

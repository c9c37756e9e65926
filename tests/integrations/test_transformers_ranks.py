"""Transformers with `tp_plan="auto"` on two ranks: the same tokens, collectives overlapped."""

from __future__ import annotations

import functools
import os
import warnings

import pytest

pytest.importorskip("transformers")

import torch
import torch.distributed as dist
from hosted import TINY, check_generates, draw_prompts, generate
from ranks import check_overlap, run_cases, talks
from transformers import AutoModelForCausalLM, DistributedConfig, LlamaConfig, LlamaForCausalLM

import torchweft as weft
from torchweft.api import session_of
from torchweft.integrations.transformers import weave

PATIENCE_S = 900


def load(rank, folder):
    warnings.simplefilter("ignore")
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="2")
    parallel = DistributedConfig(tp_plan="auto")
    return AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, distributed_config=parallel
    )


def check_tokens(rank, *, folder, cache):
    """In parts, for both caches: the tokens of the stock host, which are those of one rank."""
    model = load(rank, folder)
    wanted = generate(model, *draw_prompts(16, 24), cache)
    alone = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32)
    assert torch.equal(wanted, generate(alone, *draw_prompts(16, 24), cache))
    weave(model, [weft.overlap(parts=2)])
    check_generates(model, wanted, cache)
    assert ("all_reduce", "row-wise") in talks(model)
    # Where a cache is written, its rows are, and not a copy of the whole.
    assert [note for piece in session_of(model).pieces for note in piece.captured.notes] == []
    for plan in weft.plans(model):
        check_overlap(plan)


def check_boundary(rank, *, folder):
    """Without a graph, in parts: the same tokens, and collectives beside compute."""
    model = load(rank, folder)
    wanted = generate(model, *draw_prompts(16, 24), "none")
    weave(model, [weft.overlap(parts=2)], capture="boundary")
    check_generates(model, wanted, "none")
    assert {piece.graph.level for piece in session_of(model).pieces} == {"boundary"}
    assert ("all_reduce", "row-wise") in talks(model)
    for plan in weft.plans(model):
        check_overlap(plan)


def check_choice(rank, *, folder):
    """Ranks choose alike, whatever each has measured, and the tokens stay while they try."""
    model = load(rank, folder)
    prompts = draw_prompts(8, 12)
    wanted = generate(model, *prompts, "static")
    weave(model)
    trials = model._compiled_call_impl.trials
    agreed = trials.agreed

    def sure(own_s):  # each rank is sure of another one
        own_s[(1 + rank) % len(own_s)] = 1e-9
        return agreed(own_s)

    trials.agreed = sure
    for _ in range(trials.num_calls + 1):
        assert torch.equal(generate(model, *prompts, "static"), wanted)
    mine = {kind: str(each) for kind, each in trials.chosen.items()}
    theirs = [None, None]
    dist.all_gather_object(theirs, mine)
    assert len(mine) == 2 and theirs[0] == theirs[1], theirs


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ranks")
    torch.manual_seed(0)
    LlamaForCausalLM(LlamaConfig(**TINY)).save_pretrained(folder / "llama")
    told = {"folder": str(folder / "llama")}
    cases = {
        "dynamic": functools.partial(check_tokens, cache="dynamic", **told),
        "static": functools.partial(check_tokens, cache="static", **told),
        "boundary": functools.partial(check_boundary, **told),
        "choice": functools.partial(check_choice, **told),
    }
    return run_cases(folder, cases, patience_s=PATIENCE_S)


@pytest.mark.parametrize("name", ["dynamic", "static", "boundary", "choice"])
def test_two_ranks(results, name):
    assert results[name] == "", results[name]

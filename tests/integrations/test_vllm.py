"""vLLM with two ranks: the same greedy tokens as the stock engine, whatever is cut.

Engines take a minute to start, so each runs once, in a process of its own (`vllm_engine.py`), and
the tests share what it told.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from torchweft.bench.lines import code_lines
from torchweft.errors import StrategyError, WeftError

if importlib.util.find_spec("vllm") is None:
    pytest.skip("vLLM is not installed", allow_module_level=True)

from vllm_engine import MARK, NUM_NEW, NUM_REQUESTS, prompt

from torchweft.integrations import vllm as integration

HERE = Path(__file__).parent
HOUSE = HERE.parents[1] / "src" / "torchweft"
ALWAYS = dict.fromkeys(("prefill", "decode", "mixed"), "overlap")
TINY = {
    "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2, "vocab_size": 1000,
    "num_attention_heads": 8, "num_key_value_heads": 4, "max_position_embeddings": 512,
    "initializer_range": 0.15, "tie_word_embeddings": False,
}  # fmt: skip
SAVE = """
import json, sys, torch
from transformers import LlamaConfig, LlamaForCausalLM
torch.manual_seed(0)
LlamaForCausalLM(LlamaConfig(**json.loads(sys.argv[1]))).float().save_pretrained(sys.argv[2])
"""


PATH = os.pathsep.join([str(HERE), str(HOUSE.parent), os.environ.get("PYTHONPATH", "")])
"""Where workers find the tests, too."""


def python(*words: str, timeout_s: int = 600) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *words], capture_output=True, text=True, timeout=timeout_s, check=False,
        env={**os.environ, "PYTHONPATH": PATH},
    )  # fmt: skip


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Saved weights so large that every token depends on what it attends to."""
    folder = str(tmp_path_factory.mktemp("model"))
    made = python("-c", SAVE, json.dumps(TINY), folder)
    assert made.returncode == 0, made.stderr[-2000:]
    return folder


def engine(model: str, weft: Any, *, chunked: bool, prefix: bool, swap: bool = False) -> Any:
    spec = {"model": model, "weft": weft, "chunked": chunked, "prefix": prefix, "swap": swap}
    found = python(str(HERE / "vllm_engine.py"), json.dumps(spec))
    lines = [line for line in found.stdout.splitlines() if line.startswith(MARK)]
    assert lines, f"the engine told nothing:\n{found.stdout[-3000:]}\n{found.stderr[-3000:]}"
    return json.loads(lines[-1].removeprefix(MARK))


@pytest.fixture(scope="session")
def stock(model: str) -> list[list[int]]:
    tokens = engine(model, None, chunked=True, prefix=True)["tokens"]
    assert len(tokens) == NUM_REQUESTS >= 16 and {len(each) for each in tokens} == {NUM_NEW}
    assert len({len(prompt(number)) for number in range(NUM_REQUESTS)}) >= 12
    assert len({token for each in tokens for token in each}) > 100, "tokens say nothing"
    return list(tokens)


@pytest.fixture(scope="session")
def cut(model: str) -> Any:
    return engine(model, ALWAYS, chunked=True, prefix=True, swap=True)


def test_tokens_with_chunked_prefill_and_prefix_caching(stock: list[list[int]], cut: Any) -> None:
    assert cut["tokens"] == stock


def test_every_phase_was_cut(cut: Any) -> None:
    for told in cut["reports"]:
        text = told["report"]
        assert "2 part(s)" in text, text
        assert set(told["fallbacks"]) <= {
            "warm-up: no request is in this call",
            "state: a part reads what another part writes in the same call ('forward')",
            *(reason for reason in told["fallbacks"] if reason.startswith(("split:", "guard:"))),
        }


def test_a_prefix_that_is_written_in_the_same_step_forbids_the_split(cut: Any) -> None:
    for told in cut["reports"]:
        reasons = [reason for reason in told["fallbacks"] if "reads what another part" in reason]
        assert reasons, told["fallbacks"]


def test_warm_up_runs_unsplit_and_is_counted(cut: Any) -> None:
    for told in cut["reports"]:
        assert told["fallbacks"]["warm-up: no request is in this call"] >= 1


def test_swapped_metadata_is_noticed(stock: list[list[int]], cut: Any) -> None:
    """The negative control: parts of every other step get each other's metadata."""
    assert cut["swapped"] != stock


def test_tokens_without_chunked_prefill_and_prefix_caching(
    model: str, stock: list[list[int]]
) -> None:
    """What is fastest is chosen while requests come, alike on both ranks."""
    found = engine(model, {}, chunked=False, prefix=False)
    assert found["tokens"] == stock
    first, second = (told["chosen"] for told in found["reports"])
    assert first == second and first


def test_unknown_options_are_our_error() -> None:
    with pytest.raises(StrategyError, match=r"unknown option 'prefil'.*'prefill'"):
        integration.options_of({"prefil": "overlap"})
    with pytest.raises(StrategyError, match="unknown strategy 'overlapp'"):
        integration.options_of({"prefill": "overlapp"})
    with pytest.raises(WeftError, match="no set of options"):
        integration.options_of("overlap")
    for ours in ("rules", "splitters", "batch"):
        with pytest.raises(StrategyError, match="unknown option"):
            integration.options_of({ours: []})


INERT = """
import os, sys
before = dict(os.environ)
from vllm.platforms import current_platform
from vllm.plugins import load_general_plugins
stock = type(current_platform).apply_config_platform_defaults
load_general_plugins()
assert "torchweft.integrations.vllm" in sys.modules, "the plugin was not found"
assert type(current_platform).apply_config_platform_defaults == stock
class Config: additional_config, compilation_config = {"other": 1}, None
from torchweft.integrations.vllm import adopt
adopt(Config)
assert {n: v for n, v in os.environ.items() if n.startswith(("VLLM", "WEFT"))} == {
    n: v for n, v in before.items() if n.startswith(("VLLM", "WEFT"))}
print("inert")

from dataclasses import fields
from torchweft.integrations.vllm import SHARED
from vllm.forward_context import ForwardContext
known = {*SHARED.split(), "slot_mapping", "is_padding", "attn_metadata"}
assert {item.name for item in fields(ForwardContext)} == known, "a field is new, or gone"
print("known")
"""


def test_the_plugin_is_inert_until_it_is_asked_for() -> None:
    """And it knows every field of the forward context: an unknown one would stop the engine."""
    found = python("-c", INERT)
    assert "inert" in found.stdout and "known" in found.stdout, found.stderr[-3000:]


def test_the_integration_is_small() -> None:
    assert code_lines(HOUSE / "integrations" / "vllm.py") <= 150

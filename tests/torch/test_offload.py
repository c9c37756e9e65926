"""Weights on disk: what `offload` writes, how `prefetch` brings it in, the memory that it takes."""

from __future__ import annotations

import ctypes
import threading
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

import torchweft as weft
from torchweft.api import session_of
from torchweft.errors import StrategyError, WeftError
from torchweft.plan.plan import Plan

pytestmark = pytest.mark.usefixtures("fresh")


class Block(nn.Module):
    def __init__(self, wide: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(wide, 2 * wide), nn.Linear(2 * wide, wide, bias=False)
        self.register_buffer("scale", torch.rand(wide))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(x))) * self.scale


class Net(nn.Module):
    """Blocks in a list, and a head that stays in memory."""

    def __init__(self, wide: int = 32, num_blocks: int = 5) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block(wide) for _ in range(num_blocks))
        self.head = nn.Linear(wide, 3)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


class Tied(nn.Module):
    """A bag whose weights are also the last product's."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(16, 16), nn.Linear(16, 16), nn.Linear(16, 16)])
        self.layers[2].weight = self.layers[0].weight
        self.out = nn.Linear(16, 16)
        self.out.weight = self.layers[1].weight

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return self.out(x)


def towers() -> nn.Module:
    return nn.Sequential(*(nn.Linear(24, 24) for _ in range(4)), nn.LayerNorm(24))


def convolutions() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.Conv2d(8, 4, 3),
        nn.Flatten(),
    )


MODELS = {
    "blocks": (Net, (32,)),
    "sequential": (towers, (24,)),
    "convolutions": (convolutions, (3, 8, 8)),
    "tied": (Tied, (16,)),
}


def plan_of(model: nn.Module) -> Plan:
    return weft.plans(model)[0]


def labels(plan: Plan) -> list[str]:
    return [step.label for step in plan.steps if step.kind in ("run", "wait")]


@pytest.mark.parametrize("rows", [1, 2, 7])
@pytest.mark.parametrize("name", MODELS)
def test_a_model_computes_what_it_did_and_so_do_its_plans(name: str, rows: int, tmp_path: Path):
    make, shape = MODELS[name]
    model, x = make().eval(), torch.randn(rows, *shape)
    wanted, state = model(x), {n: t.clone() for n, t in model.state_dict().items()}
    assert weft.offload(model, tmp_path) is model
    # Kernels may differ in the last bits where bytes are not aligned as the allocator's are.
    torch.testing.assert_close(model(x), wanted)
    assert all(torch.equal(state[n], t) for n, t in model.state_dict().items())
    for strategy in (weft.prefetch(), weft.prefetch(window=3), weft.prefetch(window=0)):
        weft.compile(model, strategy, fallback="error")
        for _ in range(3):
            assert torch.equal(model(x), wanted)
        assert any(op.uses == "io" for op in session_of(model).pieces[0].graph.ops)


def test_files_hold_the_weights_of_each_block(tmp_path: Path) -> None:
    model = Net()
    weft.offload(model, tmp_path)
    assert {p.name for p in tmp_path.iterdir()} == {f"layers.{n}.safetensors" for n in range(5)}
    kept = load_file(tmp_path / "layers.3.safetensors")
    assert set(kept) == {"up.weight", "up.bias", "down.weight"}
    assert torch.equal(kept["up.weight"], model.layers[3].up.weight)


def test_weights_that_others_use_too_stay_in_memory(tmp_path: Path) -> None:
    weft.offload(Tied(), tmp_path)
    assert set(load_file(tmp_path / "layers.0.safetensors")) == {"bias"}


def test_blocks_can_be_named(tmp_path: Path) -> None:
    model = Net().eval()
    weft.offload(model, tmp_path, blocks=r"layers\.[02]|head")
    assert sorted(p.stem for p in tmp_path.iterdir()) == ["head", "layers.0", "layers.2"]
    weft.compile(model, "prefetch", fallback="error")
    model(torch.randn(3, 32))
    assert sum(op.uses == "io" for op in session_of(model).pieces[0].graph.ops) == 3


@pytest.mark.parametrize("window", [0, 1, 2, 9])
def test_a_load_comes_a_window_ahead(window: int, tmp_path: Path) -> None:
    model = weft.offload(Net().eval(), tmp_path)
    weft.compile(model, weft.prefetch(window=window), fallback="error")
    model(torch.randn(6, 32))
    plan = plan_of(model)
    loads = [step for step in plan.steps if step.kind == "run" and step.lane == "io"]
    assert len(loads) == 5
    gates = [step.after for step in loads]
    assert [bool(gate) for gate in gates] == [n > window for n in range(5)]
    for number, gate in enumerate(gates):
        if gate:
            assert plan.graph.op[gate[0][0]].path.startswith(f"layers.{number - window - 1}")


def test_other_strategies_leave_the_weights_where_they_are(tmp_path: Path) -> None:
    model, x = weft.offload(Net().eval(), tmp_path), torch.randn(6, 32)
    wanted = model(x)
    weft.compile(model, "overlap", fallback="error")
    torch.testing.assert_close(model(x), wanted)
    assert not any(op.uses == "io" for op in session_of(model).pieces[0].graph.ops)


def test_loads_of_a_sequential_plan_take_their_turn(tmp_path: Path) -> None:
    model, x = weft.offload(Net().eval(), tmp_path), torch.randn(6, 32)
    weft.compile(model, "sequential", loads=True, fallback="error")
    model(x)
    order = [label for label in labels(plan_of(model)) if label.startswith(("load", "wait layers"))]
    assert order[:4] == ["load", "wait layers.0", "load.1", "wait layers.1"]


class Peak:
    """The most anonymous memory of this process above what it had, as the system counts it."""

    def __enter__(self) -> Peak:
        ctypes.CDLL(None).malloc_trim(0)  # what was freed before must not be used again unseen
        self.start, self.bytes, self.on = anonymous_bytes(), 0, True
        self.thread = threading.Thread(target=self.watch)
        self.thread.start()
        return self

    def watch(self) -> None:
        while self.on:
            self.bytes = max(self.bytes, anonymous_bytes() - self.start)
            time.sleep(0.0005)

    def __exit__(self, *raised: object) -> None:
        self.on = False
        self.thread.join()


def anonymous_bytes() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon"))


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "malloc_trim"), reason="it takes glibc")
def test_memory_stays_within_the_limit(tmp_path: Path) -> None:
    """Eight blocks of 16 MiB: no more than three are there at once, counted by the system."""
    block = 16 << 20
    model = nn.Sequential(*(nn.Linear(2048, 2048, bias=False) for _ in range(8))).eval()
    x = torch.randn(512, 2048)  # a block computes for longer than it is read
    weft.offload(model, tmp_path)
    peaks = []
    for strategy in (weft.prefetch(memory_bytes=3 * block), weft.prefetch(window=20)):
        weft.compile(model, strategy, fallback="error")
        for _ in range(2):
            model(x)
        with Peak() as peak:
            for _ in range(3):
                model(x)
        peaks.append(peak.bytes)
    assert peaks[0] <= 3 * block + (12 << 20), "the limit, and two activations of 4 MiB"
    assert peaks[1] > 4 * block, "without a limit the meter sees more"


def test_a_limit_that_cannot_be_kept_is_told(tmp_path: Path) -> None:
    model, x = Net().eval(), torch.randn(6, 32)
    wanted = model(x)
    weft.compile(weft.offload(model, tmp_path), weft.prefetch(memory_bytes=1000))
    assert torch.equal(model(x), wanted)
    assert "offload smaller blocks" in str(weft.report(model).fallbacks)
    weft.compile(model, weft.prefetch(memory_bytes=1000), fallback="error")
    with pytest.raises(StrategyError, match="memory: a load and the one before it take"):
        model(x)


def test_weights_that_changed_are_not_taken_from_the_file(tmp_path: Path) -> None:
    model, x = weft.offload(Net().eval(), tmp_path), torch.randn(6, 32)
    weft.compile(model, "prefetch", fallback="error")
    model(x)
    model.layers[1].up.weight.add_(1)
    with pytest.raises(WeftError, match=r"weights of .*layers.1.* were changed"):
        model(x)
    weft.restore(model)
    wanted = model(x)
    weft.compile(weft.offload(model, tmp_path), "prefetch", fallback="error")
    torch.testing.assert_close(model(x), wanted)


def test_a_file_that_is_gone_or_cut_off_is_told(tmp_path: Path) -> None:
    model, x = weft.offload(Net().eval(), tmp_path), torch.randn(6, 32)
    weft.compile(model, "prefetch", fallback="error")
    model(x)
    (tmp_path / "layers.2.safetensors").rename(tmp_path / "elsewhere")
    with pytest.raises(WeftError, match=r"layers.2.safetensors: No such file"):
        model(x)


def test_a_model_without_a_list_and_a_wrong_pattern_are_refused(tmp_path: Path) -> None:
    with pytest.raises(WeftError, match="has no list of modules; name them: blocks="):
        weft.offload(nn.Linear(3, 3), tmp_path)
    with pytest.raises(WeftError, match="no module whose path matches 'decoder'"):
        weft.offload(Net(), tmp_path, blocks="decoder")
    with pytest.raises(WeftError, match="no regular expression"):
        weft.offload(Net(), tmp_path, blocks="(")


def test_where_gradients_are_wanted_weights_stay_where_they_are(tmp_path: Path) -> None:
    model, x = weft.offload(Net(), tmp_path), torch.randn(6, 32)
    weft.compile(model, "prefetch")
    with torch.enable_grad():
        model(x).sum().backward()
    assert model.layers[0].up.weight.grad is not None
    assert "weights are read as touched" in str(weft.report(model).fallbacks)


def test_a_transformer_that_nobody_here_wrote(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=97, hidden_size=32, intermediate_size=48, num_hidden_layers=3,
        num_attention_heads=4, num_key_value_heads=2, pad_token_id=0,
    )  # fmt: skip
    model, ids = transformers.LlamaForCausalLM(config).eval(), torch.randint(3, 97, (5, 7))
    wanted = model(input_ids=ids, use_cache=False).logits
    weft.offload(model, tmp_path)
    weft.compile(model, "prefetch", fallback="error")
    assert torch.equal(model(input_ids=ids, use_cache=False).logits, wanted)
    graph = session_of(model).pieces[0].graph
    assert sum(op.uses == "io" for op in graph.ops) == 3

"""Who an op is: its module path, its layer, and a name that a person knows."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
import torch.nn.functional as F
from torch import nn

import torchweft as weft
from torchweft.api import session_of
from torchweft.capture.marks import module_path
from torchweft.capture.ops.names import OpNames, Origin, Origins
from torchweft.plan.graph import NAME, Graph
from torchweft_tools.bench.models.depth_model import DepthModel

WIDE = 8


@pytest.fixture(scope="module", autouse=True)
def group() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture(autouse=True)
def fresh() -> None:
    torch._dynamo.reset()
    torch.manual_seed(0)


class RowLinear(nn.Linear):
    def forward(self, x):
        return funcol.all_reduce(F.linear(x, self.weight), "sum", dist.group.WORLD)


class Mlp(nn.Module):
    def __init__(self, down: type[nn.Linear] = RowLinear) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDE, 2 * WIDE), down(2 * WIDE, WIDE, bias=False)

    def forward(self, x):
        return self.down(torch.relu(self.up(x)))


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.mlp = nn.LayerNorm(WIDE), Mlp()

    def forward(self, x):
        return x + self.mlp(self.norm(x))


class Stack(nn.Module):
    def __init__(self, kind: type[nn.Module] = Layer, num_layers: int = 3) -> None:
        super().__init__()
        self.layers = nn.ModuleList(kind() for _ in range(num_layers))
        self.head = nn.Linear(WIDE, 4)

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


class Free(nn.Module):
    """A layer that talks to nobody."""

    def __init__(self) -> None:
        super().__init__()
        self.mlp = Mlp(nn.Linear)

    def forward(self, x):
        return x + self.mlp(x)


class Convs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 3, 3, padding=1), nn.Conv2d(3, 3, 3, padding=1)

    def forward(self, x):
        return x + self.second(torch.relu(self.first(x)))


class Stages(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stage1, self.stage2 = (nn.Sequential(Convs(), Convs()) for _ in range(2))
        self.head = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 5))

    def forward(self, x):
        return self.head(self.stage2(self.stage1(x)).mean((2, 3)))


class Again(nn.Module):
    """One block, called three times."""

    def __init__(self) -> None:
        super().__init__()
        self.block = Free()

    def forward(self, x):
        for _ in range(3):
            x = self.block(x)
            x = x - x.mean(0, keepdim=True)
        return x


def graphs(model: Callable[..., Any], *args: Any, train: bool = False, **known: Any) -> list[Graph]:
    compiled = weft.compile(model, weft.overlap(parts=2), fallback="error", **known)
    with torch.set_grad_enabled(train):
        made = compiled(*args)
        if train:
            made.sum().backward()
    return [piece.graph for piece in session_of(compiled).pieces]


def who(graph: Graph) -> list[tuple[str, str, int | None, str | None]]:
    return [(op.name, op.path, op.layer, op.block) for op in graph.ops]


def tensor_parallel(num_layers: int) -> list[tuple[str, str, int | None, str | None]]:
    """What a stack of layers under tensor parallelism is."""
    found: list[tuple[str, str, int | None, str | None]] = []
    for n in range(num_layers):
        down = f"layers.{n}.mlp.down"
        found.append((f"layers.{n}.mlp", f"layers.{n}.mlp", n, "Layer"))
        found.append((f"{down}.all_reduce", down, n, "Layer"))
    return [*found, ("head", "head", None, None)]


def x() -> torch.Tensor:
    return torch.randn(8, WIDE)


def test_an_op_belongs_to_the_module_whose_products_it_computes():
    (graph,) = graphs(Stack(), x())
    assert who(graph) == tensor_parallel(3)
    middle = [graph.structure[op.name] for op in graph.ops if op.name.endswith("mlp")][1:]
    assert len(set(middle)) == 1  # a layer of another name has the same body


def test_blocks_are_traced_once_and_each_has_its_own_path():
    torch._dynamo.reset()
    (graph,) = graphs(DepthModel(3).eval(), torch.arange(6 * 8).view(6, 8))
    layers = [op for op in graph.ops if op.layer is not None]
    assert who(graph)[-4:] == [
        *((f"layers.{n}", f"layers.{n}", n, "DepthLayer") for n in range(3)),
        ("head", "head", None, None),
    ]
    assert len({graph.structure[op.name] for op in layers}) == 1


def test_backward_graphs_say_whose_gradients_they_compute():
    forward, backward = graphs(Stack(num_layers=2), x(), train=True)
    assert set(tensor_parallel(2)) <= set(who(forward))
    told = {op.name: (op.path, op.layer) for op in backward.ops}
    assert told["layers.1.mlp"] == ("layers.1.mlp", 1)
    assert told["layers.0.mlp.mm"] == ("layers.0.mlp", 0)
    assert list(told).index("layers.1.mlp") < list(told).index("layers.0.mlp")


def test_numbers_in_a_sequence_are_layers_only_if_they_repeat():
    (graph,) = graphs(Stages().eval(), torch.randn(4, 3, 8, 8))
    stages = [(f"stage{s}.{n}", f"stage{s}.{n}", n, "Convs") for s in (1, 2) for n in (0, 1)]
    assert who(graph) == [*stages, ("head", "head", None, None)]


def test_a_model_that_is_a_list_has_names_all_the_same():
    (graph,) = graphs(nn.Sequential(Free(), Free(), nn.Linear(WIDE, WIDE)), x())
    assert who(graph) == [
        ("model.0.mlp", "0.mlp", 0, "Free"),
        ("model.1.mlp", "1.mlp", 1, "Free"),
        ("model.2", "2", None, None),
    ]


def test_ops_of_one_place_are_numbered():
    (graph,) = graphs(Again(), x())
    names = [op.name for op in graph.ops]
    assert names == ["block.mlp", "mean", "block.mlp.1", "mean.1", "block.mlp.2", "mean.2", "op"]


def test_marks_keep_their_names():
    rules = [weft.mark_path(r"layers\.\d+\.mlp", "mlp")]
    (graph,) = graphs(Stack(), x(), rules=rules)
    marked = [(op.name, op.path, op.layer) for op in graph.ops if op.mark and not op.collective]
    names = ("mlp", "mlp.1", "mlp.2")
    assert marked == [(name, f"layers.{n}.mlp", n) for n, name in enumerate(names)]
    assert "mark mlp in layers.2.mlp" in str(graph)


def test_boundary_mode_knows_modules_too():
    rules = [weft.mark_path(r"layers\.\d+\.norm", "norm")]
    (graph,) = graphs(Stack(), x(), rules=rules, capture="boundary")
    assert {*tensor_parallel(3), ("norm.2", "layers.2.norm", 2, "Layer")} <= set(who(graph))
    assert {op.layer for op in graph.ops} == {0, 1, 2, None}


def test_a_function_calls_layers_too():
    model = Stack(Free)
    (graph,) = graphs(lambda y: model(y) - model(y).mean(0, keepdim=True), x())
    assert [op.path for op in graph.ops] == ["", "", ""]
    rules = [weft.mark_path(r"layers\.\d+", "layer")]
    (graph,) = graphs(lambda y: model(y * 2), x(), rules=rules)
    assert who(graph)[1:] == [
        ("layer", "layers.0.mlp", 0, "Free"),
        ("layer.1", "layers.1.mlp", 1, "Free"),
        ("layer.2", "layers.2.mlp", 2, "Free"),
        ("head", "head", None, None),
    ]


@pytest.mark.parametrize(
    ("text", "path"),
    [
        ("L['self'].layers.3.mlp", "layers.3.mlp"),
        ("L['self']._modules['layers']._modules['3']", "layers.3"),
        ("L['self'].layers[3].mlp", "layers.3.mlp"),
        ("L['fn'].__self__.0.mlp", "0.mlp"),
        ("L['f'].__closure__[0].cell_contents.layers.0", "layers.0"),
        ("G['model'].layers.0", "model.layers.0"),
        ("L['self']", ""),
    ],
)
def test_what_dynamo_calls_a_module_becomes_a_path(text, path):
    assert module_path(text) == path


def test_any_path_gives_a_name():
    paths = ["", "0", "a.b", f"{'deep.' * 80}end", "x" * 200, "9" * 200]
    names = OpNames(["a.b.1"])
    made = [names.make(Origin(path).name(kind)) for path in paths for kind in ("op", "op", "b")]
    assert all(NAME.fullmatch(name) for name in made) and len(set(made)) == len(made)
    assert [names.make("a.b"), names.make("a.b")] == ["a.b", "a.b.2"]  # a.b.1 is a module's


def test_an_op_over_several_layers_has_none():
    def inside(layer: int, end: str) -> tuple[tuple[str, Any], ...]:
        path = f"model.layers.{layer}"
        return ("model", Stack), (path, Layer), (f"{path}.{end}", nn.Linear)

    origins = Origins([inside(layer, end) for layer in (0, 1) for end in ("norm", "up", "down")])
    assert origins.of([(inside(0, "up"), True), (inside(1, "up"), True)]) == Origin("model.layers")
    # What ends a layer without a product belongs to the one that begins.
    border = origins.of([(inside(0, "norm"), False), (inside(1, "up"), True)])
    assert border == Origin("model.layers.1.up", 1, "Layer")
    border = origins.of([(inside(0, "norm"), False), (inside(1, "norm"), False)])
    assert border == Origin("model.layers.1.norm", 1, "Layer")
    assert origins.of([]) == origins.of([((), True)]) == Origin()

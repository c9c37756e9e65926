"""Blocks that differ in one thing, or are called otherwise: each runs as itself, not as the first."""

from __future__ import annotations

import copy
from collections import OrderedDict, namedtuple
from dataclasses import dataclass
from functools import partial
from types import MethodType, SimpleNamespace

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrize
from torch.nn.utils.parametrizations import spectral_norm, weight_norm

import torchweft as weft
from torchweft.api import session_of

WIDTH = 4
HALVES = weft.overlap(parts=2)


@pytest.fixture(autouse=True)
def fresh_dynamo():
    torch._dynamo.reset()


class Plain:
    """An object that is no module."""

    def __init__(self, gain=1.0):
        self.gain = gain


class Slotted:
    __slots__ = ("gain",)

    def __init__(self, gain=1.0):
        self.gain = gain


@dataclass(frozen=True)
class Frozen:
    gain: float = 1.0


Pair = namedtuple("Pair", "low high")


class Tail(nn.Module):
    bend = 1.0

    def __init__(self):
        super().__init__()
        self.shift, self.slope = 0.0, nn.Parameter(torch.tensor(1.5))

    def forward(self, x):
        return x * self.slope * self.bend + self.shift


class Bent(Tail):
    bend = 2.0


class Block(nn.Module):
    """Reads everything it has."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.norm, self.drop, self.tail = nn.LayerNorm(WIDTH), nn.Dropout(0.5), Tail()
        self.chain = nn.Sequential(nn.Identity(), nn.Tanh())
        self.named = nn.ModuleDict({"one": nn.Identity(), "two": nn.Sigmoid()})
        self.register_buffer("offset", torch.tensor(0.5))
        self.register_buffer("hidden", torch.tensor(0.25), persistent=False)
        self.table = torch.tensor([1.0, 2.0, 3.0, 4.0])
        self.count, self.rate, self.flag, self.text, self.none = 2, 0.5, False, "mul", None
        self.steps, self.sizes, self.options = [1, 2], (3, 4), {"gain": 1.0}
        self.names, self.pair = {"a"}, Pair(1.0, 2.0)
        self.plain, self.slotted, self.frozen = Plain(), Slotted(), Frozen()
        self.space, self.ordered = SimpleNamespace(gain=1.0), OrderedDict(a=1.0, b=2.0)
        self.act, self.part = torch.relu, partial(torch.add, alpha=2)
        self.nested, self.dtype = {"inner": [{"gain": 1.0}]}, torch.float32
        self.index = 0

    @property
    def factor(self):
        return self.__dict__["rate"] * 2

    def method(self, x):
        return x + 0.0

    def forward(self, x):
        y = self.act(self.norm(self.up(x))) * self.factor
        y = self.chain(self.tail(self.drop(y)))
        for key, module in self.named.items():
            y = module(y) * len(key)
        y = y + self.offset * self.hidden + self.table * self.table.shape[0]
        y = y * self.count + self.rate if self.text == "mul" else y / self.count
        y = y - 1 if self.flag else y
        y = y if self.none is None else y + self.none
        y = y * sum(self.steps) / len(self.sizes) + self.options.get("gain", 0.0)
        y = y * len(self.names) + self.pair.low * self.sizes[0] + self.nested["inner"][0]["gain"]
        y = y + self.plain.gain + self.slotted.gain + self.frozen.gain + self.space.gain
        for number, value in enumerate(self.ordered.values()):
            y = y + number * value
        y = self.part(y, y).to(self.dtype)
        y = y * 3 if hasattr(self, "extra") else y
        return x + torch.tanh(self.method(self.down(y.float())))


class Stack(nn.Module):
    def __init__(self, kind=Block, num_layers=3):
        super().__init__()
        self.layers = nn.ModuleList(kind() for _ in range(num_layers))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


def put(path, value):
    """A change: set what is at a path of attributes to a value, or to what a function makes."""
    *holders, name = path.split(".")

    def change(layer):
        for holder in holders:
            layer = getattr(layer, holder)
        setattr(layer, name, value() if callable(value) else value)

    return change


def double(module, args, output):
    return output * 2


def halve(module, args):
    return tuple(arg / 2 for arg in args)


def halve_all(module, args, kwargs):
    return tuple(arg / 2 for arg in args), kwargs


def twice(x):
    return 2 * torch.relu(x)


def scaled(by):
    return lambda x: torch.relu(x) * by


class Halved(nn.Module):
    def forward(self, weight):
        return weight / 2


class Louder(Block):
    def method(self, x):
        return x * 2


class Answers(Block):
    def __getattr__(self, name):
        return 7.0 if name == "absent" else super().__getattr__(name)


CHANGES = {
    "class of a child": put("tail", Bent),
    "class of a child, no weights": lambda b: b.chain.__setitem__(0, nn.ReLU()),
    "class of the block": lambda b: setattr(b, "__class__", Louder),
    "forward of a child": lambda b: setattr(b.tail, "forward", lambda x: x * 9),
    "method of the block": lambda b: setattr(b, "method", lambda x: x * 9),
    "bound method": lambda b: setattr(b, "method", MethodType(lambda self, x: x * self.count, b)),
    "hook on a child": lambda b: b.tail.register_forward_hook(double),
    "hook on a child that has no weights": lambda b: b.drop.register_forward_hook(double),
    "hook on a grandchild": lambda b: b.chain[1].register_forward_hook(double),
    "hook on the block": lambda b: b.register_forward_hook(double),
    "pre-hook": lambda b: b.up.register_forward_pre_hook(halve),
    "pre-hook with kwargs": lambda b: b.up.register_forward_pre_hook(halve_all, with_kwargs=True),
    "int": put("count", 5),
    "float": put("rate", 0.75),
    "bool": put("flag", True),
    "str": put("text", "div"),
    "none": put("none", 3.0),
    "list": put("steps", [1, 5]),
    "length of a list": put("steps", [1, 2, 1]),
    "length of a tuple": put("sizes", (3, 4, 5)),
    "dict": put("options", {"gain": 4.0}),
    "key of a dict": put("options", {"loss": 1.0}),
    "order of a dict": lambda b: b.ordered.move_to_end("a"),
    "set": put("names", {"a", "b"}),
    "named tuple": put("pair", Pair(9.0, 2.0)),
    "nested container": put("nested", {"inner": [{"gain": 5.0}]}),
    "object": put("plain.gain", 4.0),
    "class of an object": put("plain", lambda: SimpleNamespace(gain=4.0)),
    "slotted object": put("slotted", lambda: Slotted(5.0)),
    "frozen object": put("frozen", lambda: Frozen(5.0)),
    "namespace": put("space.gain", 5.0),
    "function": lambda b: setattr(b, "act", twice),
    "closure": lambda b: setattr(b, "act", scaled(3.0)),
    "partial": lambda b: setattr(b, "part", partial(torch.add, alpha=5)),
    "dtype": put("dtype", torch.bfloat16),
    "one more attribute": put("extra", 1),
    "number of another type": put("count", 2.5),
    "dropout p": put("drop.p", 0.0),
    "eps of a norm": put("norm.eps", 0.3),
    "training flag": lambda b: b.train(),
    "training flag of a child": lambda b: b.drop.train(),
    "requires_grad": lambda b: b.up.weight.requires_grad_(False),
    "weight_norm": lambda b: weight_norm(b.up).parametrizations.weight.original0.data.mul_(2),
    "spectral_norm": lambda b: spectral_norm(b.up),
    "parametrisation": lambda b: parametrize.register_parametrization(b.up, "weight", Halved()),
    "tied inside": lambda b: setattr(b.down, "weight", b.up.weight),
    "no bias": lambda b: b.up.register_parameter("bias", None),
    "dtype of a buffer": lambda b: setattr(b, "offset", b.offset.double()),
    "shape of a buffer": lambda b: setattr(b, "offset", torch.tensor([0.5, 1.0, 1.5, 2.0])),
    "hidden buffer": put("hidden", None),
    "tensor that is no buffer": lambda b: setattr(b, "table", torch.tensor([9.0])),
    "strides of a weight": lambda b: setattr(b.up.weight, "data", b.up.weight.data.t()),
    "one more child": lambda b: b.named.update({"three": nn.Tanh()}),
    "name of a child": lambda b: b.named.update({"seven": b.named.pop("two")}),
    "order of children": lambda b: b.named.update({"one": b.named.pop("one")}),
    "one more in a sequence": lambda b: b.chain.append(nn.ReLU()),
    "in a sequence": lambda b: b.chain.__setitem__(1, nn.ReLU()),
    "shared child": lambda b: b.chain.__setitem__(0, b.chain[1]),
}  # fmt: skip


def compare(model, *inputs, strategies=("sequential", HALVES), calls=None):
    """Compile a copy for each strategy; every call equals eager's, and so do later ones."""
    for strategy in strategies:
        torch._dynamo.reset()
        own = copy.deepcopy(model)
        weft.compile(own, strategy)
        torch.manual_seed(0)
        wanted = model(*inputs)
        torch.manual_seed(0)
        found = own(*inputs)
        atol = 0.0 if strategy == "sequential" else 1e-6
        torch.testing.assert_close(found, wanted, rtol=0, atol=atol)
    return own


def stack_of(kind=Block):
    torch.manual_seed(0)
    return Stack(kind).eval()


INPUT = torch.linspace(-1, 1, 4 * WIDTH).view(4, WIDTH)


@torch.no_grad()
@pytest.mark.parametrize("change", CHANGES)
def test_a_block_that_is_unlike_runs_as_itself(change):
    plain = stack_of()
    for which, strategies in ((0, ["sequential"]), (1, ["sequential", HALVES])):
        model = stack_of()
        CHANGES[change](model.layers[which])
        if change not in SILENT:
            assert not torch.equal(model(INPUT), plain(INPUT)), "the change shows in no number"
        compare(model, INPUT, strategies=strategies)


SILENT = {"requires_grad", "strides of a weight", "shared child", "no bias"}


@torch.no_grad()
@pytest.mark.parametrize("change", CHANGES)
def test_a_block_that_becomes_unlike_is_noticed(change):
    model = stack_of()
    weft.compile(model)
    model(INPUT)
    assert weft.report(model).unblocked == ""
    CHANGES[change](model.layers[1])
    torch.manual_seed(0)
    wanted = model.forward(INPUT)
    torch.manual_seed(0)
    assert torch.equal(model(INPUT), wanted)

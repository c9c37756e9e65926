"""Blocks that differ in one thing, or are called otherwise: each runs as itself."""

from __future__ import annotations

import copy
import inspect
import sys
from collections import OrderedDict, namedtuple
from dataclasses import dataclass
from functools import partial
from types import MethodType, ModuleType, SimpleNamespace
from typing import ClassVar

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


class Values(nn.Module):
    """A block that reads values of many kinds."""

    def __init__(self):
        super().__init__()
        self.up = nn.Linear(WIDTH, WIDTH)
        self.table = torch.tensor([1.0, 2.0, 3.0, 4.0])
        self.count, self.rate, self.flag, self.text, self.none = 2, 0.5, False, "mul", None
        self.steps, self.sizes, self.options = [1, 2], (3, 4), {"gain": 1.0}
        self.names, self.pair = {"a"}, Pair(1.0, 2.0)
        self.plain, self.slotted, self.frozen = Plain(), Slotted(), Frozen()
        self.space, self.ordered = SimpleNamespace(gain=1.0), OrderedDict(a=1.0, b=2.0)
        self.act, self.part = torch.relu, partial(torch.add, alpha=2)
        self.nested, self.dtype = {"inner": [{"gain": 1.0}]}, torch.float32

    @property
    def factor(self):
        return self.__dict__["rate"] * 2

    def method(self, x):
        return x + 0.0

    def forward(self, x):
        y = self.act(self.up(x)) * self.factor + self.table * self.table.shape[0]
        y = y * self.count if self.text == "mul" else y / self.count
        y = y - 1 if self.flag else y
        y = y if self.none is None else y + self.none
        y = y * sum(self.steps) / len(self.sizes) + self.options.get("gain", 0.0)
        y = y * len(self.names) + self.pair.low * self.sizes[0] + self.nested["inner"][0]["gain"]
        y = y + self.plain.gain + self.slotted.gain + self.frozen.gain + self.space.gain
        for number, value in enumerate(self.ordered.values()):
            y = y + number * value
        y = self.part(y, y).to(self.dtype)
        y = y * 3 if hasattr(self, "extra") else y
        return x + torch.tanh(self.method(y.float()) / 99)


class Louder(Values):
    def method(self, x):
        return x * 2


class Children(nn.Module):
    """A block that calls modules of many kinds."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.norm, self.drop, self.tail = nn.LayerNorm(WIDTH), nn.Dropout(0.5), Tail()
        self.chain = nn.Sequential(nn.Identity(), nn.Tanh())
        self.named = nn.ModuleDict({"one": nn.Identity(), "two": nn.Sigmoid()})
        self.register_buffer("offset", torch.tensor(0.5))
        self.register_buffer("hidden", torch.tensor(0.25), persistent=False)

    def forward(self, x):
        y = self.chain(self.tail(self.drop(self.norm(self.up(x)))))
        for key, module in self.named.items():
            y = module(y) * len(key)
        y = y + self.offset * (0.0 if self.hidden is None else self.hidden)
        return x + torch.tanh(self.down(y.float()))


class Stack(nn.Module):
    def __init__(self, kind, num_layers=3):
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


TO_VALUES = {
    "class of the block": lambda b: setattr(b, "__class__", Louder),
    "method of the block": lambda b: setattr(b, "method", lambda x: x * 9),
    "bound method": lambda b: setattr(b, "method", MethodType(lambda self, x: x * self.count, b)),
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
    "order of a dict": put("ordered", lambda: OrderedDict(b=2.0, a=1.0)),
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
    "tensor that is no buffer": lambda b: setattr(b, "table", torch.tensor([9.0])),
}
TO_CHILDREN = {
    "class of a child": put("tail", Bent),
    "class of a child without weights": lambda b: b.chain.__setitem__(0, nn.ReLU()),
    "forward of a child": lambda b: setattr(b.tail, "forward", lambda x: x * 9),
    "hook on a child": lambda b: b.tail.register_forward_hook(double),
    "hook on a child without weights": lambda b: b.drop.register_forward_hook(double),
    "hook on a grandchild": lambda b: b.chain[1].register_forward_hook(double),
    "hook on the block": lambda b: b.register_forward_hook(double),
    "pre-hook": lambda b: b.up.register_forward_pre_hook(halve),
    "pre-hook with kwargs": lambda b: b.up.register_forward_pre_hook(halve_all, with_kwargs=True),
    "dropout p": lambda b: put("p", 0.0)(b.drop.train()),
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
    "strides of a weight": lambda b: setattr(b.up.weight, "data", b.up.weight.data.t()),
    "one more child": lambda b: b.named.update({"three": nn.Tanh()}),
    "name of a child": lambda b: b.named.update({"seven": b.named.pop("two")}),
    "order of children": lambda b: b.named.update({"one": b.named.pop("one")}),
    "one more in a sequence": lambda b: b.chain.append(nn.ReLU()),
    "in a sequence": lambda b: b.chain.__setitem__(1, nn.ReLU()),
    "shared child": lambda b: b.chain.__setitem__(0, b.chain[1]),
}
CHANGES = {name: (Values, change) for name, change in TO_VALUES.items()}
CHANGES |= {name: (Children, change) for name, change in TO_CHILDREN.items()}
NO_NUMBER = ("requires_grad", "dropout p", "dtype of a buffer")  # changes that change no number


INPUT = torch.linspace(-1, 1, 4 * WIDTH).view(4, WIDTH)


def stack_of(kind, num_layers=3):
    torch.manual_seed(0)
    return Stack(kind, num_layers).eval()


def compare(model, *inputs, atol=0.0):
    """A compiled copy gives what the model gives, now and by another strategy."""
    own = copy.deepcopy(model)
    weft.compile(own, "sequential")
    for strategy in (None, HALVES):
        with weft.context(strategy=strategy):
            torch.manual_seed(0)
            wanted = model(*inputs)
            torch.manual_seed(0)
            found = own(*inputs)
        torch.testing.assert_close(found, wanted, rtol=0, atol=atol if strategy is None else 1e-6)
    return own


@torch.no_grad()
@pytest.mark.parametrize("name", CHANGES)
def test_a_block_that_is_unlike_runs_as_itself(name):
    kind, change = CHANGES[name]
    model = stack_of(kind)
    first = len(name) % 2  # the block that is unlike is the first one, or a later one
    change(model.layers[1 - first])
    assert name in NO_NUMBER or not torch.equal(model(INPUT), stack_of(kind)(INPUT))
    compare(model, INPUT)


@torch.no_grad()
@pytest.mark.parametrize("start", range(0, len(CHANGES), 5))
def test_a_block_that_becomes_unlike_is_noticed(start):
    chosen = list(CHANGES)[start : start + 5]
    for kind in {CHANGES[name][0]: None for name in chosen}:
        names = [name for name in chosen if CHANGES[name][0] is kind]
        model = stack_of(kind, len(names) + 1)
        weft.compile(model, "sequential")
        model(INPUT)
        assert weft.report(model).unblocked == ""
        for layer, name in zip(model.layers[1:], names, strict=True):
            CHANGES[name][1](layer)
            torch.manual_seed(0)
            wanted = model.forward(INPUT)
            torch.manual_seed(0)
            assert torch.equal(model(INPUT), wanted), name


@torch.no_grad()
@pytest.mark.parametrize("kind", [Values, Children])
def test_like_blocks_are_traced_once(kind):
    model = stack_of(kind)
    for number, layer in enumerate(model.layers):
        layer.number, layer.name = number, f"layer{number}"  # nobody reads them
        layer.up.number = number
    weft.compile(model, "sequential")
    assert torch.equal(model(INPUT), model.forward(INPUT))
    piece = session_of(model).pieces[0]
    codes = [id(piece.captured.bodies[op.name].code) for op in piece.graph.ops]
    assert len(codes) == 3
    assert len(set(codes)) == 1


class Given(nn.Module):
    """A block that looks at how it is called."""

    def __init__(self):
        super().__init__()
        self.up, self.gain = nn.Linear(WIDTH, WIDTH), nn.Parameter(torch.rand(WIDTH))
        self.kept, self.settings = torch.rand(WIDTH), Plain()

    def forward(self, x, y=None, *more, z=None, by=1, how="add", part=None):
        if isinstance(x, dict):
            x, y = x.values()
        elif isinstance(x, tuple | list):
            x, y = (x[0], x[1] * (1 if isinstance(x, tuple) else 2))
        elif isinstance(x, Held):
            x, y = x.left, x.right
        out = torch.tanh(self.up(x)) * self.gain + self.kept * self.settings.gain
        if y is not None:
            out = (out + y) * (2 if y is x else 1)
        if z is not None:
            out = out - z / 3
        for number, each in enumerate(more):
            out = out + each / (2 + number)
        if part is not None:
            out = part(out)
        out = out - 1 if by is True else out / by if isinstance(by, int) else out * by * 3
        return torch.relu(out) if how == "relu" else out


@dataclass
class Held:
    left: torch.Tensor
    right: torch.Tensor


SHARED = torch.linspace(0, 1, 4 * WIDTH).view(4, WIDTH)
LOUD = [1.0]


class ReadsGlobal(Given):
    def forward(self, x):
        return torch.tanh(self.up(x)) + SHARED * LOUD[0]


class KnowsParent(Given):
    def forward(self, x):
        first, last = (self is self.parent[0].layers[n] for n in (0, -1))
        return torch.tanh(self.up(x)) * (3 if first else 2 if last else 1)


class Autocast(Given):
    def forward(self, x):
        y = self.up(x)
        return torch.tanh(y) if y.dtype is torch.float32 else torch.relu(y.float())


def factory(by):
    class Inner(nn.Module):
        def __init__(self):
            super().__init__()
            self.up = nn.Linear(WIDTH, WIDTH)

        def forward(self, x):
            return self.up(x) * by

    return Inner


def both(b, x):
    y = x
    for layer in b:
        x = layer(x, y)
        y = x / 2
    return x


def chain(*calls):
    """Call the blocks one after another, each in a way of its own."""

    def forward(b, x):
        y = x / 2
        for layer, call in zip(b, calls, strict=True):
            x, y = call(layer, x, y), x
        return x

    return forward


def autocast(layer, x, y):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return layer(x)


def plainly(layer, x, y):
    return layer(x)


def twofold(layer, x, y):
    return layer(x, y)


CALLS = {
    "the same tensor at first": (Given, both),
    "the same tensor later": (Given, chain(twofold, lambda b, x, y: b(x, x), twofold)),
    "a view": (Given, chain(twofold, lambda b, x, y: b(x, x.view(-1, WIDTH)), twofold)),
    "parts that overlap": (
        Given,
        lambda b, x: b[2](b[1](x[1:], x[:-1]), b[0](x[1:] + 1, x[:-1] + 1)),
    ),
    "a tuple of the same": (
        Given, chain(lambda b, x, y: b((x, x)), lambda b, x, y: b((x, y)), plainly)),
    "tuple against list": (
        Given, chain(lambda b, x, y: b((x, y)), lambda b, x, y: b([x, y]), plainly)),
    "tuple against arguments": (
        Given, chain(twofold, lambda b, x, y: b((x, y)), lambda b, x, y: b(x, (y)))),
    "dicts of the same": (
        Given, chain(lambda b, x, y: b({"a": x, "b": x}), lambda b, x, y: b({"a": x, "b": y}),
                     lambda b, x, y: b({"b": x, "a": y}))),
    "dataclasses": (
        Given, chain(lambda b, x, y: b(Held(x, x)), lambda b, x, y: b(Held(x, y)), twofold)),
    "a dataclass between": (
        Given, chain(twofold, lambda b, x, y: b(Held(x, y), y), twofold)),
    "keyword against position": (
        Given, chain(twofold, lambda b, x, y: b(x, z=y), lambda b, x, y: b(y=y, x=x))),
    "two keywords": (
        Given, chain(lambda b, x, y: b(x, y=y, z=x), lambda b, x, y: b(x, z=y, y=x),
                     lambda b, x, y: b(x, z=x, y=y))),
    "more arguments": (
        Given, chain(lambda b, x, y: b(x, y, x, y), lambda b, x, y: b(x, y, y, x),
                     lambda b, x, y: b(x, x, y, y))),
    "default against given": (Given, chain(plainly, lambda b, x, y: b(x, None), twofold)),
    "numbers": (
        Given, chain(*[lambda b, x, y, by=by: b(x, y, by=by) for by in (1, True, 1.0)])),
    "text": (
        Given, chain(*[lambda b, x, y, how=how: b(x, y, how=how) for how in ("", "relu", "")])),
    "functions": (
        Given, chain(*[lambda b, x, y, f=f: b(x, part=f) for f in (torch.tanh, torch.relu, None)])),
    "its own weight": (
        Given, chain(lambda b, x, y: b(x, b.gain.expand(4, -1)), lambda b, x, y: b(x, y),
                     lambda b, x, y: b(x, b.up.weight))),
    "its own weight at first": (
        Given, chain(lambda b, x, y: b(x, b.gain), lambda b, x, y: b(x, b.up.bias), twofold)),
    "what it reads as well": (ReadsGlobal, lambda b, x: b[2](b[1](b[0](SHARED) + x))),
    "its place": (KnowsParent, chain(*[plainly] * 3)),
    "autocast": (Autocast, chain(plainly, autocast, plainly)),
}  # fmt: skip


class Caller(nn.Module):
    def __init__(self, kind, call):
        super().__init__()
        self.layers, self.call = nn.ModuleList(kind() for _ in range(3)), call
        if kind is KnowsParent:
            for layer in self.layers:
                vars(layer)["parent"] = [self]

    def forward(self, x):
        return self.call(self.layers, x)


@torch.no_grad()
@pytest.mark.parametrize("name", CALLS)
def test_a_call_that_is_unlike_is_traced_for_itself(name):
    torch.manual_seed(0)
    compare(Caller(*CALLS[name]).eval(), INPUT)


def tie_first(model):
    model.head = model.layers[0].gain


def tie_siblings(model):
    model.layers[1].gain = model.layers[0].gain


def share_table(model):
    model.kept = model.layers[0].kept


def share_settings(model):
    model.settings = model.layers[0].settings
    model.layers[1].settings.gain = 2.0


def other_code(model):
    for number, by in enumerate((2.0, 3.0, 4.0)):
        model.layers[number] = factory(by)()


class Outer(Stack):
    """Reads what its blocks have before it calls them."""

    def __init__(self):
        super().__init__(Given)
        self.head, self.kept, self.settings = None, torch.zeros(()), Plain()

    def forward(self, x):
        x = x * self.settings.gain + self.kept.sum()
        x = x if self.head is None else x + self.head
        return super().forward(x)


@torch.no_grad()
@pytest.mark.parametrize(
    "change", [tie_first, tie_siblings, share_table, share_settings, other_code]
)
def test_what_is_shared_with_others_is_told_apart(change):
    torch.manual_seed(0)
    model = Outer().eval()
    change(model)
    own = compare(model, INPUT)
    for each in (own, model):
        for layer in each.layers[1:]:
            if isinstance(layer, Given):
                layer.settings, layer.kept = Plain(3.0), layer.kept * 2
    assert torch.equal(own(INPUT), model(INPUT))


class Writes(Stack):
    """Writes into what its blocks read, between two of them."""

    def __init__(self, write):
        super().__init__(Given)
        self.write, self.shared = write, [1.0]
        for layer in self.layers:
            layer.settings = self.layers[0].settings

    def forward(self, x):
        for number, layer in enumerate(self.layers):
            self.write(self, layer, number)
            x = layer(x)
        return x


def write_attribute(model, layer, number):
    layer.settings.gain = number + 1.0


def write_first(model, layer, number):
    model.layers[0].settings.gain = number + 1.0


def write_tensor(model, layer, number):
    layer.kept = torch.ones(WIDTH) * number


@torch.no_grad()
@pytest.mark.parametrize("write", [write_attribute, write_first, write_tensor])
def test_what_is_written_between_two_calls_is_seen(write):
    torch.manual_seed(0)
    compare(Writes(write).eval(), INPUT)


@torch.no_grad()
def test_a_changed_global_is_seen(monkeypatch):
    torch.manual_seed(0)
    model = Stack(ReadsGlobal).eval()
    own = compare(model, INPUT)
    monkeypatch.setitem(globals(), "LOUD", [2.0])
    assert torch.equal(own(INPUT), model(INPUT))


class Counts(Given):
    def forward(self, x, calls=[]):  # noqa: B006
        calls.append(1)
        return torch.tanh(self.up(x)) * len(calls)


class AddsDefault(Given):
    def forward(self, x, *, bias=SHARED[0]):
        return torch.tanh(self.up(x)) + bias


def counted():
    num_calls = 0

    class Counted(Given):
        def forward(self, x):
            nonlocal num_calls
            num_calls += 1
            return torch.tanh(self.up(x)) * num_calls

    return Counted


@torch.no_grad()
@pytest.mark.parametrize("make", [lambda: Counts, lambda: AddsDefault, counted])
def test_what_a_forward_holds_is_read_and_written(make):
    Counts.forward.__defaults__[0].clear()
    wanted = [model(INPUT) for model in [stack_of(make())] for _ in range(3)]
    Counts.forward.__defaults__[0].clear()
    model = weft.compile(stack_of(make()), "sequential")
    for each in wanted:
        assert torch.equal(model(INPUT), each)
    assert "its forward holds" in weft.report(model).unblocked


class Chosen(Given):
    """Reads from a class which of its kind are chosen; that class lies in a Python module."""

    those: ClassVar = set()

    def forward(self, x):
        return torch.tanh(self.up(x)) * (5 if self in self.those else 1)


class ChosenElsewhere(Given):
    def forward(self, x):
        return torch.tanh(self.up(x)) * (5 if self in Chosen.those else 1)


@torch.no_grad()
@pytest.mark.parametrize("kind", [Chosen, ChosenElsewhere])
def test_blocks_that_a_class_knows_are_told_apart(kind):
    model = stack_of(kind, 4)
    Chosen.those = {model.layers[1]}
    weft.compile(model, "sequential")
    for layer in model.layers[1:3]:
        Chosen.those.add(layer)
        assert torch.equal(model(INPUT), model.forward(INPUT))
    assert weft.report(model).unblocked == ""


@torch.no_grad()
def test_blocks_that_a_python_module_knows_are_told_apart(monkeypatch):
    chosen = ModuleType("chosen")
    monkeypatch.setitem(sys.modules, "chosen", chosen)
    code = (
        inspect.getsource(Given)
        + """
class Known(Given):
    def forward(self, x):
        return torch.tanh(self.up(x)) * (5 if self in THOSE else 1)
"""
    )
    vars(chosen).update(torch=torch, nn=nn, WIDTH=WIDTH, Plain=Plain, THOSE=set())
    exec(code, vars(chosen))
    model = stack_of(chosen.Known, 4)
    weft.compile(model, "sequential")
    for layer in model.layers[1:3]:
        chosen.THOSE.add(layer)
        assert torch.equal(model(INPUT), model.forward(INPUT))

"""The `Origin` of an op: the module path that its calls came from, its layer, and a known name.

    layers.3.norm, layers.3.mlp.up (counts), layers.3.mlp.down (counts)
        ->  path "layers.3.mlp", layer 3, block "DecoderLayer", name "layers.3.mlp"

What counts (a product, a convolution) says where an op belongs; where nothing does, all its calls.
An op that ends one layer and begins the next belongs to the latter. One that computes in several
layers has the path that they share, and no layer. A layer is the outermost module that stands in a
list by its number, such as `layers.3`. The modules of a sequence, and those with names such as
`encoder_layer_3`, are layers if several are of one class that is not a single operator of torch.
Names are no identity: equal ops share bodies all the same.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Any, NamedTuple

from torch import fx, nn

from torchweft.capture.marks import module_path
from torchweft.plan.graph import NAME

Stack = tuple[tuple[str, Any], ...]
"""The modules that a call stands in, the outermost first: path and class (or its name)."""
NUMBERED = re.compile(r"(?P<base>(?:.*[._])?)(?P<number>[0-9]{1,9})")
MAX_PATH = 150  # of a name's 200 letters


class Layer(NamedTuple):
    """A repeated module: its path, its number in its list, the name of its class."""

    path: str
    number: int
    block: str


@dataclass(frozen=True)
class Origin:
    """Where in the model an op is computed; see `Op`."""

    path: str = ""
    layer: int | None = None
    block: str | None = None

    def name(self, kind: str = "") -> str:
        """What an op of this place is called, before names are told apart: `kind` is its end."""
        parts = self.path.split(".")
        while len(".".join(parts)) > MAX_PATH and len(parts) > 1:
            del parts[0]
        text = ".".join([*filter(None, parts), *filter(None, [kind])])[-MAX_PATH:]
        return text if NAME.fullmatch(text) else f"model.{text}".rstrip(".")


class Origins:
    """The places of a graph's ops, by what all its calls tell of the model."""

    def __init__(self, stacks: Iterable[Stack]) -> None:
        seen = set(stacks)
        kinds = {path: kind for stack in seen for path, kind in stack}
        parents = {path for stack in seen for path, _ in stack[:-1]}
        numbered = {path: hit for path in kinds if (hit := NUMBERED.fullmatch(path))}
        alike = Counter((hit["base"], str(kinds[path])) for path, hit in numbered.items())
        self.layers: dict[str, Layer] = {}
        self.paths = frozenset(kinds)
        for path, hit in numbered.items():
            base, (module, block) = hit["base"], _class(kinds[path])
            listed = base.endswith(".") and not _is_sequence(kinds.get(base[:-1]))
            own = module.partition(".")[0] != "torch" or path in parents
            if listed or (own and alike[base, str(kinds[path])] > 1):
                self.layers[path] = Layer(path, int(hit["number"]), block)

    def of(self, calls: Sequence[tuple[Stack, bool]]) -> Origin:
        """The place of an op: the stacks of its calls, and whether each call counts."""
        known = [call for call in calls if call[0]]
        counting = [call for call in known if call[1]]
        found = [(stack, self._layer(stack)) for stack, _ in counting or known]
        layers = [layer for _, layer in found if layer is not None]
        if len(set(layers)) > 1 and counting:
            layers.clear()
        layer = layers[-1] if layers else None
        inside = [stack[-1][0] for stack, its in found if layer is None or its == layer]
        path = _shared(inside)
        return Origin(path, layer.number, layer.block) if layer else Origin(path)

    def _layer(self, stack: Stack) -> Layer | None:
        return next((self.layers[path] for path, _ in stack if path in self.layers), None)


class OpNames:
    """Gives each op a name of its own: `mlp`, `mlp.1`; never one that is another module's path."""

    def __init__(self, paths: Iterable[str] = ()) -> None:
        self.paths, self.used, self.counts = frozenset(paths), set[str](), Counter[str]()

    def make(self, base: str) -> str:
        """`base` itself for the first op that asks, a number behind it for others."""
        while True:
            number = self.counts[base]
            self.counts[base] += 1
            name = f"{base}.{number}" if number else base
            if name not in self.used and not (number and name in self.paths):
                self.used.add(name)
                return name


def stack_of(node: fx.Node) -> Stack:
    """The modules that a call stands in; of a call of a backward graph, those it is derived of."""
    meta = node.meta
    stack = meta.get("nn_module_stack") or meta.get("fwd_nn_module_stack") or {}
    return tuple((_plain(module_path(path)), kind) for path, kind in stack.values() if path)


def _plain(path: str) -> str:
    return re.sub(r"[^A-Za-z0-9_.]", "_", path)[:200]


def _shared(paths: Sequence[str]) -> str:
    """The path of the innermost module that all of these are in."""
    parts = sorted(path.split(".") for path in paths)  # between the first and the last, all share
    both = zip(parts[0], parts[-1], strict=False) if parts else ()
    return ".".join(a for a, _ in takewhile(lambda pair: pair[0] == pair[1], both))


def _class(kind: Any) -> tuple[str, str]:
    """The module and the name of a class, which Dynamo tells as a class or as text."""
    if isinstance(kind, type):
        module, name = kind.__module__, kind.__name__
    else:
        module, _, name = str(kind).rpartition(".")
    return module, re.sub(r"\W", "_", name)[:200] or "Module"


def _is_sequence(kind: Any) -> bool:
    if isinstance(kind, type):
        return issubclass(kind, nn.Sequential)
    return str(kind).endswith(".Sequential")

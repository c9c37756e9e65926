"""`offload`: weights of repeated modules on disk, and the ops that bring them in.

    model --offload(folder)--> folder/layers.0.safetensors, layers.1 ...     once
    graph --add_loads--> load0 (io) -> its weights -> layers.0 -> load1 (io) -> ...   at capture

The model computes what it did before: its parameters are what is in the files, mapped into memory
and read by the system as they are touched. Where a plan is to bring them in (`loads=`), each block
is one `load` op of the graph, which uses io, reads one file into memory of its own and makes the
weights of the block; the plan frees them behind their last use. The op says when the weights in the
model are no longer those in its file.
"""

from __future__ import annotations

import json
import math
import mmap
import operator
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar
from weakref import WeakValueDictionary

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, fx, nn

from torchweft.capture.marks import MarkRule, mark_op
from torchweft.errors import StateError, WeftError, clip
from torchweft.private.core import is_traceable_wrapper_subclass

Model = TypeVar("Model", bound=nn.Module)
ALIGNED = 64  # bytes, as torch's own allocator has it
PRIVATE: Any = {"flags": mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS} if os.name == "posix" else {}
FILE = "_weft_file"  # of a parameter: the block that it is in, and its number there
LOADS: tuple[MarkRule, ...] = (mark_op(r"torchweft\.load(\.|$)", "load", uses="io"),)
"""What makes an op of each load."""


@dataclass(eq=False)
class BlockFile:
    """The weights of one block in a file: each with its shape, dtype and place.

    given: the parameters of the model, with the version and the bytes that were written.
    """

    path: Path
    places: tuple[tuple[tuple[int, ...], torch.dtype, int, int], ...]
    given: list[tuple[nn.Parameter, int, int]] = field(default_factory=list)

    def read(self) -> list[Tensor]:
        """The weights, in memory of their own. Raises `StateError` if they are not the model's."""
        for weight, version, place in self.given:
            if weight._version != version or weight.data_ptr() != place:
                cure = "call weft.offload again"
                raise StateError(f"offload: weights of {self.path} were changed; {cure}.")
        made = []
        total = sum(stop - start + ALIGNED for *_, start, stop in self.places)
        room = mmap.mmap(-1, total, **PRIVATE)
        at = 0  # pages of its own: the system has them back as soon as the plan frees the last
        try:
            with self.path.open("rb") as file:
                for shape, dtype, start, stop in self.places:
                    file.seek(start)
                    with memoryview(room)[at : at + stop - start] as bytes_:
                        if file.readinto(bytes_) != stop - start:
                            raise StateError(f"offload: {self.path} is shorter than it was.")
                    count = math.prod(shape)
                    if count:
                        flat = torch.frombuffer(room, dtype=dtype, count=count, offset=at)
                    made.append(flat.view(shape) if count else torch.empty(shape, dtype=dtype))
                    at += (stop - start + ALIGNED - 1) // ALIGNED * ALIGNED
                if hasattr(os, "posix_fadvise"):  # nor need it keep what was read
                    os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        except OSError as error:
            raise StateError(f"offload: {self.path}: {error.strerror}.") from None
        return made


_FILES: WeakValueDictionary[str, BlockFile] = WeakValueDictionary()


@torch.library.custom_op("torchweft::load", mutates_args=())
def load(name: str) -> list[Tensor]:
    """The weights of a block that is on disk."""
    return _file(name).read()


@load.register_fake
def _(name: str) -> list[Tensor]:
    return [torch.empty(shape, dtype=dtype) for shape, dtype, *_ in _file(name).places]


def _file(name: str) -> BlockFile:
    if name not in _FILES:
        raise StateError(f"offload: the model whose weights are {name} is gone.")
    return _FILES[name]


def offload(model: Model, folder: str | Path, *, blocks: str = "") -> Model:
    """Put the weights of repeated modules on disk, a file each; the model computes as before.

    blocks: a regular expression on the paths of modules; by default the children of the outermost
    lists and sequences, such as the layers of a transformer. Weights that several blocks share, or
    that others use too, stay in memory. Give it to `weft.compile(model, "prefetch")` then.

    Raises `WeftError` if there is no such module, or if a weight is not on the CPU.
    """
    chosen = dict(_blocks(model, blocks))
    if not chosen:
        what = f"no module whose path matches {blocks!r}" if blocks else "no list of modules"
        raise WeftError(f"offload: {type(model).__name__} has {what}; name them: blocks=...")
    users: dict[int, set[str]] = {}
    for path, weight in model.named_parameters(remove_duplicate=False):
        home = next((own for own in chosen if path.startswith(f"{own}.")), "")
        users.setdefault(id(weight), set()).add(home)
    Path(folder).mkdir(parents=True, exist_ok=True)
    for path, block in chosen.items():
        own = {n: w for n, w in block.named_parameters() if users[id(w)] == {path}}
        if own:
            _write(own, Path(folder).resolve() / f"{path}.safetensors")
    return model


def _blocks(model: nn.Module, blocks: str) -> Iterator[tuple[str, nn.Module]]:
    """The outermost modules that are wanted."""
    try:
        wanted = re.compile(blocks) if blocks else None
    except re.error as error:
        raise WeftError(f"offload: {clip(blocks)} is no regular expression: {error}.") from None
    taken: list[str] = []
    lists = {
        f"{path}.{name}".lstrip(".")
        for path, module in model.named_modules()
        if isinstance(module, nn.ModuleList | nn.Sequential)
        for name, _ in module.named_children()
    }
    for path, module in model.named_modules():
        inside = any(path.startswith(f"{outer}.") for outer in taken)
        hit = wanted.fullmatch(path) if wanted is not None else path in lists
        if path and hit and not inside and any(True for _ in module.parameters()):
            taken.append(path)
            yield path, module


def _write(weights: Mapping[str, nn.Parameter], path: Path) -> None:
    """Put weights into a file, and let the parameters be what is there."""
    for name, weight in weights.items():
        if weight.device.type != "cpu" or is_traceable_wrapper_subclass(weight.data):
            kind = type(weight.data).__name__
            raise WeftError(f"offload: {name} is a {kind} on {weight.device}; it takes plain ones.")
    partial = path.with_suffix(".partial")
    save_file({name: weight.data.contiguous().clone() for name, weight in weights.items()}, partial)
    partial.replace(path)  # who has the old file open keeps it
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(length))
    places = []
    with safe_open(path, framework="pt") as mapped:
        for name, weight in weights.items():
            start, stop = (8 + length + at for at in header[name]["data_offsets"])
            places.append((tuple(weight.shape), weight.dtype, start, stop))
            weight.data = mapped.get_tensor(name)
    block = BlockFile(path, tuple(places))
    for number, weight in enumerate(weights.values()):
        block.given.append((weight, weight._version, weight.data_ptr()))
        setattr(weight, FILE, (block, number))
    _FILES[str(path)] = block


def add_loads(gm: fx.GraphModule, example_inputs: Sequence[Any]) -> bool:
    """Let a graph load the weights that are on disk, each block before its first use.

    Tells whether there are any.
    """
    taken: dict[BlockFile, dict[fx.Node, int]] = {}
    placeholders = gm.graph.find_nodes(op="placeholder")
    for node, given in zip(placeholders, example_inputs, strict=False):
        block, number = getattr(given, FILE, (None, 0))
        if block is not None and node.users:
            taken.setdefault(block, {})[node] = number
    for block, numbers in taken.items():
        users = {user for node in numbers for user in node.users}
        first = next(node for node in gm.graph.nodes if node in users)
        with gm.graph.inserting_before(first):
            made = gm.graph.call_function(torch.ops.torchweft.load.default, (str(block.path),))
            made.meta |= {"nn_module_stack": first.meta.get("nn_module_stack", {})}
            for node, number in numbers.items():
                weight = gm.graph.call_function(operator.getitem, (made, number))
                node.replace_all_uses_with(weight)
                example = node.meta.get("example_value")
                if isinstance(example, Tensor):
                    weight.meta["example_value"] = torch.empty_like(example)
                weight.meta["nn_module_stack"] = made.meta["nn_module_stack"]
    gm.recompile()
    return bool(taken)

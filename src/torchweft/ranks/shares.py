"""Shares of rows: what a graph has in the place of an all_reduce that was taken apart.

    y [R, H]  --reduce_scatter-->  [C, H]  --calls row by row-->  [C, H]  --all_gather-->  [R, H]
    x [R, H]  --share----------->  [C, H]      C = R / ranks, rounded up

Rows that are missing in the last shares are filled with zeros, and left out when shares are put
together again, so any number of rows will do. `share` takes a rank's rows of what all ranks have.

`Alike` is what such a graph takes for granted: the inputs that all ranks must be given alike, for a
rank computes its rows for all of them. What they hold is part of what ranks agree on.
"""

from __future__ import annotations

import re
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple
from zlib import crc32

import torch

from torchweft.errors import PlanError
from torchweft.ranks.flights import all_gather_into_tensor, land, reduce_scatter_tensor
from torchweft.ranks.ranks import user_group
from torchweft.ranks.speakers import number_of


@torch.library.custom_op(
    "weft::reduce_scatter_tensor", mutates_args=(),
    schema="(Tensor input, str reduce_op, int group_size, str group_name, bool rounded)"
    " -> Tensor",
)  # fmt: skip
def scatter_rows(
    input: torch.Tensor, reduce_op: str, group_size: int, group_name: str, rounded: bool
) -> torch.Tensor:
    """This rank's share, along dim 0, of everybody's sum."""
    return land(reduce_scatter_tensor(input, reduce_op, group_size, group_name, rounded))[0]


@scatter_rows.register_fake
def _(
    input: torch.Tensor, reduce_op: str, group_size: int, group_name: str, rounded: bool
) -> torch.Tensor:
    return input.new_empty(_rounded(input, group_size))


@torch.library.custom_op(
    "weft::all_gather_into_tensor", mutates_args=(),
    schema="(Tensor input, int group_size, str group_name, SymInt rows) -> Tensor",
)  # fmt: skip
def gather_rows(input: torch.Tensor, group_size: int, group_name: str, rows: int) -> torch.Tensor:
    """The shares of all ranks, one after another along dim 0, as many rows as there are."""
    return land(all_gather_into_tensor(input, group_size, group_name, rows))[0]


@gather_rows.register_fake
def _(input: torch.Tensor, group_size: int, group_name: str, rows: int) -> torch.Tensor:
    return input.new_empty([rows, *input.shape[1:]])


@torch.library.custom_op(
    "weft_rows::share", mutates_args=(),
    schema="(Tensor input, int group_size, str group_name) -> Tensor",
)  # fmt: skip
def share(input: torch.Tensor, group_size: int, group_name: str) -> torch.Tensor:
    """This rank's share, along dim 0, of what all ranks have."""
    shape = _rounded(input, group_size)
    start = user_group(group_name).rank() * shape[0]
    mine = input[start : start + shape[0]]
    if len(mine) == shape[0]:
        return mine.clone(memory_format=torch.contiguous_format)
    filled = input.new_zeros(shape)
    filled[: len(mine)] = mine
    return filled


@share.register_fake
def _(input: torch.Tensor, group_size: int, group_name: str) -> torch.Tensor:
    return input.new_empty(_rounded(input, group_size))


def _rounded(input: torch.Tensor, num_ranks: int) -> list[Any]:
    return [(input.shape[0] + num_ranks - 1) // num_ranks, *input.shape[1:]]


@dataclass(frozen=True)
class Alike:
    """What the ranks of a communicator must have in common: inputs, by name, and calls, as text."""

    communicator: str
    names: frozenset[str]
    code: str


UNLIKE = (
    "A rank computes its share of the rows for all of them here (weft.decompose), so each must be "
    "given the same inputs and weights there; without that rewrite it need not."
)


class Summed(NamedTuple):
    """An input as it was when its checksum was taken."""

    tensor: weakref.ReferenceType[torch.Tensor]
    version: int
    total: int


class Sums:
    """Checksums of what ranks must be given alike; those of weights are kept while they stay."""

    def __init__(self, alike: Sequence[Alike], names: Sequence[str]) -> None:
        self.alike = [
            (each, [at for at, name in enumerate(names) if name in each.names]) for each in alike
        ]
        self._known: dict[int, Summed] = {}

    def __call__(self, told: dict[str, int], given: Sequence[Any]) -> dict[str, int]:
        """What ranks tell each other, with checksums. `told`: by process group."""
        told = dict(told) if self.alike else told
        for each, places in self.alike:
            sums = [self._sum(at, given[at]) for at in places]
            for name in told:
                if each.communicator == re.sub(r"\W", "_", f"group_{name}"):
                    told[name] = number_of(f"{told[name]} {each.code} {sums}")
        return told

    def __enter__(self) -> None:
        """Around a call: if its ranks do not agree, say what else that may come from."""

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if self.alike and type(error) is PlanError:
            raise PlanError(f"{error}\n  {UNLIKE}", rule=error.rule) from error

    def _sum(self, at: int, tensor: Any) -> int:
        """The checksum of an input; the same tensor, unchanged, has that of the call before."""
        if not isinstance(tensor, torch.Tensor) or tensor.numel() == 0:
            return 0
        bare, known = tensor.is_inference(), self._known.get(at)  # such have no version
        version = 0 if bare else tensor._version
        if known is not None and tensor.device.type != "cpu":
            return known.total  # to look would be to wait for the device
        steady = not bare or isinstance(tensor, torch.nn.Parameter)
        if known is not None and steady and known.tensor() is tensor and known.version == version:
            return known.total
        plain = tensor.detach().reshape(-1).contiguous().view(torch.uint8)
        total = crc32(plain.cpu().numpy().data)
        self._known[at] = Summed(weakref.ref(tensor), version, total)
        return total

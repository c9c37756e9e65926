"""Shares of rows: what a graph has in the place of an all_reduce that was taken apart.

    y [R, H]  --reduce_scatter-->  [C, H]  --calls row by row-->  [C, H]  --all_gather-->  [R, H]
    x [R, H]  --share----------->  [C, H]      C = R / ranks, rounded up

Rows that are missing in the last shares are filled with zeros, and left out when shares are put
together again, so any number of rows will do. `share` takes a rank's rows of what all ranks have.
"""

from __future__ import annotations

from typing import Any

import torch

from torchweft.ranks.flights import all_gather_into_tensor, land, reduce_scatter_tensor
from torchweft.ranks.ranks import user_group


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

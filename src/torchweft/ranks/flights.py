"""The `Flight`: a collective that was issued and has not landed.

    flight = all_reduce(x, "sum", "0")        issue: c10d starts to work
    (y,) = land(flight)                       complete: wait for it, never without a bound

Each function here is named after an operator of `_c10d_functional`, takes its arguments and gives
what it gives, but talks to the process group directly: there is no registry of works in between.
The group is found by its name at each call, and all ranks have agreed on the call by then. Beyond
the operator's arguments:

    out    the tensor that takes the result (`dist.all_reduce(x)`: x itself)
    mine   nobody else reads the input afterwards: it may be reduced where it is

On an accelerator a collective runs on the current stream, which is its lane's: NCCL would take one
of its own, without the lane's priority and two events away. Whoever completes it waits for the lane
as for any other step, so there is no work to wait for.

A host's own all_reduce is one whose reduction tells the call: `host: ["host.all_reduce.default", 0,
["", "tp:0"]]`, an operator, which of its arguments is reduced, and all of them.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from operator import attrgetter
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor
from torch.distributed import distributed_c10d as c10d

from torchweft.errors import RunError, unknown
from torchweft.private.core import AllgatherOptions
from torchweft.ranks.ranks import group, place_in, wait, wait_for_message

Tensors = Sequence[Tensor]
Out = Tensor | None
NAMES = ("sum", "avg", "product", "min", "max", "band", "bor", "bxor")
REDUCE: Mapping[str, Any] = MappingProxyType(
    {name: getattr(c10d.ReduceOp, name.upper()) for name in NAMES}
)
HOST = "host: "


@dataclass(frozen=True, slots=True)
class Flight:
    """A work on its way, what it makes, what is to be copied behind it, what it still reads.

    work: None where there is nothing to wait for: a rank outside of the group, or an accelerator.
    back: pairs (target, source), for c10d cannot write into a target with gaps.
    message: of a message between two ranks the process group; None for collectives.
    """

    work: Any
    made: tuple[Tensor, ...]
    back: tuple[tuple[Tensor, Tensor], ...] = ()
    kept: tuple[Tensor, ...] = ()
    message: str | None = None


def land(flight: Flight) -> tuple[Tensor, ...]:
    """Wait until the work has ended; what it made."""
    if flight.work is not None:
        if flight.message is not None:
            wait_for_message(flight.work, flight.message)
        else:
            wait(flight.work)
    for target, source in flight.back:
        target.copy_(source)
    return flight.made


def all_reduce(
    input: Tensor, reduce_op: str, group_name: Any, *, out: Out = None, mine: bool = False
) -> Flight:
    """Everybody's sum (or another reduction), on every rank."""
    if reduce_op.startswith(HOST):
        function, before, behind = _host_call(reduce_op)
        in_place = not function._schema.returns
        given = _copied(input, out, mine) if in_place else input
        made = function(*before, given, *behind)
        return _flight(None, [given if in_place else made], out)
    room = _copied(input, out, mine)
    # Complex numbers go as pairs, as the functional operator sends them.
    sent = torch.view_as_real(room) if room.is_complex() else room
    options = _options(c10d.AllreduceOptions(), room, reduce_op)
    return _flight(_group(group_name).allreduce([sent], options), [room], out)


def broadcast(
    input: Tensor, src: int, group_name: Any, *, out: Out = None, mine: bool = False
) -> Flight:
    """What rank `src` of the group has, on every rank."""
    room = _copied(input, out, mine)
    options = _options(c10d.BroadcastOptions(), room)
    options.rootRank = src
    return _flight(_group(group_name).broadcast([room], options), [room], out)


def all_gather_into_tensor(
    input: Tensor, group_size: int, group_name: Any, rows: int | None = None, *, out: Out = None
) -> Flight:
    """Everybody's tensor, one after another along dim 0; of shares that were rounded up, `rows`."""
    given = input.contiguous()
    room = _room(given, _gathered(given, group_size), out)
    options = _options(AllgatherOptions(), given)
    work = _group(group_name)._allgather_base(room, given, options)
    made = room if rows is None or rows == len(room) else room[:rows]
    return _flight(work, [made], out, given)


def reduce_scatter_tensor(
    input: Tensor,
    reduce_op: str,
    group_size: int,
    group_name: Any,
    rounded: bool = False,
    *,
    out: Out = None,
) -> Flight:
    """This rank's piece, along dim 0, of everybody's sum; `rounded` up if rows do not divide."""
    given = input.contiguous()
    if rounded and (missing := -len(given) % group_size):
        given = torch.cat([given, given.new_zeros([missing, *given.shape[1:]])])
    room = _room(given, _scattered(given, group_size), out)
    options = _options(c10d.ReduceScatterOptions(), given, reduce_op)
    work = _group(group_name)._reduce_scatter_base(room, given, options)
    return _flight(work, [room], out, given)


def all_to_all_single(
    input: Tensor,
    output_split_sizes: Sequence[int],
    input_split_sizes: Sequence[int],
    group_name: Any,
    *,
    out: Out = None,
) -> Flight:
    """The k-th piece along dim 0 goes to rank k; what all ranks sent here, one after another."""
    given = input.contiguous()
    room = _room(given, [sum(output_split_sizes), *given.shape[1:]], out)
    sizes = (list(output_split_sizes), list(input_split_sizes))
    options = _options(c10d.AllToAllOptions(), given)
    work = _group(group_name).alltoall_base(room, given, *sizes, options)
    return _flight(work, [room], out, given)


def all_reduce_coalesced(inputs: Tensors, reduce_op: str, group_name: Any) -> Flight:
    """`all_reduce` of several tensors at once."""
    rooms = tuple(_copied(item, None, False) for item in inputs)
    options = _options(c10d.AllreduceCoalescedOptions(), rooms[0], reduce_op)
    return _flight(_group(group_name).allreduce_coalesced(list(rooms), options), rooms)


def all_gather_into_tensor_coalesced(inputs: Tensors, group_size: int, group_name: Any) -> Flight:
    """`all_gather_into_tensor` of several tensors at once."""
    given = tuple(item.contiguous() for item in inputs)
    rooms = tuple(_room(item, _gathered(item, group_size), None) for item in given)
    options = _options(AllgatherOptions(), given[0])
    work = _group(group_name).allgather_into_tensor_coalesced(list(rooms), list(given), options)
    return _flight(work, rooms, None, *given)


def reduce_scatter_tensor_coalesced(
    inputs: Tensors, reduce_op: str, group_size: int, group_name: Any
) -> Flight:
    """`reduce_scatter_tensor` of several tensors at once."""
    given = tuple(item.contiguous() for item in inputs)
    rooms = tuple(_room(item, _scattered(item, group_size), None) for item in given)
    options = _options(c10d.ReduceScatterOptions(), given[0], reduce_op)
    ranks = _group(group_name)
    work = ranks.reduce_scatter_tensor_coalesced(list(rooms), list(given), options)
    return _flight(work, rooms, None, *given)


def isend(tensor: Tensor, dst: int, tag: int, group_name: Any) -> Flight:
    """A message to a rank, by its number in the world."""
    given = tensor.contiguous()
    work = _group(group_name).send([given], place_in(group_name, dst), tag)
    flight = _flight(work, [given])
    return replace(flight, made=(), kept=(given,), message=str(group_name))


def irecv(tensor: Tensor, src: int, tag: int, group_name: Any, *, out: Out = None) -> Flight:
    """The message of a rank, by its number in the world, into a new tensor like this one."""
    room = _room(tensor, tensor.shape, out)
    work = _group(group_name).recv([room], place_in(group_name, src), tag)
    return replace(_flight(work, [room], out), message=str(group_name))


@cache
def _host_call(text: str) -> tuple[Any, list[Any], list[Any]]:
    """A host's operator, and the arguments before and behind the one that is reduced."""
    name, place, args = json.loads(text.removeprefix(HOST))
    return attrgetter(name)(torch.ops), args[:place], args[place + 1 :]


@torch.library.custom_op(
    "weft::all_reduce", mutates_args=(),
    schema="(Tensor input, str reduce_op, str group_name) -> Tensor",
)  # fmt: skip
def host_all_reduce(input: Tensor, reduce_op: str, group_name: str) -> Tensor:
    """A host's own all_reduce, as graphs show it."""
    return all_reduce(input, reduce_op, group_name).made[0]


@host_all_reduce.register_fake
def _(input: Tensor, reduce_op: str, group_name: str) -> Tensor:
    return torch.empty_like(input)


_KINDS: tuple[Callable[..., Flight], ...] = (
    all_reduce, broadcast, all_gather_into_tensor, reduce_scatter_tensor, all_to_all_single,
    all_reduce_coalesced, all_gather_into_tensor_coalesced, reduce_scatter_tensor_coalesced,
    isend, irecv,
)  # fmt: skip
STARTS = MappingProxyType({start.__name__: start for start in _KINDS})
IN_PLACE = ("all_reduce", "broadcast")
"""Kinds whose result may stand where the input was."""
SINGLE = tuple(name for name in STARTS if not name.endswith("_coalesced"))
"""Kinds with one result, which may be put into a tensor of the caller's."""


def _flight(work: Any, rooms: Sequence[Tensor], out: Out = None, *kept: Tensor) -> Flight:
    back = ((out, rooms[0]),) if out is not None and out is not rooms[0] else ()
    if work is not None and rooms[0].device.type != "cpu":
        work.wait()  # the lane's stream, if the backend has taken another; the host goes on
        work = None
    return Flight(work, tuple(rooms), back, kept)


def _group(name: Any) -> Any:
    return group(name) if isinstance(name, str) else name


def _options(options: Any, given: Tensor, reduce_op: str | None = None) -> Any:
    """The options of a collective: on an accelerator it runs on the current stream."""
    if reduce_op is not None and reduce_op not in REDUCE:
        raise RunError(f"collective: {unknown('reduction', reduce_op, REDUCE)}")
    if reduce_op is not None:
        options.reduceOp = REDUCE[reduce_op]
    options.asyncOp = given.device.type == "cpu"
    return options


def _copied(input: Tensor, out: Out, mine: bool) -> Tensor:
    """Where the input is reduced: in place if it may be, else in a copy without gaps."""
    if (mine or out is input) and input.is_contiguous():
        return input  # perhaps a slice of a whole: the other parts have slices of their own
    return input.clone(memory_format=torch.contiguous_format)


def _room(given: Tensor, shape: Sequence[int], out: Out) -> Tensor:
    """Where the result goes: the caller's tensor if it has no gaps, else a new one."""
    if out is not None and out.is_contiguous() and list(out.shape) == list(shape):
        return out
    return given.new_empty(shape)


def _gathered(tensor: Tensor, num_ranks: int) -> list[int]:
    first = tensor.shape[0] if tensor.dim() else 1
    return [first * num_ranks, *tensor.shape[1:]]


def _scattered(tensor: Tensor, num_ranks: int) -> list[int]:
    if tensor.shape[0] % num_ranks:
        raise RunError(
            f"collective: {tensor.shape[0]} entries of dim 0 do not divide by {num_ranks} ranks."
        )
    return [tensor.shape[0] // num_ranks, *tensor.shape[1:]]

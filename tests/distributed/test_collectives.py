"""Every form of every collective, on two ranks: two phases, in parts, equal to eager to the bit."""

from __future__ import annotations

import functools
import warnings

import pytest
import torch
import torch.distributed as dist
from ranks import check_clean, check_phases, run_once, talks
from torch.distributed import _functional_collectives as funcol

import torchweft as weft

NUM_RANKS = 2
groups: dict[str, dist.ProcessGroup] = {}


def group(name):
    """A group of its own for the world, or for this rank alone; the same at every ask."""
    if not groups:
        groups["other"] = dist.new_group([0, 1])
        alone = [dist.new_group([rank]) for rank in range(NUM_RANKS)]
        groups["alone"] = alone[dist.get_rank()]
    return groups[name]


def all_reduce(x, op="sum"):
    return funcol.all_reduce(x * 2, op, dist.group.WORLD) - 1


def all_reduce_bits(x):
    return funcol.all_reduce(x.int() + 1, "bor", dist.group.WORLD)


def all_reduce_complex(x):
    return torch.view_as_real(funcol.all_reduce(torch.complex(x, x + 1), "sum", dist.group.WORLD))


def all_reduce_with_gaps(x):
    return funcol.all_reduce(x.view(-1, 2, 2).transpose(1, 2), "sum", dist.group.WORLD) * 1


def all_reduce_of_what_is_read_again(x):
    y = x * 2
    return funcol.all_reduce(y, "sum", dist.group.WORLD) + y


def all_reduce_of_an_input(x):
    return funcol.all_reduce(x, "sum", dist.group.WORLD) + x


def all_reduce_of_a_view(x):
    y = x * 2
    z = funcol.all_reduce(y.view(-1, 2, 2), "sum", dist.group.WORLD)
    return z.flatten(1) + y


def all_reduce_of_a_reshaped_row(x):
    y = x.view(-1, 2, 2).transpose(1, 2)
    return funcol.all_reduce(y.reshape(-1, 4), "sum", dist.group.WORLD) + x


def reduce_scatter(x, op="sum"):
    return funcol.reduce_scatter_single(torch.cat([x, x * 2]), op, 0, dist.group.WORLD)


def reduce_scatter_columns(x):
    return funcol.reduce_scatter_single(x * 2, "sum", 1, dist.group.WORLD) + 1


def all_gather(x):
    return funcol.all_gather_single(x * 2, 0, dist.group.WORLD) + 1


def all_gather_columns(x):
    return funcol.all_gather_single(x * 2, 1, dist.group.WORLD) + 1


def all_to_all(x):
    return funcol.all_to_all_single(torch.stack([x, x * 2]), None, None, dist.group.WORLD) + 1


def all_to_all_of_folded_ranks(x):
    return funcol.all_to_all_single(torch.cat([x, x * 2]), None, None, dist.group.WORLD) + 1


def all_to_all_of_sized_pieces(x):
    rows = torch.stack([x, x * 2, x * 3, x * 4])
    return funcol.all_to_all_single(rows, [2, 2], [2, 2], dist.group.WORLD) + 1


def broadcast(x):
    return funcol.broadcast(x * 2, 1, dist.group.WORLD) + 1


def all_reduce_coalesced(x):
    y, z = funcol.all_reduce_coalesced([x * 2, x + 1], "sum", dist.group.WORLD)
    return y * z


def all_gather_coalesced(x):
    y, z = funcol.all_gather_single_coalesced([x * 2, x + 1], dist.group.WORLD)
    return y * z


def reduce_scatter_coalesced(x):
    given = [torch.cat([x, x * 2]), torch.cat([x, x]) + 1]
    y, z = funcol.reduce_scatter_single_coalesced(given, "sum", [0, 0], dist.group.WORLD)
    return y * z


def in_place_all_reduce(x, op=dist.ReduceOp.SUM):
    y = x * 2
    dist.all_reduce(y, op=op)
    return y + 1


def in_place_all_reduce_of_an_input(x):
    dist.all_reduce(x)
    return x + 1


def in_place_all_reduce_with_gaps(x):
    y = (x * 2).view(-1, 2, 2).transpose(1, 2)
    dist.all_reduce(y)
    return y + 1


def in_place_reduce_scatter(x):
    out = torch.empty_like(x)
    dist.reduce_scatter_single(out, torch.cat([x, x * 2]))
    return out + 1


def in_place_all_gather(x):
    out = torch.empty(2 * x.shape[0], x.shape[1])
    dist.all_gather_single(out, x * 2)
    return out + 1


def in_place_all_gather_into_a_list(x):
    out = [torch.empty_like(x) for _ in range(2)]
    dist.all_gather(out, x * 2)
    return out[0] + out[1] * 3


def in_place_all_to_all(x):
    rows = torch.stack([x, x * 2])
    out = torch.empty_like(rows)
    dist.all_to_all_single(out, rows)
    return out + 1


def of_several_groups(x):
    y = funcol.all_reduce(x * 2, "sum", group("other"))
    z = funcol.all_reduce(x + 1, "sum", group("alone"))
    return funcol.all_reduce(y * z, "max", dist.group.WORLD)


def reduction(function, op):
    return functools.partial(function, op=op)


ROWS = {
    "all_reduce": (all_reduce, "all_reduce"),
    "all_reduce bits": (all_reduce_bits, "all_reduce"),
    "all_reduce complex": (all_reduce_complex, "all_reduce"),
    "all_reduce with gaps": (all_reduce_with_gaps, "all_reduce"),
    "all_reduce read again": (all_reduce_of_what_is_read_again, "all_reduce"),
    "all_reduce of an input": (all_reduce_of_an_input, "all_reduce"),
    "all_reduce of a view": (all_reduce_of_a_view, "all_reduce"),
    "all_reduce of a reshaped row": (all_reduce_of_a_reshaped_row, "all_reduce"),
    "reduce_scatter": (reduce_scatter, "reduce_scatter_tensor"),
    "reduce_scatter avg": (reduction(reduce_scatter, "avg"), "reduce_scatter_tensor"),
    "reduce_scatter columns": (reduce_scatter_columns, "reduce_scatter_tensor"),
    "all_gather": (all_gather, "all_gather_into_tensor"),
    "all_gather columns": (all_gather_columns, "all_gather_into_tensor"),
    "all_to_all": (all_to_all, "all_to_all_single"),
    "all_to_all folded": (all_to_all_of_folded_ranks, "all_to_all_single"),
    "all_to_all sized": (all_to_all_of_sized_pieces, "all_to_all_single"),
    "broadcast": (broadcast, "broadcast"),
    "all_reduce coalesced": (all_reduce_coalesced, "all_reduce_coalesced"),
    "all_gather coalesced": (all_gather_coalesced, "all_gather_into_tensor_coalesced"),
    "reduce_scatter coalesced": (reduce_scatter_coalesced, "reduce_scatter_tensor_coalesced"),
    "in place all_reduce": (in_place_all_reduce, "all_reduce"),
    "in place all_reduce with gaps": (in_place_all_reduce_with_gaps, "all_reduce"),
    "in place all_reduce of an input": (in_place_all_reduce_of_an_input, "all_reduce"),
    "in place reduce_scatter": (in_place_reduce_scatter, "reduce_scatter_tensor"),
    "in place all_gather": (in_place_all_gather, "all_gather_into_tensor"),
    "in place all_gather list": (in_place_all_gather_into_a_list, "all_gather_into_tensor"),
    "in place all_to_all": (in_place_all_to_all, "all_to_all_single"),
    "several groups": (of_several_groups, "all_reduce"),
}
for name in ("avg", "product", "min", "max"):
    ROWS[f"all_reduce {name}"] = (reduction(all_reduce, name), "all_reduce")
for op in (dist.ReduceOp.AVG, dist.ReduceOp.MAX):
    ROWS[f"in place {op}"] = (reduction(in_place_all_reduce, op), "all_reduce")


def check_form(rank, *, name):
    """A form gives the bits of eager, whole and in parts, and leaves its input as eager does."""
    function, kind = ROWS[name]
    group("other")
    x = torch.arange(24.0).view(6, 4) % 5 + 2 * rank
    given = x.clone()
    want = function(given)
    for parts, strategy in ((1, "sequential"), (2, weft.overlap(parts=2))):
        model = weft.compile(function, strategy, fallback="error")
        for _ in range(2):
            mine = x.clone()
            assert torch.equal(model(mine), want), f"{model(x.clone())} is not {want}"
            assert torch.equal(mine, given), "the input was changed"
        check_clean(model)
        plan = weft.plans(model)[0]
        assert plan.num_parts == parts
        check_phases(plan)
        assert set(talks(model)) == {(kind, "row-wise")}, weft.report(model)
        last = [step for step in plan.steps if step.kind == "issue"][-1]
        assert last.parts == (None if parts == 1 else (1, 2)), "each part has its own collective"


def broken_broadcast(x):
    y = x * 2
    dist.broadcast(y, 0)
    return y + 1


def broken_reduce(x):
    y = x * 2
    dist.reduce(y, 0)
    return y[:1] * 0 + x


def broken_async(x):
    y = x * 2
    dist.all_reduce(y, async_op=True).wait()
    return y + 1


def broken_barrier(x):
    y = x * 2
    dist.barrier()
    return y + 1


def broken_reduce_scatter_list(x):
    out, rows = torch.empty_like(x), [x * 2, x * 3]
    dist.reduce_scatter(out, rows)
    return out + 1


def broken_all_to_all_list(x):
    out, rows = [torch.empty_like(x) for _ in range(2)], [x * 2, x * 3]
    dist.all_to_all(out, rows)
    return out[0] + out[1] * 3


def broken_send(x):
    y, out = x * 2, torch.empty_like(x)
    peer = 1 - dist.get_rank()
    if peer:
        dist.send(y, peer)
        dist.recv(out, peer)
    else:
        dist.recv(out, peer)
        dist.send(y, peer)
    return out + 1


BREAKS = {
    "broadcast": (broken_broadcast, "dist.broadcast(y, 0)"),
    "reduce": (broken_reduce, "dist.reduce(y, 0)"),
    "async_op": (broken_async, "dist.all_reduce(y, async_op=True)"),
    "barrier": (broken_barrier, "dist.barrier()"),
    "list reduce_scatter": (broken_reduce_scatter_list, "dist.reduce_scatter(out, rows)"),
    "list all_to_all": (broken_all_to_all_list, "dist.all_to_all(out, rows)"),
    "send": (broken_send, "dist."),
}


def check_break(rank, *, name):
    """What Dynamo does not capture gives right results, and the report names its line."""
    function, code = BREAKS[name]
    warnings.filterwarnings("ignore", "Dynamo does not know how to trace")
    x = torch.arange(24.0).view(6, 4) + rank
    want = function(x.clone())
    model = weft.compile(function, weft.overlap(parts=2))
    for _ in range(2):
        assert torch.equal(model(x.clone()), want)
    report = weft.report(model)
    if name == "list reduce_scatter" and torch.__version__ >= "2.14":  # captured from then on
        assert not report.breaks and not report.fallbacks, report
        return
    assert any(code in text and __file__ in text for text in report.breaks), report
    assert code in str(report)


def check_error(rank):
    """What gloo cannot do is a `RunError` that says so, as it is an error of eager."""

    def bits_of_floats(x):
        return funcol.all_reduce(x * 2, "bor", dist.group.WORLD)

    x = torch.ones(6, 4)
    with pytest.raises(RuntimeError, match="BOR"):
        funcol.wait_tensor(bits_of_floats(x))
    with pytest.raises(weft.RunError, match="BOR"):
        weft.compile(bits_of_floats, weft.overlap(parts=2))(x)


def check_unlike_pieces(rank):
    """An all_to_all whose pieces are of other sizes on the other rank: run whole, as eager."""
    sends, receives = ([1, 3], [1, 2]) if rank == 0 else ([2, 4], [3, 4])

    def exchange(x):
        return funcol.all_to_all_single(x * 2, receives, sends, dist.group.WORLD) + 1

    x = torch.arange(4.0 * sum(sends)).view(-1, 4) + rank
    want = exchange(x)
    model = weft.compile(exchange, weft.overlap(parts=2))
    for _ in range(3):
        assert torch.equal(model(x), want)
    assert weft.report(model).num_uncaptured == 0


def check_send(rank):
    """Functional send and receive, rank 0 ahead of rank 1: what is received is what was sent."""
    name, ops = dist.group.WORLD.group_name, torch.ops._c10d_functional

    def first(x):
        y = x * 2
        ops.wait_tensor(ops.isend(y, 1, 0, name))
        return y

    def second(x):
        return ops.wait_tensor(ops.irecv(torch.empty_like(x), 0, 0, name)) + 1

    x = torch.arange(24.0).view(6, 4)
    model = weft.compile((first, second)[rank], weft.overlap(parts=2))
    for _ in range(3):
        assert torch.equal(model(x), x * 2 + rank)
    report = weft.report(model)
    assert report.num_uncaptured == 0 and not report.breaks, report
    assert [kind for kind, _ in talks(model)] == [("send", "recv")[rank]]


CASES = {f"form {name}": functools.partial(check_form, name=name) for name in ROWS}
CASES |= {f"break {name}": functools.partial(check_break, name=name) for name in BREAKS}
CASES |= {"unlike pieces": check_unlike_pieces, "send": check_send}
CASES["error"] = check_error  # the last: its group is dead afterwards


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    return run_once(tmp_path_factory, __name__, lambda folder: CASES)


@pytest.mark.parametrize("name", CASES)
def test_case(results, name):
    assert results[name] == "", results[name]

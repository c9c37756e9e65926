"""Mutations at the aten level go back in place, or stay copies with a note."""

from __future__ import annotations

import pytest
import torch
from torch import fx
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import torchweft as weft
from torchweft.api import session_of
from torchweft.capture import aten as aten_passes

ROWS, HEADS, LENGTH, HIDDEN = 6, 4, 64, 8


@pytest.fixture(autouse=True)
def _fresh():
    torch.manual_seed(0)
    torch._dynamo.reset()


def by_index(cache, key, at):
    cache[:, :, at] = key
    return (cache * 2).sum(-1)


def by_index_copy(cache, key, at):
    cache.index_copy_(2, at, key)
    return cache.sum(-1)


def by_slice(cache, key, at):
    cache[:, :, 3:4] = key
    return cache.sum(-1)


def by_select(cache, key, at):
    cache[:, 1, 3] = key[:, 1, 0]
    return cache.sum(-1)


def twice(cache, key, at):
    cache[:, :, 3:4] = key
    first = cache.sum(-1)
    cache.add_(1)
    return first + cache.amax(-1)


def unknown(cache, key, at):
    cache.exp_()
    return cache.sum(-1)


def reads_old(cache, key, at):
    old = cache[:, :, :2]
    cache[:, :, at] = key
    return old.sum(-1) + cache[:, :, :2].mean(-1)


def from_itself(cache, key, at):
    cache[:, :, 1:3] = cache[:, :, 4:6]
    return cache.sum(-1)


def returns_it(cache, key, at):
    cache.index_copy_(2, at, key)
    return cache, cache[:, 0]


def keeps_old(cache, key, at):
    old = cache * 1
    cache.mul_(2).index_copy_(2, at, key)
    return old + cache


WRITES = [
    by_index, by_index_copy, by_slice, by_select, twice, reads_old, from_itself, returns_it,
    keeps_old, unknown,
]  # fmt: skip


def inputs():
    return (
        torch.randn(ROWS, HEADS, LENGTH, HIDDEN),
        torch.randn(ROWS, HEADS, 1, HIDDEN),
        torch.tensor([5]),
    )


@pytest.mark.parametrize("write", WRITES, ids=lambda write: write.__name__)
def test_writes_are_those_of_eager(write):
    for strategy in ("sequential", weft.overlap(parts=2)):
        torch._dynamo.reset()
        run = weft.compile(write, strategy, level="aten")
        for _ in range(2):
            cache, key, at = inputs()
            twin = cache.clone()
            with torch.no_grad():
                found, wanted = run(cache, key, at), write(twin, key, at)
            assert torch.equal(cache, twin)
            for mine, theirs in zip(tree_leaves(found), tree_leaves(wanted), strict=True):
                torch.testing.assert_close(mine, theirs)
        assert [piece.graph.level for piece in session_of(run).pieces] == ["aten"]


class Counted(TorchDispatchMode):
    """Counts the bytes that calls write: new results, and what they change in place."""

    def __init__(self):
        super().__init__()
        self.num_bytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        views = all(r.alias_info is not None and not r.alias_info.is_write
                    for r in func._schema.returns)  # fmt: skip
        if not views:
            name, leaves = func._schema.name, tree_leaves(result)
            if name in ("aten::index_put_", "aten::index_copy_"):
                leaves = [leaf for leaf in tree_leaves(args) if isinstance(leaf, torch.Tensor)][1:]
            self.num_bytes += sum(t.nbytes for t in leaves if isinstance(t, torch.Tensor))
        return result


def count(write):
    """Bytes written by the piece of a function (Dynamo steps aside under a mode), and its notes."""
    run = weft.compile(write, "sequential", level="aten")
    session = session_of(run)
    with torch.no_grad(), session.service.keep_inputs() as kept:
        run(*inputs())
    [(piece, given)] = list(kept.items())
    with torch.no_grad(), Counted() as counted:
        piece(*given)
    return counted.num_bytes, list(piece.captured.notes)


def put_index(cache, key, at):
    cache[:, :, at] = key
    return key + 1


def put_copy(cache, key, at):
    cache.index_copy_(2, at, key)
    return key + 1


def put_slice(cache, key, at):
    cache[:, :, 3:4] = key
    return key + 1


@pytest.mark.parametrize("write", [put_index, put_copy, put_slice])
def test_a_write_of_one_token_copies_one_token(write, monkeypatch):
    whole = ROWS * HEADS * LENGTH * HIDDEN * 4
    after, notes = count(write)
    assert notes == []
    assert after <= 2 * whole // LENGTH + 8  # the token, its place, and what is handed out
    monkeypatch.setattr(aten_passes, "put_back", lambda gm: [])
    torch._dynamo.reset()
    before, _ = count(write)
    assert before >= 2 * whole


def test_a_written_input_that_is_handed_out_is_the_input_itself():
    """With tensor subclasses around, AOTAutograd hands out the final copy, not the input."""
    graph = fx.Graph()
    cache, key, at = (graph.placeholder(name) for name in ("cache", "key", "at"))
    new = graph.call_function(torch.ops.aten.index_copy.default, (cache, 2, at, key))
    back = graph.call_function(torch.ops.aten.copy_.default, (cache, new))
    graph.output((back, back))
    given = inputs()
    for node, value in zip((cache, key, at, new, back), (*given, given[0], given[0]), strict=True):
        node.meta["val"] = value
    gm = fx.GraphModule(torch.nn.Module(), graph)
    assert aten_passes.put_back(gm) == []
    gm.recompile()
    wanted = given[0].index_copy(2, given[2], given[1])
    found, again = gm(*given)
    assert found is given[0] and again is found and torch.equal(found, wanted)


def test_what_stays_a_copy_has_a_note():
    _, notes = count(unknown)
    assert notes == ["arg1_1 is written through a copy of the whole: exp is no known write to it"]

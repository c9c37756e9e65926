"""Checksums of what ranks must be given alike: taken anew where something changed, only there."""

from __future__ import annotations

import pytest
import torch

from torchweft.plan.deals import Alike
from torchweft.plan.graph import Graph, Op, Value
from torchweft.plan.sizes import Size
from torchweft.ranks import checksums
from torchweft.ranks.checksums import Checksums

SHAPE = (Size.of(4), Size.of(4))
NAMES = ("x", "weight", "count")
GRAPH = Graph(
    "alike",
    tuple(Value(name, SHAPE) for name in (*NAMES, "y")),
    (Op("f", NAMES, ("y",), rows="mixing"),),
    NAMES,
    ("y",),
    None,
)


@pytest.fixture
def taken(monkeypatch):
    """The tensors whose sums were taken, by shape."""
    seen, take = [], checksums._sum_of
    monkeypatch.setattr(checksums, "_sum_of", lambda t: (seen.append(tuple(t.shape)), take(t))[1])
    return seen


def number(sums: Checksums, *given: object) -> int:
    (told,) = sums.numbers(given, in_parts=False).values()
    return told


def test_an_input_that_is_new_at_each_call_does_not_have_weights_summed_again(taken):
    sums, weight = Checksums(GRAPH, [Alike("tp", frozenset(NAMES))], str), torch.ones(8)
    told = {number(sums, torch.zeros(4), weight, 3) for _ in range(5)}
    assert len(told) == 1, "equal inputs, equal numbers"
    assert taken.count((8,)) == 1 and taken.count((4,)) == 5


def test_what_is_written_or_replaced_tells_another_number(taken):
    sums, x, weight = (
        Checksums(GRAPH, [Alike("tp", frozenset(NAMES))], str),
        torch.zeros(4),
        torch.ones(8),
    )
    before = number(sums, x, weight, 3)
    assert number(sums, x, weight, 3) == before and len(taken) == 2
    weight[0] = 2.0
    assert number(sums, x, weight, 3) != before
    assert number(sums, x, torch.ones(8), 3) == before


def test_tensors_of_inference_mode_are_looked_at_each_time():
    sums = Checksums(GRAPH, [Alike("tp", frozenset({"weight"}))], str)
    with torch.inference_mode():
        weight = torch.ones(8)
        before = number(sums, None, weight, None)
        weight[0] = 2.0
        assert number(sums, None, weight, None) != before


def test_a_graph_that_asks_for_nothing_compares_nothing(taken):
    assert Checksums(GRAPH, [], str).numbers([torch.ones(4)] * 3, in_parts=True) == {}
    assert not taken

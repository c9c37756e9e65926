"""Steady calls: one look-up, and still everything that a first call does where it matters."""

from __future__ import annotations

import threading

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters

import torchweft as weft
from torchweft.api import session_of
from torchweft.capture.guards import Guards
from torchweft.errors import WeftError
from torchweft_tools.bench import dispatch, stream

pytestmark = pytest.mark.usefixtures("fresh")


def layers():
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8)).eval()


def steady(model, *inputs):
    """Call often enough that the short way is open, and see that it is."""
    for _ in range(3):
        model(*inputs)
    (piece,) = session_of(model).pieces
    assert piece._ready, "no call took the short way"
    return piece


@pytest.mark.parametrize("strategy", ["sequential", weft.overlap(parts=2)])
def test_a_steady_call_looks_nothing_up_again(strategy, monkeypatch):
    plain = layers()
    model, x = weft.compile(nn.Sequential(*plain), strategy), torch.randn(6, 8)
    piece = steady(model, x)
    monkeypatch.setattr(piece, "_first_call", None)
    for _ in range(3):
        y = torch.randn(6, 8)
        torch.testing.assert_close(model(y), plain(y))
    assert piece.plans.strategy_runs == 1


def test_one_plan_serves_all_sizes_of_other_dims_and_is_right_for_each():
    plain = layers()
    model = weft.compile(nn.Sequential(*plain), weft.overlap(parts=2))
    for length in (3, 5, 7, 9, 5, 7):  # from the second on, the length is a symbol
        x = torch.randn(6, length, 8)
        torch.testing.assert_close(model(x), plain(x))
    pieces = session_of(model).pieces
    assert [piece.plans.strategy_runs for piece in pieces] == [1, 1]
    assert len(pieces[-1]._ready) == 3, "each length has borders and sizes of its own"


def test_other_sizes_take_the_long_way_once_each():
    plain = layers()
    model = weft.compile(nn.Sequential(*plain), weft.overlap(parts=2))
    piece = steady(model, torch.randn(6, 8))
    for rows in (5, 7, 5, 7, 6):
        x = torch.randn(rows, 8)
        torch.testing.assert_close(model(x), plain(x))
    assert len(piece._ready) == 3 and piece.plans.strategy_runs == 1


def test_what_the_host_tells_has_its_own_short_way(monkeypatch):
    seen = []

    def look(s):
        seen.append(s.context.phase)
        s.sequential()

    model, x = weft.compile(layers(), look), torch.randn(6, 8)
    piece = steady(model, x)
    for phase in ("decode", "prefill", "decode") * 2:
        with weft.context(phase=phase):
            model(x)
    assert seen == [None, "decode", "prefill"]
    monkeypatch.setattr(piece, "_first_call", None)
    with weft.context(phase="decode"):
        model(x)
    with pytest.raises(TypeError), weft.context(phase="decode", tokens_per_request=[2, 4]):
        model(x)  # the long way: other requests may be cut elsewhere


def test_an_error_in_a_steady_call_tells_its_step():
    class Picky(nn.Module):
        def forward(self, x, index):
            return x[:, index] * 2

    model = weft.compile(Picky(), "sequential")
    x, good = torch.randn(6, 8), torch.tensor([0, 3])
    steady(model, x, good)
    with pytest.raises(weft.RunError, match=r"run: .* failed: IndexError"):
        model(x, torch.tensor([0, 9]))
    assert torch.equal(model(x, good), x[:, good] * 2)


def test_trace_and_check_of_a_steady_model():
    model, x = weft.compile(layers(), weft.overlap(parts=2)), torch.randn(6, 8)
    steady(model, x)
    assert weft.trace(model, x).spans
    assert weft.check(model, x)


def test_overlapping_inputs_are_seen_in_steady_calls_too():
    class Adds(nn.Module):
        def forward(self, x, y):
            return x.add_(y * 1)

    model = weft.compile(Adds(), weft.overlap(parts=2))
    steady(model, torch.zeros(6, 8), torch.ones(6, 8))
    room = torch.arange(56.0).view(7, 8)
    model(room[1:], room[:-1])
    wanted = torch.arange(56.0).view(7, 8)
    wanted[1:].add_(wanted[:-1] * 1)
    assert torch.equal(room, wanted)
    assert any("overlap in memory" in why for why, _ in weft.report(model).fallbacks)


def test_a_batch_stays_dynamic_after_dynamo_was_reset():
    plain = layers()
    model = weft.compile(nn.Sequential(*plain), "sequential")
    model(torch.randn(6, 8))
    torch._dynamo.reset()
    before = counters["stats"]["unique_graphs"]
    for rows in (6, 7, 9, 33):
        x = torch.randn(rows, 8)
        torch.testing.assert_close(model(x), plain(x))
    assert counters["stats"]["unique_graphs"] == before + 1


def test_who_else_compiles_with_our_inputs_does_not_compile_anew():
    x, plain = torch.randn(6, 8), layers()
    stock = torch.compile(nn.Sequential(*plain), backend="eager")
    stock(x)
    before = counters["stats"]["unique_graphs"]
    weft.compile(layers(), weft.overlap(parts=2))(x)
    stock(x)
    assert counters["stats"]["unique_graphs"] == before + 1


def test_every_call_of_which_nothing_is_captured_is_counted():
    inner = torch.compiler.disable(lambda x: x * 2)
    model, x = weft.compile(lambda x: inner(x), "sequential"), torch.randn(6, 8)
    for _ in range(3):
        model(x)
    assert weft.report(model).fallbacks[0][1] == 3


def test_steady_calls_of_several_sizes_from_several_threads():
    plain = layers()
    model = weft.compile(nn.Sequential(*plain), weft.overlap(parts=2))
    steady(model, torch.randn(6, 8))
    wrong = []

    def call(seed):
        with torch.no_grad():
            for number in range(40):
                x = torch.randn(4 + (seed + number) % 5, 8)
                if not torch.allclose(model(x), plain(x), atol=1e-6):
                    wrong.append(seed)

    threads = [threading.Thread(target=call, args=(seed,)) for seed in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_guards_are_the_same_in_python_and_in_sympy():
    import sympy
    from torch.utils._sympy.functions import FloorDiv, Mod

    s, t = (sympy.Symbol(name, integer=True, positive=True) for name in ("s0", "s1"))
    conditions = (
        sympy.Ge(s, 2), sympy.Eq(Mod(s, 4), 0), sympy.Ne(FloorDiv(s, 3), 5), sympy.Lt(s * t, 90),
    )  # fmt: skip
    for rows in range(1, 40):
        env = {"s0": rows, "s1": 3}
        values = {symbol: sympy.Integer(env[str(symbol)]) for symbol in (s, t)}
        broken = [str(c) for c in conditions if c.xreplace(values) == sympy.false]
        assert Guards(conditions).refuse(env) == (broken[0] if broken else "")
    assert Guards(conditions).refuse({"s1": 3}) == "", "unknown sizes break nothing"


def test_dispatch_row_and_summary_take_the_worst_that_counts():
    times = {name: [2.0] * 30 for pair in dispatch.RATIOS.values() for name in pair}
    small = dispatch.row(8, times | {"eager": [1.0] * 30})
    large = dispatch.row(64, times | {"eager": [4.0] * 30})
    assert (small["sequential_vs_eager"], large["sequential_vs_eager"]) == (2, 0.5)
    found = dispatch.summary([small, large])
    assert found["sequential_vs_eager"] == 0.5, "small models do not count here"
    assert found["two_parts_vs_plain"] == 2


def test_stream_of_many_sizes_runs_the_strategy_once_a_bucket():
    rows, summary = stream.run(num_calls=60, num_counts=40)
    assert sum(row["calls"] for row in rows) == 60
    assert summary["strategy_runs"] <= 20 and summary["recompiles"] == 0
    with pytest.raises(WeftError, match="must be from 1 to 5"):
        stream.run(num_calls=5, num_counts=9)

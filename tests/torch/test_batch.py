"""Where the batch is: behind graph breaks, inside of objects; and what is told if there is none."""

from __future__ import annotations

import threading
from dataclasses import dataclass

import pytest
import torch
from torch import nn

import torchweft as weft


class Two(nn.Module):
    """Two layers; subclasses put something between them."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x):
        return self.down(self.between(self.up(x).relu()))

    def between(self, y):
        torch._dynamo.graph_break()
        return y


class Turned(Two):
    def forward(self, x):
        y = self.up(x).t()
        torch._dynamo.graph_break()
        return self.down(y.t()).relu()


class Foreign(Two):
    """What comes back from code that Dynamo does not see is another tensor."""

    def between(self, y):
        return torch.compiler.disable(lambda t: t.clone())(y)


class Folded(Two):
    """Behind the break positions of all rows are one dim."""

    def forward(self, x):
        y = self.up(x).flatten(0, 1)
        torch._dynamo.graph_break()
        return self.down(torch.compiler.disable(torch.clone)(y)).relu()


class Nested(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner, self.last = Two(), nn.Linear(8, 4)

    def forward(self, x):
        y = self.inner(x)
        torch.compiler.disable(len)(y)
        return self.last(y).relu()


@dataclass
class Pair:
    x: torch.Tensor
    scale: torch.Tensor


class Slots:
    __slots__ = ("x",)

    def __init__(self, x):
        self.x = x


class Box:
    def __init__(self, **inside):
        self.inside = inside


def parts_of(model):
    """Of each piece that has run, the numbers of parts of its plans."""
    return [sorted({plan.num_parts for plan in p.plans}) for p in weft.report(model).pieces]


@pytest.mark.parametrize("kind", [Two, Turned, Foreign, Nested])
@pytest.mark.parametrize("rows", [6, 16])
def test_the_batch_is_carried_past_graph_breaks(kind, rows):
    model, x = kind().eval(), torch.randn(rows, 8)
    with torch.no_grad():
        wanted = model(x)
        weft.compile(model, weft.overlap(parts=2), fallback="error")
        for _ in range(3):
            torch.testing.assert_close(model(x), wanted)
        torch.testing.assert_close(model(torch.cat([x, x])), torch.cat([wanted, wanted]))
    report = weft.report(model)
    assert len(report.pieces) >= 2 and report.fallbacks == ()
    assert all(parts == [2] for parts in parts_of(model)), report


def test_rows_that_are_folded_into_another_dim_are_the_batch_behind_a_break():
    model, x = Folded().eval(), torch.randn(6, 5, 8)
    with torch.no_grad():
        wanted = model(x)
        weft.compile(model, weft.overlap(parts=2), fallback="error")
        for _ in range(2):
            torch.testing.assert_close(model(x), wanted)
    assert parts_of(model) == [[2], [2]]


@pytest.mark.filterwarnings("ignore:The .grad attribute")  # Dynamo's own look at a tensor
def test_a_backward_hook_leaves_parts_in_training():
    model, plain, x = Two(), Two(), torch.randn(6, 8, requires_grad=True)
    plain.load_state_dict(model.state_dict())
    for each in (model, plain):
        each.up.register_full_backward_hook(lambda *_: None)
    weft.compile(model, weft.overlap(parts=2))
    for _ in range(2):
        model(x).square().sum().backward()
        plain(x).square().sum().backward()
    for mine, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad)
    report = weft.report(model)
    assert [2] in parts_of(model)
    assert all(parts == [2] for parts in parts_of(model)), report


@pytest.mark.parametrize(
    "wrap",
    [lambda x: Pair(x, x), Slots, lambda x: Box(x=x, n=3)],
    ids=["dataclass", "slots", "attributes"],
)
def test_inputs_that_are_only_inside_of_objects_are_split(wrap):
    def run(item):
        x = item.inside["x"] if isinstance(item, Box) else item.x
        return (x.sin() @ torch.ones(8, 8)).relu()

    compiled, x = weft.compile(run, weft.overlap(parts=2), fallback="error"), torch.randn(6, 8)
    for _ in range(2):
        torch.testing.assert_close(compiled(wrap(x)), run(wrap(x)))
    assert parts_of(compiled) == [[2]]


def test_of_sizes_inside_of_an_object_the_commonest_is_the_batch():
    def run(item):
        return item.inside["a"] * item.inside["b"] + item.inside["table"].sum(0)

    given = Box(table=torch.randn(9, 8), a=torch.randn(6, 8), b=torch.randn(6, 8))
    compiled = weft.compile(run, weft.overlap(parts=2), fallback="error")
    torch.testing.assert_close(compiled(given), run(given))
    assert parts_of(compiled) == [[2]]


def test_a_piece_without_a_batch_is_counted_with_its_reason():
    run = weft.compile(lambda x: x.sin() * 2, weft.overlap(parts=2))
    x = torch.randn(1, 8)
    for _ in range(3):
        assert torch.equal(run(x), x.sin() * 2)
    ((reason, count),) = weft.report(run).fallbacks
    assert count == 3 and "has no batch to split" in reason and "one row" in reason
    assert "fallback 3 x" in str(weft.report(run))


def test_a_size_that_dynamo_fixes_is_told():
    def run(x):
        return x.sin() * (2 if int(x.shape[0]) == 6 else 3)

    compiled, x = weft.compile(run, weft.overlap(parts=2)), torch.randn(6, 8)
    assert torch.equal(compiled(x), run(x))
    ((reason, _),) = weft.report(compiled).fallbacks
    assert "Dynamo fixed" in reason and "6" in reason


@pytest.mark.parametrize("call", [lambda x: x.sin() * 2, lambda x: x - x], ids=["one", "two"])
def test_no_batch_is_an_error_where_fallbacks_are(call):
    run = weft.compile(call, weft.overlap(parts=2), fallback="error")
    with pytest.raises(weft.StrategyError, match="has no batch to split"):
        run(torch.randn(1, 8))


def test_a_graph_of_which_no_op_may_be_split_is_counted():
    def run(x):
        return x.cumsum(0)

    compiled, x = weft.compile(run, weft.overlap(parts=2)), torch.randn(6, 8)
    for _ in range(2):
        assert torch.equal(compiled(x), run(x))
    ((reason, count),) = weft.report(compiled).fallbacks
    assert count == 2 and "no op of 'piece0' may be split" in reason and "cumsum" in reason
    torch._dynamo.reset()
    strict = weft.compile(run, weft.overlap(parts=2), fallback="error")
    with pytest.raises(weft.StrategyError, match="cumsum"):
        strict(x)


def test_a_strategy_that_asks_for_no_parts_is_content():
    for strategy in ("sequential", weft.overlap(parts=2, min_tokens=100)):
        torch._dynamo.reset()
        run = weft.compile(lambda x: x.cumsum(0), strategy, fallback="error")
        run(torch.randn(6, 8))
        run(torch.randn(1, 8))
        assert weft.report(run).fallbacks == ()


def test_a_loop_with_growing_shapes_keeps_its_parts():
    model = Foreign().eval()
    weft.compile(model, weft.overlap(parts=2), fallback="error")
    plain = Foreign().eval()
    plain.load_state_dict(model.state_dict())
    with torch.no_grad():
        for length in range(1, 6):
            x = torch.randn(4, length, 8)
            torch.testing.assert_close(model(x), plain(x))
    assert all(parts == [2] for parts in parts_of(model))


def test_threads_do_not_disturb_each_others_batches():
    model, plain = Foreign().eval(), Foreign().eval()
    plain.load_state_dict(model.state_dict())
    weft.compile(model, weft.overlap(parts=2), fallback="error")
    wrong = []

    def work(rows):
        with torch.no_grad():
            for _ in range(5):
                x = torch.randn(rows, 8)
                if not torch.allclose(model(x), plain(x), atol=1e-5):
                    wrong.append(rows)

    with torch.no_grad():
        model(torch.randn(4, 8))
    threads = [threading.Thread(target=work, args=(rows,)) for rows in (4, 6, 8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong and weft.report(model).fallbacks == ()

"""Inner compilers: other kernels inside ops, the same results within rounding."""

from __future__ import annotations

import threading
import time

import pytest
import torch
from torch import nn

import torchweft as weft
from torchweft.api import session_of
from torchweft.capture.bodies import inner
from torchweft.capture.rows.axes import order_of
from torchweft.errors import CaptureError, RunError, StrategyError

pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit.*is deprecated")  # Inductor's imports


@torch.library.custom_op("inner_test::read", mutates_args=())
def read(x: torch.Tensor) -> torch.Tensor:
    return x + 1


read.register_fake(torch.empty_like)


class Mlp(nn.Module):
    def __init__(self, bias: bool) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(32, 64, bias=bias), nn.Linear(64, 32, bias=bias)

    def forward(self, x):
        return x + self.down(torch.nn.functional.silu(self.up(x)))


@pytest.mark.parametrize("name", ["onednn", "inductor"])
@pytest.mark.parametrize("level", ["torch", "aten"])
def test_results_are_those_of_eager(name, level):
    torch.manual_seed(0)
    model = Mlp(bias=False).eval()
    with torch.no_grad():
        for rows in (8, 9, 64):
            x = torch.randn(rows, 32)
            wanted = model.forward(x)
            weft.compile(model, weft.overlap(parts=2), inner=name, level=level)
            torch.testing.assert_close(model(x), wanted)
    assert weft.plans(model)[0].num_parts == 2
    assert weft.report(model).fallbacks == ()


def test_onednn_takes_the_place_of_linear():
    model, x = Mlp(bias=True).eval(), torch.randn(8, 32)
    with torch.no_grad():
        wanted = model(x)
        weft.compile(model, "sequential", inner="onednn")
        torch.testing.assert_close(model(x), wanted)
        with torch.profiler.profile() as profile:
            model(x)
    names = {event.name for event in profile.events()}
    assert "mkldnn::_linear_pointwise" in names
    assert "aten::addmm" not in names


def test_onednn_leaves_alone_what_it_cannot_do():
    x, weight = torch.randn(4, 8), torch.randn(3, 8, requires_grad=True)
    assert inner.linear(x, weight).requires_grad
    with torch.no_grad():
        double = inner.linear(x.double(), weight.double())
        assert torch.equal(double, torch.nn.functional.linear(x.double(), weight.double()))
        assert inner.linear(torch.empty(0, 8), weight).shape == (0, 3)


def test_an_unknown_inner_compiler_is_refused():
    with pytest.raises(StrategyError, match="Known: eager, inductor, onednn"):
        weft.compile(Mlp(bias=False), "sequential", inner="tvm")


def structures_of(model):
    bodies = session_of(model).pieces[-1].bodies
    forms = [form for body in bodies for form in getattr(body, "by", ()) if not form.rooms]
    return list({id(form): form for form in forms}.values())


class Stack(nn.Module):
    """Layers that a mark keeps apart: equal ops, and a different one between them."""

    def __init__(self, num_layers: int = 3) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Mlp(bias=True) for _ in range(num_layers))

    def forward(self, x):
        for layer in self.layers:
            with weft.mark("layer"):
                x = layer(x)
        return x


@torch.no_grad()
def test_ops_of_one_structure_are_compiled_once():
    model, x = Stack(3).eval(), torch.randn(6, 32)
    wanted = model(x)
    weft.compile(model, weft.overlap(parts=2), inner="inductor")
    torch.testing.assert_close(model(x), wanted)
    assert len(structures_of(model)) == 1
    assert len(weft.plans(model)[0].graph.ops) == 3
    # Once for all layers, and once for the last of them, which writes where the output belongs.
    assert weft.report(model).pieces[0].num_compiled == 2
    assert "compiled by Inductor: 2 time(s)" in str(weft.report(model))


@torch.no_grad()
def test_a_steady_call_never_enters_dynamo():
    model = Stack(2).eval()
    weft.compile(model, "sequential", inner="inductor")
    for rows in (4, 5, 6, 7):
        model(torch.randn(rows, 32))
    frames = dict(torch._dynamo.utils.counters["frames"])
    for rows in range(4, 40):
        x = torch.randn(rows, 32)
        torch.testing.assert_close(model(x), model.forward(x))
    assert dict(torch._dynamo.utils.counters["frames"]) == frames
    assert weft.report(model).pieces[0].num_compiled == 1


@torch.no_grad()
def test_a_mark_keeps_an_op_eager():
    class Two(nn.Module):
        def forward(self, x):
            with weft.mark("kept", inner="eager"):
                x = x.sin() * 2
            with weft.mark("fused"):
                return x.cos() + 1

    model, x = Two(), torch.randn(8, 16)
    wanted = model(x)
    weft.compile(model, "sequential", inner="inductor")
    torch.testing.assert_close(model(x), wanted)
    assert [structure.name for structure in structures_of(model)] == ["fused"]
    with pytest.raises(CaptureError, match="Known: eager, inductor, onednn"):
        weft.mark_op("sin", inner="tvm")


@torch.no_grad()
@pytest.mark.parametrize("num_rows", [6, 1, 0])
def test_a_layout_that_was_not_compiled_for_gives_the_same_numbers(num_rows):
    model, x = Stack(1).eval(), torch.randn(6, 32)
    weft.compile(model, "sequential", inner="inductor")
    model(x)
    structure = structures_of(model)[0]
    state = {tuple(weight.shape): weight for weight in model.parameters()}
    shapes = [tuple(size.constant for size in value.shape) for value in structure.reads]
    assert sorted(map(str, shapes)) == sorted(map(str, [(None, 32), *state]))
    reads = (
        x,
        x.t().contiguous().t(),  # dims in another order
        torch.stack((x, x), dim=1)[:, 0],  # gaps
        x[:1].expand(6, 32),  # every row in the same bytes
    )
    for read in reads:
        part = read[:num_rows]
        (got,) = structure.call(*(state.get(shape, part) for shape in shapes))
        torch.testing.assert_close(got, model.forward(part))
    assert len(structure.variants) == {6: 2, 1: 2, 0: 1}[num_rows]


@torch.no_grad()
def test_a_write_reaches_the_users_tensor():
    class Writes(nn.Module):
        def forward(self, x, cache):
            with weft.mark("write"):
                cache[:, 1:3] = x * 2
                return cache.sum(1) + x.sum(1)

    model, x = Writes(), torch.randn(4, 2)
    for cache in (torch.zeros(4, 5), torch.zeros(5, 4).t(), torch.zeros(4, 10)[:, ::2]):
        mine = cache.clone()
        wanted = model.forward(x, mine)
        weft.compile(model, weft.overlap(parts=2), inner="inductor")
        torch.testing.assert_close(model(x, cache), wanted)
        assert torch.equal(cache, mine)


@torch.no_grad()
def test_a_write_into_shared_bytes_is_seen_by_the_other_name():
    class Writes(nn.Module):
        def forward(self, x, one, two):
            with weft.mark("write"):
                one.add_(x)
                return two * 2

    model, x, base = Writes(), torch.randn(4, 2), torch.zeros(8, 2)
    weft.compile(model, "sequential", inner="inductor")
    apart = model(x, base[:4], torch.ones(4, 2))
    torch.testing.assert_close(apart, torch.full((4, 2), 2.0))
    wanted = (base[:4] + x) * 2
    torch.testing.assert_close(model(x, base[:4], base[:4]), wanted)
    wanted = (base[1:5] + torch.cat((x[1:], torch.zeros(1, 2)))) * 2
    torch.testing.assert_close(model(x, base[:4], base[1:5]), wanted)


def test_inductor_lets_gradients_through():
    model, x = Mlp(bias=True), torch.randn(8, 32)
    model(x).sum().backward()
    wanted = [parameter.grad.clone() for parameter in model.parameters()]
    for level in ("torch", "aten"):
        model.zero_grad()
        weft.compile(model, "sequential", inner="inductor", level=level)
        model(x).sum().backward()
        for parameter, grad in zip(model.parameters(), wanted, strict=True):
            torch.testing.assert_close(parameter.grad, grad)


@torch.no_grad()
def test_what_inductor_refuses_runs_eagerly_and_is_told(monkeypatch):
    from torchweft.private import inductor

    def fail(*args, **kwargs):
        raise RuntimeError("no such luck")

    monkeypatch.setattr(inductor, "compile_fx_inner", fail)
    model, x = Stack(1).eval(), torch.randn(6, 32)
    wanted = model(x)
    weft.compile(model, "sequential", inner="inductor")
    assert torch.equal(model(x), wanted)
    assert "layer runs eagerly: Inductor failed" in str(weft.report(model))


def test_the_order_of_dims_in_memory():
    x = torch.randn(2, 3, 4)
    assert order_of(x) == (0, 1, 2)
    assert order_of(x.permute(1, 2, 0)) == (2, 0, 1)
    assert order_of(x[:, :2]) is None
    assert order_of(x[:, :1]) is None
    assert order_of(x[:1, :2]) == (0, 1, 2)
    assert order_of(x[:1].expand(2, 3, 4)) is None


@torch.no_grad()
@pytest.mark.parametrize("inner", ["onednn", "inductor"])
def test_a_last_op_without_products_writes_where_it_belongs(inner):
    class Residual(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(16, 16)

        def forward(self, x):
            with weft.mark("product"):
                y = self.linear(x)
            with weft.mark("sum"):
                return x + y

    torch._dynamo.reset()
    plain, x = Residual().eval(), torch.randn(8, 16)
    wanted = plain(x)
    model = weft.compile(plain, weft.overlap(parts=2), inner=inner)
    for _ in range(3):
        torch.testing.assert_close(model(x), wanted)
    (plan,) = weft.plans(model)
    assert plan.num_parts == 2 and not [step for step in plan.steps if step.kind == "copy"]


@torch.no_grad()
@pytest.mark.parametrize("level", ["torch", "aten"])
def test_a_weight_that_changes_where_dynamo_does_not_look_is_noticed(level):
    torch._dynamo.reset()
    model, x = Stack(2).eval(), torch.randn(6, 32)
    weft.compile(model, "sequential", inner="inductor", level=level)
    for _ in range(4):
        model(x)
    weight = model.layers[1].up.weight
    weight.data = weight.data.t().contiguous().t()  # the same numbers, in another order
    wanted = model.forward(x)
    for _ in range(2):  # by Dynamo, which captures anew, or by us, who run the model as it is
        torch.testing.assert_close(model(x), wanted)
    fallbacks = [reason for reason, _ in weft.report(model).fallbacks]
    assert all("torch._dynamo.reset()" in reason for reason in fallbacks)
    torch._dynamo.reset()
    torch.testing.assert_close(model(x), wanted)


@torch.no_grad()
@pytest.mark.parametrize("fallback", ["sequential", "error"])
def test_a_call_with_weights_that_were_not_compiled_for_runs_as_it_is(fallback):
    torch._dynamo.reset()
    model, x = Stack(2).eval(), torch.randn(6, 32)
    wanted = model(x)
    weft.compile(model, "sequential", inner="inductor", fallback=fallback)
    for _ in range(3):
        model(x)
    for piece in session_of(model).pieces:  # where Dynamo does not look
        trusted = piece.inner(None).trusted
        name, (shape, *others) = next(iter(trusted.wanted.items()))
        trusted.wanted[name], trusted._guards = ((*shape, 1), *others), None
    for _ in range(2):
        if fallback == "error":
            with pytest.raises(CaptureError, match=r"Call torch._dynamo.reset\(\)"):
                model(x)
        else:
            torch.testing.assert_close(model(x), wanted)
    counts = [count for reason, count in weft.report(model).fallbacks if "reset()" in reason]
    assert counts == ([2] if fallback == "sequential" else [])


@torch.library.custom_op("weft_test::longer", mutates_args=())
def longer(x: torch.Tensor, extra: int) -> torch.Tensor:
    return torch.cat((x, x.new_zeros(x.shape[0], extra)), dim=1)


@longer.register_fake
def _(x, extra):
    return torch.empty_like(x)  # a lie, unless extra is 0


@torch.no_grad()
def test_an_operator_that_lies_about_its_shape_is_caught_before_a_kernel_runs():
    class Lies(nn.Module):
        def forward(self, x):
            with weft.mark("lie", inner="eager"):
                x = longer(x, 1)
            with weft.mark("sum"):
                return x * 2 + 1

    torch._dynamo.reset()
    model = weft.compile(Lies(), "sequential", inner="inductor")
    with pytest.raises(RunError, match=r"of shape \(4, 4\), but its graph says \(4, 3\)"):
        model(torch.randn(4, 3))


@torch.no_grad()
def test_sizes_are_looked_at_once_where_torch_vouches_for_them():
    from torchweft.capture.bodies.inductor import Structure

    class Both(nn.Module):
        def forward(self, x):
            with weft.mark("own"):
                x = x.sin() + 1
            with weft.mark("foreign"):
                return longer(x, 0) * 2

    torch._dynamo.reset()
    model, x = weft.compile(Both(), "sequential", inner="inductor"), torch.randn(4, 3)
    torch.testing.assert_close(model(x), (x.sin() + 1) * 2)
    found: dict[str, Structure] = {s.name: s for s in structures_of(model)}
    assert {name: s.is_vouched for name, s in found.items()} == {"own": True, "foreign": False}


def test_lanes_that_compile_at_once_take_turns(monkeypatch):
    """A compilation patches what all threads see: two at a time left modules that cannot run."""
    from torchweft.private import inductor

    compile_fx, inside, met = inductor.compile_fx, threading.Semaphore(1), []

    def alone(*args, **kwargs):
        met.append(not inside.acquire(blocking=False))
        time.sleep(0.05)  # the other lane has its turn now
        try:
            return compile_fx(*args, **kwargs)
        finally:
            if not met[-1]:
                inside.release()

    monkeypatch.setattr(inductor, "compile_fx", alone)

    class Reads(nn.Module):
        def __init__(self):
            super().__init__()
            self.tower = nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 32))

        def forward(self, x, y):
            return self.tower(x) + torch.ops.inner_test.read(y)

    plain = Reads().eval()
    rules = [weft.mark_op("read", "read", uses="io")]
    x, y = torch.randn(8, 32), torch.randn(8, 32)
    with torch.no_grad():
        wanted = plain(x, y)
        model = weft.compile(plain, "branches", rules=rules, inner="inductor")
        torch.testing.assert_close(model(x, y), wanted)
    assert len({step.lane for step in weft.plans(model)[0].steps}) > 1
    assert len(met) > 1 and not any(met)
    assert not weft.report(model).fallbacks

"""Under other inner compilers too, parts write their rows of whole values where they belong."""

from __future__ import annotations

import pytest
import torch
from test_zero_copy import WIDE, Many
from torch import nn
from torch.nn import functional as F

import torchweft as weft
from torchweft import options
from torchweft.api import session_of
from torchweft.capture import marks
from torchweft.capture.bodies import epilogue
from torchweft.errors import CaptureError, StrategyError
from torchweft_tools.bench import memory
from torchweft_tools.bench.measure.kernels import bare_stores, hidden_copies, plain_copies
from torchweft_tools.bench.measure.meter import Allocations, Meter

pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit.*is deprecated")  # Inductor's imports


def run(model, x, strategy, inner):
    """Outputs and the session of a model under a strategy; the model stays as it was."""
    torch._dynamo.reset()
    weft.compile(model, strategy, inner=inner)
    session = session_of(model)
    for _ in range(3):
        found = model(x)
    model._compiled_call_impl = None
    return found, session


def forms_of(session):
    """What Inductor compiled: plain forms, and those that write in place."""
    bodies = [body for piece in session.pieces for body in piece.bodies]
    forms = {id(form): form for body in bodies for form in getattr(body, "by", ())}
    plain = [form for form in forms.values() if not form.rooms]
    return plain, [form for form in forms.values() if form.rooms]


def copies_of(session):
    plans = [entry.plan for piece in session.pieces for entry in piece.plans.all_entries()]
    return [step for plan in plans for step in plan.steps if step.kind == "copy"]


@torch.no_grad()
@pytest.mark.parametrize("parts", [2, 3])
def test_every_kind_of_maker_writes_its_part_by_inductor(parts):
    torch.manual_seed(0)
    model, x = Many().eval(), torch.randn(7, 5, WIDE)
    whole, before = run(model, x, "sequential", "inductor")
    found, session = run(model, x, weft.overlap(parts=parts), "inductor")
    assert not copies_of(session) and not session.pieces[0].captured.unplaced
    _, (told,) = forms_of(session)
    assert len(told.rooms) == len(whole) and not told.refused
    assert len(told.variants) == 1  # for parts of all sizes
    assert hidden_copies(session, plain_copies(before)) == []
    for name, tensor in whole.items():
        assert found[name].stride() == tensor.stride(), name
        assert torch.allclose(found[name], tensor, rtol=1e-5, atol=1e-6), name


class Ends(nn.Module):
    """A product, and behind it whatever is asked for."""

    def __init__(self, end):
        super().__init__()
        self.linear, self.end = nn.Linear(32, 16), end

    def forward(self, x):
        return self.end(self.linear(x.sin()))


def allocated(form):
    """The buffers that the code of a form allocates."""
    return form.variants[0].source.count("= empty_strided_cpu(")


@torch.no_grad()
@pytest.mark.parametrize("name", ["itself", "relu", "softmax", "cat"])
def test_the_last_kernel_stores_where_it_is_told(name):
    ends = {
        "itself": lambda y: y,
        "relu": lambda y: y.relu() + 1,
        "softmax": lambda y: F.softmax(y, -1),
        "cat": lambda y: torch.cat((y + 1, y * 2, y - 1), -1),
    }
    model, x = Ends(ends[name]).eval(), torch.randn(8, 32)
    whole, before = run(model, x, "sequential", "inductor")
    found, session = run(model, x, weft.overlap(parts=2), "inductor")
    assert torch.equal(found, whole)
    (plain,), _ = forms_of(before)
    _, (told,) = forms_of(session)
    reused = name == "relu"  # the plain form stores over the product
    assert allocated(told) == allocated(plain) - (not reused)
    assert bare_stores(told.variants[0].source) == []
    assert not copies_of(session) and hidden_copies(session, {}) == []
    if name == "itself":
        assert "torch.ops.torchweft.addmm_out" in told.variants[0].source


@torch.no_grad()
def test_what_comes_behind_reads_from_where_it_was_written():
    class Both(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.last = nn.Linear(32, 16), nn.Linear(16, 16)

        def forward(self, x):
            product = self.first(x)
            hidden = product.relu() + 1
            return product, hidden, self.last(hidden)

    model, x = Both().eval(), torch.randn(8, 32)
    whole, _ = run(model, x, "sequential", "inductor")
    found, session = run(model, x, weft.overlap(parts=2), "inductor")
    assert all(map(torch.equal, found, whole))
    _, (told,) = forms_of(session)
    assert allocated(told) == 0 and not copies_of(session)


@torch.no_grad()
def test_the_form_that_writes_in_place_is_compiled_for_plans_that_split():
    model, x = Ends(torch.exp).eval(), torch.randn(8, 32)
    _, session = run(model, x, "sequential", "inductor")
    (plain,), (told,) = forms_of(session)
    assert (len(plain.variants), len(told.variants)) == (1, 0)
    _, session = run(model, x, weft.overlap(parts=2), "inductor")
    (plain,), (told,) = forms_of(session)
    assert (len(plain.variants), len(told.variants)) == (0, 1)


@torch.no_grad()
def test_ops_of_one_structure_share_the_form_that_writes_in_place():
    class Heads(nn.Module):
        def __init__(self):
            super().__init__()
            self.heads = nn.ModuleList(nn.Linear(32, 16) for _ in range(3))

        def forward(self, x):
            found = []
            for head in self.heads:
                with weft.mark("head"):
                    found.append(head(x).exp())
            return found

    model, x = Heads().eval(), torch.randn(8, 32)
    wanted = model(x)
    found, session = run(model, x, weft.overlap(parts=2), "inductor")
    assert all(map(torch.allclose, found, wanted))
    assert len(session.pieces[0].graph.ops) == 3
    _, (told,) = forms_of(session)
    assert len(told.variants) == 1 and not copies_of(session)


@torch.no_grad()
def test_what_inductor_must_copy_is_a_visible_copy_with_its_reason():
    class Sorts(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(32, 16)

        def forward(self, x):
            y = self.linear(x)
            return y.cumsum(-1), y.exp()

    model, x = Sorts().eval(), torch.randn(8, 32)
    whole, _ = run(model, x, "sequential", "inductor")
    weft.compile(model, weft.overlap(parts=2), inner="inductor")
    assert all(map(torch.equal, model(x), whole))
    session = session_of(model)
    (name,) = {step.names[0] for step in copies_of(session)}
    assert session.pieces[0].captured.unplaced == {
        name: "Inductor copies what aten.cumsum.default makes"
    }
    told = f"{name} is copied together: Inductor copies what aten.cumsum.default makes"
    assert told in str(weft.report(model))
    _, (form,) = forms_of(session)
    assert len(form.rooms) == 1


@torch.no_grad()
@pytest.mark.parametrize("inner", ["inductor", "onednn"])
def test_rows_that_do_not_lie_together_are_copied_with_the_reason(inner):
    class Across(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(32, 16)

        def forward(self, x):
            return self.linear(x).transpose(0, 1).contiguous() * 2

    model, x = Across().eval(), torch.randn(8, 5, 32)
    wanted = model(x)
    found, session = run(model, x, weft.overlap(parts=2), inner)
    torch.testing.assert_close(found, wanted)
    reasons = list(session.pieces[0].captured.unplaced.values())
    assert reasons == (["its batch is not the leading dim"] if inner == "inductor" else [])
    assert bool(copies_of(session)) is (inner == "inductor")


@torch.no_grad()
def test_onednn_copies_nothing_but_its_own_products():
    class Both(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.last = nn.Linear(32, 16), nn.Linear(16, 16)

        def forward(self, x):
            hidden = self.first(x).exp()
            return hidden, self.last(hidden).view(-1, 4, 4)

    model, x = Both().eval(), torch.randn(8, 32)
    whole, _ = run(model, x, "sequential", "onednn")
    found, session = run(model, x, weft.overlap(parts=2), "onednn")
    assert all(
        torch.allclose(a, b, rtol=1e-5, atol=1e-6) for a, b in zip(found, whole, strict=True)
    )
    assert list(session.pieces[0].captured.unplaced.values()) == [
        "oneDNN's products do not write where they are told"
    ]
    assert {step.names[0] for step in copies_of(session)} == set(
        session.pieces[0].captured.unplaced
    )


def test_without_onednn_the_error_names_the_cure(monkeypatch):
    monkeypatch.setattr(marks, "has_mkldnn", False)
    monkeypatch.setattr(options, "has_mkldnn", False)
    with pytest.raises(CaptureError, match=r"no oneDNN\. Take inner='eager'"):
        weft.mark_op("sin", inner="onednn")
    with pytest.raises(CaptureError, match=r"no oneDNN\. Take inner='eager'"):
        weft.mark("sin", inner="onednn").__enter__()
    with pytest.raises(StrategyError, match=r"no oneDNN\. Take inner='eager'"):
        weft.compile(nn.Linear(2, 2), "sequential", inner="onednn")


def test_gradients_are_the_reason_of_copies_in_the_report():
    model, x = nn.Linear(WIDE, WIDE).requires_grad_(False), torch.randn(8, WIDE)
    weft.compile(model, weft.overlap(parts=2))
    model(x)
    assert "is copied together: gradients are on" in str(weft.report(model))


@torch.no_grad()
def test_a_copy_inside_of_kernels_is_found_in_their_code(monkeypatch):
    monkeypatch.setattr(epilogue, "TOLD", {})
    monkeypatch.setattr(epilogue, "called_from_outside", lambda func: False)
    model, x = Ends(lambda y: y).eval(), torch.randn(8, 32)
    with torch._inductor.config.patch(force_disable_caches=True):
        _, session = run(model, x, weft.overlap(parts=2), "inductor")
    (told,) = hidden_copies(session, {})
    assert "Inductor copies inside" in told


@torch.no_grad()
def test_the_allocator_tells_what_compiled_code_holds():
    model, x = Ends(torch.exp).eval(), torch.randn(100, 32)
    weft.compile(model, "sequential", inner="inductor")
    for _ in range(3):
        model(x)
    with Meter() as meter:
        model(x)
    with Allocations() as allocations:
        model(x)
    assert meter.peak_bytes < allocations.peak_bytes  # a dispatch mode does not see its buffers
    sines, products = 100 * 32 * 4, 100 * 16 * 4
    assert sines + products <= allocations.peak_bytes < 2 * (sines + products)


def test_bench_memory_runs_under_inductor(monkeypatch):
    pytest.importorskip("transformers")
    monkeypatch.setattr(memory, "PARTS", (4,))  # two parts are those of the tests above
    rows, summary = memory.run(models="vit", inner="inductor")
    assert [(row["parts"], row["split"], row["error"]) for row in rows] == [(4, True, "")]
    assert summary["share_zero_copy"] == 1.0 and not rows[0]["hidden"]
    assert 0 < summary["worst_peak_ratio"] <= 1.05
    with pytest.raises(StrategyError, match="Known: eager, inductor, onednn"):
        memory.run(models="vit", inner="tvm")

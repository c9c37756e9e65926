"""`weft.restore`: a model or a function as it was before `weft.compile`."""

from __future__ import annotations

import threading
import time

import pytest
import torch
from torch import nn

import torchweft as weft

pytestmark = pytest.mark.usefixtures("fresh")


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x).relu()
        return x


def hooks_of(model):
    return [
        hook
        for module in model.modules()
        for hook in (*module._forward_hooks.values(), *module._forward_pre_hooks.values())
    ]


@pytest.mark.parametrize("capture", ["graph", "boundary"])
def test_a_model_is_as_it_was(capture):
    x, model = torch.randn(6, 8), Net().eval()
    wanted, before = model(x), {name: dict(vars(m)) for name, m in model.named_modules()}
    threads = threading.active_count()
    rules = [weft.mark_module(nn.Linear, "linear")]
    weft.compile(model, weft.overlap(parts=2), rules=rules, capture=capture)
    for _ in range(3):
        torch.testing.assert_close(model(x), wanted)
    assert weft.plans(model)[0].num_parts == 2
    assert weft.restore(model) is model
    assert model._compiled_call_impl is None and not hooks_of(model)
    for name, module in model.named_modules():
        now = {key: value for key, value in vars(module).items() if key != "_compiled_call_impl"}
        assert now.keys() == before[name].keys()
        assert type(module).forward is (Net.forward if not name else type(module).forward)
    assert torch.equal(model(x), wanted)
    end = time.monotonic() + 5
    while threading.active_count() > threads and time.monotonic() < end:
        time.sleep(0.01)
    assert threading.active_count() <= threads, "its threads have ended"
    with pytest.raises(weft.WeftError, match="not compiled"):
        weft.report(model)


def test_restoring_twice_is_restoring_once():
    model = weft.compile(Net(), "overlap")
    weft.restore(model)
    assert weft.restore(model) is model
    function = weft.compile(torch.relu, "sequential")
    assert weft.restore(function) is torch.relu
    assert weft.restore(function) is torch.relu


def test_a_model_that_was_compiled_twice_is_as_before_the_first():
    x, model = torch.randn(6, 8), Net().eval()
    rules = [weft.mark_module(nn.Linear, "linear")]
    weft.compile(model, "overlap", capture="boundary", rules=rules)
    weft.compile(model, weft.overlap(parts=3))
    model(x)
    weft.restore(model)
    assert model._compiled_call_impl is None and not hooks_of(model)


def test_a_function_comes_back_itself():
    def double(x):
        return x * 2

    wrapped = weft.compile(weft.compile(double, "overlap"), weft.overlap(parts=2))
    wrapped(torch.randn(4, 2))
    assert weft.restore(wrapped) is double


def test_a_compilation_of_torch_comes_back():
    model = Net().eval()
    model.compile(backend="eager")
    own = model._compiled_call_impl
    weft.compile(model, "overlap")
    weft.restore(model)
    assert model._compiled_call_impl is own


def test_a_model_can_be_compiled_again():
    x, model = torch.randn(6, 8), Net().eval()
    weft.restore(weft.compile(model, "sequential"))
    weft.compile(model, weft.overlap(parts=2))
    model(x)
    assert weft.plans(model)[0].num_parts == 2


def test_submodules_keep_their_own_compilation():
    model = Net().eval()
    weft.compile(model.layers[0], "sequential")
    own = model.layers[0]._compiled_call_impl
    weft.restore(weft.compile(model, "overlap"))
    assert model.layers[0]._compiled_call_impl is own


@pytest.mark.parametrize("never", [Net(), torch.relu, 3])
def test_what_was_never_compiled_is_our_error(never):
    with pytest.raises(weft.WeftError, match=r"restore: .* was not compiled by weft\.compile"):
        weft.restore(never)


def test_what_torch_alone_compiled_is_our_error():
    model = Net()
    model.compile(backend="eager")
    with pytest.raises(weft.WeftError, match=r"was not compiled by weft\.compile"):
        weft.restore(model)


def test_a_woven_model_is_restored_too():
    from torchweft.integrations.transformers import weave

    x, model = torch.randn(6, 8), Net().eval()
    weave(model)(x)
    assert weft.restore(model)._compiled_call_impl is None


def test_disabled_there_is_nothing_to_undo(monkeypatch):
    monkeypatch.setenv("WEFT_DISABLE", "1")
    model = weft.compile(Net(), "overlap")
    assert weft.restore(model) is model, "a switch of the operator breaks no clean-up"

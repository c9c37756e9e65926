"""Attention in groups of heads, in one process: layouts, kinds of attention, what is refused."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch.nn import functional as F
from ulysses import STYLES, Layer, Model, by_einsum, by_hand, flash, given, in_place, repeated

import torchweft as weft
from torchweft.api import session_of
from torchweft.errors import CaptureError, StrategyError

pytestmark = pytest.mark.usefixtures("fresh")
ATTENTIONS = [flash, by_hand, by_einsum]


@pytest.fixture(autouse=True, scope="module")
def alone():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def woven(model, pieces=2, rows=1, strategy="sequential", what="all_to_all_single"):
    """The plan of a compiled model, after calls that are equal to eager's."""
    x = given(rows)
    wanted = model.eval()(x)
    rewrites = [weft.chunk(what, pieces, dim="heads")]
    weft.compile(model, strategy, rewrites=rewrites, fallback="error")
    for _ in range(2):
        torch.testing.assert_close(model(x), wanted)
    (piece,) = session_of(model).pieces
    assert [each.proof.refused for each in piece.variants.pieces if each.proof.verdict] == [None]
    return weft.plans(model)[0]


def refused(model, message, pieces=2, what="all_to_all_single", rows=1):
    model = model if isinstance(model, torch.nn.Module) else Model(make=model)
    weft.compile(model.eval(), "sequential", rewrites=[weft.chunk(what, pieces, dim="heads")])
    with pytest.raises(CaptureError, match=message):
        model(given(rows))


def sent(plan):
    return [op.name for op in plan.graph.ops if op.collective is not None]


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("attend", ATTENTIONS)
def test_groups_are_equal_to_the_whole(style, attend):
    plan = woven(Model(style, attend), pieces=3)
    assert len(sent(plan)) == 2 * 3 * 4
    name = "softmax" if attend is not flash else "scaled_dot_product_attention"
    done = f"chunk(all_to_all_single, 3 pieces by heads): 2 {name} with 4 all_to_all_single"
    assert f"history rewrite {done}\n" in str(plan)


@pytest.mark.parametrize("style", STYLES)
def test_groups_run_in_parts_too(style):
    plan = woven(Model(style, by_hand), rows=4, strategy="overlap")
    assert plan.num_parts == 2 and len(sent(plan)) == 2 * 2 * 4


@pytest.mark.parametrize(
    "how",
    [
        {"stacked": True},
        {"turned": True},
        {"bias": True},
        {"bias": True, "turned": True, "attend": by_hand},
        {"keys": 4},
        {"keys": 4, "attend": repeated},
        {"keys": 4, "attend": by_hand},
    ],
    ids=lambda options: " ".join(f"{k}={getattr(v, '__name__', v)}" for k, v in options.items()),
)
def test_kinds_of_layers(how):
    for rows in (1, 3):
        torch._dynamo.reset()
        plan = woven(Model("deepspeed", **how), rows=rows)
        assert len(sent(plan)) == 2 * 2 * (2 if "stacked" in how else 4)


def test_a_key_that_serves_all_heads_is_sent_once():
    plan = woven(Model("deepspeed", keys=1))
    assert len(sent(plan)) == 2 * (2 * 2 + 2)


@pytest.mark.parametrize("what", ["scaled_dot_product_attention", "layers.1", "softmax"])
def test_attention_is_named(what):
    layers = 1 if what == "layers.1" else 2
    plan = woven(Model("xdit", by_hand if what == "softmax" else flash), what=what)
    assert len(sent(plan)) == 2 * 4 + layers * 4


def test_a_group_is_attended_to_while_the_next_is_on_the_wire():
    labels = [step.label for step in woven(Model("deepspeed", layers=1)).steps]
    talk = "layers.0.all_to_all_single.{}of2{}"
    attention = labels.index(f"issue {talk.format(1, '.3')}") - 1
    while labels[attention].startswith("free"):
        attention -= 1
    assert labels.index(f"issue {talk.format(2, '.2')}") < attention, labels
    assert attention < labels.index(f"complete {talk.format(2, '')}"), labels
    back = (
        labels.index(f"issue {talk.format(1, '.3')}"),
        labels.index(f"complete {talk.format(1, '.3')}"),
    )
    assert back[0] < labels.index(f"issue {talk.format(2, '.3')}") < back[1], labels


def odd(act):
    class Changed(Layer):
        def __init__(self):
            super().__init__("deepspeed", lambda q, k, v, mask: act(q, k, v))

    return Changed


def attend(q, k, v):
    return F.scaled_dot_product_attention(q, k, v)


@pytest.mark.parametrize(
    ("act", "message"),
    [
        (lambda q, k, v: attend(q.softmax(1), k, v), "does not treat heads one by one"),
        (lambda q, k, v: attend(q.flip(1), k, v), "does not treat heads one by one"),
        (lambda q, k, v: attend(q - q.mean((1, 2, 3), keepdim=True), k, v), "heads"),
        (lambda q, k, v: attend(F.layer_norm(q, q.shape[1:]), k, v), "another number of heads"),
        (lambda q, k, v: attend(q, k, v).cumsum(1), "does not treat heads one by one"),
        (lambda q, k, v: attend(q, k.roll(1, 1), v), "does not treat heads one by one"),
        (lambda q, k, v: attend(q, k, v).mul_(2), "written in place|writes in place"),
    ],
)  # fmt: skip
def test_heads_that_meet_are_refused(act, message):
    refused(odd(act), message)


def test_what_cannot_be_cut_is_refused():
    refused(Model("xdit"), "each rank has 8 heads, fewer than 9 pieces", pieces=9)
    torch._dynamo.reset()
    refused(Model("xdit", keys=2), "each rank has 2 heads of keys, fewer than 3", pieces=3)
    torch._dynamo.reset()
    refused(Model("xdit"), "no attention stands there.*only linear", what="layers.0.out")
    torch._dynamo.reset()
    refused(lambda: torch.nn.TransformerEncoderLayer(48, 8, dropout=0.0), "all_to_all|attention",
            what="*")  # fmt: skip


class Routed(torch.nn.Module):
    """Experts between two all_to_alls: no attention."""

    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(48, 48)

    def forward(self, x):
        return in_place(self.linear(in_place(x.contiguous())).relu())


def test_an_all_to_all_of_experts_is_left_alone():
    refused(Routed, "no attention stands there or between its all_to_alls")
    torch._dynamo.reset()
    model = Model(make=Routed).eval()
    wanted = model(given(1))
    weft.compile(model, "ulysses", fallback="error")
    torch.testing.assert_close(model(given(1)), wanted)
    assert "no attention stands there" in str(weft.plans(model)[0])


def test_wrong_dims_are_told():
    with pytest.raises(StrategyError, match="such as -1, or 'heads'; got 'head'"):
        weft.chunk("attention", 2, dim="head")


def test_gradients_pass_through_groups():
    model, plain = Model("diffusers", by_hand), Model("diffusers", by_hand)
    x = given(2)
    rewrites = [weft.chunk("all_to_all_single", 2, dim="heads")]
    weft.compile(model, "overlap", rewrites=rewrites)
    with torch.enable_grad():
        for each in (model, plain):
            each(x).square().sum().backward()
    for one, other in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad)
    assert weft.report(model).fallbacks == ()
    assert any("pieces by heads): 2 _softmax" in str(plan) for plan in weft.plans(model))

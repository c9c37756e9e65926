"""`Options`: written down once, checked once, and the same at every door."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import re
from pathlib import Path

import pytest
import torch
from torch import nn

import torchweft as weft
from torchweft.api import session_of
from torchweft.backend import weft as backend
from torchweft.integrations.transformers import warm, weave
from torchweft.options import Options
from torchweft.run.cpu import Lanes
from torchweft.serve.session import Session

ROOT = Path(__file__).parents[2]
NAMES = [field.name for field in dataclasses.fields(Options)]


pytestmark = pytest.mark.usefixtures("fresh")


def layers():
    return nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8)).eval()


def test_every_option_can_be_given_to_the_dynamo_backend():
    x, model = torch.randn(8, 8), layers()
    run = torch.compile(model, backend="weft", options={"blocks": True, "zero_copy": False})
    assert torch.equal(run(x), model(x))


@pytest.mark.parametrize("given", [{"capture": "boundary"}, {"shadow": 2}])
def test_what_a_backend_cannot_do_is_refused_and_the_door_is_named(given):
    with pytest.raises(weft.StrategyError, match=r"weft\.compile"):
        backend(torch.fx.symbolic_trace(layers()), [torch.randn(8, 8)], options=given)


def test_check_keeps_the_options_that_the_model_was_compiled_with():
    x = torch.randn(8, 8)
    model = weft.compile(layers(), weft.overlap(parts=9), fallback="error")
    with pytest.raises(weft.StrategyError, match="9 parts"):
        weft.check(model, x)
    assert weft.check(model, x, fallback="sequential"), "and what is said here comes first"
    assert weft.check(model, x, strategy="sequential").equal == "bit-equal"
    with pytest.raises(weft.StrategyError, match=r"unknown option 'tolerence'.*strategy"):
        weft.check(model, x, tolerence=1e-3)


def test_check_keeps_a_rule_about_one_module_of_the_model():
    model = layers()
    weft.compile(model, weft.overlap(parts=2), rules=[weft.mark_module(model[2], "last")])
    assert weft.check(model, torch.randn(8, 8))


def test_check_keeps_boundary_mode(monkeypatch):
    monkeypatch.setattr(torch, "compile", None)
    model = weft.compile(layers(), weft.overlap(parts=2), capture="boundary")
    assert weft.check(model, torch.randn(8, 8))


def test_closing_a_dynamic_model_leaves_a_submodule_its_own_compilation():
    x = torch.randn(8, 8)
    model = layers()
    weft.compile(model[0], weft.overlap(parts=2))
    own = model[0]._compiled_call_impl
    dynamic = weft.dynamic(model)
    dynamic(x)
    dynamic.close()
    assert model[0]._compiled_call_impl is own
    assert model[2]._compiled_call_impl is None
    torch.testing.assert_close(model(x), model._call_impl(x))
    assert weft.plans(model[0])


def test_what_was_compiled_after_a_dynamic_model_was_made_stays_when_that_closes():
    model = layers()
    dynamic = weft.dynamic(model)
    weft.compile(model[0], "sequential")
    own = model[0]._compiled_call_impl
    dynamic.close()
    assert model[0]._compiled_call_impl is own


@pytest.mark.parametrize(
    "given",
    [
        {"strategy": "no such strategy"},
        {"no_such_option": 1},
        {"watchdog_s": 0},
        {"capture": "boundary", "level": "aten"},
    ],
)
def test_disabled_means_that_nothing_is_looked_at(given, monkeypatch):
    monkeypatch.setenv("WEFT_DISABLE", "1")
    monkeypatch.setattr(Session, "__init__", None)
    model = layers()
    assert weft.compile(model, **given) is model
    assert weave(model, **given) is model
    assert model._compiled_call_impl is None
    assert weft.compile(torch.relu, **given) is torch.relu
    warm(model, [(1, 4)])
    x = torch.randn(2, 4)
    compiled = torch.compile(torch.relu, backend="weft", options=given)
    assert torch.equal(compiled(x), torch.relu(x))


WRONG = {
    "strategy": (3, "neither a name nor a function"),
    "rules": ("mark", "rules must be marks"),
    "inner": ("indcutor", "Did you mean 'inductor'"),
    "costs": (5, "costs must be the path of a file of `torchweft profile`"),
    "fallback": ("raise", "unknown fallback 'raise'. Known: error, sequential"),
    "strict": ("yes", "strict must be True or False; got 'yes'"),
    "batch": (1.5, "batch must be a dim"),
    "machine": ("cpu", "machine must be a Machine"),
    "num_threads": (0, "num_threads must be a positive number of threads; got 0"),
    "jitter": (1, "jitter must be True or False; got 1"),
    "shadow": (1.5, "shadow must be a number of calls"),
    "level": ("atne", "Did you mean 'aten'"),
    "watchdog_s": (0, "watchdog_s must be a positive number of seconds; got 0"),
    "graphs": ([0], "1 to 64 sizes of the batch"),
    "blocks": (None, "blocks must be True or False; got None"),
    "zero_copy": ("", "zero_copy must be True or False"),
    "capture": ("grahp", "Did you mean 'graph'"),
    "splitters": ([3], "names are identifiers"),
    "kernels": ([len], "kernels must be functions by name"),
    "rewrites": (["chunk"], "rewrites must be rewrites, such as [weft.chunk('down_proj', 4)]"),
    "loads": ("yes", "loads must be True, False or None"),
    "remember": ("no", "remember must be True or False"),
}


@pytest.mark.parametrize("name", NAMES)
def test_a_value_that_cannot_be_is_named_with_its_cure(name):
    value, said = WRONG[name]
    with pytest.raises(weft.WeftError, match=re.escape(said)) as caught:
        Options(**{name: value})
    assert caught.value.rule in ("option", "name")
    with pytest.raises(type(caught.value), match=re.escape(said)):
        weft.compile(layers(), **{name: value})


def test_options_are_frozen_values():
    rules = [weft.mark_module(nn.Linear, "linear")]
    options = Options("overlap", rules=rules, graphs=[4, 2, 2], machine=weft.cpu(2))
    assert options == Options("overlap", rules=tuple(rules), graphs=(2, 4), machine=weft.cpu(2))
    assert hash(options) == hash(
        Options("overlap", rules=rules, graphs=[4, 2], machine=weft.cpu(2))
    )
    with pytest.raises(dataclasses.FrozenInstanceError):
        options.strict = False
    rules.clear()
    assert len(options.rules) == 1
    split = weft.Splitter("state", "call", dict, dict, {"rows": weft.by_rows})
    assert hash(Options("sequential", splitters=[split])) == hash(
        Options("sequential", splitters=(split,))
    )


def test_an_unknown_option_lists_the_choices_at_every_door():
    doors = {
        "compile": lambda **given: weft.compile(layers(), **given),
        "check": lambda **given: weft.check(
            layers(), torch.ones(2, 8), strategy="sequential", **given
        ),
        "weave": lambda **given: weave(layers(), **given),
        "backend": lambda **given: backend(torch.fx.symbolic_trace(layers()), [], options=given),
    }
    for door in doors.values():
        with pytest.raises(weft.StrategyError, match=r"unknown option 'shadwo'.*'shadow'.*batch"):
            door(shadwo=1)


def test_compile_has_the_signature_of_the_options():
    """Adding a field is enough: the door that users see takes its parameters from there."""
    parameters = inspect.signature(weft.compile).parameters
    assert list(parameters) == ["model", *NAMES]
    own = inspect.signature(Options).parameters
    assert all(parameters[name] == own[name] for name in NAMES)
    assert [p.name for p in own.values() if p.kind is not p.KEYWORD_ONLY] == ["strategy"]
    for name in NAMES:
        assert f"{name}: " in (weft.compile.__doc__ or ""), f"{name} is not documented"


def test_a_new_field_reaches_every_door(monkeypatch):
    """The doors hand on whatever names the dataclass has; none of them knows one by heart."""
    made = dataclasses.make_dataclass(
        "More", [("more", int, dataclasses.field(default=0, kw_only=True))],
        bases=(Options,), frozen=True,
    )  # fmt: skip
    for module in ("api", "backend", "integrations.vllm"):
        monkeypatch.setattr(f"torchweft.{module}.Options", made)
    model = weft.compile(layers(), "sequential", more=3)
    assert session_of(model).options.more == 3
    assert weft.check(model, torch.randn(8, 8), more=4)
    assert session_of(weave(layers(), more=5)).options.more == 5
    gm = torch.fx.symbolic_trace(layers())
    assert callable(backend(gm, [torch.randn(8, 8)], options={"more": 6}))
    from torchweft.integrations.vllm import phases_of

    assert phases_of({"more": 7}).session.options.more == 7


def test_no_option_is_spelled_in_a_second_place():
    """Nowhere else are as many as five options the parameters of one function, or its arguments."""
    spelled = []
    for path in (ROOT / "src" / "torchweft").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef):
                names = {arg.arg for arg in (*node.args.args, *node.args.kwonlyargs)}
            elif isinstance(node, ast.ClassDef):
                found = [each.target for each in node.body if isinstance(each, ast.AnnAssign)]
                names = {each.id for each in found if isinstance(each, ast.Name)}
            elif isinstance(node, ast.Call):
                names = {word.arg for word in node.keywords if word.arg}
            else:
                continue
            if len(names & set(NAMES)) >= 5:
                spelled.append(f"{path.name}:{node.lineno}")
    assert [where.partition(":")[0] for where in spelled] == ["options.py"]


def test_every_option_stands_in_the_docs():
    table = (ROOT / "docs" / "models.md").read_text(encoding="utf-8").partition("\n## ")[0]
    assert re.findall(r"^\| `(\w+)` \|", table, re.MULTILINE) == NAMES


def test_what_follows_from_options_is_found_in_one_place():
    options = Options("sequential")
    assert options.resolved_strategy is weft.sequential
    assert options.resolved_machine == weft.cpu()
    assert options.batch_dim == 0 and Options("sequential", batch=1).batch_dim == 1
    assert (
        Options("sequential", graphs=[8, 2]).graph_sizes == (2, 8)
        and Options("sequential", graphs=True).graph_sizes == ()
    )
    split = weft.Splitter("state", "call", dict, dict)
    assert [rule.form for rule in Options("sequential", splitters=[split]).all_rules] == ["state"]


def test_a_session_takes_the_value():
    session = Session(Options("overlap"))
    assert session.options.resolved_strategy is weft.overlap and isinstance(session.lanes, Lanes)

"""Commands that run a model, the doctor, and the live demo."""

from __future__ import annotations

import json
from contextlib import nullcontext

import pytest
import torch

from torchweft.serve.auto import Auto
from torchweft_tools.bench.measure.pairs import measure, ratio
from torchweft_tools.cli import app as cli
from torchweft_tools.cli.doctor import examine

MODEL = """
import torch
from torch import nn

def build():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4)).eval(), torch.randn(16, 8)

def mixing():
    return (lambda x: x - x.mean(0)), {"x": torch.randn(6, 3)}

def nothing():
    return 3
"""


@pytest.fixture(autouse=True)
def model_file(tmp_path, monkeypatch):
    torch._dynamo.reset()
    monkeypatch.chdir(tmp_path)
    (tmp_path / "subject_model.py").write_text(MODEL)


def said(capsys, *words):
    code = cli.run(list(words))
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_show_prints_the_graph_of_a_model(capsys):
    code, out, _ = said(capsys, "show", "subject_model.py:build")
    assert code == 0
    assert "graph piece0" in out
    assert "row-wise" in out


def test_show_names_what_runs_whole(capsys):
    code, out, _ = said(capsys, "show", "subject_model.py:mixing")
    assert code == 0
    assert "runs whole" in out
    assert "mean" in out


def test_run_tells_what_became_of_it(capsys):
    code, out, _ = said(capsys, "run", "subject_model.py:build", "--strategy", "overlap", "--json")
    told = json.loads(out.splitlines()[-1])
    assert code == 0
    assert told["pieces"] == 1
    assert told["split_share"] == pytest.approx(1.0)


def test_check_is_equal_and_says_so(capsys):
    code, out, _ = said(capsys, "check", "subject_model.py:build", "--option", "parts=3")
    assert code == 0
    assert "equal" in out or "within tolerance" in out


def test_trace_draws_and_saves(capsys, tmp_path):
    code, out, _ = said(capsys, "trace", "subject_model.py:build", "-o", "run.json")
    assert code == 0
    assert "measured" in out
    assert json.loads((tmp_path / "run.json").read_text())["traceEvents"]


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("subject_model.py:absent", "Known: build, mixing"),
        ("subject_model.py:nothing", "must return"),
        ("no_file.py:build", "no file"),
        ("no.such.module:build", "no module"),
        (":", "FILE.py:FUNCTION"),
    ],
)
def test_a_model_that_is_none_gets_our_error(capsys, name, says):
    code, _, err = said(capsys, "run", name)
    assert code == 1
    assert says in err


def test_the_doctor_looks_at_everything():
    found = {item.what: item for item in examine()}
    assert set(found) >= {
        "python",
        "torch",
        "bfloat16 matmul",
        "C++ compiler",
        "network namespaces",
    }
    assert found["torch"].state == "ok"
    assert all(item.cure for item in found.values() if item.state != "ok")


def test_the_demo_runs_two_models_and_saves_a_trace(capsys, tmp_path):
    code, out, _ = said(capsys, "demo", "--no-race", "--folder", str(tmp_path))
    assert code == 0
    assert out.count("Measured, 30 pairs") == 2
    assert "nothing to overlap" in out
    assert (tmp_path / "ranker.json").exists()


def test_a_ratio_has_an_interval_that_holds_the_median():
    found = ratio([1.0, 2.0, 3.0, 4.0, 5.0] * 6)
    assert found.low <= found.median <= found.high
    assert found.median == 3.0
    assert found.num_pairs == 30


def test_measure_runs_baseline_and_candidate_in_turn():
    calls = []
    measure(lambda: calls.append("a"), lambda: calls.append("b"), num_pairs=3, num_warm=0)
    assert calls == ["a", "b", "a"] * 3


def test_tune_races_a_model_and_keeps_the_choice(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(Auto, "tuning", lambda self: nullcontext())  # Inductor takes its time
    file = tmp_path / "tuned_model.py"
    file.write_text(MODEL)
    assert cli.run(["tune", f"{file}:build"]) == 0
    assert "as it is" in capsys.readouterr().out
    assert cli.run(["tune", f"{file}:build", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["choices"]

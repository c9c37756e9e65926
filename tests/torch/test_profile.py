"""Profiles: what is measured, what is kept, and what the simulator makes of it."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import torchweft as weft
from torchweft.errors import MachineError, WeftError
from torchweft.plan.graph import Op
from torchweft.plan.machine import cpu
from torchweft_tools.bench.simulator import context_rows, order, summary
from torchweft_tools.cli import app as cli
from torchweft_tools.formats.weft_files import load_costs, load_measured
from torchweft_tools.profile import (
    _Book,
    _factor,
    _middle,
    _of_a_run,
    _rates,
    _Run,
    measure,
    save_profile,
)


@torch.library.custom_op("profiles::fetch", mutates_args=())
def fetch(x: Tensor) -> Tensor:
    time.sleep(0.02)
    return x + 1


fetch.register_fake(lambda x: torch.empty_like(x))
RULES = [weft.mark_op("fetch", "fetch", uses="io")]


class Waits(nn.Module):
    """A branch that waits, and one that computes."""

    def __init__(self) -> None:
        super().__init__()
        self.tower = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64))

    def forward(self, x: Tensor) -> Tensor:
        return self.tower(x) + fetch(x)


def compiled(model: nn.Module, **options: Any) -> nn.Module:
    return weft.compile(model.eval(), "sequential", **options)


def test_every_op_is_measured_at_every_size_of_a_part() -> None:
    model = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 32))
    rules = [weft.mark_module(model[0], "first"), weft.mark_module(model[2], "last")]
    marked = compiled(model, rules=rules)
    profile = measure(marked, [torch.randn(16, 32)], parts=(1, 2, 4), num_calls=3)
    sizes = {rows for _, _, points in profile.costs.table.entries for rows, _ in points}
    assert sizes == {16, 8, 4}
    assert profile.num_samples >= 3 * (1 + 2 + 4)
    assert torch.__version__ in profile.about


def test_what_waits_is_priced_as_it_was_seen() -> None:
    profile = measure(compiled(Waits(), rules=RULES), [torch.randn(8, 64)], num_calls=3)
    slow = [s for _, _, points in profile.costs.table.entries for _, s in points if s > 0.015]
    assert len(slow) == 1  # an operator that nobody has declared runs whole
    assert profile.costs.call_s >= 0


def test_a_profile_reads_back(tmp_path: Path) -> None:
    profile = measure(compiled(Waits(), rules=RULES), [torch.randn(8, 64)], num_calls=2)
    save_profile(profile, tmp_path / "costs.json")
    assert load_measured(tmp_path / "costs.json") == profile.costs
    assert load_costs(tmp_path / "costs.json") == profile.costs.table


@pytest.mark.parametrize("damage", ["machine", "entries", "weft_costs", "call_s"])
def test_a_damaged_profile_is_our_error(tmp_path: Path, damage: str) -> None:
    path = tmp_path / "costs.json"
    save_profile(
        measure(compiled(Waits(), rules=RULES), [torch.randn(4, 64)], parts=(1,), num_calls=1), path
    )
    data = json.loads(path.read_text())
    path.write_text(json.dumps({**data, damage: [["x"]]}))
    with pytest.raises(MachineError):
        load_measured(path)


def test_a_model_that_nothing_is_captured_of_cannot_be_profiled() -> None:
    def nothing(x: Tensor) -> int:
        return 1

    with pytest.raises(WeftError, match="no captured graph"):
        measure(weft.compile(nothing, "sequential"), [torch.randn(4)], num_calls=1)


def test_flights_that_end_by_twos_are_two_at_once() -> None:
    """One after another, each takes what it takes alone."""
    device, (turns, twins) = cpu().devices[0], (_Book(), _Book())
    turns.behind += [1.0, 0.9, 1.1, 1.0]
    twins.behind += [1.9, 0.1, 2.1, 0.0]
    flights = [_rates(device, [], book).num_flights for book in (turns, twins, _Book())]
    assert flights == [1, 2, 1]


def test_a_factor_is_that_of_all_time_spent_together() -> None:
    assert _factor([(2.0, 1.0), (2.0, 1.0)]) == 2.0
    assert _factor([(1.0, 2.0)]) == 1.0  # nothing is faster beside others
    assert _factor([(1.0, 0.0)]) == 10.0  # bounded
    assert _middle([1.0, 2.0, 3.0, 100.0]) == 2.5
    assert _middle([7.0]) == 7.0
    assert not _Book().seen


def test_a_run_takes_the_mean_of_its_call_and_an_odd_call_does_not_count() -> None:
    """Three quick flights of four, the fourth ten times as long: each call pays for all of them."""
    op = Op("r", ("x",), ("r_out",), uses="network")
    calls = [[0.2, 0.2, 0.2, 2.0]] * 3 + [[9.0] * 4]
    runs = [
        _Run(op, ("r", "cpu"), 8, seconds, 0, 0, call)
        for call, each in enumerate(calls)
        for seconds in each
    ]
    assert _of_a_run(runs) == pytest.approx(2.6 / 4)


def test_profile_and_simulation_against_a_trace_by_the_command_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("waits_model.py").write_text(
        "import torch, torchweft as weft\n"
        "from test_profile import RULES, Waits\n"
        "def build():\n    return Waits().eval(), torch.randn(8, 64)\n"
    )
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    assert cli.run(["profile", "waits_model.py:build", "-o", "costs.json", "--calls", "2"]) == 0
    assert "a call takes" in capsys.readouterr().out
    model, x = compiled(Waits(), rules=RULES), torch.randn(8, 64)
    with torch.no_grad():
        weft.trace(model, x).save("run.json")
    plan = weft.plans(model)[0]
    plan.save("run.plan")
    from torchweft_tools.formats.weft_files import save_graph

    save_graph(plan.graph, "graph.json")
    words = "simulate run.plan --graph graph.json --batch 8 --costs costs.json --against run.json"
    assert cli.run(words.split()) == 0
    assert "makespan" in capsys.readouterr().out.splitlines()[-1]
    assert cli.run([*words.split(), "--json"]) == 0
    steps = json.loads(capsys.readouterr().out)["steps"]
    assert steps[-1]["step"] == "makespan"
    assert all(set(row) == {"step", "simulated_s", "measured_s", "error"} for row in steps)
    assert cli.run([*words.split(), "--lanes", "2"]) == 1
    assert "the file has the machine" in capsys.readouterr().err
    assert cli.run(["profile", "waits_model.py:build", "--parts", "0"]) == 1


RESULT = {
    "shape": [4, 64],
    "link": "1gbit",
    "held_out": True,
    "slowdowns": {},
    "predicted_s": {"sequential": 1.1, "overlap_2": 0.9, "overlap_4": 0.8},
    "times": {
        "sequential": [1.0] * 30,
        "sequential_again": [1.0] * 30,
        "overlap_2": [0.7] * 30,
        "overlap_4": [0.8] * 30,
    },
}


def test_errors_and_order_of_a_context() -> None:
    rows = context_rows("dense", RESULT)
    assert [round(row["error"], 3) for row in rows] == [0.1, 0.286, 0.0]
    assert order(rows) == (2, 1)  # overlap_4 is taken for the fastest, and is not
    told = summary(rows)
    assert told["cases"] == told["held_out"] == 3
    assert told["rank_correlation"] == pytest.approx(1 / 3)
    assert summary([]) == {"cases": 0}


def test_pairs_closer_than_the_noise_do_not_count() -> None:
    noisy = {**RESULT["times"], "sequential_again": [1.3] * 30}  # type: ignore[dict-item]
    rows = context_rows("dense", {**RESULT, "times": noisy})
    assert order(rows) == (2, 0)  # overlap_2 and overlap_4 are too near each other

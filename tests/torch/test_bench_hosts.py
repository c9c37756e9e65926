"""The arithmetic of the hosts bench: rows and summary of given times, lines, and wrong options."""

from __future__ import annotations

import subprocess
import sys

import pytest

from torchweft.errors import WeftError
from torchweft_tools.bench import hosts
from torchweft_tools.bench.measure.lines import code_lines


def result(**times):
    usual = {"stock": [2.0, 4.0, 2.0], "again": [2.0, 2.0, 4.0], "weft": [1.0, 1.0, 1.0]} | times
    return {
        "version": "1.2", "strategy": "overlap(parts=2)", "link": "1gbit half duplex",
        "unit": "tokens/s", "work": 100, "times": usual, "equal": True,
    }  # fmt: skip


def test_a_row_tells_rates_and_the_median_of_pairs():
    found = hosts.row("transformers", "prefill", result())
    assert (found["stock"], found["weft"], found["unit"]) == (50.0, 100.0, "tokens/s")
    assert (found["ratio"], found["ratio_low"], found["ratio_high"]) == (2.0, 2.0, 4.0)
    assert (found["aa"], found["aa_low"], found["aa_high"]) == (1.0, 0.5, 2.0)
    assert set(hosts.COLUMNS) <= set(found)
    assert 10 < found["lines"] <= 75


def test_the_faster_stock_is_what_counts():
    slower = hosts.row("vllm", "prefill", result(compiled=[5.0, 5.0, 5.0]))
    assert (slower["mode"], slower["stock"], slower["ratio"]) == ("eager", 50.0, 2.0)
    faster = hosts.row("vllm", "prefill", result(compiled=[0.5, 0.5, 0.5]))
    assert (faster["mode"], faster["stock"], faster["ratio"]) == ("compiled", 200.0, 0.5)
    assert (faster["eager"], faster["compiled"], faster["aa"]) == (50.0, 200.0, 1.0)


def test_the_summary_tells_best_and_worst():
    rows = [
        hosts.row("transformers", "prefill", result()),
        hosts.row("transformers", "generate", result(weft=[4.0, 4.0, 4.0])),
    ]
    found = hosts.summary(rows)
    assert found["best"] == {"transformers": 2.0}
    assert (found["worst_ratio"], found["aa_worst"], found["aa_spread"]) == (0.5, 0.5, 1.0)
    assert found["all_equal"]
    assert hosts.summary([])["worst_ratio"] is None


def test_a_host_that_is_not_installed_is_named_with_the_cure(monkeypatch):
    missing = hosts.Host("no_such_host", "nowhere", "transformers.py", ("prefill",))
    monkeypatch.setitem(hosts.HOSTS, "missing", missing)
    rows, summary = hosts.run(hosts="missing", links="1gbit")
    assert rows == []
    [why] = summary["failed"].values()
    assert "no_such_host is not installed" in why and "make hosts" in why


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"hosts": "transformer"}, "transformers"),
        ({"workloads": "prefil"}, "prefill"),
        ({"links": "fast"}, "is not a rate"),
        ({"num_pairs": 3}, "--pairs must be 30 or more"),
    ],
)
def test_wrong_options_list_the_choices(options, said):
    with pytest.raises(WeftError, match=said):
        hosts.run(**options)


SOURCE = '''"""A docstring

of lines."""

# a comment
import os  # another


def f(a,
      b):
    """Says."""
    return """no
docstring"""
'''


def test_lines_of_code_are_those_that_hold_code(tmp_path):
    (tmp_path / "one.py").write_text(SOURCE)
    assert code_lines(tmp_path / "one.py") == 5
    (tmp_path / "two.py").write_text("x = 1\n")
    assert code_lines(tmp_path) == 6


@pytest.mark.parametrize(("line", "code"), [("pass", 0), ("raise ValueError('no engine')", 1)])
def test_a_player_ends_though_its_engines_run(line, code):
    text = (
        "import threading\nfrom torchweft_tools.bench.measure.messages import leaving\n"
        f"threading.Thread(target=threading.Event().wait).start()\nwith leaving():\n    {line}\n"
    )
    found = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, timeout=60)
    assert found.returncode == code
    assert ("no engine" in found.stderr) is bool(code)

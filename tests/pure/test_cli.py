"""The command line: what it prints, its exit codes, and that no mistake ends in a traceback."""

from __future__ import annotations

import inspect
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from torchweft.errors import WeftError
from torchweft.files import write_json
from torchweft.plan.machine import cpu, to_data
from torchweft.plan.plan import Plan
from torchweft.plan.strategies import overlap
from torchweft.plan.verify import verify
from torchweft.plan.write.strategy import write
from torchweft_tools.cli import app as cli
from torchweft_tools.cli import bench as cli_bench
from torchweft_tools.cli.text import printable, read_literal, read_pairs
from torchweft_tools.demo.blueprint import transformer
from torchweft_tools.formats.weft_files import load_trace, save_graph

Capture = pytest.CaptureFixture[str]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> Path:
    """A folder with a graph file, a safe plan and an unsafe one; commands run in it."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("WEFT_DEBUG", raising=False)
    assert cli.run(["blueprint", "transformer", "-o", "graph.json"]) == 0
    words = "plan graph.json --strategy overlap --option parts=2 --batch 512 -o safe.plan"
    assert cli.run(words.split()) == 0
    text = Path("safe.plan").read_text()
    Path("unsafe.plan").write_text(text.replace("  compute  complete reduce_attn0[0]\n", ""))
    capsys.readouterr()
    return tmp_path


def out(words: str, capsys: Capture, code: int = 0) -> str:
    assert cli.run(words.split()) == code
    return capsys.readouterr().out


def data(words: str, capsys: Capture, code: int = 0) -> dict[str, Any]:
    """The one JSON object that a command prints."""
    lines = out(f"{words} --json", capsys, code).splitlines()
    assert len(lines) == 1
    found = json.loads(lines[0])
    assert isinstance(found, dict)
    return found


@pytest.mark.usefixtures("folder")
def test_plan_is_written_lowered_verified_and_printed(capsys: Capture) -> None:
    text = out("plan graph.json --strategy overlap --option parts=4 --batch 512", capsys)
    plan = verify(Plan.parse(text).bind(transformer(2)))
    assert plan.num_parts == 4
    assert data("plan graph.json --batch 8", capsys)["verified"] is True


@pytest.mark.usefixtures("folder")
def test_bare_plan_is_what_the_strategy_wrote(capsys: Capture) -> None:
    text = out("plan graph.json --strategy overlap --batch 512 --bare", capsys)
    assert text == str(write(overlap, transformer(2), cli.read_context(512, (), "", None)))
    assert "buffer b0" in out("plan graph.json --strategy overlap --batch 8 --buffers", capsys)


@pytest.mark.usefixtures("folder")
def test_lanes_machine_tokens_and_sizes_reach_the_plan(capsys: Capture) -> None:
    write_json("machine.json", to_data(cpu(3)))
    assert "lane compute2" in out("plan graph.json --batch 8 --lanes 3", capsys)
    assert "lane compute2" in out("plan graph.json --batch 8 --machine machine.json", capsys)
    words = "plan graph.json --batch 10 --strategy overlap --option at=requests --size s1=3"
    assert "at requests" in out(f"{words} --tokens-per-request 6,1,3", capsys)


@pytest.mark.usefixtures("folder")
def test_safe_plan_is_called_safe(capsys: Capture) -> None:
    assert "plan safe: 44 steps" in out("verify safe.plan --graph graph.json", capsys)
    found = data("verify safe.plan --graph graph.json", capsys)
    assert (found["safe"], found["findings"]) == (True, [])


@pytest.mark.usefixtures("folder")
def test_unsafe_plan_lists_its_findings_and_fails(capsys: Capture) -> None:
    assert "never completed" in out("verify unsafe.plan --graph graph.json", capsys, 1)
    found = data("verify unsafe.plan --graph graph.json", capsys, 1)
    assert found["safe"] is False
    assert found["findings"][0]["rule"] == "coverage"


@pytest.mark.usefixtures("folder")
def test_finding_comes_with_an_excerpt_and_an_arrow(capsys: Capture) -> None:
    lines = Path("safe.plan").read_text().splitlines()
    at = lines.index("  compute  complete reduce_attn0[0]")
    lines.insert(at + 3, lines.pop(at))
    Path("late.plan").write_text("\n".join(lines))
    text = out("verify late.plan --graph graph.json", capsys, 1)
    assert "<-- here" in text and "race:" in text
    found = data("verify late.plan --graph graph.json", capsys, 1)["findings"]
    assert all(item["lane"] == "compute" and item["step"] is not None for item in found)
    assert "race" in {item["rule"] for item in found}


@pytest.mark.usefixtures("folder")
def test_plans_of_several_ranks_are_verified_together(capsys: Capture) -> None:
    words = "verify safe.plan safe.plan --graph graph.json"
    assert "2 plans of 2 ranks safe" in out(words, capsys)
    assert cli.run(["plan", "graph.json", "--batch", "512", "-o", "whole.plan"]) == 0
    capsys.readouterr()
    text = out("verify safe.plan whole.plan --graph graph.json", capsys, 1)
    assert "rank" in text and "2 plans of 2 ranks unsafe" in text


@pytest.mark.usefixtures("folder")
def test_each_rank_may_have_a_graph_of_its_own(capsys: Capture) -> None:
    save_graph(transformer(3), "other.json")
    out("plan other.json --strategy overlap --batch 512 -o other.plan", capsys)
    words = "verify other.plan --graph graph.json --graph other.json"
    assert "plan safe" in out(words, capsys)


@pytest.mark.usefixtures("folder")
def test_simulation_is_labelled_simulated(capsys: Capture) -> None:
    words = "simulate safe.plan --graph graph.json --batch 512"
    text = out(words, capsys)
    assert "(simulated)" in text and "makespan" in text and "compute" in text
    assert out(words, capsys) == text
    found = data(words, capsys)
    assert found["simulated"] is True
    assert 0 < found["critical_path_s"] <= found["makespan_s"]
    alone = data(f"{words} --no-contention", capsys)
    assert alone["makespan_s"] <= found["makespan_s"]


@pytest.mark.usefixtures("folder")
def test_trace_is_saved_for_viewers(capsys: Capture) -> None:
    words = "simulate safe.plan --graph graph.json --batch 512 --trace"
    out(f"{words} trace.json", capsys)
    assert load_trace("trace.json").simulated
    assert json.loads(Path("trace.json").read_text())["traceEvents"]
    out(f"{words} trace.txt", capsys)
    assert "(simulated)" in Path("trace.txt").read_text()


@pytest.mark.usefixtures("folder")
def test_unsafe_plan_is_not_simulated(capsys: Capture) -> None:
    words = "simulate unsafe.plan --graph graph.json --batch 512"
    error = data(words, capsys, 1)["error"]
    assert (error["kind"], error["rule"]) == ("PlanError", "coverage")


@pytest.mark.usefixtures("folder")
def test_show_prints_numbered_text(capsys: Capture) -> None:
    assert out("show graph.json", capsys).splitlines()[0].startswith("graph transformer2")
    lines = out("show safe.plan", capsys).splitlines()
    assert lines[0] == "weft plan 1"
    assert [line.split()[0] for line in lines[lines.index("steps") + 1 :]] == [
        str(number) for number in range(44)
    ]


@pytest.mark.usefixtures("folder")
def test_diff_shows_what_differs(capsys: Capture) -> None:
    assert out("diff safe.plan safe.plan", capsys) == ""
    assert "-  compute  complete reduce_attn0[0]" in out("diff safe.plan unsafe.plan", capsys, 1)


def test_strategies_are_listed_with_options_and_what_they_do(capsys: Capture) -> None:
    listed = " ".join(out("strategies", capsys).split())
    assert "overlap(parts=2, min_tokens=0, at=None) Split the batch" in listed
    rows = {row["name"]: row for row in data("strategies", capsys)["strategies"]}
    assert rows["overlap"]["options"]["parts"] == 2


def test_version_is_told(capsys: Capture) -> None:
    assert out("--version", capsys).startswith("torchweft 0.")


def test_demo_tells_the_whole_story(capsys: Capture) -> None:
    text = out("demo --quick", capsys)
    for part in ("graph transformer2", "(simulated)", "Simulated speed-up", "PlanError: race:"):
        assert part in text


def fake_bench(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """A bench of the name `verify` that keeps what it was called with."""
    called: dict[str, Any] = {}

    def run(
        *, num_plans: int = 10, seed: int = 0, quick: bool = False, progress: Any = None
    ) -> Any:
        called.update(num_plans=num_plans, seed=seed, quick=quick)
        progress(1, 2)
        return [{"kind": "a\nb", "n": 1}, {"kind": "[red]", "n": 2.5}], {"plans": num_plans}

    from torchweft_tools.bench import verify as module

    monkeypatch.setattr(module, "run", run)
    return called


def test_bench_ends_with_one_json_line(monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    called = fake_bench(monkeypatch)
    found = data("bench verify --plans 20 --seed=7 --quick", capsys)
    assert found["bench"] == "verify" and found["summary"] == {"plans": 20}
    assert len(found["rows"]) == 2
    assert called == {"num_plans": 20, "seed": 7, "quick": True}


def test_bench_prints_a_table_for_people(monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    fake_bench(monkeypatch)
    text = out("bench verify", capsys)
    assert "kind" in text and "[red]" in text and "plans 10" in text


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("bench", "Known: ablation, auto, boundary, depth"),
        ("bench verfy", "Did you mean 'verify'"),
        ("bench verify --plan 3", "Did you mean '--plans'"),
        ("bench verify --plans", "needs a value"),
        ("bench verify --plans many", "cannot be 'many'"),
        ("bench verify --plans True", "cannot be 'True'"),
        ("bench verify more", "unknown option 'more'"),
    ],
)
def test_bench_that_is_not_there_lists_the_choices(
    words: str, says: str, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    fake_bench(monkeypatch)
    assert says in data(words, capsys, 1)["error"]["message"]


def test_real_bench_runs(capsys: Capture) -> None:
    found = data("bench verify --plans 4 --workers 1", capsys)
    assert found["summary"]["plans"] == 4


MISTAKES = {
    "plan missing.json --batch 1": "there is no graph file missing.json",
    "plan safe.plan --batch 1": "is not JSON",
    "plan . --batch 1": "cannot read graph file",
    "plan graph.json --batch 8 --strategy overlop": "Did you mean 'overlap'",
    "plan graph.json --batch 8 --strategy overlap --option prts=2": "Did you mean 'parts'",
    "plan graph.json --batch 8 --strategy overlap --option parts": "is not NAME=VALUE",
    "plan graph.json --batch 8 --strategy overlap --option parts=1 --option parts=2": "twice",
    "plan graph.json --batch 8 --strategy overlap --option parts=none": "parts",
    "plan graph.json --batch 1 --strategy overlap": "1 rows cannot make 2 parts",
    "plan graph.json --batch 8 --size s1=x": "'s1' is not a whole number",
    "plan graph.json --batch 8 --tokens-per-request 1,x": "such as 512,17,1",
    "plan graph.json --batch 8 --lanes 0": "at least one compute lane",
    "plan graph.json --batch 8 --machine graph.json": "is not a machine file",
    "plan graph.json --batch 8 --machine graph.json --lanes 2": "do not go together",
    "plan graph.json --batch 8 -o nowhere/x.plan": "nowhere",
    "verify missing.plan --graph graph.json": "there is no plan file",
    "verify graph.json --graph graph.json": "this is not a plan",
    "verify safe.plan --graph safe.plan": "is not JSON",
    "verify safe.plan --graph other.json": "was made for graph 'transformer2'",
    "simulate safe.plan --graph graph.json --batch 1": "1 rows cannot make 2 parts",
    "simulate safe.plan --graph graph.json --batch 8 --trace x.html": "Known: .json, .txt",
    "simulate safe.plan --graph graph.json --batch 8 --trace nowhere/x.json": "nowhere",
    "show missing.plan": "missing.plan",
    "show empty": "this is not a plan",
    "diff safe.plan graph.json": "this is not a plan",
    "blueprint transfomer": "Did you mean 'transformer'",
    "blueprint transformer -o nowhere/x.json": "nowhere",
}


@pytest.mark.usefixtures("folder")
@pytest.mark.parametrize("words", MISTAKES)
def test_mistake_is_our_error_on_stderr_and_exit_code_one(words: str, capsys: Capture) -> None:
    save_graph(transformer(3), "other.json")
    Path("empty").touch()
    assert cli.run(words.split()) == 1
    shown = capsys.readouterr()
    assert MISTAKES[words] in shown.err and "Traceback" not in shown.err
    assert shown.err.split(":")[0].endswith("Error")
    assert not shown.out


@pytest.mark.usefixtures("folder")
def test_mistake_is_data_for_tools(capsys: Capture) -> None:
    error = data("plan missing.json --batch 1", capsys, 1)["error"]
    assert error["kind"] == "GraphError" and error["rule"] == "file"
    assert "missing.json" in error["message"] and error["step"] is None
    error = data("plan graph.json --batch 8 --strategy overlap --option prts=2", capsys, 1)["error"]
    assert (error["kind"], error["rule"]) == ("StrategyError", "option")


@pytest.mark.usefixtures("folder")
def test_unreadable_command_line_is_exit_code_two(capsys: Capture) -> None:
    for words in ("plan", "plan graph.json", "plan graph.json --batch x", "pln", "plan --nope"):
        assert cli.run(words.split()) == 2
        assert "Usage: torchweft" in capsys.readouterr().err
        assert data(words, capsys, 2)["error"]["rule"] == "usage"


@pytest.mark.usefixtures("folder")
def test_debug_shows_where_an_error_was_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WEFT_DEBUG", "1")
    with pytest.raises(WeftError):
        cli.run(["plan", "missing.json", "--batch", "1"])


@pytest.mark.usefixtures("folder")
def test_control_characters_of_a_file_do_not_reach_the_terminal(capsys: Capture) -> None:
    text = Path("safe.plan").read_text()
    Path("evil.plan").write_text(text.replace("history write", "history \x1b[31mwrite\u202e"))
    for words in ("show evil.plan", "diff safe.plan evil.plan"):
        cli.run(words.split())
        shown = capsys.readouterr()
        assert "\x1b" not in shown.out + shown.err and "\u202e" not in shown.out + shown.err
    Path("evil.plan").write_text(text.replace("  compute  split x", "  \x1b]0;evil\x07"))
    assert cli.run(["show", "evil.plan"]) == 1
    assert "\x1b" not in capsys.readouterr().err


def test_escapes_leave_drawn_text_alone() -> None:
    assert printable("▐█attn0[0]█··\n é") == "▐█attn0[0]█··\n é"
    assert printable("a\x1b[0m\r\nb\ud800") == "a\\x1b[0m\\r\nb\\ud800"


def test_values_of_options_are_literals_or_text() -> None:
    words = ["a=4", "b=0.5", "c=None", "d=True", "e=text", "f=x=y", "g=[1]", "h=__import__('os')"]
    assert read_pairs(words, "option") == {
        "a": 4, "b": 0.5, "c": None, "d": True, "e": "text", "f": "x=y", "g": "[1]",
        "h": "__import__('os')",
    }  # fmt: skip
    assert read_literal("(" * 5000) == "(" * 5000


def test_benches_are_listed_with_a_line_each_and_without_torch(tmp_path: Path) -> None:
    code = (
        "import sys; from torchweft_tools.cli import app; code = app.run(['bench', '--help']);"
        "assert 'torch' not in sys.modules and 'torchweft_tools.bench.verify' not in sys.modules"
    )
    command = [sys.executable, "-c", code]
    shown = subprocess.run(command, check=True, capture_output=True, text=True, cwd=tmp_path)
    for name in cli_bench.BENCHES:
        assert name in shown.stdout
        line = cli_bench.first_line(name)
        assert line[0].isupper() and line.endswith("."), name
    assert "Random plans, judged by the oracle" in shown.stdout


def test_help_of_a_bench_shows_its_options_with_types_and_defaults(capsys: Capture) -> None:
    text = " ".join(out("bench verify --help", capsys).split())
    assert "--plans <int> random plans to judge. [default: 20000]" in text
    assert "--seed <int>" in text and "--json" in text
    assert "A *false accept* is an unsafe plan without findings" in text


@pytest.mark.parametrize("name", cli_bench.BENCHES)
def test_every_option_of_a_bench_has_a_help(name: str) -> None:
    module = __import__(f"torchweft_tools.bench.{name}", fromlist=["run"])
    command = cli_bench.bench_command(name)
    options = {item.name: item for item in command.params if item.name != "as_json"}
    arguments = inspect.signature(module.run).parameters
    assert set(options) == set(arguments) - {"progress"}
    assert "quick" in options, "a minute or two, to see that it runs"
    assert all(item.help for item in options.values())
    assert {item.name: item.default for item in options.values()} == {
        name: arguments[name].default for name in options
    }


def test_json_may_stand_before_the_name_of_a_bench(
    monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    called = fake_bench(monkeypatch)
    assert json.loads(out("bench --json verify --seed 3", capsys))["summary"] == {"plans": 10}
    assert called["seed"] == 3


def test_command_starts_without_torch(tmp_path: Path) -> None:
    code = (
        "import sys; from torchweft_tools.cli import app; code = app.run(['strategies']);"
        "assert 'torch' not in sys.modules and 'numpy' not in sys.modules; sys.exit(code)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, cwd=tmp_path)


def test_closed_pipe_is_no_traceback(tmp_path: Path) -> None:
    save_graph(transformer(200), tmp_path / "graph.json")
    words = [
        sys.executable,
        "-c",
        "from torchweft_tools.cli.app import main; main()",
        "show",
        "graph.json",
    ]
    with subprocess.Popen(
        words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd=tmp_path, env=dict(os.environ)
    ) as command:
        assert command.stdout is not None and command.stderr is not None
        command.stdout.close()
        assert b"Traceback" not in command.stderr.read()


@pytest.mark.usefixtures("folder")
def test_plan_is_drawn_as_a_picture_that_says_simulated(capsys: Capture) -> None:
    out("plan graph.json --strategy overlap --batch 8 --svg two.svg", capsys)
    text = Path("two.svg").read_text()
    names = [node.tag.partition("}")[2] for node in ElementTree.fromstring(text).iter()]
    assert names[0] == "svg"
    assert names.count("title") > 4
    assert "(simulated)" in text
    assert ">network</text>" in text


@pytest.mark.usefixtures("folder")
def test_bare_plan_has_no_picture(capsys: Capture) -> None:
    assert cli.run(["plan", "graph.json", "--batch", "8", "--bare", "--svg", "two.svg"]) == 1
    assert "leave out --bare" in capsys.readouterr().err

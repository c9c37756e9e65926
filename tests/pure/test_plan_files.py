"""Plan files that are truncated, edited, foreign, huge or hostile: a plan, or our own error."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from unittest.mock import patch

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from torchweft.errors import PlanError, WeftError
from torchweft.files import MAX_BYTES
from torchweft.plan.context import Context
from torchweft.plan.machine import cpu
from torchweft.plan.plan import MAX_STEPS, Plan, Step
from torchweft.plan.simulator import simulate
from torchweft.plan.strategies import overlap
from torchweft.plan.verify import findings, verify
from torchweft.plan.write.strategy import write
from torchweft_tools.buffers import lower_into_buffers
from torchweft_tools.demo.blueprint import transformer

GRAPH = transformer(2, kv_cache=True)
CONTEXT = Context(batch=16)
PLAN = lower_into_buffers(write(overlap, GRAPH, CONTEXT))
TEXT = str(PLAN)
HOSTILE = "x\n__import__('os').system('touch pwned')"


def edited(old: str, new: str) -> str:
    assert old in TEXT, f"{old!r} is not in the plan"
    return TEXT.replace(old, new, 1)


def test_plan_cut_off_after_any_line_is_refused() -> None:
    lines = TEXT.splitlines(keepends=True)
    for number in range(len(lines)):
        with pytest.raises(PlanError) as caught:
            Plan.parse("".join(lines[:number]))
        assert caught.value.rule == ("truncated" if number else "syntax")
        assert "cut off" in str(caught.value) or not number


def test_plan_cut_off_at_any_character_is_refused() -> None:
    for number in range(len(TEXT) - 1):
        with pytest.raises(PlanError):
            Plan.parse(TEXT[:number])


def test_missing_line_is_noticed_wherever_it_stood() -> None:
    lines = TEXT.splitlines(keepends=True)
    for number, line in enumerate(lines):
        rest = "".join(lines[:number] + lines[number + 1 :])
        try:
            plan = Plan.parse(rest).bind(GRAPH)
        except PlanError:
            continue
        free = ("history", "lane io", "  compute  free", "place attn", "place mlp")
        harmless = line.startswith(free)
        assert bool(findings(plan)) != harmless, line


def test_comments_and_blank_lines_do_not_sneak_in() -> None:
    assert Plan.parse(TEXT.replace("\n", "\n\n")) == PLAN
    with pytest.raises(PlanError, match="cannot read this step"):
        Plan.parse(edited("steps\n", "steps\n# a comment\n"))


def test_plan_of_another_graph_is_refused(tmp_path: Path) -> None:
    PLAN.save(tmp_path / "one.plan")
    with pytest.raises(PlanError, match="was made for graph 'transformer2'") as caught:
        Plan.load(tmp_path / "one.plan", transformer(3))
    assert caught.value.rule == "graph"
    with pytest.raises(PlanError, match=r"plan.bind\(graph\)"):
        verify(Plan.load(tmp_path / "one.plan"))


LINKED = """weft plan 2
graph transformer2 0123456789abcdef
parts 1
lane one on one uses compute
lane one.to.two on one uses io to two
steps
  one         a
  one.to.two  wait a
  one.to.two  copy v to two
end
"""


def test_plan_with_lanes_of_links_is_of_format_2() -> None:
    plan = Plan.parse(LINKED)
    assert str(plan) == LINKED
    assert [lane.to for lane in plan.lanes] == [None, "two"]
    assert str(PLAN).startswith("weft plan 1\n")
    assert Plan.parse(edited("weft plan 1", "weft plan 2")) == PLAN


def test_lane_of_a_link_is_known_by_its_name_in_format_1() -> None:
    old = LINKED.replace("plan 2", "plan 1").replace(" uses io to two", " uses io")
    assert Plan.parse(old) == Plan.parse(LINKED)
    for other in ("uses io,memory", "uses io via one"):
        assert all(lane.to is None for lane in Plan.parse(old.replace("uses io", other)).lanes)
    assert Plan.parse(old.replace("one.to.two", "wire")).lanes[1].to is None


def test_lane_of_a_link_cannot_say_so_in_format_1() -> None:
    with pytest.raises(PlanError, match="starts with plan format 2") as caught:
        Plan.parse(LINKED.replace("plan 2", "plan 1"))
    assert caught.value.rule == "version"


@pytest.mark.parametrize("version", ["3", "0", "1.0", "", "one", "1 1"])
def test_plan_of_another_version_is_refused(version: str) -> None:
    with pytest.raises(PlanError, match="this torchweft reads") as caught:
        Plan.parse(edited("weft plan 1", f"weft plan {version}"))
    assert caught.value.rule == "version"


HEADS = {
    "no fraction": ("parts 1/2 1/2", "parts 1/0 1/2"),
    "endless fraction": ("parts 1/2 1/2", f"parts 1/{'9' * 5000} 1/2"),
    "fraction to trip over": ("parts 1/2 1/2", f"parts {'1' * 40}!"),
    "not one batch": ("parts 1/2 1/2", "parts 1/2 1/3"),
    "too many parts": ("parts 1/2 1/2", "parts " + " ".join(["1/2000"] * 2000)),
    "unknown rule": ("parts 1/2 1/2", "parts 1/2 1/2 at tokens"),
    "two graphs": ("parts 1/2", "graph other 0123456789abcdef\nparts 1/2"),
    "endless offset": ("in b0 at 0", f"in b0 at {'9' * 5000}"),
    "negative offset": ("in b0 at 0", "in b0 at -1"),
    "unit of no size": ("unit s0", "unit __import__('os')"),
    "endless unit": ("unit s0", "unit " + "(" * 9 + "9" + "**8)" * 9),
    "wide unit": ("unit s0", "unit ((a+b+c+d+e)**8)**8"),
    "unit by nothing": ("unit s0", "unit 4 // 0"),
    "unit modulo nothing": ("unit s0", "unit mod(4, 0)"),
    "unit of one maximum": ("unit s0", "unit max(4)**99"),
    "foreign digits": ("parts 1/2 1/2", "parts 1/٢ 1/2"),
    "lane of no name": ("lane io", "lane i/o"),
    "hostile lane": ("lane io", f"lane {HOSTILE}"),
    "hostile history": ("history write", f"{HOSTILE[2:]}\nhistory write"),
    "hostile place": ("place y", f"place {HOSTILE}"),
}


@pytest.mark.usefixtures("in_time")
@pytest.mark.parametrize("name", HEADS)
def test_head_line_that_cannot_be_is_shown(name: str) -> None:
    old, new = HEADS[name]
    text = edited(old, new)
    with pytest.raises(PlanError) as caught:
        Plan.parse(text)
    if name != "two graphs":
        number = next(n for n, line in enumerate(text.splitlines()) if line not in TEXT)
        assert f"line {number + 1}:" in str(caught.value)
    assert "<-- here" in str(caught.value)
    assert len(str(caught.value)) < 2000


STEPS = {
    "hostile op": ("attn0[0]", HOSTILE),
    "hostile label": ("compute  split x", f"compute  wait {HOSTILE}\n  compute  split x"),
    "call": ("attn0[0]", "__import__('os')"),
    "no part": ("attn0[0]", "attn0[]"),
    "turned range": ("attn0[0]", "attn0[1:0]"),
    "short range": ("attn0[0]", "attn0[0:1]"),
    "foreign digit": ("attn0[0]", "attn0[٠]"),
    "endless part": ("attn0[0]", f"attn0[{'9' * 5000}]"),
    "issue nowhere": ("issue reduce_attn0[0] on network", "issue reduce_attn0[0]"),
    "run somewhere": ("attn0[0]\n", "attn0[0] on network\n"),
    "joined value": ("split x", "split (x y)"),
    "copy by kernel": ("split x", "copy x by fused"),
    "run to device": ("attn0[0]\n", "attn0[0] to gpu0\n"),
    "no lane": ("compute  attn0[0]", "attn0[0]"),
}


@pytest.mark.parametrize("name", STEPS)
def test_step_that_cannot_be_read_is_shown(name: str) -> None:
    text = edited(*STEPS[name])
    with pytest.raises(PlanError) as caught:
        Plan.parse(text)
    assert caught.value.rule == "syntax"
    assert "<-- here" in str(caught.value)
    assert len(str(caught.value)) < 2000


EDITS = {
    "op": ("compute  attn0[0]", "compute  atn0[0]", "Did you mean 'attn0'"),
    "lane": ("compute  attn0[0]", "compite  attn0[0]", "Did you mean 'compute'"),
    "part": ("compute  attn0[0]", "compute  attn0[7]", r"\[7\] of 2"),
    "value": ("split x", "split z", "unknown value 'z'"),
    "resource": ("uses io", "uses magic", "unknown resource 'magic'"),
    "buffer": ("in b0 at 0", "in b7 at 0", "unknown buffer 'b7'"),
    "device": ("compute  split x", "compute  copy x to gpu0\n  compute  split x", "unknown device"),
    "twice": ("compute  attn0[0]", "compute  attn0[0]\n  compute  attn0[0]", "runs twice"),
    "never": ("  compute  attn0[0]\n", "", r"attn0\[0\] never runs"),
    "unmerged": ("  compute  merge y\n", "", "never merged"),
    "wait for nothing": ("compute  split x", "compute  wait nope\n  compute  split x", "not in"),
    "wait for itself": ("compute  split x", "compute  wait merge y\n  compute  split x", "behind"),
}


@pytest.mark.parametrize("name", EDITS)
def test_plan_edited_by_hand_is_refused_by_the_verifier(name: str) -> None:
    old, new, says = EDITS[name]
    plan = Plan.parse(edited(old, new)).bind(GRAPH)
    with pytest.raises(PlanError, match=says):
        verify(plan)


def test_huge_files_are_refused_before_they_are_read(tmp_path: Path) -> None:
    path = tmp_path / "huge.plan"
    with path.open("wb") as file:
        file.truncate(MAX_BYTES + 1)
    with pytest.raises(PlanError, match="larger than 32 MiB"):
        Plan.load(path)


def test_too_many_steps_are_refused() -> None:
    with pytest.raises(PlanError, match=f"at most {MAX_STEPS} lines"):
        Plan.parse(TEXT + "\n" * (MAX_STEPS + 1))


@pytest.mark.usefixtures("in_time")
def test_long_lines_are_refused_quickly_and_shown_short() -> None:
    for line in ("a" * 10**6, "compute  " + "(" + "a " * 10**5 + ")", "compute " + " " * 10**6):
        with pytest.raises(PlanError) as caught:
            Plan.parse(edited("  compute  split x", line))
        assert len(str(caught.value)) < 2000


@pytest.mark.parametrize("found", [b"", b"\xff\xfe", b"\x00" * 64, b"{}", b"weft plan"])
def test_files_that_are_no_plan_are_refused(found: bytes, tmp_path: Path) -> None:
    path = tmp_path / "no.plan"
    path.write_bytes(found)
    with pytest.raises(PlanError):
        Plan.load(path)


def test_missing_file_and_directory_are_refused(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match="there is no plan file"):
        Plan.load(tmp_path / "missing.plan")
    with pytest.raises(PlanError, match="cannot read plan file"):
        Plan.load(tmp_path)


def test_step_on_a_long_unknown_lane_reads_back() -> None:
    step = Step("run", "a_lane_with_a_long_name", ("attn0",))
    plan = PLAN.then("by hand", steps=(*PLAN.steps, step))
    assert Plan.parse(str(plan)) == plan


def test_saved_plan_is_loaded_as_it_was(tmp_path: Path) -> None:
    PLAN.save(tmp_path / "one.plan")
    assert Plan.load(tmp_path / "one.plan", GRAPH) == PLAN
    assert [path.name for path in tmp_path.iterdir()] == ["one.plan"]


flips = st.lists(st.tuples(st.integers(0, len(TEXT) - 1), st.characters()), min_size=1, max_size=4)


@settings(max_examples=400)
@given(flips)
@example([(TEXT.index("b0 on"), "\x1b")])
def test_flipped_characters_give_a_plan_or_our_error(changes: list[tuple[int, str]]) -> None:
    letters = list(TEXT)
    for at, letter in changes:
        letters[at] = letter
    survive("".join(letters))


words = st.sampled_from(sorted({word for line in TEXT.splitlines() for word in line.split(" ")}))


@settings(max_examples=300)
@given(st.integers(0, len(TEXT.splitlines())), st.lists(words, max_size=8))
def test_inserted_words_give_a_plan_or_our_error(at: int, inserted: list[str]) -> None:
    lines = TEXT.splitlines()
    lines.insert(at, " ".join(inserted))
    survive("\n".join(lines))


@settings(max_examples=200)
@given(st.data())
def test_moved_lines_give_a_plan_or_our_error(data: st.DataObject) -> None:
    lines = TEXT.splitlines()
    for _ in range(data.draw(st.integers(1, 3))):
        lines.insert(data.draw(st.integers(0, len(lines))), data.draw(st.sampled_from(lines)))
        lines.pop(data.draw(st.integers(0, len(lines) - 1)))
    survive("\n".join(lines))


def survive(text: str) -> None:
    """All that is done with a plan file works or raises our error; what is read, reads back."""
    with nothing_runs(), suppress(WeftError):
        plan = Plan.parse(text)
        assert reads_back(plan), f"this plan does not read back:\n{plan}"
        bound = plan.bind(GRAPH)
        for item in findings(bound):
            item.error(bound)
        simulate(bound, CONTEXT, cpu())


def reads_back(plan: Plan) -> bool:
    try:
        return Plan.parse(str(plan)) == plan
    except PlanError:
        return False


@contextmanager
def nothing_runs() -> Iterator[None]:
    """Whatever executes text or a command in here fails the test."""
    with ExitStack() as stack:
        for name in ("builtins.eval", "builtins.exec", "os.system", "subprocess.Popen"):
            stack.enter_context(patch(name, side_effect=AssertionError("something was executed")))
        yield

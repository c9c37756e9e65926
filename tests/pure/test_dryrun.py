"""The checker of dry runs, on records made by hand and at random: no torch, no device."""

from __future__ import annotations

import json
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchweft.errors import MachineError
from torchweft_tools.dryrun.build import include_folders_of, stubs
from torchweft_tools.dryrun.calls import (
    ByteSpan,
    CallsError,
    RankCalls,
    gather,
    load_calls,
    overlap,
    read_calls,
    save_calls,
)
from torchweft_tools.dryrun.check import Fault, check
from torchweft_tools.dryrun.run import run
from torchweft_tools.dryrun.show import report

SIZE = 512


class Paper:
    """The record of one rank, written by hand; buffers are numbers."""

    def __init__(self, rank: int = 0) -> None:
        self.rank, self.calls, self.ops = rank, [], 0

    def put(self, call: str, **fields: Any) -> Paper:
        self.calls.append({"n": len(self.calls) + 1, "call": call, **fields})
        return self

    def kernel(
        self, s: int, reads: Any = (), writes: Any = (), line: str = "", g: int = 0
    ) -> Paper:
        self.ops += 1
        self.put("kernel", s=s, g=g, name="k", op=self.ops)
        spans = [[[b * SIZE, SIZE, [], b * SIZE] for b in items] for items in (reads, writes)]
        line = line or f"p.py:{self.ops}"
        return self.put("op", op=self.ops, name="op", reads=spans[0], writes=spans[1], line=line)

    def record(self, s: int, e: int, g: int = 0) -> Paper:
        return self.put("record", s=s, e=e, g=g)

    def wait(self, s: int, e: int, g: int = 0) -> Paper:
        return self.put("wait", s=s, e=e, g=g)

    def alloc(self, s: int, b: int) -> Paper:
        return self.put("alloc", s=s, ptr=b * SIZE)

    def free(self, b: int) -> Paper:
        return self.put("free", ptr=b * SIZE, line="p.py:free")

    def talk(
        self, s: int, b: int, count: int = 8, comm: str = "c", line: str = "", **own: Any
    ) -> Paper:
        fields = {"rank": self.rank, "size": 2, "in": count, "out": count, "dtype": 7, "reduce": 0}
        span = [[b * SIZE, SIZE, [], b * SIZE]]
        more = {"kind": "all_reduce", "comm": comm, "peer": -1, "group": 0, "line": line, **own}
        return self.put("collective", s=s, g=0, reads=span, writes=span, **{**fields, **more})

    def data(self) -> dict[str, Any]:
        return {"rank": self.rank, "pid": 1, "calls": self.calls}


def faults(*papers: Paper) -> list[Fault]:
    return check(ranks_of(*papers))


def ranks_of(*papers: Paper) -> tuple[RankCalls, ...]:
    return read_calls(paper.data() for paper in papers)


def rules(*papers: Paper) -> list[str]:
    return [fault.rule for fault in faults(*papers)]


# Races.


def test_a_missing_wait_is_a_race_and_names_both_lines() -> None:
    (fault,) = faults(Paper().kernel(0, writes=[1]).kernel(1, reads=[1]))
    assert fault.rule == "race" and fault.lines == ("p.py:2", "p.py:1")


def test_a_wait_orders() -> None:
    assert not faults(Paper().kernel(0, writes=[1]).record(0, 1).wait(1, 1).kernel(1, reads=[1]))


def test_two_readers_do_not_race() -> None:
    assert not faults(Paper().kernel(0, reads=[1]).kernel(1, reads=[1]))


def test_order_goes_through_a_third_stream() -> None:
    paper = Paper().kernel(0, writes=[1]).record(0, 1).wait(2, 1).record(2, 2).wait(1, 2)
    assert not faults(paper.kernel(1, reads=[1]))


def test_an_event_is_what_was_recorded_last_before_the_wait() -> None:
    paper = Paper().record(0, 1).kernel(0, writes=[1]).wait(1, 1).record(0, 1)
    assert rules(paper.kernel(1, reads=[1])) == ["race"]


@pytest.mark.parametrize("what", [{"s": 0}, {"dev": 0}, {"e": 1}])
def test_the_host_orders_when_it_waits(what: dict[str, int]) -> None:
    paper = Paper().kernel(0, writes=[1]).record(0, 1).put("sync", what="wait", **what)
    assert not faults(paper.kernel(1, reads=[1]))


def test_a_wait_of_the_host_for_another_stream_orders_nothing() -> None:
    paper = Paper().kernel(0, writes=[1]).kernel(2, writes=[2]).put("sync", what="wait", s=2)
    assert rules(paper.kernel(1, reads=[1])) == ["race"]


@pytest.mark.parametrize(("blocking", "wanted"), [(1, []), (0, ["race"])])
def test_the_legacy_stream_waits_for_blocking_streams(blocking: int, wanted: list[str]) -> None:
    paper = Paper().put("stream", s=0, dev=0, priority=0, blocking=2)
    paper.put("stream", s=1, dev=0, priority=0, blocking=blocking)
    assert rules(paper.kernel(1, writes=[1]).kernel(0, reads=[1])) == wanted


def test_columns_beside_each_other_do_not_overlap() -> None:
    left, right = ByteSpan(0, 8, ((4, 16),)), ByteSpan(8, 8, ((4, 16),))
    assert not overlap(left, right)
    assert overlap(left, ByteSpan(4, 8, ((4, 16),)))
    assert overlap(left, ByteSpan(0, 64))


def test_the_work_of_a_graph_is_done_again_at_each_launch() -> None:
    paper = Paper().put("capture", s=3, g=1).kernel(3, writes=[1], g=1).put("captured", s=3, g=1)
    paper.put("launch", s=0, graph=1, g=0)
    ordered = Paper()
    ordered.calls, ordered.ops = list(paper.calls), paper.ops
    assert rules(paper.kernel(1, reads=[1])) == ["race"]
    assert not faults(ordered.record(0, 1).wait(1, 1).kernel(1, reads=[1]))


@pytest.mark.parametrize(("waits", "wanted"), [(False, ["race"]), (True, [])])
def test_a_replay_does_not_write_over_what_is_still_read(waits: bool, wanted: list[str]) -> None:
    paper = Paper().put("capture", s=3, g=1).alloc(3, 1).kernel(3, writes=[1], g=1)
    paper.put("captured", s=3, g=1).put("launch", s=0, graph=1, g=0)
    paper.record(0, 1).wait(1, 1).kernel(1, reads=[1])
    if waits:
        paper.record(1, 2).wait(0, 2)
    assert rules(paper.put("launch", s=0, graph=1, g=0)) == wanted


def test_streams_inside_a_graph_race_too() -> None:
    paper = Paper().put("capture", s=3, g=1).record(3, 1, g=1).kernel(3, writes=[1], g=1)
    paper.wait(4, 1, g=1).kernel(4, reads=[1], g=1).record(4, 2, g=1).wait(3, 2, g=1)
    paper.put("captured", s=3, g=1)
    assert not faults(paper)
    assert rules(paper.put("launch", s=0, graph=1, g=0)) == ["race"]


def test_a_collective_on_the_second_half_of_a_block_races_with_an_op_there() -> None:
    """A collective knows addresses alone; the op knows that they lie in a larger block."""
    half = SIZE // 2
    paper = Paper().put("kernel", s=0, g=0, name="k", op=1)
    paper.put("op", op=1, name="op", reads=[], writes=[[SIZE, half, [], SIZE]], line="p.py:1")
    paper.talk(1, 1, line="p.py:2")
    paper.calls[-1].update(reads=[[SIZE + half, half]], writes=[[SIZE + half, half]])
    paper.put("kernel", s=0, g=0, name="k", op=2)
    paper.put(
        "op", op=2, name="op", reads=[[SIZE + half, half, [], SIZE]], writes=[], line="p.py:3"
    )
    assert [fault.lines for fault in faults(paper)] == [("p.py:3", "p.py:2")]


# Lifetimes.


def freed(*, keep: bool = False, waits: bool = False) -> Paper:
    paper = Paper().alloc(0, 1).kernel(0, writes=[1]).record(0, 1).wait(1, 1).kernel(1, reads=[1])
    if keep:
        paper.put("keep", ptr=SIZE, s=1)
    if waits:
        paper.record(1, 2).wait(0, 2)
    return paper.free(1).alloc(0, 2).kernel(0, writes=[2])


def test_memory_freed_before_its_last_reader_is_found() -> None:
    (fault,) = faults(freed())
    assert fault.rule == "early-free" and fault.lines == ("p.py:2", "p.py:free")


def test_kept_memory_or_a_wait_is_enough() -> None:
    assert not faults(freed(keep=True))
    assert not faults(freed(waits=True))


def test_a_block_freed_while_a_collective_uses_a_part_of_it_is_found() -> None:
    paper = Paper().alloc(0, 1).talk(1, 1, line="p.py:9")
    paper.calls[-1].update(reads=[[SIZE + 8, 8]], writes=[[SIZE + 8, 8]])
    paper.free(1).alloc(0, 1).kernel(0, writes=[1])
    assert [(fault.rule, fault.lines[0]) for fault in faults(paper)] == [("early-free", "p.py:9")]


# Events and streams.


def test_a_wait_before_the_record_waits_for_nothing() -> None:
    paper = Paper().kernel(0, writes=[1]).wait(1, 1).record(0, 1).kernel(1, reads=[1])
    assert rules(paper) == ["late-event", "race"]


def test_an_event_behind_other_work_is_advice() -> None:
    paper = Paper().kernel(0, writes=[1]).kernel(0, writes=[2]).record(0, 1).wait(1, 1)
    (fault,) = faults(paper.kernel(1, reads=[1]))
    assert fault.rule == "late-record" and fault.is_advice


def test_a_wait_that_an_op_hides_is_advice() -> None:
    paper = Paper().kernel(0, writes=[1]).put("sync", what="cudaStreamSynchronize", s=0, op=1)
    assert rules(paper) == ["hidden-sync"]
    assert not faults(Paper().put("sync", what="cudaDeviceSynchronize", dev=0, line="p.py:1"))


def test_a_collective_on_a_stream_that_computes_is_advice() -> None:
    def both(stream: int) -> list[Paper]:
        papers = [Paper(rank).kernel(0, writes=[1]) for rank in (0, 1)]
        return [
            paper.record(0, 1).wait(stream, 1).talk(stream, 1, line="p.py:8") for paper in papers
        ]

    assert rules(*both(0)) == ["compute-stream"]
    assert not rules(*both(1))


def test_refused_and_unknown_calls_are_found() -> None:
    paper = Paper().put("error", name="cudaStreamEndCapture", code=904, line="p.py:1")
    texts = [str(fault) for fault in faults(paper.put("unmodelled", name="cudaMallocAsync"))]
    assert "904 at p.py:1" in texts[0] and "cudaMallocAsync" in texts[1]


# Ranks.


def test_swapped_collectives_name_both_ranks() -> None:
    (fault,) = faults(
        Paper(0).talk(1, 1, 8, line="p.py:1").talk(1, 2, 16, line="p.py:2"),
        Paper(1).talk(1, 2, 16, line="p.py:2").talk(1, 1, 8, line="p.py:1"),
    )
    assert fault.rule == "collectives" and fault.lines == ("p.py:1", "p.py:2")


def test_swapped_collectives_of_one_size_are_known_by_their_lines() -> None:
    first = Paper(0).talk(1, 1, line="p.py:1").talk(1, 2, line="p.py:2")
    assert rules(first, Paper(1).talk(1, 2, line="p.py:2").talk(1, 1, line="p.py:1")) == [
        "collectives"
    ]
    # Each rank has lines of its own: a root and the others.
    assert not rules(first, Paper(1).talk(1, 1, line="p.py:8").talk(1, 2, line="p.py:9"))


def test_swapped_collectives_of_one_line_are_known_by_what_made_their_bytes() -> None:
    """As from a loop: one size, one line; the sums would be wrong without a word."""

    def rank(number: int, order: list[int]) -> Paper:
        paper = Paper(number).kernel(0, writes=[1]).kernel(0, writes=[2]).record(0, 1).wait(1, 1)
        for buffer in order:
            paper.talk(1, buffer, line="p.py:9")
        return paper

    assert "collectives" not in rules(rank(0, [1, 2]), rank(1, [1, 2]))
    assert "collectives" in rules(rank(0, [1, 2]), rank(1, [2, 1]))
    other = rank(1, [2, 1]).kernel(0, writes=[3])  # not the same program: nothing can be compared
    assert "collectives" not in rules(rank(0, [1, 2]), other)


def test_a_rank_that_gives_a_share_of_its_own_is_right() -> None:
    """Each rank makes all shares by the same kernels, and gathers its own."""

    def rank(number: int) -> Paper:
        paper = Paper(number).kernel(0, writes=[1]).kernel(0, writes=[2]).record(0, 1).wait(1, 1)
        return paper.talk(1, 1 + number, line="p.py:9", kind="all_gather")

    assert "collectives" not in rules(rank(0), rank(1))


def test_a_root_that_changes_has_lines_of_its_own() -> None:
    """for root in ranks: `if rank == root: broadcast  # 1`, and `else: broadcast  # 2`."""

    def rank(number: int) -> Paper:
        paper = Paper(number)
        for root in (0, 1):
            line = "p.py:1" if root == number else "p.py:2"
            paper.talk(1, root, line=line, kind="broadcast", peer=root)
        return paper

    assert not rules(rank(0), rank(1))


def test_processes_without_a_rank_are_told_apart(tmp_path: Path) -> None:
    """As torch.multiprocessing.spawn leaves them: their communicators have their ranks."""

    def leave(pid: int, known: int, **comm: int) -> None:
        head = {"n": 0, "call": "process", "pid": pid, "rank": known, "devices": 2}
        paper = Paper().kernel(0)
        if comm:
            paper.put("comm", comm="c", **comm)
        lines = [json.dumps(item) for item in (head, *paper.calls)]
        (tmp_path / f"calls-{pid}.jsonl").write_text("\n".join(lines))

    leave(7, -1, rank=1, size=2)
    leave(8, -1, rank=0, size=2)
    assert [(data["rank"], data["pid"]) for data in gather(tmp_path)] == [(0, 8), (1, 7)]
    leave(9, 1)  # RANK is what counts
    leave(10, 1)
    told = [(data["rank"], data["pid"]) for data in gather(tmp_path)]
    assert told == [(0, 8), (1, 9), (2, 10), (3, 7)]


def test_a_collective_that_one_rank_never_issues_is_found() -> None:
    (fault,) = faults(Paper(0).talk(1, 1).talk(1, 1), Paper(1).talk(1, 1))
    assert "never issued on rank 1" in fault.text


def test_a_message_must_be_met_and_of_one_size() -> None:
    def message(rank: int, kind: str, count: int = 8) -> Paper:
        count_in, count_out = (count, 0) if kind == "send" else (0, count)
        own = {"kind": kind, "peer": 1 - rank, "in": count_in, "out": count_out}
        return Paper(rank).talk(1, 1, line=f"p.py:{kind}", **own)

    assert not rules(message(0, "send"), message(1, "recv"))
    (fault,) = faults(message(0, "send"), message(1, "recv", 16))
    assert fault.rule == "collectives" and fault.lines == ("p.py:send", "p.py:recv")
    (fault,) = faults(message(0, "send"), Paper(1))
    assert "rank 1 never receives it" in fault.text
    (fault,) = faults(Paper(0), message(1, "recv"))
    assert "rank 0 never sends it" in fault.text and fault.lines == ("p.py:recv",)
    assert not faults(message(0, "send"))  # the other rank has left no record


def test_two_communicators_in_another_order_on_one_stream_are_a_circle() -> None:
    first = Paper(0).talk(1, 1, comm="a").talk(1, 2, comm="b")
    (fault,) = faults(first, Paper(1).talk(1, 2, comm="b").talk(1, 1, comm="a"))
    assert "circle" in fault.text
    # On streams of their own they do not wait for each other.
    assert not faults(
        Paper(0).talk(1, 1, comm="a").talk(2, 2, comm="b"),
        Paper(1).talk(2, 2, comm="b").talk(1, 1, comm="a"),
    )


# Laws, on random programs. The oracle walks edges; it knows no clocks.


@st.composite
def programs(draw: st.DrawFn) -> list[tuple[int, frozenset[int], frozenset[int]]]:
    """Kernels on three streams that touch four buffers."""
    some = st.frozensets(st.integers(1, 4), max_size=2)
    return draw(st.lists(st.tuples(st.integers(0, 2), some, some), min_size=2, max_size=8))


def conflicts(program: list[Any]) -> list[tuple[int, int]]:
    """Pairs of kernels that must be ordered."""
    touched = [(s, reads, writes) for s, reads, writes in program]
    pairs = []
    for i, j in combinations(range(len(touched)), 2):
        (_, r, w), (_, r2, w2) = touched[i], touched[j]
        if w & (r2 | w2) or r & w2:
            pairs.append((i, j))
    return pairs


def written(program: list[Any], waits: list[tuple[int, int]]) -> Paper:
    """The program, an event behind each kernel, and these waits: (kernel, the one it waits for)."""
    paper = Paper()
    for j, (stream, reads, writes) in enumerate(program):
        for i in (i for k, i in waits if k == j):
            paper.wait(stream, i + 1)
        paper.kernel(stream, reads, writes).record(stream, j + 1)
    return paper


def reaches(program: list[Any], waits: list[tuple[int, int]], i: int, j: int) -> bool:
    """Whether kernel i is behind kernel j's back, by walking from j along streams and waits."""
    seen, todo = set(), [j]
    while todo:
        k = todo.pop()
        if k in seen:
            continue
        seen.add(k)
        todo += [h for h in range(k) if program[h][0] == program[k][0]]
        todo += [h for one, h in waits if one == k]
    return i in seen


@given(programs(), st.data())
def test_every_wait_taken_out_is_found_unless_others_imply_it(
    program: list[Any], data: st.DataObject
) -> None:
    pairs = conflicts(program)
    waits = [(j, i) for i, j in pairs if program[i][0] != program[j][0]]
    assert "race" not in rules(written(program, waits))
    for gone in waits:
        left = [wait for wait in waits if wait != gone]
        is_wrong = any(not reaches(program, left, i, j) for i, j in pairs)
        assert ("race" in rules(written(program, left))) == is_wrong, (program, gone)


@given(programs(), st.data())
def test_every_early_free_is_found(program: list[Any], data: st.DataObject) -> None:
    """A buffer of stream 0 is freed somewhere, and stream 0 goes on with other memory."""
    pairs = conflicts(program)
    waits = [(j, i) for i, j in pairs if program[i][0] != program[j][0]]
    program = [*program, (0, frozenset(), frozenset({9}))]
    last = len(program) - 1
    buffer = data.draw(st.integers(1, 4))
    extra = data.draw(st.lists(st.integers(0, last - 1), max_size=2))
    waits += [(last, i) for i in extra if program[i][0] != 0]
    paper = Paper().alloc(0, buffer)
    body = written(program, waits)
    at = max(i for i, call in enumerate(body.calls) if call["call"] == "kernel")
    at -= sum(1 for k, _ in waits if k == last)  # before the waits of the last kernel
    for item in (*body.calls[:at], *Paper().free(buffer).alloc(0, 9).calls, *body.calls[at:]):
        paper.put(item["call"], **{k: v for k, v in item.items() if k not in ("n", "call")})
    users = [i for i, (s, r, w) in enumerate(program) if s != 0 and buffer in r | w]
    is_wrong = any(not reaches(program, waits, i, last) for i in users)
    assert ("early-free" in rules(paper)) == is_wrong


@given(st.lists(st.tuples(st.integers(1, 2), st.integers(1, 3)), min_size=2, max_size=6), st.data())
def test_every_swapped_collective_is_found(talks: list[Any], data: st.DataObject) -> None:
    def rank(number: int, order: list[int]) -> Paper:
        paper = Paper(number)
        for i in order:
            comm, count = talks[i]
            paper.talk(1, i, 8 * count, comm=str(comm), line=f"p.py:{i}")
        return paper

    order = list(range(len(talks)))
    assert not rules(rank(0, order), rank(1, order))
    at = data.draw(st.integers(0, len(talks) - 2))
    swapped = [*order[:at], order[at + 1], order[at], *order[at + 2 :]]
    assert "collectives" in rules(rank(0, order), rank(1, swapped))


# Files, text, and mistakes.


def test_a_record_is_read_back_and_shown(tmp_path: Path) -> None:
    paper = Paper().kernel(0, writes=[1]).record(0, 1).wait(1, 1).talk(1, 1, line="p.py:7")
    paper.put("sync", what="cudaDeviceSynchronize", dev=0, line="p.py:9")
    save_calls(tmp_path / "calls.json", [paper.data()])
    ranks = load_calls(tmp_path / "calls.json")
    assert ranks == ranks_of(paper)
    text = report(ranks, check(ranks))
    for word in ("stream 0", "all_reduce(8)", "host waits", "p.py:9", "no findings"):
        assert word in text
    assert "ended" not in text
    assert "exit code 3. Numbers mean nothing" in report(ranks, (), code=3)
    assert "ended with signal 11" in report(ranks, (), code=-11)


def test_the_timeline_has_columns_for_the_streams_that_it_shows() -> None:
    paper = Paper().kernel(7, writes=[1]).kernel(8, writes=[2]).kernel(9, writes=[3])
    lines = report(ranks_of(paper), (), max_lines=2).splitlines()
    assert lines[3].split() == ["stream", "8", "stream", "9"]
    assert lines[4].startswith("... 1 lines before") and lines[5:7] == ["op", " " * 32 + "op"]


def test_a_process_that_was_ended_leaves_what_it_wrote(tmp_path: Path) -> None:
    head = {"n": 0, "call": "process", "pid": 5, "rank": 1, "devices": 1, "events": "lazy"}
    lines = [json.dumps(item) for item in (head, *Paper().kernel(0).calls)]
    (tmp_path / "calls-5.jsonl").write_text("\n".join(lines) + '\n{"n": 9, "ca')
    (tmp_path / "calls-6.jsonl").write_text(json.dumps(head))  # a launcher
    (data,) = gather(tmp_path)
    assert data["rank"] == 1 and len(data["calls"]) == 2


def test_a_file_that_is_no_record_is_an_error_of_ours(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text("[]")
    with pytest.raises(CallsError, match="not a record"):
        load_calls(tmp_path / "a.json")
    with pytest.raises(CallsError, match="cannot be read"):
        load_calls(tmp_path / "b.json")
    with pytest.raises(CallsError, match="a call that cannot be read"):
        read_calls([{"rank": 0, "calls": [{"call": "kernel"}]}])


def test_what_cannot_run_is_an_error_with_a_cure() -> None:
    with pytest.raises(MachineError, match="no command"):
        run(["no-such-command"])
    with pytest.raises(MachineError, match="devices must be"):
        run(["python"], devices=0)
    with pytest.raises(MachineError, match="lazy or eager"):
        run(["python"], events="late")
    with pytest.raises(MachineError, match="does not run as a Python"):
        include_folders_of("no-such-python")


def test_what_headers_declare_and_nobody_models_becomes_a_stub() -> None:
    text = stubs(
        "extern cudaError_t cudaNew(int a);\n"
        "cublasStatus_t cublasSgemm_v2(cublasHandle_t handle, int m);\n"
        "cublasStatus_t cublasSetNew(cublasHandle_t handle, int m);\n"
        "CUresult cuNew(int a);\n"
    )
    assert 'cudaNew(void) { return weft_unmodelled("cudaNew", 801); }' in text
    assert 'weft_product(handle, "cublasSgemm_v2")' in text
    assert 'weft_unmodelled("cublasSetNew"' in text
    assert "cuNew" not in text  # no function of the driver is stood in for

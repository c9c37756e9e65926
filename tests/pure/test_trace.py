"""Traces: numbers computed by hand, the text timeline, Chrome JSON, to disk and back."""

from __future__ import annotations

import json
import math
from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchweft.errors import WeftError
from torchweft.plan.trace import SPANS, Span, Trace, format_s, to_data
from torchweft_tools.formats.weft_files import load_trace, read_trace


def span(kind: str, label: str, lane: str, start_s: float, end_s: float, **more: Any) -> Span:
    uses = more.get("uses", "network" if lane == "network" else "compute")
    busy_s = more.get("busy_s", 0.0 if kind == "wait" else end_s - start_s)
    return Span(kind, label, lane, "cpu", uses, "", more.get("parts"), start_s, end_s, busy_s)


ATTN, MLP = (
    span("run", "attn[0]", "compute", 0, 4e-3),
    span("run", "mlp[0]", "compute", 7e-3, 10e-3),
)
REDUCE = span("transfer", "reduce[0]", "network", 4.5e-3, 6.5e-3)
TRACE = Trace(
    "small",
    (
        ATTN,
        span("issue", "issue reduce[0]", "compute", 4e-3, 4.5e-3, uses="network"),
        REDUCE,
        span(
            "complete", "complete reduce[0]", "compute", 4.5e-3, 7e-3, uses="network", busy_s=5e-4
        ),
        span("run", "load", "io", 0, 2e-3, uses="io"),
        MLP,
    ),
    memory=((0.0, 0), (0.001, 3 * 2**20), (0.009, 2**20)),
    simulated=True,
    critical_path=(ATTN, MLP),
    lanes=(("compute", "cpu"), ("network", "cpu")),
)


def test_numbers_of_a_trace() -> None:
    assert TRACE.makespan_s == pytest.approx(10e-3)
    assert TRACE.busy_s("compute") == pytest.approx(8e-3)
    assert TRACE.busy_s("network") == pytest.approx(2e-3)
    assert TRACE.critical_path_s == pytest.approx(7e-3)
    assert TRACE.peak_bytes == 3 * 2**20
    assert TRACE.lanes == (("compute", "cpu"), ("network", "cpu"), ("io", "cpu"))


FLIGHTS = Trace(
    "flights",
    (
        span("transfer", "reduce[0]", "network", 0, 6e-3),
        span("transfer", "reduce[1]", "network", 1e-3, 8e-3),
        span("transfer", "reduce[2]", "network", 2e-3, 7e-3),
        span("run", "attn", "compute", 2e-3, 8e-3),
        span("transfer", "reduce[3]", "network", 9e-3, 10e-3),
    ),
)


def test_a_lane_with_several_flights_is_never_busier_than_the_clock() -> None:
    assert FLIGHTS.busy_s("network") == pytest.approx(9e-3)
    shares = [float(word[:-1]) for word in FLIGHTS.to_text().split() if word.endswith("%")]
    assert len(shares) == 3 and max(shares) <= 100


def test_flights_at_once_are_told_apart() -> None:
    text = FLIGHTS.to_text()
    assert all(f"reduce[{number}]" in text for number in range(3))
    lines = [line for line in text.splitlines() if "reduce" in line]
    assert len(lines) == 3 and [line[:7] for line in lines] == ["network", " " * 7, " " * 7]
    events = FLIGHTS.to_chrome()["traceEvents"]
    names = [event["args"]["name"] for event in events if event["name"] == "thread_name"]
    assert names == ["network", "network, flight 2", "network, flight 3", "compute"]
    bars: dict[int, list[tuple[float, float]]] = {}
    for event in (event for event in events if event["ph"] == "X"):
        bars.setdefault(event["tid"], []).append((event["ts"], event["ts"] + event["dur"]))
    for row in bars.values():
        assert all(one[1] <= two[0] + 1e-9 for one, two in pairwise(sorted(row)))


def test_network_is_exposed_where_no_compute_or_memory_step_runs() -> None:
    spans = (
        span("transfer", "a", "network", 0, 4),
        span("transfer", "b", "network2", 3, 6, uses="network"),
        span("run", "c", "compute", 1, 2),
        span("copy", "copy d", "other", 1.5, 3, uses="memory"),
        span("run", "load", "io", 0, 6, uses="io"),
        span("wait", "wait b", "compute", 2, 6, uses=""),
    )
    trace = Trace("t", spans)
    assert trace.network_s == 6
    assert trace.exposed_network_s == pytest.approx(1 + 3)
    assert trace.overlap_share == pytest.approx(1 / 3)


def test_without_network_there_is_nothing_to_hide() -> None:
    trace = Trace("t", (ATTN,))
    assert (trace.network_s, trace.exposed_network_s, trace.overlap_share) == (0, 0, 1)
    assert "in flight" not in trace.to_text()


def test_unknown_lane_lists_the_choices() -> None:
    with pytest.raises(WeftError, match=r"unknown lane 'netwrok'\. Did you mean 'network'"):
        TRACE.busy_s("netwrok")


def test_text_timeline_reads_as_written() -> None:
    assert TRACE.to_text(width=64) == (
        "small (simulated): makespan 10 ms, critical path 7 ms\n"
        "         |0 ms                   |5\n"
        "compute  ▐██████attn[0]██████▒▒············▐████mlp[0]████   80%\n"
        "network                        ╞reduce[0]                    20%\n"
        "io       ╟──load───                                          20%\n"
        "network 2 ms in flight, 2 ms exposed, 0% hidden\n"
        "memory peak 3 MiB\n"
        "█ compute  ═ network  ─ io  ▒ issue  · waiting\n"
    )


@given(
    st.lists(
        st.tuples(
            st.sampled_from(SPANS),
            st.text(max_size=9),
            st.sampled_from(["compute", "network", "a_lane_with_a_name_longer_than_its_column"]),
            st.floats(0, 1e4),
            st.floats(0, 1e4),
        ),
        max_size=12,
    ),
    st.integers(1, 150),
)
def test_text_keeps_its_width_whatever_the_spans(items: list[Any], width: int) -> None:
    spans = [span(k, label, lane, min(a, b), max(a, b)) for k, label, lane, a, b in items]
    printable = [item._replace(label="".join(filter(str.isalnum, item.label))) for item in spans]
    lines = Trace("t", tuple(printable), simulated=True).to_text(width).splitlines()
    assert "simulated" in lines[0]
    num_lanes = len({item.lane for item in spans})
    assert all(len(line) <= max(width, 52) for line in lines[1 : 2 + num_lanes])


def test_measured_traces_say_so() -> None:
    assert "measured" in Trace("t", (ATTN,)).to_text()
    assert "simulated" not in json.dumps(Trace("t", (ATTN,)).to_chrome()["traceEvents"])


def test_empty_trace_can_be_drawn() -> None:
    assert "makespan 0 us" in Trace("none", ()).to_text()
    assert Trace("none", ()).to_chrome()["traceEvents"] == []


def test_chrome_names_lanes_and_spans() -> None:
    events = json.loads(json.dumps(TRACE.to_chrome(), allow_nan=False))["traceEvents"]
    names = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
    devices = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    assert devices == {1: "cpu (simulated)"}
    shown = [e for e in events if e["ph"] == "X"]
    assert [(e["name"], names[e["pid"], e["tid"]]) for e in shown] == [
        (item.label, item.lane) for item in TRACE.spans
    ]
    assert [e["ts"] for e in shown] == pytest.approx([s.start_s * 1e6 for s in TRACE.spans])
    durations = [(s.end_s - s.start_s) * 1e6 for s in TRACE.spans]
    assert [e["dur"] for e in shown] == pytest.approx(durations)
    counters = [(e["ts"], e["args"]["bytes"]) for e in events if e["ph"] == "C"]
    assert counters == [(0, 0), (1000, 3 * 2**20), (9000, 2**20)]


def test_chrome_arrows_lead_from_issue_to_transfer_to_complete_and_to_waits() -> None:
    spans = (*TRACE.spans, span("wait", "wait mlp[0]", "other", 1e-3, 10e-3, uses=""))
    chrome = Trace("t", spans).to_chrome()
    arrows = [e for e in chrome["traceEvents"] if e["ph"] in "sf"]
    assert Counter(e["id"] for e in arrows) == {0: 2, 1: 2, 2: 2}
    lanes = {
        e["tid"]: e["args"]["name"] for e in chrome["traceEvents"] if e["name"] == "thread_name"
    }
    pairs = [
        (lanes[a["tid"]], lanes[b["tid"]]) for a, b in zip(arrows[::2], arrows[1::2], strict=True)
    ]
    assert pairs == [("compute", "network"), ("network", "compute"), ("compute", "other")]
    assert all(a["ts"] <= b["ts"] for a, b in zip(arrows[::2], arrows[1::2], strict=True))


def test_json_reads_back(tmp_path: Path) -> None:
    TRACE.save(tmp_path / "run.json")
    assert Trace.load(tmp_path / "run.json") == TRACE
    assert read_trace(to_data(TRACE)) == TRACE


def test_text_file_is_the_timeline(tmp_path: Path) -> None:
    TRACE.save(tmp_path / "run.txt")
    assert (tmp_path / "run.txt").read_text() == TRACE.to_text()


def test_unknown_suffix_lists_the_choices(tmp_path: Path) -> None:
    with pytest.raises(WeftError, match=r"unknown suffix '\.svg'\..*\.json, \.txt"):
        TRACE.save(tmp_path / "run.svg")


@pytest.mark.parametrize(
    "change",
    [
        {"version": 2},
        {"spans": 3},
        {"spans": [[]]},
        {"spans": [["run"] * 10]},
        {"spans": [["leap", "a", "b", "c", "d", "", None, 0, 1, 1]]},
        {"spans": [["run", 7, "b", "c", "d", "", None, 0, 1, 1]]},
        {"spans": [["run", "a", "b", "c", "d", "", None, 2, 1, 1]]},
        {"spans": [["run", "a", "b", "c", "d", "", None, 0, math.nan, 1]]},
        {"spans": [["run", "a", "b", "c", "d", "", None, 0, math.inf, 1]]},
        {"spans": [["run", "a", "b", "c", "d", "", None, -1, 1, 1]]},
        {"spans": [["run", "a", "b", "c", "d", "", [], 0, 1, 1]]},
        {"spans": [["run", "a", "b", "c", "d", "", ["x", "y"], 0, 1, 1]]},
        {"spans": [["run", "a", "b", "c", "d", "", 5, 0, 1, 1]]},
        {"lanes": [1]},
        {"memory": [[0, "many"]]},
        {"critical_path": [99]},
        {"critical_path": ["a"]},
    ],
)
def test_damaged_traces_are_refused(tmp_path: Path, change: dict[str, Any]) -> None:
    path = tmp_path / "run.json"
    path.write_text(json.dumps({"weft_trace": {**to_data(TRACE), **change}}))
    with pytest.raises(WeftError):
        load_trace(path)


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"traceEvents": []}', '{"weft_trace": 1}'])
def test_other_json_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "run.json"
    path.write_text(text)
    with pytest.raises(WeftError):
        load_trace(path)


@pytest.mark.parametrize(
    ("seconds", "text"), [(0, "0 us"), (1.5e-6, "1.5 us"), (0.01234, "12.3 ms"), (2, "2 s")]
)
def test_times_read_well(seconds: float, text: str) -> None:
    assert format_s(seconds) == text

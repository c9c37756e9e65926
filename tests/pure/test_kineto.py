"""Traces of others: profiler files of several devices, damaged ones, and the command that reads."""

from __future__ import annotations

import gzip
import json
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchweft.errors import WeftError
from torchweft.plan.context import Context
from torchweft.plan.lower.lower import lower
from torchweft.plan.machine import cpu
from torchweft.plan.simulator import simulate
from torchweft.plan.strategies import overlap
from torchweft.plan.write.strategy import write
from torchweft_tools.cli.app import run
from torchweft_tools.cli.explaining import explain_files
from torchweft_tools.demo.blueprint import transformer
from torchweft_tools.formats.kineto import read_trace_file
from torchweft_tools.formats.weft_files import save_graph

sys.path.insert(0, str(Path(__file__).parents[1]))
import large_trace

REDUCE = "ncclDevKernel_AllReduce_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)"


def event(cat: str, name: str, tid: object, ts: float, dur: float, **args: Any) -> dict[str, Any]:
    return {"ph": "X", "cat": cat, "name": name, "pid": 1, "tid": tid, "ts": ts, "dur": dur,
            "args": args}  # fmt: skip


def kernel(name: str, stream: int, ts: float, dur: float, at: float, **more: Any) -> list[Any]:
    """A kernel and its launch, which ends at `at`."""
    runtime = more.pop("runtime", "cuda_runtime")
    number = int(ts * 10 + stream)
    launch = event(runtime, "LaunchKernel", 9, at - 1, 1, correlation=number)
    return [
        launch,
        event("kernel", name, stream, ts, dur, stream=stream, correlation=number, **more),
    ]


def saved(path: Path, *events: Any, rank: int | None = None) -> Path:
    info = {} if rank is None else {"distributedInfo": {"backend": "nccl", "rank": rank}}
    flat = [one for each in events for one in (each if isinstance(each, list) else [each])]
    path.write_text(json.dumps({"schemaVersion": 1, "traceEvents": flat, **info}))
    return path


def ms(explanation: Any) -> list[float]:
    """Overlapped, exposed and idle microseconds of the first rank."""
    times = explanation.ranks[0]
    return [round(s * 1e6, 3) for s in (times.overlapped_s, times.exposed_s, times.idle_s)]


def test_a_device_trace_is_told_by_streams(tmp_path: Path) -> None:
    path = saved(
        tmp_path / "a.json",
        kernel("gemm", 7, 1000, 100, 900),
        kernel(REDUCE, 20, 1100, 50, 950, **{"Process Group Description": "tp"}),
        kernel("gemm2", 7, 1100, 10, 951),
        kernel("gemm3", 7, 1150, 100, 952),
        event("gpu_user_annotation", "nccl:all_reduce", 20, 1100, 50),
        event("python_function", "x.py(1): f", 9, 800, 500),
        {"ph": "s", "id": 1, "pid": 1, "tid": 9, "ts": 1000, "cat": "ac2g", "name": "ac2g"},
    )
    found = explain_files([path])
    assert ms(found) == [10, 40, 0]
    assert found.ranks[0].communicators == {"tp": pytest.approx(40e-6)}
    assert found.owners == {"dependency": pytest.approx(40e-6)}
    assert found.what_if and found.simulated_s == pytest.approx(240e-6, rel=0.2)


@pytest.mark.parametrize(
    "name",
    [
        "ncclKernel_AllGather_RING_LL_Sum_int8_t(ncclWorkElem)",
        "rcclGenericKernel<1, false>",
        "void oneccl_allreduce_kernel",
        "void vllm::cross_device_reduce_1stage<__nv_bfloat16, 8>",
        "multimem_all_reduce_kernel",
        "one_shot_all_reduce_kernel",
        "void deep_ep::intranode::dispatch<8, 768>",
        "void dpsk::ep::internode::combine<false, 8, __nv_bfloat16, 8, 2, 16, 24>(int4*)",
        "Memcpy PtoP (Device -> Device)",
    ],
)
def test_kernels_that_talk_are_known_by_their_names(tmp_path: Path, name: str) -> None:
    path = saved(
        tmp_path / "a.json", kernel("gemm", 7, 1000, 100, 900), kernel(name, 9, 1100, 50, 950)
    )
    assert ms(explain_files([path])) == [0, 50, 0]


@pytest.mark.parametrize("runtime", ["cuda_driver", "hip_runtime", "xpu_runtime"])
def test_launches_of_every_vendor_are_joined(tmp_path: Path, runtime: str) -> None:
    """The second kernel is launched when the first has ended for 50 us."""
    path = saved(
        tmp_path / "a.json",
        kernel("gemm", 7, 1000, 100, 900, runtime=runtime),
        kernel("gemm2", 7, 1160, 100, 1150, runtime=runtime),
    )
    found = explain_files([path])
    assert found.owners == {"launch-bound": pytest.approx(60e-6)}


def test_a_collective_on_the_stream_of_the_compute_is_on_the_wrong_lane(tmp_path: Path) -> None:
    path = saved(
        tmp_path / "a.json",
        kernel("gemm", 7, 1000, 100, 900),
        kernel(REDUCE, 7, 1100, 50, 950),
        kernel("gemm2", 7, 1150, 100, 951),
    )
    found = explain_files([path])
    assert found.owners == {"wrong lane": pytest.approx(50e-6)}
    assert str(found).startswith("NEVER ENGAGED: no network op ran beside compute")


def test_copies_to_the_host_are_io_and_allocations_memory(tmp_path: Path) -> None:
    path = saved(
        tmp_path / "a.json",
        kernel("gemm", 7, 1000, 100, 900),
        event("gpu_memcpy", "Memcpy HtoD (Pinned -> Device)", 8, 1100, 30, stream=8),
        event("cuda_runtime", "cudaMalloc", 9, 1130, 20),
        kernel("gemm2", 7, 1150, 100, 1149),
    )
    got = explain_files([path]).owners
    assert got["memory cap"] == pytest.approx(20e-6)
    assert sum(got.values()) == pytest.approx(50e-6)


def test_two_ranks_and_their_straggler(tmp_path: Path) -> None:
    early = kernel("gemm", 7, 1000, 100, 900), kernel(REDUCE, 20, 1100, 200, 950)
    late = kernel("gemm", 7, 5000, 250, 4900), kernel(REDUCE, 20, 5250, 50, 4950)
    one = saved(tmp_path / "a.json", *early, kernel("next", 7, 1300, 10, 960), rank=1)
    two = saved(tmp_path / "b.json", *late, kernel("next", 7, 5300, 10, 4960), rank=0)
    found = explain_files([one, two])
    assert [times.rank for times in found.ranks] == [0, 1]
    assert found.ranks[1].owners["another rank late"][0] == pytest.approx(150e-6)
    assert "another rank late" not in found.ranks[0].owners
    with pytest.raises(WeftError, match="is of rank 1, as another file is"):
        explain_files([one, one])
    assert [times.rank for times in explain_files([one, two], ranks=[1]).ranks] == [1]
    with pytest.raises(WeftError, match="unknown rank"):
        explain_files([one, two], ranks=[7])


def test_threads_and_gloo_where_there_is_no_device(tmp_path: Path) -> None:
    """A flight counts from the end of the call that issues it; gloo's own ops are no compute."""
    path = saved(
        tmp_path / "a.json",
        event("cpu_op", "Torch-Compiled Region: 0/0", 1, 990, 500),
        event("cpu_op", "aten::linear", 1, 1000, 100),
        event("cpu_op", "aten::addmm", 1, 1010, 80),
        event("cpu_op", "c10d::allreduce_", 1, 1100, 10),
        event("user_annotation", "gloo:all_reduce", 2, 1105, 95),
        event("cpu_op", "aten::copy_", 2, 1120, 5),
        event("cpu_op", "aten::relu", 1, 1150, 20),
        event("cpu_op", "aten::add", 1, 1200, 40),
        rank=3,
    )
    found = explain_files([path])
    assert ms(found) == [20, 70, 10]
    assert found.ranks[0].rank == 3
    assert found.ranks[0].owners["dependency"][0] == pytest.approx(30e-6)


def test_steps_are_told_apart_and_the_median_is_shown(tmp_path: Path) -> None:
    events: list[Any] = []
    for number, length in enumerate((100, 300, 120)):
        at = 1000 + 400 * number
        events.append(event("user_annotation", f"ProfilerStep#{number + 5}", 9, at - 20, 390))
        events.append(kernel("gemm", 7, at, length, at - 10))
    path = saved(tmp_path / "a.json", *events)
    found = explain_files([path])
    assert found.name == "a.json ProfilerStep#7"  # 120, 600 and 220 us, each from the one before
    assert len(found.steps) == 3
    assert explain_files([path], step=7).name == "a.json ProfilerStep#7"
    with pytest.raises(WeftError, match=r"unknown step.*Known: 5, 6, 7"):
        explain_files([path], step=8)


def test_a_large_file_has_the_times_it_was_made_with(tmp_path: Path) -> None:
    path = tmp_path / "rank0.json"
    num_layers = large_trace.write(path, 1)
    with gzip.open(tmp_path / "rank0.json.gz", "wb") as file:
        file.write(path.read_bytes())
    for name in ("rank0.json", "rank0.json.gz"):
        times = explain_files([tmp_path / name], step=2).ranks[0]
        layers = num_layers // 5
        assert times.overlapped_s == pytest.approx(layers * 300e-6)
        assert times.exposed_s == pytest.approx(layers * 200e-6)
        assert times.owners["dependency"][0] == pytest.approx(times.exposed_s)


def test_our_own_files_are_read_with_their_plan(tmp_path: Path) -> None:
    graph, context = transformer(2), Context(512)
    plan = lower(write(overlap(parts=2), graph, context, cpu()))
    trace = simulate(plan, context, cpu())
    trace.save(tmp_path / "run.json")
    plan.save(tmp_path / "run.plan")
    save_graph(graph, tmp_path / "graph.json")
    plain = explain_files([tmp_path / "run.json"])
    assert plain.all.exposed_s == pytest.approx(trace.exposed_network_s)
    assert explain_files([tmp_path / "run.json"], plan=plan).all.step_s == plain.all.step_s
    words = ["explain", str(tmp_path / "run.json"), "--plan", str(tmp_path / "run.plan")]
    assert run([*words, "--graph", str(tmp_path / "graph.json")]) == 0
    assert run(words) == 1


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "not a trace"),
        ('{"traceEvents": [{"ph": "X"', "not a trace"),
        ("[1, 2]", "event 0 is none"),
        ("{}", "has no events"),
        ("[" * 100_000, "not a trace"),
        ('{"traceEvents": []}', "has no events"),
        ('{"traceEvents": [{"ph": "X", "cat": "kernel", "name": "k", "ts": "soon"}]}', "no time"),
        ('{"traceEvents": [{"ph": "X", "cat": "kernel", "name": "k", "ts": -1}]}', "no time"),
        ('{"traceEvents": [{"ph": "M", "name": "process_name"}]}', "no kernels and no operators"),
        ('{"weft_trace": {"version": 1}}', "damaged"),
    ],
)
def test_a_damaged_file_is_an_error_of_ours(tmp_path: Path, text: str, says: str) -> None:
    path = tmp_path / "bad.json"
    path.write_text(text)
    with pytest.raises(WeftError, match=says):
        explain_files([path])
    assert run(["explain", str(path)]) == 1


def test_a_number_without_end_is_an_error_of_ours(tmp_path: Path) -> None:
    path = tmp_path / "bad.json"
    text = json.dumps({"traceEvents": [event("kernel", "k", 7, 12345, 1)]})
    path.write_text(text.replace("12345", "1" * 400))
    with pytest.raises(WeftError, match=r"event 0|not a trace"):
        explain_files([path])


def test_a_file_that_is_cut_off_is_an_error_of_ours(tmp_path: Path) -> None:
    large_trace.write(tmp_path / "a.json", 0.1)
    data = gzip.compress((tmp_path / "a.json").read_bytes())
    for at in (5, 30, len(data) // 2, len(data) - 9):
        (tmp_path / "cut.json.gz").write_bytes(data[:at])
        with pytest.raises(WeftError, match=r"cannot read|not a trace"):
            explain_files([tmp_path / "cut.json.gz"])


def test_the_command_prints_text_or_json(tmp_path: Path, capsys: Any) -> None:
    path = saved(
        tmp_path / "a.json", kernel("gemm", 7, 1000, 100, 900), kernel(REDUCE, 9, 1100, 50, 950)
    )
    assert run(["explain", str(path)]) == 0
    assert "last part" in capsys.readouterr().out
    assert run(["explain", str(path), "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert data["owners"] == {"last part": pytest.approx(50e-6)}
    assert run(["explain", str(tmp_path / "none.json"), "--json"]) == 1


WORD = st.sampled_from(("kernel", "cpu_op", "cuda_runtime", "user_annotation", "gpu_memcpy", "x"))
NAMES = st.sampled_from(
    (REDUCE, "gemm", "gloo:all_reduce", "c10d::allreduce_", "aten::mm", "ProfilerStep#3",
     "weft run compute compute a[0]", "cudaMalloc")
)  # fmt: skip
TIME = st.integers(0, 1000) | st.floats(0, 1000)
EVENTS = st.builds(
    lambda cat, name, tid, ts, dur, link: event(cat, name, tid, ts, dur, correlation=link),
    WORD, NAMES, st.integers(0, 2), TIME, TIME, st.integers(0, 5),
)  # fmt: skip


@given(st.lists(EVENTS, max_size=12))
def test_any_file_gives_an_explanation_or_our_error(tmp_path_factory: Any, events: Any) -> None:
    path = tmp_path_factory.getbasetemp() / "any.json"
    saved(path, *events)
    try:
        found = explain_files([path])
    except WeftError:
        return
    times = found.all
    assert sum(found.owners.values()) == pytest.approx(times.exposed_s + times.idle_s, abs=1e-9)
    assert read_trace_file(path).steps

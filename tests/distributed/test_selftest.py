"""The self-test: a node that is well passes; each check fails where its thing is broken."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import torchweft as weft
from torchweft.errors import MachineError, RunError, WeftError
from torchweft_tools.dryrun.calls import read_calls
from torchweft_tools.selftest import checks, selftest
from torchweft_tools.selftest.dry import judge
from torchweft_tools.selftest.rank import attempt, together
from torchweft_tools.selftest.rig import CheckError, Rig, Skip


@pytest.fixture(scope="module")
def group() -> Iterator[dist.ProcessGroup]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


@pytest.fixture
def rig(group: dist.ProcessGroup) -> Rig:
    torch._dynamo.reset()
    return Rig(torch.device("cpu"), 0, 1, group, (torch.float32,), 3)


def two(rig: Rig) -> Rig:
    """The rig as the first of two ranks."""
    return Rig(rig.device, 0, 2, rig.side, rig.dtypes, rig.num_pairs)


ALONE = ["lanes", "lifetimes", "collectives", "equality", "noise", "speed"]


def steady(rig: Rig, runs: Mapping[str, Callable[[], Tensor]]) -> dict[str, list[float]]:
    """Races of a node that is well: tests run beside others, and say nothing about seconds."""
    for run in runs.values():
        run()
    return {name: [0.1] * rig.num_pairs for name in runs}


@pytest.mark.parametrize("name", ALONE)
def test_a_check_passes_where_all_is_well(
    name: str, rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checks, "_race", steady)
    with torch.no_grad():
        assert checks.TOGETHER[name](rig)


def test_programs_are_timed_in_turn(rig: Rig) -> None:
    order: list[str] = []

    def run(name: str) -> Tensor:
        order.append(name)
        return torch.zeros(1)

    times = checks._race(rig, {name: partial(run, name) for name in ("plain", "woven")})
    assert {name: len(each) for name, each in times.items()} == {"plain": 3, "woven": 3}
    timed = order[2:]
    assert sorted(timed) == ["plain"] * 3 + ["woven"] * 3
    assert all({*timed[start : start + 2]} == {"plain", "woven"} for start in range(0, 6, 2))


def broken(kind: str) -> Callable[..., Any]:
    """`_woven` of a Weft with a fault."""

    def woven(rig: Rig, plain: Any, strategy: Any, **options: Any) -> Any:
        if kind == "plain":
            return plain
        if kind == "other":
            return _raises
        good = weft.compile(plain, "sequential") if kind == "one lane" else plain
        calls: list[Tensor] = []

        def call(x: Tensor) -> Tensor:
            result = good(x).clone()
            if kind == "wrong":
                result[-1] += 0.5
            elif kind == "late":
                for earlier in calls:  # memory that is used again while somebody still reads it
                    earlier.fill_(float("nan"))
                calls.append(result)
            return result

        return good if kind == "one lane" else call

    return woven


def _raises(x: Tensor) -> Tensor:
    raise RunError("something else")


BROKEN = [
    ("lanes", "wrong"), ("lanes", "one lane"), ("lifetimes", "late"), ("lifetimes", "wrong"),
    ("collectives", "wrong"), ("equality", "wrong"), ("speed", "wrong"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "kind"), BROKEN)
def test_a_check_fails_where_its_thing_is_broken(
    name: str, kind: str, rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checks, "_woven", broken(kind))
    with torch.no_grad(), pytest.raises(CheckError):
        checks.TOGETHER[name](rig)


def test_ranks_that_run_on_with_other_plans_or_without_a_rank_fail(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checks, "_woven", broken("plain"))
    with pytest.raises(CheckError, match="other plans ran on"):
        checks.agreement(rig)
    with pytest.raises(CheckError, match="went on without the rank"):
        checks.faults(two(rig))
    monkeypatch.setattr(checks, "_woven", broken("other"))
    with pytest.raises(RunError):
        checks.agreement(rig)


def test_biased_clocks_and_slow_plans_fail(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    def race(rig: Rig, runs: dict[str, Any]) -> dict[str, list[float]]:
        return {name: [0.1 * 3**number] * 9 for number, name in enumerate(runs)}

    monkeypatch.setattr(checks, "_race", race)
    with pytest.raises(CheckError, match="biased"):
        checks.noise(rig)
    with torch.no_grad(), pytest.raises(CheckError, match="as fast as the plain model"):
        checks.speed(rig)


def test_a_check_that_cannot_run_is_skipped_with_its_reason(rig: Rig) -> None:
    with pytest.raises(Skip, match="no device graphs"):
        checks.graphs(rig)
    assert attempt("graphs", rig)["state"] == "skipped"


def test_one_rank_that_fails_is_the_outcome_of_all() -> None:
    well = {"check": "lanes", "state": "passed", "reason": "", "figures": {}, "seconds": 1.0}
    ill = {**well, "state": "failed", "reason": "differs"}
    assert together([well, well]) == well
    verdict = together([well, ill, ill])
    assert (verdict["state"], verdict["failed_ranks"]) == ("failed", [1, 2])
    assert verdict["reason"] == "rank 1: differs"


def test_two_ranks_pass_and_the_bundle_names_nobody(tmp_path: Path) -> None:
    chosen = ["collectives", "agreement", "faults"]
    bundle = selftest.run(num_ranks=2, only=chosen, num_pairs=3)
    assert bundle["failed"] == []
    assert [each["check"] for each in bundle["checks"]] == chosen
    assert {each["state"] for each in bundle["checks"]} == {"passed"}
    text = json.dumps(bundle)
    assert str(Path.home()) not in text and str(tmp_path) not in text
    assert "ok" in selftest.summary(bundle)


def test_ranks_that_hang_are_ended() -> None:
    bundle = selftest.run(num_ranks=2, only=["lanes", "noise"], check_s=0.2)
    assert bundle["failed"] == ["lanes", "noise"]
    assert bundle["checks"][0]["reason"] == "it took longer than 0.2 s"


def test_what_cannot_be_asked_for_is_our_error() -> None:
    with pytest.raises(WeftError, match="unknown check 'lane'"):
        selftest.run(only=["lane"])
    with pytest.raises(WeftError, match="ranks must be 1 or more"):
        selftest.run(num_ranks=0)
    with pytest.raises(WeftError, match="unknown device 'tpu'"):
        selftest.run(device="tpu")
    if not torch.cuda.is_available():
        with pytest.raises(MachineError, match="sees no CUDA device"):
            selftest.run(device="cuda")


def rank_of(*calls: dict[str, Any]) -> dict[str, Any]:
    numbered = [{"n": number + 1, **call} for number, call in enumerate(calls)]
    return {"rank": 0, "pid": 1, "calls": numbered}


def test_recorded_calls_are_judged() -> None:
    begin, end = {"call": "mark", "name": "steady overlap"}, {"call": "mark", "name": "end overlap"}
    kernel = {"call": "kernel", "s": 1, "g": 0, "name": "k", "op": 1}
    sync = {"call": "sync", "name": "cudaStreamSynchronize", "s": 1, "line": "a.py:1"}
    assert judge(read_calls([rank_of(begin, kernel, end)]), ["overlap"]) == []
    (reason,) = judge(read_calls([rank_of(begin, kernel, sync, end)]), ["overlap"])
    assert "waits 1 times" in reason
    (reason,) = judge(read_calls([rank_of(kernel)]), ["overlap"])
    assert "never came to" in reason
    assert judge((), ["overlap"]) == ["nothing was recorded"]


def test_calls_of_a_device_are_compared_with_those_of_the_dry_run() -> None:
    from torchweft_tools.selftest.calls import differences

    kinds, calls = ["overlap", "train"], ["aten.add on stream 0", "record event 1 on stream 0"]
    rank = {"overlap": calls, "train": calls}
    assert differences([rank] * 2, [rank] * 2, kinds, 2) == []
    short, other = {**rank, "overlap": calls[:1]}, {**rank, "train": ["replay", *calls]}
    assert differences([rank], [short], kinds, 1) == [
        "rank 0, overlap, call 1: record event 1 on stream 0 on the device, nothing more in the "
        "dry run"
    ]
    (reason,) = differences([rank, other], [rank, rank], kinds, 2)
    assert reason.startswith("rank 1, train, call 0: replay on the device")
    assert "no call at all" in differences([{}], [{}], kinds, 1)[0]
    assert "1 ranks told" in differences([rank], [], kinds, 1)[0]


def test_device_graphs_with_wrong_numbers_fail(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """A CPU has none, so the check gets one under another name."""

    def model(rig: Any, built: Any) -> Any:
        return built.eval().requires_grad_(False)

    other = SimpleNamespace(device=SimpleNamespace(type="other"), tensor=rig.tensor, rank=0)
    monkeypatch.setattr(checks, "_model", model)
    monkeypatch.setattr(checks, "_woven", broken("plain"))
    with torch.no_grad():
        assert checks.graphs(other)["calls"] == checks.NUM_CALLS  # type: ignore[arg-type]
        monkeypatch.setattr(checks, "_woven", broken("wrong"))
        with pytest.raises(CheckError, match="replay 0"):
            checks.graphs(other)  # type: ignore[arg-type]

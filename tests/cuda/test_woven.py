"""Weft's own plans on the dry run: no findings, no waits of the host when steady; the law."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from itertools import combinations, pairwise

import contract
import pytest
from planted import Dry

from torchweft_tools.dryrun.calls import ON_STREAM, DeviceCall, RankCalls, overlap
from torchweft_tools.dryrun.check import check

ONE = [
    "sequential",
    "overlap",
    "branches",
    "overlap-graphs",
    "branches-graphs",
    "train",
    "train-graphs",
]
SEVERAL = ["overlap", "overlap-graphs"]
ORDER = ("record", "wait")
Runs = dict[int, tuple[RankCalls, ...]]


@pytest.fixture(scope="module")
def runs(dry: Dry) -> Runs:
    made = {}
    for size in (1, 2, 4):
        code, made[size] = dry("woven.py", ",".join(ONE if size == 1 else SEVERAL), ranks=size)
        assert code == 0
    return made


def steady(rank: RankCalls, kind: str) -> list[DeviceCall]:
    """The calls between the marks of a kind."""
    names = [call.name if call.kind == "mark" else "" for call in rank.calls]
    return list(rank.calls[names.index(f"steady {kind}") : names.index(f"end {kind}")])


CASES = [(1, kind) for kind in ONE] + [(size, kind) for size in (2, 4) for kind in SEVERAL]


@pytest.mark.parametrize("size", [1, 2, 4])
def test_nothing_is_wrong(runs: Runs, size: int) -> None:
    assert len(runs[size]) == size
    assert [str(fault) for fault in check(runs[size]) if not fault.is_advice] == []


@pytest.mark.parametrize(("size", "kind"), CASES)
def test_a_steady_call_never_synchronises(runs: Runs, size: int, kind: str) -> None:
    for rank in runs[size]:
        calls = steady(rank, kind)
        assert sum(call.kind in ON_STREAM for call in calls) >= 3
        assert [call.place for call in calls if call.kind == "sync"] == []


@pytest.mark.parametrize("size", [2, 4])
def test_collectives_run_beside_compute_and_inside_graphs(runs: Runs, size: int) -> None:
    for rank in runs[size]:
        calls = steady(rank, "overlap")
        talking = {call.stream for call in calls if call.kind == "collective"}
        assert talking and not talking & {c.stream for c in calls if c.kind == "kernel"}
        assert any(call.kind == "collective" and call.graph for call in rank.calls)
        launches = [c for c in steady(rank, "overlap-graphs") if c.kind == "launch"]
        assert len(launches) == 3  # one a call


@pytest.mark.parametrize("size", [2, 4])
def test_a_collective_runs_on_its_lane_and_costs_no_events_of_its_own(
    runs: Runs, size: int
) -> None:
    for rank in runs[size]:
        calls = steady(rank, "overlap")
        assert len({call.stream for call in calls if call.kind in (*ON_STREAM, *ORDER)}) == 2
        num_talks = sum(call.kind == "collective" for call in calls)
        assert sum(call.kind == "wait" for call in calls) <= 2 * num_talks, "there and back"
        assert sum(call.kind == "keep" for call in calls) < num_talks, (
            "frees go by the plan's events"
        )


def test_a_rank_may_end_while_another_is_behind(dry: Dry) -> None:
    code, ranks = dry("ahead.py", "15", ranks=2)
    assert code == 0
    faults = [str(fault) for fault in check(ranks) if not fault.is_advice]
    assert all("never issued on rank 1" in fault for fault in faults), "it has heard of the end"


def test_a_backward_graph_reads_what_its_forward_graph_has_saved_where_it_is(runs: Runs) -> None:
    calls = steady(runs[1][0], "train-graphs")
    copies = sum(call.kind == "copy" for call in calls)
    assert copies == 3 * (1 + 4 + 1), "each step: the output, four gradients out, one gradient in"


# The law, by an oracle that walks edges and knows no clocks.


def edges(calls: list[DeviceCall]) -> dict[int, list[int]]:
    """For each piece of work, what it comes directly behind."""
    behind: dict[int, list[int]] = {}
    last: dict[int, int] = {}
    gates: dict[int, list[int]] = defaultdict(list)
    events: dict[int, list[int]] = {}
    for i, call in enumerate(calls):
        front = [*gates[call.stream], *([last[call.stream]] if call.stream in last else [])]
        if call.kind in ON_STREAM:
            behind[i], gates[call.stream], last[call.stream] = front, [], i
        elif call.kind == "record":
            events[call.event] = front
        elif call.kind == "wait":
            gates[call.stream] += events.get(call.event, [])
    return behind


def is_ordered(calls: list[DeviceCall]) -> bool:
    """Whether every two calls that touch the same bytes, one writing, are ordered."""
    behind = edges(calls)
    pairs = combinations(behind, 2)
    return all(i in _before(j, behind) for i, j in pairs if _conflict(calls[i], calls[j]))


def is_freed_early(calls: list[DeviceCall]) -> bool:
    """Whether a stream goes on with fresh memory while another uses what was freed before."""
    behind = edges(calls)
    for at, free in enumerate(calls):
        block = free.data.get("ptr")
        mine = [i for i in range(at) if calls[i].data.get("ptr") == block]
        born = max((i for i in mine if calls[i].kind == "alloc"), default=None)
        if free.kind != "free" or born is None or any(calls[i].kind == "free" for i in mine[-1:]):
            continue
        home = calls[born].stream
        kept = {calls[i].stream for i in mine if i > born and calls[i].kind == "keep"}
        users = [
            i
            for i in range(born, at)
            if i in behind
            and calls[i].stream not in {home, *kept}
            and block in {span.storage for span in (*calls[i].reads, *calls[i].writes)}
        ]
        later = range(at + 1, len(calls))
        asked = next(
            (i for i in later if (calls[i].kind, calls[i].stream) == ("alloc", home)), None
        )
        after = [i for i in behind if asked and i > asked and calls[i].stream == home]
        first = min(after, default=None)
        if first is not None and not set(users) <= _before(first, behind):
            return True
    return False


def _before(start: int, behind: dict[int, list[int]]) -> set[int]:
    seen: set[int] = set()
    todo = [start]
    while todo:
        for i in behind[todo.pop()]:
            if i not in seen:
                seen.add(i)
                todo.append(i)
    return seen


def _conflict(one: DeviceCall, other: DeviceCall) -> bool:
    pairs = [(a, b) for a in one.writes for b in (*other.reads, *other.writes)]
    return any(
        overlap(a, b) for a, b in (*pairs, *((a, b) for a in one.reads for b in other.writes))
    )


def test_every_swapped_collective_is_found(runs: Runs) -> None:
    """Those of the parts of a batch are equal in kind, size and line."""
    ranks = [replace(rank, calls=tuple(steady(rank, "overlap"))) for rank in runs[2]]
    assert "collectives" not in {fault.rule for fault in check(ranks)}
    calls = list(ranks[1].calls)
    talks = [i for i, call in enumerate(calls) if call.kind == "collective"]
    for i, j in pairwise(talks):
        swapped = [*calls]
        swapped[i], swapped[j] = calls[j], calls[i]
        faults = check([ranks[0], replace(ranks[1], calls=tuple(swapped))])
        assert "collectives" in {fault.rule for fault in faults}


def num_waits_missed(rank: RankCalls, calls: list[DeviceCall]) -> int:
    """A wait is found missing exactly if nothing else orders what it ordered."""
    whole = [c for c in calls if c.kind in (*ON_STREAM, "record", "wait")]
    assert is_ordered(whole)
    num_missed = 0
    for i, call in enumerate(whole):
        if call.kind != "wait":
            continue
        fewer = whole[:i] + whole[i + 1 :]
        missing = "race" in {f.rule for f in check([replace(rank, calls=tuple(fewer))])}
        assert missing == (not is_ordered(fewer)), call
        num_missed += missing
    return num_missed


def are_early_frees_found(rank: RankCalls, calls: list[DeviceCall]) -> bool:
    """Without its note (record_stream), a value that another stream reads is freed too early.

    Notes for waits that come anyway are not missed; at last the waits are taken out as well.
    """

    def found(fewer: list[DeviceCall]) -> bool:
        is_early = "early-free" in {f.rule for f in check([replace(rank, calls=tuple(fewer))])}
        assert is_early == is_freed_early(fewer)
        return is_early

    whole = [c for c in calls if c.kind != "sync"]
    assert not found(whole)
    for i, call in enumerate(whole):
        if call.kind == "keep":
            found(whole[:i] + whole[i + 1 :])
    return found([call for call in whole if call.kind not in ("keep", "wait")])


@pytest.mark.parametrize(("size", "kind"), [(1, "branches"), (2, "overlap")])
def test_every_wait_taken_out_is_found(runs: Runs, size: int, kind: str) -> None:
    # One call of the model is enough: its addresses are its own.
    assert num_waits_missed(runs[size][0], steady(runs[size][0], kind)) >= 3


def test_every_early_free_is_found(runs: Runs) -> None:
    assert are_early_frees_found(runs[1][0], steady(runs[1][0], "branches"))


def test_the_law_holds_for_random_plans(dry: Dry) -> None:
    """The plans of random graphs that the accelerator's own tests run."""
    seeds = range(32)
    code, ranks = dry("plans.py", ",".join(map(str, seeds)))
    assert code == 0
    assert [str(fault) for fault in check(ranks) if not fault.is_advice] == []
    num_waits, num_frees = 0, 0
    for seed in seeds:
        calls = steady(ranks[0], str(seed))
        assert not [call for call in calls if call.kind == "sync"], seed
        num_waits += num_waits_missed(ranks[0], calls)
        num_frees += are_early_frees_found(ranks[0], calls)
    assert num_waits >= 60 and num_frees >= 4


def test_the_plans_of_the_contract(dry: Dry) -> None:
    """Those that every runtime runs, by streams and as device graphs."""
    numbers = range(len(contract.CASES) + 1)
    kinds = [f"contract-{number}{graphs}" for number in numbers for graphs in ("", "-graphs")]
    code, ranks = dry("plans.py", ",".join(kinds))
    assert code == 0
    assert [str(fault) for fault in check(ranks) if not fault.is_advice] == []
    num_waits = 0
    for kind in kinds:
        calls = steady(ranks[0], kind)
        is_graph = kind.endswith("-graphs")
        assert not [call for call in calls if call.kind == "sync"], kind
        assert sum(call.kind == "launch" for call in calls) == is_graph, kind
        if not is_graph:
            num_waits += num_waits_missed(ranks[0], calls)
    assert num_waits >= 10


def test_an_all_reduce_of_the_host_runs_on_the_network_lane_as_it_is(dry: Dry) -> None:
    code, ranks = dry("foreign.py", ranks=2)
    assert code == 0
    assert [str(fault) for fault in check(ranks) if not fault.is_advice] == []
    for rank in ranks:
        calls = steady(rank, "foreign")
        assert not [call for call in calls if call.kind in ("collective", "sync")]
        own = [c for c in calls if c.kind == "kernel" and "host.all_reduce" in c.name]
        assert len(own) == 2 * 3 * 2, "calls, layers, parts"
        (lane,) = {call.stream for call in own}
        others = {call.stream for call in calls if call.kind == "kernel" and call not in own}
        assert lane not in others
        num_waits = sum(call.kind == "wait" for call in calls)
        assert num_waits <= 2 * len(own), "there and back"


def test_many_graphs_of_a_process_share_their_streams(dry: Dry) -> None:
    """Torch has 32 streams of a priority, and hands them out in turn."""
    code, (rank,) = dry("guests.py", "pieces")
    assert code == 0
    assert len({call.stream for call in steady(rank, "pieces") if call.kind in ON_STREAM}) == 2


@pytest.mark.parametrize("kind", ["captured", "captured-graphs"])
def test_a_host_may_capture_around_us(dry: Dry, kind: str) -> None:
    """Nothing is traced, captured or waited for in a capture of the host's own."""
    code, (rank,) = dry("guests.py", kind)
    assert code == 0
    calls = steady(rank, "captured")
    assert sum(call.kind == "launch" for call in calls) == 1
    inside = [call for call in calls if call.graph]
    assert len({call.graph for call in inside}) == 1 and len({call.stream for call in inside}) == 2


@pytest.mark.parametrize("kind", ["ahead", "ahead-graphs"])
def test_a_host_runs_ahead_of_another(dry: Dry, kind: str) -> None:
    """In a steady call no host waits for another: rank 1 begins when rank 0 has issued it all."""
    code, ranks = dry("hosts.py", kind, ranks=2)
    assert code == 0
    assert all(not [c for c in steady(rank, "ahead") if c.kind == "sync"] for rank in ranks)


def test_hosts_that_call_different_models_get_an_error(dry: Dry) -> None:
    code, _ = dry("hosts.py", "swapped", ranks=2)
    assert code == 0


def test_hosts_that_run_ahead_go_back_at_one_call(dry: Dry) -> None:
    code, ranks = dry("hosts.py", "disabled", ranks=2)
    assert code == 0
    assert [str(fault) for fault in check(ranks) if not fault.is_advice] == []


@pytest.mark.parametrize("graphs", ["", "-graphs"])
@pytest.mark.parametrize("strategy", ["sequential", "overlap", "branches"])
def test_models_of_other_kinds(dry: Dry, strategy: str, graphs: str) -> None:
    """None falls back, races or waits for the device; with graphs a steady call is one launch."""
    names = ("attention", "experts", "towers", "images", "steps")
    kinds = [f"{name}-{strategy}{graphs}" for name in names]
    code, ranks = dry("models.py", ",".join(kinds))
    assert code == 0
    assert [str(fault) for fault in check(ranks) if not fault.is_advice] == []
    for kind in kinds:
        calls = steady(ranks[0], kind)
        assert not [call for call in calls if call.kind == "sync"], kind
        assert sum(call.kind == "launch" for call in calls) == (2 if graphs else 0), kind


@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_data_parallel_training_goes_on_beside_us(dry: Dry, kind: str) -> None:
    """Layers of ours inside a model that PyTorch's own DDP or FSDP2 trains."""
    code, ranks = dry("beside.py", kind, ranks=2)
    assert code == 0
    assert [str(fault) for fault in check(ranks) if not fault.is_advice] == []
    ours = [call for rank in ranks for call in steady(rank, kind) if call.kind == "sync"]
    assert not [call for call in ours if "torchweft" in call.line]
    talks = {call.stream for call in steady(ranks[0], kind) if call.kind == "collective"}
    assert talks, "they still reduce"

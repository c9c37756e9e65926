"""Programs that are not ours on the dry run: a planted bug is named by its line."""

from __future__ import annotations

import pytest
from planted import Dry, here

from torchweft_tools.dryrun.check import Fault, check

# What each bug is found as. Torch issues no wait for an event that was never recorded.
PLANTED = {
    "race": "race",
    "inference": "race",
    "overwrite": "race",
    "early_free": "early-free",
    "late_event": "race",
    "late_record": "late-record",
    "hidden_sync": "hidden-sync",
    "graph_race": "race",
    "replay": "race",
}
REFUSED = {"unjoined": 904, "sync_in_capture": 900}


@pytest.fixture(scope="module")
def bugs(dry: Dry) -> list[Fault]:
    code, ranks = dry("streams.py", ",".join(PLANTED), "bug")
    assert code == 0
    return check(ranks)


@pytest.mark.parametrize("kind", PLANTED)
def test_a_planted_bug_is_named_by_its_line(bugs: list[Fault], kind: str) -> None:
    named = [fault.rule for fault in bugs if here("streams.py", kind) in fault.lines]
    assert named == [PLANTED[kind]]


def test_nothing_else_is_found(bugs: list[Fault]) -> None:
    assert sorted(fault.rule for fault in bugs) == sorted(PLANTED.values())


def test_small_integers_are_computed_once(dry: Dry) -> None:
    code, _ = dry("streams.py", "integers", "mended")
    assert code == 0


def test_mended_programs_pass(dry: Dry) -> None:
    code, ranks = dry("streams.py", ",".join([*PLANTED, *REFUSED, "checkpoint"]), "mended")
    assert code == 0
    assert check(ranks) == []


def test_python_may_end_while_threads_of_torch_want_its_lock(dry: Dry) -> None:
    code, ranks = dry("ending.py")
    assert code == 0
    assert check(ranks) == []


def test_ops_of_missing_libraries_are_one_kernel_each(dry: Dry) -> None:
    code, ranks = dry("libraries.py", "convolution,solvers,outer,sizes")
    assert code == 0
    assert [str(fault) for fault in check(ranks) if not fault.is_advice] == []
    names = {call.data.get("name", "") for call in ranks[0].calls if call.kind == "kernel"}
    for library in ("cuSOLVER", "cuFFT", "the CUDA driver"):
        assert any(name.endswith(f"({library})") for name in names), library


@pytest.mark.parametrize("kind", ["refused", "compiled"])
def test_what_no_kernel_can_stand_for_is_an_error_of_ours(dry: Dry, kind: str) -> None:
    code, ranks = dry("libraries.py", kind)
    assert code == 1
    (fault,) = [fault for fault in check(ranks) if not fault.is_advice]
    assert fault.rule == "unmodelled"
    assert kind == "compiled" or fault.lines == (here("libraries.py", "refused"),)


def test_spawned_processes_have_the_ranks_of_their_communicators(dry: Dry) -> None:
    """Without RANK, as torch.multiprocessing.spawn starts them."""
    _, ranks = dry("spawned.py", "bug", devices=2)
    assert [rank.rank for rank in ranks] == [0, 1]
    faults = [fault for fault in check(ranks) if not fault.is_advice]
    assert [(fault.rule, fault.lines[0], fault.times) for fault in faults] == [
        ("race", here("spawned.py", "work"), 4)  # on both ranks: what it reads, what it writes
    ]


@pytest.mark.parametrize("kind", REFUSED)
def test_a_capture_that_breaks_a_rule_is_refused_with_cudas_own_code(dry: Dry, kind: str) -> None:
    code, ranks = dry("streams.py", kind, "bug", patience_s=5)
    assert code != 0  # torch raises, as it would on a device
    first = next(fault for fault in check(ranks) if fault.rule == "error")
    assert f"refused with {REFUSED[kind]}" in first.text
    assert first.lines == (here("streams.py", kind),)


def test_programs_of_two_ranks_pass(dry: Dry) -> None:
    """DDP, FSDP2 and a tensor-parallel module; objects told over NCCL arrive."""
    kinds = "ddp,fsdp2,tensor_parallel,swapped,circle,compute_stream,objects"
    code, ranks = dry("ranks.py", kinds, "mended", ranks=2)
    assert code == 0
    assert [rank.rank for rank in ranks] == [0, 1]
    assert [str(fault) for fault in check(ranks) if not fault.is_advice] == []
    said = {call.name for call in ranks[0].calls if call.kind == "collective"}
    assert {"all_reduce", "all_gather", "reduce_scatter", "broadcast", "send"} <= said


def test_a_missing_wait_for_a_collective_is_named_by_its_line(dry: Dry) -> None:
    code, ranks = dry("ranks.py", "tensor_parallel,compute_stream", "bug", ranks=2)
    assert code == 0
    wrong = [fault for fault in check(ranks) if not fault.is_advice]
    assert [(fault.rule, fault.lines[0]) for fault in wrong] == [
        ("race", here("ranks.py", "RowLinear"))
    ]
    slow = [fault for fault in check(ranks) if fault.rule == "compute-stream"]
    assert [fault.lines for fault in slow] == [(here("ranks.py", "compute_stream"),)]


@pytest.mark.parametrize("kind", ["swapped", "circle"])
def test_collectives_in_another_order_on_one_rank_are_found(dry: Dry, kind: str) -> None:
    """A device would wait forever; here the host goes on, unless it needs what never comes."""
    _, ranks = dry("ranks.py", kind, "bug", ranks=2, patience_s=20)
    faults = [fault for fault in check(ranks) if fault.rule == "collectives"]
    assert len(faults) == 1 and here("ranks.py", kind) in faults[0].lines

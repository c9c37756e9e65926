"""Benches that were stopped go on: cases whose results are in the journal are not run again."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from torchweft.errors import WeftError
from torchweft_tools.bench import auto
from torchweft_tools.bench.measure.journal import Journal


class Case:
    """Makes two results, counts how often, and fails when it is told to."""

    def __init__(self) -> None:
        self.num_runs, self.fails = 0, False

    def __call__(self) -> Iterator[dict[str, Any]]:
        self.num_runs += 1
        yield {"seconds": 1.0}
        if self.fails:
            raise WeftError("the ranks ended")
        yield {"seconds": 2.0}


def test_a_case_that_is_in_the_journal_is_not_run_again(tmp_path: Path) -> None:
    path, case = str(tmp_path / "bench.jsonl"), Case()
    first = list(Journal(path).results({"link": "1gbit", "pairs": 30}, case))
    again = list(Journal(path).results({"pairs": 30, "link": "1gbit"}, case))
    assert first == again == [{"seconds": 1.0}, {"seconds": 2.0}]
    assert case.num_runs == 1


def test_results_of_other_options_are_not_taken(tmp_path: Path) -> None:
    path, case = str(tmp_path / "bench.jsonl"), Case()
    list(Journal(path).results({"pairs": 30}, case))
    list(Journal(path).results({"pairs": 60}, case))
    assert case.num_runs == 2


def test_a_case_that_failed_is_run_again(tmp_path: Path) -> None:
    path, case = str(tmp_path / "bench.jsonl"), Case()
    case.fails, seen = True, []
    with pytest.raises(WeftError, match="the ranks ended"):
        for result in Journal(path).results("one", case):
            seen.append(result)
    assert seen == [{"seconds": 1.0}], "what came before it is shown"
    case.fails = False
    assert len(list(Journal(path).results("one", case))) == 2


def test_without_a_journal_every_case_runs() -> None:
    case = Case()
    for _ in range(2):
        list(Journal().results("one", case))
    assert case.num_runs == 2


def test_another_file_is_refused_and_left_as_it_is(tmp_path: Path) -> None:
    path = tmp_path / "notes.txt"
    path.write_text("not a journal\n")
    with pytest.raises(WeftError, match=r"line 1 of .* is no case"):
        Journal(str(path))
    assert path.read_text() == "not a journal\n"


def test_the_auto_bench_goes_on_with_the_contexts_that_are_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[list[list[int]]] = []

    def compete(spec: dict[str, Any], on_progress: Any) -> Iterator[dict[str, Any]]:
        asked.append(spec["shapes"])
        for number, shape in enumerate(spec["shapes"]):
            if number == len(asked):
                raise WeftError("the machine was shut down")
            times = {name: [1.0] * 3 for name in ("eager", "eager_again", "inductor", "auto")}
            told = {"chosen": "as it is", "speeds": {}, "bound_s": 1.0, "call_s": 0.0}
            told |= {"max_abs_diff": 0.0}
            yield {"link": "1gbit", "shape": shape, "times": times, **told}

    monkeypatch.setattr(auto, "compete", compete)
    journal = str(tmp_path / "auto.jsonl")
    runs = [auto.run(models="experts", links="1gbit", journal=journal) for _ in range(3)]
    shapes = auto.SHAPES["experts"]
    assert asked == [shapes, shapes[1:]], "nobody is asked where nothing is missing"
    assert [len(rows) for rows, _ in runs] == [1, 3, 3]
    assert [list(summary["failed"]) for _, summary in runs] == [
        ["experts 1gbit half duplex"],
        [],
        [],
    ]

"""Published races of overlapped engines: each broken form is refused by its rule, no mended one."""

from __future__ import annotations

from dataclasses import replace
from itertools import permutations
from pathlib import Path

import pytest

from torchweft.plan.kernels.declaration import Declaration
from torchweft.plan.lower.lower import lower
from torchweft.plan.plan import Plan
from torchweft.plan.verify import findings, findings_ranks
from torchweft_tools.bench import races
from torchweft_tools.bench.oracle import by_closure, by_interleavings
from torchweft_tools.bench.races import RACES
from torchweft_tools.bench.races.known_race import KnownRace, read_graph

PAGE = Path(__file__).parents[2] / "docs" / "races.md"
REBUILT = [race for race in RACES if race.broken]
FLAGGED = [race for race in RACES if race.rule is not None]
each_rebuilt = pytest.mark.parametrize("race", REBUILT, ids=lambda race: race.name)
each_flagged = pytest.mark.parametrize("race", FLAGGED, ids=lambda race: race.name)


def listed_by_lane(plans: list[Plan]) -> list[list[Plan]]:
    """The same plans, lane after lane, in every order of their lanes."""
    names = dict.fromkeys(step.lane for plan in plans for step in plan.steps)
    return [
        [
            replace(plan, steps=tuple(s for lane in order for s in plan.steps if s.lane == lane))
            for plan in plans
        ]
        for order in permutations(names)
    ]


@each_flagged
def test_the_broken_form_is_refused_by_its_rule_however_its_lanes_are_listed(
    race: KnownRace,
) -> None:
    for plans in [race.broken_plans(), *listed_by_lane(race.broken_plans())]:
        assert findings_ranks(plans)[0].rule == race.rule, "\n".join(map(str, plans))


@each_rebuilt
def test_the_mended_form_is_accepted_and_so_is_its_order_lowered_by_us(race: KnownRace) -> None:
    assert findings_ranks(race.mended_plans()) == []
    assert findings_ranks(race.lowered_plans()) == []
    assert race.mended_plans() != race.broken_plans()


@each_rebuilt
def test_the_oracle_agrees(race: KnownRace) -> None:
    forms = race.broken_plans(), race.mended_plans(), race.lowered_plans()
    for plans, safe in zip(forms, (race.rule is None, True, True), strict=True):
        assert by_closure(plans) == safe
        assert by_interleavings(plans) in (safe, None)


@each_rebuilt
def test_every_plan_reads_back(race: KnownRace) -> None:
    for plan in race.broken_plans() + race.mended_plans():
        assert Plan.parse(str(plan)) == plan


def test_the_bench_counts_what_is_known_and_what_is_flagged() -> None:
    rows, summary = races.run()
    assert summary == {"known": 28, "flagged": 25, "mended": 26, "mended_accepted": 26}
    assert {row["oracle"] for row in rows if row["raised"] != "-"} == {"agrees"}
    quick, same = races.run(quick=True)
    assert same == summary
    assert quick == [row | {"oracle": "-"} for row in rows]


def test_what_the_format_cannot_say_is_named() -> None:
    silent = {race.thread: race for race in RACES if race.rule is None}
    assert set(silent) == {
        "vllm-project/vllm#38451", "NVIDIA/TensorRT-LLM#18023", "pytorch/pytorch#137257"
    }  # fmt: skip
    assert all(race.why_not for race in silent.values())
    assert findings_ranks(silent["vllm-project/vllm#38451"].broken_plans()) == []


def test_threads_are_told_once_and_stand_on_the_page() -> None:
    assert len({race.thread for race in RACES}) == len(RACES)
    page = PAGE.read_text(encoding="utf-8").splitlines()
    for race in RACES:
        row = next((line for line in page if f"[{race.thread}]" in line), "")
        assert row.endswith(f"| {race.rule or 'none'} |"), f"{race.thread} {row}"


def plan(ops: str, lanes: str, steps: str, places: str = "") -> Plan:
    case = KnownRace("x/x#1", "", "", None, (ops,), lanes, (steps,), places=places)
    return case.broken_plans()[0]


def test_a_free_beside_an_overwrite_is_a_race_however_lanes_are_listed() -> None:
    places = "buffer b on gpu unit 4\nplace h in b at 0\nplace k in b at 0"
    broken = plan(
        "first x -> h\nuse h -> y\nother x -> k\nlast k -> z",
        "A on gpu; B on gpu; C on gpu",
        "A first\nA use\nB wait use\nB free h\nC wait use\nC other\nC last",
        places,
    )
    for (listed,) in listed_by_lane([broken]):
        assert {found.rule for found in findings(listed)} == {"race"}


def test_lowering_keeps_the_order_of_collectives_on_two_lanes() -> None:
    ops = "one x -> a all_reduce@dp\ntwo x -> b all_reduce@dp\nthree x -> c all_reduce@tp"
    bare = plan(ops, "A on gpu; B on gpu", "A one\nB two\nB three")
    assert [found.rule for found in findings(bare)] == ["order"]
    lowered = lower(bare)
    assert [str(step) for step in lowered.steps if step.kind == "wait"] == ["B  wait one"]
    assert findings(lowered) == []


def test_lowering_orders_flights_by_their_starts() -> None:
    ops = "one x -> a all_reduce@dp two-phase\ntwo x -> b all_reduce@dp\nlast a,b -> y"
    bare = plan(ops, "A on gpu; net on gpu via A; B on gpu", "net one\nB two\nA last")
    lowered = lower(bare)
    assert "B  wait issue one" in [str(step) for step in lowered.steps]
    assert findings(lowered) == []


def test_a_graph_is_read_from_its_lines() -> None:
    graph = read_graph("g", "a x -> u,v=u\nb v -> - mutates c send@pp>1 two-phase", batched=True)
    assert graph.inputs == ("x", "c")
    assert graph.outputs == ("u",)
    assert graph.root["v"] == "u"
    assert graph.op["b"].two_phase
    assert graph.op["b"].collective.peer == 1
    with pytest.raises(AssertionError, match="cannot read the op"):
        read_graph("g", "a makes u", batched=False)


# What random attacks found beyond the published races; the oracle and the verifier must agree.

CHAIN = "first x -> h\nsecond h -> y"
PAIR = "one x -> a all_reduce@dp\ntwo x -> b all_gather@dp"


def verdicts(*plans: Plan) -> set[str]:
    """The rules that are broken, however lanes are listed; the oracle agrees."""
    forms = listed_by_lane(list(plans))
    assert {by_closure(form) for form in forms} == {not findings_ranks(forms[0])}
    return {found.rule for form in forms for found in findings_ranks(form)[:1]}


def test_a_kernel_may_start_two_collectives_that_another_rank_starts_in_turn() -> None:
    silent = plan(PAIR, "A on gpu", "A (one two) by both")
    said = (("all_reduce", "issue"), ("all_gather", "issue"))
    joined = replace(silent, declared=(Declaration("both", talks=said),))
    apart = plan(PAIR, "A on gpu", "A one\nA two")
    assert verdicts(joined, apart) == verdicts(apart, joined) == set()
    assert verdicts(silent, apart) == {"legality"}
    swapped = replace(silent, declared=(Declaration("both", talks=said[::-1]),))
    assert verdicts(swapped, apart) == {"order"}


def test_a_hosted_lane_stands_on_the_device_of_its_host() -> None:
    ops = "first x -> h all_reduce@dp two-phase\nsecond h -> y"
    steps = "A issue first on net\nA complete first\nA second"
    assert verdicts(plan(ops, "A on gpu; net on gpu via A", steps)) == set()
    assert verdicts(plan(ops, "A on gpu; net on cpu via A", steps)) == {"legality"}


def test_a_value_is_not_copied_to_the_device_that_it_is_on() -> None:
    ops = "first x -> h=x\nsecond h -> y"
    assert verdicts(plan(ops, "A on gpu", "A first\nA copy h to gpu\nA second")) == {"legality"}


def test_a_place_is_on_the_device_of_its_maker_even_if_nothing_goes_there() -> None:
    places = "buffer far on cpu unit 4\nplace h in far at 0"
    ops, lanes, steps = "first x -> h\nother x -> y", "A on gpu; B on cpu", "A first by k\nA other"
    assert verdicts(plan(ops, lanes, steps, places)) == {"memory"}


def test_a_copy_that_nothing_orders_is_a_race_and_one_that_is_missing_is_not() -> None:
    lanes = "A on gpu; B on cpu"
    late = plan(CHAIN, lanes, "A first\nA copy h to cpu\nB second")
    assert verdicts(late) == {"race"}
    assert verdicts(plan(CHAIN, lanes, "A first\nB wait first\nB second")) == {"memory"}
    assert verdicts(plan(CHAIN, lanes, "A first\nB second")) == {"memory"}

"""Dealt rows in the middle: what a graph may say of them, where a batch is cut, and in which parts
shares are read."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchweft.errors import GraphError, PlanError, StrategyError
from torchweft.plan.context import Context, Cut
from torchweft.plan.deals import beside
from torchweft.plan.graph import Batch, Collective, Deal, Graph, Op, Value, graph_data
from torchweft.plan.lower.lower import lower
from torchweft.plan.machine import cpu
from torchweft.plan.plan import Place, Plan
from torchweft.plan.simulator import simulate
from torchweft.plan.sizes import Size
from torchweft.plan.strategies import sequential, tokenweave
from torchweft.plan.verify import findings, verify
from torchweft.plan.write.scheduler import Scheduler
from torchweft.plan.write.strategy import write
from torchweft_tools.formats.weft_files import read_graph

ROWS, HIDDEN = Size.of("s0"), Size.of(8)


def share(name: str, num_ranks: int = 2, **facts: object) -> Value:
    batch = Batch(0, deal=Deal("tp", num_ranks))
    return Value(name, (Size.of(f"s0//{num_ranks}"), HIDDEN), batch=batch, **facts)  # type: ignore[arg-type]


def full(name: str) -> Value:
    return Value(name, (ROWS, HIDDEN), batch=Batch(0))


def talk(kind: str, reads: str, makes: str) -> Op:
    meets = Collective(kind, "tp")
    return Op(kind + makes, (reads,), (makes,), uses="network", two_phase=True, collective=meets)


def layers(num_ranks: int = 2, count: int = 2) -> Graph:
    """reduce_scatter - residual - norm - all_gather, as sequence parallelism has it."""
    values, ops, last = [full("x")], [], "x"
    residual = ""
    for at in range(count):
        values += [share(f"r{at}", num_ranks), share(f"h{at}", num_ranks)]
        values += [share(f"n{at}", num_ranks), full(f"g{at}"), full(f"y{at}")]
        ops += [
            talk("reduce_scatter_tensor", last, f"r{at}"),
            Op(f"add{at}", (f"r{at}", residual) if residual else (f"r{at}",), (f"h{at}",)),
            Op(f"norm{at}", (f"h{at}",), (f"n{at}",)),
            talk("all_gather_into_tensor", f"n{at}", f"g{at}"),
            Op(f"mlp{at}", (f"g{at}",), (f"y{at}",)),
        ]
        last, residual = f"y{at}", f"h{at}"
    return Graph("dealt", tuple(values), tuple(ops), ("x",), (last,), "s0")


def in_order(s: Scheduler) -> None:
    while ready := s.ready():
        for op, part in ready:
            s.run(op, part)
    s.merge()


def halves(s: Scheduler) -> None:
    s.split(2)
    in_order(s)


@given(st.lists(st.integers(1, 9), min_size=1, max_size=5), st.integers(1, 6), st.integers(1, 400))
def test_borders_are_multiples_of_the_unit_or_there_are_none(
    shares: list[int], unit: int, num_rows: int
) -> None:
    cut = Cut.sizes(shares)
    try:
        bounds = cut.bounds(num_rows, (), unit)
    except StrategyError:
        assert num_rows % unit or num_rows // unit < sum(shares)
        return
    assert bounds[0] == 0 and bounds[-1] == num_rows and len(bounds) == len(shares) + 1
    assert len(shares) == 1 or all(border % unit == 0 for border in bounds)
    if unit == 1:
        assert bounds == cut.bounds(num_rows)


def test_borders_between_requests_are_multiples_too() -> None:
    cut = Cut.even(2, "requests")
    assert cut.bounds(16, (5, 3, 4, 4), 4) == (0, 8, 16)
    with pytest.raises(StrategyError, match="cannot make 2 parts"):
        cut.bounds(16, (5, 2, 2, 7), 4)


@pytest.mark.parametrize("num_ranks", [2, 3, 4])
def test_every_leg_runs_in_parts(num_ranks: int) -> None:
    graph = layers(num_ranks)
    assert graph.row_unit == num_ranks
    context = Context(batch=10 * num_ranks)
    plan = verify(lower(write(halves, graph, context, cpu())))
    assert verify(replace(Plan.parse(str(plan)), bound=graph)) == plan
    issued = [step for step in plan.steps if step.kind == "issue"]
    assert len(issued) == 8 and all(step.parts for step in issued)
    assert all(border % num_ranks == 0 for border in plan.bounds(10 * num_ranks))
    assert 0 < simulate(plan, context, cpu()).makespan_s < float("inf")


def test_a_batch_that_does_not_divide_is_not_cut() -> None:
    with pytest.raises(StrategyError, match="multiples of 4 rows here; the batch has 10"):
        write(halves, layers(4), Context(batch=10), cpu())
    write(lambda s: s.sequential(), layers(4), Context(batch=10), cpu())


def test_sizes_that_do_not_divide_are_refused_where_they_are_given() -> None:
    def uneven(s: Scheduler) -> None:
        s.split([5, 3])

    with pytest.raises(StrategyError, match="multiples of 2 rows") as caught:
        write(uneven, layers(), Context(batch=8), cpu())
    assert caught.value.rule == "split" and "s.split([5, 3])" in str(caught.value.source)


def test_rows_that_have_whole_shares_inside_need_no_multiple() -> None:
    deal = Deal("tp", 4)
    assert Batch(0, inner=Size.of(8), deal=deal).row_unit == 1
    assert Batch(0, inner=Size.of(6), deal=deal).row_unit == 2
    assert Batch(0, inner=Size.of("s1"), deal=deal).row_unit == 4
    assert Batch(0).row_unit == 1


def test_shares_are_read_in_the_parts_in_which_they_were_made() -> None:
    def joins(s: Scheduler) -> None:
        s.split(2)
        for part in range(2):
            s.run("reduce_scatter_tensorr0", part)
        s.run("add0")

    def tears(s: Scheduler) -> None:
        s.split(2)
        s.run("reduce_scatter_tensorr0")
        s.run("add0", 0)

    for author in (joins, tears):
        with pytest.raises(StrategyError, match="run it on the parts on which") as caught:
            write(author, layers(), Context(batch=8), cpu())
        assert caught.value.rule == "dealt"


def test_a_stretch_of_shares_may_run_whole() -> None:
    def once(s: Scheduler) -> None:
        s.split(2)
        for op in s.graph.ops:
            parts = (None,) if op.name.startswith("mlp1") else (0, 1)
            for part in parts if s.graph.dealt & {*op.touched, *op.makes} else (None,):
                s.run(op, part)
        s.merge()

    verify(lower(write(once, layers(), Context(batch=8), cpu())))


def test_the_verifier_sees_shares_that_are_read_in_other_parts() -> None:
    graph = layers(count=1)
    plan = write(halves, graph, Context(batch=8), cpu())
    steps = [step for step in plan.steps if step.names != ("add0",)]
    at = next(i for i, step in enumerate(steps) if step.names == ("norm0",))
    lane = steps[at].lane
    steps.insert(at, steps[at]._replace(names=("add0",), parts=None, lane=lane))
    broken = lower(replace(plan, steps=tuple(steps)))
    assert any("shares of parts" in finding.message for finding in findings(broken))
    with pytest.raises(PlanError):
        verify(broken)
    whole = lower(plan)
    placed = replace(whole, places=(*whole.places, Place("n0")))
    assert any("has a place" in finding.message for finding in findings(placed))


BAD = {
    "needs the row-wise": ("mixing", "touches 'h0', the shares of each part"),
    "draws": ("random", "the shares of each part"),
}


@pytest.mark.parametrize("name", BAD)
def test_ops_on_shares_are_row_wise(name: str) -> None:
    kind, says = BAD[name]
    graph = layers(count=1)
    ops = [replace(op, rows=kind) if op.name == "norm0" else op for op in graph.ops]
    with pytest.raises(GraphError, match=says):
        replace(graph, ops=tuple(ops))


def test_shares_neither_enter_nor_leave_a_graph() -> None:
    graph = layers(count=1)
    with pytest.raises(GraphError, match="'n0' goes in or out of the graph"):
        replace(graph, outputs=("n0",))
    with pytest.raises(GraphError, match="dealt to 1 ranks"):
        replace(graph, values=tuple(share("r0", 1) if v.name == "r0" else v for v in graph.values))


def test_the_digest_and_the_file_know_of_shares() -> None:
    two, four = layers(2), layers(4)
    assert two.digest != four.digest and "dealt@tp" in str(two)
    assert read_graph(graph_data(two)) == two and read_graph(graph_data(two)).row_unit == 2
    assert replace(two, unit=6).row_unit == 6 and replace(two, unit=3).row_unit == 6
    with pytest.raises(GraphError, match="unit"):
        replace(two, unit=0)


@pytest.mark.parametrize("parts", [2, 3, 4])
def test_tokenweave_moves_shares_on_beside_compute(parts: int) -> None:
    graph = layers(count=3)
    context = Context(batch=24)
    plan = verify(lower(write(tokenweave(parts=parts), graph, context, cpu())))
    runs = [step for step in plan.steps if step.kind in ("run", "issue")]
    for at, step in enumerate(runs):
        if step.names[0].startswith("norm"):  # its gather leaves before anything long is computed
            follow = runs[at + 1]
            assert follow.kind == "issue" and follow.names[0].startswith("all_gather"), str(plan)
            assert follow.parts == step.parts
    assert write(tokenweave(min_tokens=64), graph, context, cpu()).num_parts == 1


def test_tokenweave_is_quicker_than_no_split_where_the_wire_takes_as_long() -> None:
    """Simulated: some of the talk is hidden."""
    graph, context = layers(count=3), Context(batch=1 << 16)
    machine = cpu(network_bytes_per_s=1e9, flops_per_s=1e10)
    plans = [lower(write(how, graph, context, machine)) for how in (tokenweave, sequential)]
    woven_s, whole_s = [simulate(plan, context, machine).makespan_s for plan in plans]
    assert woven_s < whole_s


def weighted(*makers: Op, reads: str = "w") -> tuple[tuple[Op, ...], dict[str, Value]]:
    """Ops and values of one layer whose norm reads a value without rows that these ops make."""
    graph = layers(count=1)
    norm = replace(graph.op["norm0"], reads=("h0", reads))
    plain = [Value(name, (HIDDEN,)) for name in ("weight", "w", "v")]
    ops = tuple(norm if op.name == "norm0" else op for op in graph.ops)
    return (*makers, *ops), {value.name: value for value in (*graph.values, *plain)}


def test_shares_meet_inputs_and_what_is_made_of_them() -> None:
    common, why = beside(*weighted(Op("scale", ("weight",), ("w",), rows="batch-free")))
    assert not why
    assert common["tp"].inputs == {"weight"} and "scale" in common["tp"].ops
    assert "mlp0" not in common["tp"].ops


def test_a_weight_that_ranks_have_reduced_need_not_be_compared() -> None:
    common, why = beside(*weighted(talk("all_reduce", "weight", "w")))
    assert not why
    assert common["tp"].inputs == frozenset()


ELSEWHERE = replace(talk("all_reduce", "weight", "w"), collective=Collective("all_reduce", "dp"))


@pytest.mark.parametrize(
    ("maker", "why"),
    [
        (talk("reduce_scatter_tensor", "weight", "w"), "another on each rank"),
        (ELSEWHERE, "another on each rank"),
        (Op("mean", ("x",), ("w",), rows="mixing"), "made of rows"),
        (Op("draw", (), ("w",), rows="random"), "another on each rank"),
    ],
)
def test_what_differs_between_ranks_may_not_meet_shares(maker: Op, why: str) -> None:
    for layer in (weighted(maker), weighted(maker, Op("on", ("w",), ("v",)), reads="v")):
        found = beside(*layer, lambda op: op.rows == "random")[1]
        assert why in found, found


def test_a_weight_that_is_written_before_is_what_was_written() -> None:
    write = Op("write", ("weight", "x"), (), ("weight",), rows="mixing")
    assert "made of rows" in beside(*weighted(write, reads="weight"))[1]

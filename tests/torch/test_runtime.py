"""The CPU runtime on hand-made graphs: laws 6 and 7, failures, threads."""

from __future__ import annotations

import os
import signal
import threading
import time
from dataclasses import replace

import pytest
import torch
from contract import CASES, ROWS, by_hand, diamond, edged, inputs, planned, scatter, spread

from torchweft.errors import RunError
from torchweft.plan.graph import Batch, Value
from torchweft.plan.sizes import Size
from torchweft.plan.strategies import overlap
from torchweft.plan.verify import findings
from torchweft.run.cpu import LINGER_S, Lanes, run, run_traced
from torchweft.run.writer import compile_program, putter, taker


@pytest.fixture
def lanes():
    held = Lanes()
    yield held
    held.close()


@pytest.mark.parametrize("jitter", [False, True])
@pytest.mark.parametrize(("strategy", "num_lanes"), [*CASES, (scatter, 3), (edged, 3)])
def test_laws_6_and_7_outputs_are_the_same_bits_with_and_without_jitter(
    strategy, num_lanes, jitter, lanes
):
    graph, bodies = diamond()
    plan = planned(strategy, num_lanes, graph)
    program = compile_program(plan, bodies, jitter=jitter)
    for _ in range(3):
        given, expected = inputs(), inputs()
        wanted = by_hand(graph, bodies, expected)
        found = run(program, given, plan.cut.bounds(ROWS), lanes)
        for a, b in zip(wanted, found, strict=True):
            assert torch.equal(a, b)
        assert torch.equal(given[1], expected[1]), "the state was left as program order leaves it"


@pytest.mark.parametrize("seed", range(4))
def test_no_run_begins_before_what_it_comes_after(seed, lanes):
    graph, bodies = diamond()
    plan = planned(lambda s: edged(s, seed=seed, parts=1), 3, graph)
    log: list[tuple[str, bool]] = []

    def logging(name, body):
        def logged(*given):
            log.append((name, False))
            made = body(*given)
            log.append((name, True))
            return made

        return logged

    logged = {name: logging(name, body) for name, body in bodies.items()}
    run(compile_program(plan, logged, jitter=True), inputs(), plan.cut.bounds(ROWS), lanes)
    edges = [(step, op) for step in plan.steps for op, _ in step.after]
    assert len(edges) > len(graph.ops)
    for step, op in edges:
        assert log.index((op, True)) < log.index((step.names[0], False))


@pytest.mark.parametrize("parts", [2, 3, 4])
def test_dropping_any_wait_is_noticed_when_its_target_is_late(parts, lanes):
    """The tests are awake: every wait of the program is there for a reason that shows."""
    graph, bodies = diamond()
    plan = planned(lambda s: scatter(s, parts=parts), 3, graph)
    waits = [index for index, step in enumerate(plan.steps) if step.kind == "wait"]
    # A program joins its lanes before it hands out, which implies the waits of the merges.
    waits = [index for index in waits if guarded(plan, index).kind != "merge"]
    assert len(waits) >= 5
    wanted_inputs = inputs()
    wanted = by_hand(graph, bodies, wanted_inputs)
    for index in waits:
        target = plan.steps[index].target

        def late(step, target=target):
            return 0.05 if step.label == target else 0.0

        good = compile_program(plan, bodies, jitter=late)
        assert not wrong(good, plan, wanted, wanted_inputs, lanes)
        broken = replace(plan, steps=plan.steps[:index] + plan.steps[index + 1 :])
        assert findings(broken), "the verifier knows"
        program = compile_program(broken, bodies, jitter=late)
        tries = (wrong(program, plan, wanted, wanted_inputs, lanes) for _ in range(5))
        assert any(tries), f"nothing notices that step {index}, {plan.steps[index]}, is gone"


def guarded(plan, index):
    """The step that a wait stands before."""
    lane = plan.steps[index].lane
    rest = plan.steps[index:]
    return next(step for step in rest if step.lane == lane and step.kind != "wait")


def wrong(program, plan, wanted, wanted_inputs, lanes):
    given = inputs()
    try:
        found = run(program, given, plan.cut.bounds(ROWS), lanes)
    except RunError:
        return True
    pairs = [*zip(wanted, found, strict=True), *zip(wanted_inputs, given, strict=True)]
    return not all(torch.equal(a, b) for a, b in pairs)


@pytest.mark.parametrize("op", ["start", "go_left", "go_right", "go_third", "join", "mean"])
def test_an_op_that_raises_in_any_lane_gives_one_error_and_the_next_call_works(op, lanes):
    graph, bodies = diamond()
    plan = planned(spread, 3, graph)

    def explode(*reads):
        raise ValueError("boom")

    program = compile_program(plan, {**bodies, op: explode})
    with pytest.raises(RunError, match="boom") as caught:
        run(program, inputs(), (0, ROWS), lanes)
    assert op in str(caught.value)
    assert "may be half written: state" in caught.value.story
    assert isinstance(caught.value.__cause__, ValueError)
    good = compile_program(plan, bodies)
    assert torch.equal(
        run(good, inputs(), (0, ROWS), lanes)[0], by_hand(graph, bodies, inputs())[0]
    )


def test_ctrl_c_in_the_middle_stops_all_lanes(lanes):
    graph, bodies = diamond()
    plan = planned(spread, 3, graph)

    def interrupt(*reads):
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(0.05)
        return bodies["start"](*reads)

    program = compile_program(plan, {**bodies, "start": interrupt})
    with pytest.raises(KeyboardInterrupt):
        run(program, inputs(), (0, ROWS), lanes)
    good = compile_program(plan, bodies)
    assert torch.equal(
        run(good, inputs(), (0, ROWS), lanes)[0], by_hand(graph, bodies, inputs())[0]
    )


def test_lane_threads_go_home():
    before = set(threading.enumerate())
    graph, bodies = diamond()
    plan = planned(spread, 3, graph)
    run(compile_program(plan, bodies), inputs(), (0, ROWS), Lanes())
    deadline = time.monotonic() + 10 * LINGER_S
    while set(threading.enumerate()) - before and time.monotonic() < deadline:
        time.sleep(0.05)
    assert set(threading.enumerate()) <= before


def test_calls_from_eight_threads_at_once_keep_apart(lanes):
    graph, bodies = diamond()
    plan = planned(spread, 3, graph)
    program = compile_program(plan, bodies, jitter=True)
    wanted = by_hand(graph, bodies, inputs())
    wrongs = []

    def call():
        for _ in range(5):
            found = run(program, inputs(), (0, ROWS), lanes)
            if not all(torch.equal(a, b) for a, b in zip(wanted, found, strict=True)):
                wrongs.append(found)

    threads = [threading.Thread(target=call) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrongs


def test_lanes_take_over_the_callers_modes(lanes):
    graph, bodies = diamond()
    seen = {}

    def look(name, body):
        def looking(*reads):
            seen[name] = (
                torch.is_grad_enabled(),
                torch.is_inference_mode_enabled(),
                torch.is_autocast_enabled("cpu"),
                torch.get_num_threads(),
            )
            return body(*reads)

        return looking

    plan = planned(spread, 3, graph)
    assert len({step.lane for step in plan.steps}) == 3
    program = compile_program(plan, {name: look(name, body) for name, body in bodies.items()})
    with torch.inference_mode(), torch.autocast("cpu"):
        run(program, inputs(), (0, ROWS), lanes)
    assert set(seen.values()) == {(False, True, True, torch.get_num_threads())}


def test_a_fork_after_lanes_exist_runs_too(lanes):
    graph, bodies = diamond()
    plan = planned(spread, 3, graph)
    bodies = {name: _plain(body) for name, body in bodies.items()}
    program = compile_program(plan, bodies)
    wanted = run(program, inputs(), (0, ROWS), lanes)
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        torch.set_num_threads(1)
        found = run(program, inputs(), (0, ROWS), lanes)
        good = all(torch.allclose(a, b) for a, b in zip(wanted, found, strict=True))
        os.write(writer, b"1" if good else b"0")
        os._exit(0)
    os.close(writer)
    assert os.read(reader, 1) == b"1"
    os.close(reader)
    os.waitpid(child, 0)


def _plain(body):
    return body


def test_a_trace_has_a_span_for_every_run(lanes):
    graph, bodies = diamond()
    plan = planned(spread, 2, graph)
    program = compile_program(plan, bodies, traced=True)
    _, trace = run_traced(program, inputs(), (0, ROWS), lanes)
    assert {span.op for span in trace.spans if span.kind == "run"} == {op.name for op in graph.ops}
    assert not trace.simulated
    assert all(span.end_s >= span.start_s >= 0 for span in trace.spans)


def test_a_hostile_name_never_reaches_the_source():
    graph, bodies = diamond()
    program = compile_program(planned(overlap(parts=2), 1, graph), bodies)
    for name in [*graph.op, *graph.value]:
        assert len(name) == 1 or name not in program.source


def test_rows_with_a_symbolic_length_are_taken_and_put_between_copies_of_the_batch():
    length, rows, copies = 3, 4, 2
    batch = Batch(0, outer=Size.of(copies), inner=Size.of("s1"))
    value = Value("x", (Size.of("s0") * Size.of("s1") * copies,), batch=batch)
    whole = torch.arange(copies * rows * length)
    part = taker(value)(whole, rows, 1, 3)
    wanted = whole.view(copies, rows, length)[:, 1:3].flatten()
    assert torch.equal(part, wanted)
    made = torch.zeros_like(whole)
    putter(value)(made, part, rows, 1, 3)
    assert torch.equal(taker(value)(made, rows, 1, 3), wanted)
    assert int(made.count_nonzero()) == copies * 2 * length

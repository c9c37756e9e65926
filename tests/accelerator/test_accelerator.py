"""The accelerator runtime on the test device: the contract of all runtimes, streams, lifetimes."""

from __future__ import annotations

import threading
from dataclasses import replace

import pytest
import torch
from contract import CASES, ROWS, by_hand, diamond, inputs, planned, scatter, spread
from device import DeviceTensor
from double import NUM_SMS, torch_like
from drawn import drawn_call, drawn_graph, drawn_inputs, drawn_plan

from torchweft.errors import RunError
from torchweft.plan.graph import Batch, Graph, Op, Value
from torchweft.plan.machine import Lane, accelerator
from torchweft.plan.plan import Step
from torchweft.plan.sizes import Size
from torchweft.plan.strategies import overlap, sequential
from torchweft.plan.verify import verify
from torchweft.run.accelerator.accelerator import Accelerator, Runtime
from torchweft.run.accelerator.cuda import Cuda
from torchweft.run.accelerator.dispatch import dispatch
from torchweft.run.accelerator.streams import compile_streams


@pytest.fixture
def runtime(device):
    return Runtime(Accelerator(device.device, torch_like(device)))


def call(runtime, device, program, bounds, given=None):
    """One call: the outputs and the state it changed, read on the caller's stream."""
    given = given or [device.put(tensor) for tensor in inputs()]
    found = runtime.run(program, given, bounds)
    return [tensor.cpu() for tensor in (*found, given[1])]


def wanted_of(graph, bodies):
    given = inputs()
    return [*by_hand(graph, bodies, given), given[1]]


@pytest.mark.parametrize("delays", [0.0, 0.001])
@pytest.mark.parametrize(("strategy", "num_lanes"), [*CASES, (scatter, 3)])
def test_laws_6_and_7_outputs_are_the_same_bits_with_and_without_delays(
    strategy, num_lanes, delays, device, runtime
):
    graph, bodies = diamond()
    plan = planned(strategy, num_lanes, graph, accelerator)
    program = runtime.compile(plan, bodies)
    device.delays = delays
    for late in (None, *device.streams):
        device.late = late
        found = call(runtime, device, program, plan.cut.bounds(ROWS))
        assert all(map(torch.equal, wanted_of(graph, bodies), found))


def test_the_host_does_not_wait_for_the_device(device, runtime):
    graph, bodies = diamond()
    plan = planned(spread, 3, graph, accelerator)
    given = [device.put(tensor) for tensor in inputs()]
    device.late = device.default
    found = runtime.run(runtime.compile(plan, bodies), given, (0, ROWS))
    assert found[0].held.isnan().all(), "all is issued, nothing has run yet"
    assert torch.equal(found[0].cpu(), wanted_of(graph, bodies)[0])


@pytest.mark.parametrize("op", ["start", "go_left", "go_right", "go_third", "join", "mean"])
def test_an_op_that_raises_gives_one_error_and_the_next_call_works(op, device, runtime):
    graph, bodies = diamond()
    plan = planned(spread, 3, graph, accelerator)

    def explode(*reads):
        raise ValueError("boom")

    with pytest.raises(RunError, match="boom") as caught:
        call(runtime, device, runtime.compile(plan, {**bodies, op: explode}), (0, ROWS))
    assert op in str(caught.value)
    assert "may be half written: state" in caught.value.story
    assert isinstance(caught.value.__cause__, ValueError)
    assert device.current is device.default
    found = call(runtime, device, runtime.compile(plan, bodies), (0, ROWS))
    assert all(map(torch.equal, wanted_of(graph, bodies), found))


def test_ctrl_c_stays_what_it_is(device, runtime):
    graph, bodies = diamond()
    plan = planned(spread, 3, graph, accelerator)

    def interrupt(*reads):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        call(runtime, device, runtime.compile(plan, {**bodies, "join": interrupt}), (0, ROWS))
    assert device.current is device.default


def test_after_a_failed_call_the_callers_stream_waits_for_what_was_issued(device, runtime):
    graph, bodies = diamond()
    plan = planned(spread, 3, graph, accelerator)

    def explode(*reads):
        raise ValueError("boom")

    given = [device.put(tensor) for tensor in inputs()]
    program = runtime.compile(plan, {**bodies, "join": explode})
    call(runtime, device, runtime.compile(plan, bodies), (0, ROWS))  # the streams exist
    wanted = inputs()
    bodies["go_right"](wanted[0] * 3 + 1, wanted[1])
    device.late = next(s for s in device.streams if s is not device.default)
    with pytest.raises(RunError):
        runtime.run(program, given, (0, ROWS))
    assert torch.equal(given[1].cpu(), wanted[1])


def test_calls_from_eight_threads_at_once_keep_apart(device, runtime):
    graph, bodies = diamond()
    plan = planned(spread, 3, graph, accelerator)
    program, wanted = runtime.compile(plan, bodies), wanted_of(graph, bodies)
    device.delays = 0.0005
    wrongs = []

    def calls(own):
        with device, torch.no_grad():
            device.current = own
            for _ in range(3):
                found = call(runtime, device, program, (0, ROWS))
                if not all(map(torch.equal, wanted, found)):
                    wrongs.append(found)

    threads = [threading.Thread(target=calls, args=(device.new_stream(),)) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrongs


def test_a_trace_has_a_span_for_every_run_in_device_time(device, runtime):
    graph, bodies = diamond()
    plan = planned(spread, 2, graph, accelerator)
    given = [device.put(tensor) for tensor in inputs()]
    program = runtime.compile(plan, bodies, traced=True)
    device.delays = 0.001
    outputs, trace = runtime.run_traced(program, given, (0, ROWS))
    assert {span.op for span in trace.spans if span.kind == "run"} == set(graph.op)
    assert all(span.end_s >= span.start_s for span in trace.spans)
    assert torch.equal(outputs[0].cpu(), wanted_of(graph, bodies)[0])


def test_a_plan_of_one_lane_has_neither_streams_nor_events(device, runtime):
    graph, bodies = diamond()
    program = runtime.compile(planned(sequential, 1, graph, accelerator), bodies)
    before = len(device.streams)
    call(runtime, device, program, (0, ROWS))
    assert len(device.streams) == before
    assert "_event(" not in program.source
    assert "record_stream" not in program.source
    assert "on(" not in program.source.split("\n", 1)[1]


# Lifetimes: bytes go back to the stream that asked for them, whoever still uses them.


def test_an_output_may_be_dropped_while_the_callers_stream_still_uses_it(device, runtime):
    graph, bodies = diamond()
    plan = planned(scatter, 3, graph, accelerator)
    program = runtime.compile(plan, bodies)
    given = [device.put(tensor) for tensor in inputs()]
    wanted = wanted_of(graph, bodies)
    call(runtime, device, program, plan.cut.bounds(ROWS))
    device.late = device.default
    outputs = runtime.run(program, given, plan.cut.bounds(ROWS))
    twice = [output * 2 for output in outputs]
    del outputs
    assert all(torch.equal(a.cpu(), b * 2) for a, b in zip(twice, wanted, strict=False))


@pytest.mark.parametrize("seed", [2, 6, 10, 14])
def test_every_note_of_a_use_on_another_stream_is_there_for_a_reason(
    seed, monkeypatch, device, runtime
):
    """As for events: without a note, clocks tell a race exactly if some order gives a wrong sum."""
    graph, bodies = drawn_graph(seed)
    plan = drawn_plan(graph, seed)
    device.judge = True
    noting, num_notes, skipped = DeviceTensor.record_stream, 0, None

    def note(tensor, stream):
        nonlocal num_notes
        num_notes += 1
        if num_notes - 1 != skipped:
            noting(tensor, stream)

    monkeypatch.setattr(DeviceTensor, "record_stream", note)

    def play(late):
        nonlocal num_notes
        device.late = None
        device.synchronize()
        device.late, device.races, num_notes = late, [], 0
        given = [device.put(tensor) for tensor in drawn_inputs()]
        found = drawn_call(runtime, program, given)
        return [tensor.cpu() for tensor in (*found, *given)]

    program = runtime.compile(plan, bodies)
    wanted = play(None)
    assert not device.races
    total = num_notes
    for number in range(total):
        skipped, races, wrong = number, False, False
        for late in list(device.streams):
            wrong = not all(map(torch.equal, wanted, play(late)))
            races = races or bool(device.races)
            if wrong:
                break
        assert wrong == races
    assert total, "the plan has values that several streams use"


def test_a_split_that_copies_is_work_that_others_wait_for(device, runtime):
    """Rows inside an outer dim are no view: the parts are made by the stream of the split."""
    rows, wide = Size.of("s0"), Size.of(4)
    values = (
        Value("x", (rows * 2, wide), batch=Batch(0, outer=Size.of(2))),
        Value("a", (rows, wide), batch=Batch(0)),
        Value("y", (rows, wide), batch=Batch(0)),
    )
    ops = (Op("add", ("x",), ("a",)), Op("last", ("a", "x"), ("y",)))
    graph = Graph("outer", values, ops, ("x",), ("y",), "s0")

    def halves(s):
        s.split(2)
        for op in ("add", "last"):
            for part in (0, 1):
                s.run(op, part, lane=("compute", "compute1")[part])
        s.merge()

    def machine(num_lanes):  # a lane with a priority has a stream of its own
        base = accelerator(num_lanes)
        lanes = [replace(lane, priority=-(lane.name == "compute2")) for lane in base.lanes]
        return replace(base, lanes=tuple(lanes))

    plan = planned(halves, 3, graph, machine)
    steps = [
        step._replace(lane="compute2") if step.kind == "split" else step for step in plan.steps
    ]
    steps = [step for step in steps if step.target != "split x"]
    steps[1:1] = [Step("wait", lane, target="split x") for lane in ("compute", "compute1")]
    plan = verify(plan.then("by hand", steps=tuple(steps)))
    bodies = {
        "add": lambda x: (x.unflatten(0, (2, -1)).sum(0),),
        "last": lambda a, x: (a * x.unflatten(0, (2, -1))[0],),
    }
    given = torch.randn(2 * ROWS, 4)
    wanted = by_hand(graph, bodies, (given,))[0]
    device.judge = True
    program = runtime.compile(plan, bodies)
    for late in [None, *range(5)]:
        device.late = None if late is None else device.streams[late]
        found = runtime.run(program, [device.put(given)], plan.cut.bounds(ROWS))
        assert torch.equal(found[0].cpu(), wanted)
        assert not device.races


# What a lane asks of its stream.


def test_the_network_lane_has_a_stream_of_its_own_that_goes_first(device, runtime):
    graph, bodies = drawn_graph(2)
    plan = drawn_plan(graph, 2)
    drawn_call(runtime, runtime.compile(plan, bodies), list(map(device.put, drawn_inputs())))
    priorities = {lane.name: lane.priority for lane in dispatch(plan).streams if lane}
    assert priorities["network"] == -1
    assert -1 in [stream.priority for stream in device.streams]


def test_a_lane_with_a_budget_gets_a_green_context_on_cuda(device):
    graph, bodies = diamond()
    plan = planned(spread, 2, graph, lambda n: accelerator(n, compute_sms=4))
    runtime = Runtime(Cuda(torch.device("meta"), torch_like(device)))
    found = call(runtime, device, runtime.compile(plan, bodies), (0, ROWS))
    assert all(map(torch.equal, wanted_of(graph, bodies), found))
    assert [s.num_sms for s in device.streams if s.num_sms] == [4, 4], "the first lane has one too"
    assert device.contexts == [4], "two contexts would be the same multiprocessors"
    with pytest.raises(RunError, match="from the same ones"):
        runtime.device.stream(Lane("other", num_sms=2))


def test_a_budget_that_cannot_be_held_is_refused(device, runtime):
    lane = Lane("compute", num_sms=4)
    with pytest.raises(RunError, match="cannot hold it to"):
        runtime.device.stream(lane)
    cuda, api = Cuda(torch.device("meta"), torch_like(device)), torch_like(device)
    with pytest.raises(RunError, match=f"has {NUM_SMS}"):
        cuda.stream(Lane("compute", num_sms=NUM_SMS + 1))
    with pytest.raises(RunError, match="one of the two"):
        cuda.stream(Lane("compute", num_sms=4, priority=-1))

    def create(**options):
        raise RuntimeError("Green Context requires CUDA driver 12.8+")

    api.cuda.green_contexts.GreenContext.create = create
    with pytest.raises(RunError, match=r"no green context here: .*12\.8"):
        Cuda(torch.device("meta"), api).stream(lane)


def test_a_hostile_name_never_reaches_the_source():
    graph, bodies = diamond()
    program = compile_streams(planned(overlap(parts=2), 1, graph, accelerator), bodies)
    for name in [*graph.op, *graph.value]:
        assert len(name) == 1 or name not in program.source

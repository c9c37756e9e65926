"""Device graphs on the test device: capture with all streams, in pieces, replay, and the rules."""

from __future__ import annotations

import pytest
import torch
from contract import ROWS, by_hand, diamond, inputs, planned, scatter, spread
from double import torch_like
from drawn import drawn_call, drawn_graph, drawn_inputs, drawn_plan, without
from queues import RuleError

from torchweft.errors import RunError
from torchweft.plan.graph import Batch, Graph, Op, Value
from torchweft.plan.machine import accelerator
from torchweft.plan.sizes import Size
from torchweft.plan.strategies import sequential
from torchweft.run.accelerator import graphs as graphs_module
from torchweft.run.accelerator.accelerator import Accelerator, Runtime, accelerator_of
from torchweft.run.accelerator.cuda import Cuda
from torchweft.run.accelerator.dispatch import dispatch
from torchweft.run.accelerator.graphs import (
    ALIAS,
    FROZEN,
    MAX_CAPTURES,
    MOVES,
    OPAQUE,
    WANTED,
    Graphs,
)
from torchweft.run.accelerator.streams import write_streams


@pytest.fixture(params=[Accelerator, Cuda])
def runtime(device, request):
    found = request.param(device.device, torch_like(device))
    reasons = []
    made = Runtime(found, Graphs(found, reasons.append))
    made.reasons = reasons
    return made


class NoGraph:
    """A body that a device graph must not hold."""

    graph = False

    def __init__(self, body):
        self.function = body


def given_by(seed):
    generator = torch.Generator().manual_seed(seed)
    return list(torch.randn(2, ROWS, 16, generator=generator))


def check_calls(runtime, device, plan, bodies, *, num=5, late=None, state=None):
    """Calls with new inputs each and a state that stays: results, and the state, as by hand."""
    graph, bounds = plan.graph, plan.cut.bounds(ROWS)
    program = runtime.compile(plan, bodies)
    plain = {name: getattr(body, "function", body) for name, body in bodies.items()}
    ours, theirs = device.put(inputs()[1]), inputs()[1]
    kept = []
    for number in range(num):
        x = given_by(number)[0]
        device.late = late
        found = runtime.run(program, [device.put(x), ours], bounds)
        kept.append((found, by_hand(graph, plain, (x, theirs))))
        assert torch.equal(ours.cpu(), theirs)
    for found, wanted in kept:  # later calls have not written over earlier outputs
        assert all(torch.equal(a.cpu(), b) for a, b in zip(found, wanted, strict=True))


@pytest.mark.parametrize(("strategy", "num_lanes"), [(sequential, 1), (spread, 3), (scatter, 3)])
def test_a_whole_plan_is_one_graph_that_is_replayed_with_new_inputs(
    strategy, num_lanes, device, runtime
):
    graph, bodies = diamond()
    check_calls(runtime, device, planned(strategy, num_lanes, graph, accelerator), bodies)
    (shape,) = runtime.graphs.shapes.values()
    assert [part.graph is not None for part in shape.parts] == [True]
    assert runtime.graphs.num_replays == 3 - (shape.num_captures - 1)
    assert not runtime.reasons


def test_a_captured_plan_is_right_in_the_worst_order_of_its_streams(device, runtime):
    graph, bodies = diamond()
    plan = planned(scatter, 3, graph, accelerator)
    check_calls(runtime, device, plan, bodies)
    for stream in list(device.streams):
        check_calls(runtime, device, plan, bodies, late=stream)
    device.delays = 0.0005
    check_calls(runtime, device, plan, bodies)


@pytest.mark.parametrize("names", [["join"], ["start"], ["mean"], ["go_left", "again"]])
@pytest.mark.parametrize("strategy", [spread, scatter])
def test_ops_marked_graph_false_run_between_graphs_at_every_replay(
    names, strategy, device, runtime
):
    graph, bodies = diamond()
    num_runs = 0

    def seen(body):
        def run(*reads):
            nonlocal num_runs
            num_runs += 1
            assert device.capturing is None
            _ = reads[0].sum().item()  # the host waits: forbidden in a capture
            return body(*reads)

        return NoGraph(run)

    plain = {name: bodies[name] for name in names}
    plan = planned(strategy, 3, graph, accelerator)
    marked = {**bodies, **{name: seen(bodies[name]) for name in names}}
    program = runtime.compile(plan, marked)
    ours, theirs = device.put(inputs()[1]), inputs()[1]
    for number in range(5):
        x = given_by(number)[0]
        before = num_runs
        found = runtime.run(program, [device.put(x), ours], plan.cut.bounds(ROWS))
        assert num_runs > before
        wanted = by_hand(graph, {**bodies, **plain}, (x, theirs))
        assert all(torch.equal(a.cpu(), b) for a, b in zip(found, wanted, strict=True))
        assert torch.equal(ours.cpu(), theirs)
    (shape,) = runtime.graphs.shapes.values()
    assert {part.graph is not None for part in shape.parts} >= {True, False}
    assert runtime.graphs.num_replays >= 1


@pytest.mark.parametrize("seed", [0, 2, 4, 6, 12])
def test_flights_land_where_a_graph_ends(seed, device, runtime):
    """A two-phase op that is in the air where another must not be captured is completed first."""
    graph, bodies = drawn_graph(seed)
    plan = drawn_plan(graph, seed)
    op = graph.ops[len(graph.ops) // 2]
    held = bodies[op.name]
    marked = {**bodies, op.name: Apart(held)}
    program = runtime.compile(plan, marked)
    wanted = None
    for _ in range(4):
        given = [device.put(tensor) for tensor in drawn_inputs()]
        found = [t.cpu() for t in (*drawn_call(runtime, program, given), *given)]
        wanted = wanted or found
        assert all(map(torch.equal, wanted, found))
    assert runtime.graphs.num_replays + runtime.graphs.shapes.popitem()[1].num_captures >= 2


class Apart:
    """Any body, two-phase or not, with graph=False."""

    graph = False

    def __init__(self, body):
        self.body = self.function = body
        self.into = getattr(body, "into", None)
        if hasattr(body, "issue"):
            self.issue, self.complete = body.issue, body.complete

    def __call__(self, *reads):
        return self.body(*reads)


def test_what_stays_where_it_was_has_no_slot_until_it_moves(device, runtime):
    graph, bodies = diamond()
    plan = planned(spread, 2, graph, accelerator)
    program = runtime.compile(plan, bodies)
    x, state = (device.put(tensor) for tensor in inputs())
    for _ in range(4):
        runtime.run(program, [x, state], (0, ROWS))
    (shape,) = runtime.graphs.shapes.values()
    assert shape.fixed == [True, True]
    assert runtime.graphs.num_replays == 2
    other = device.put(given_by(7)[0])
    theirs = state.cpu()
    found = runtime.run(program, [other, state], (0, ROWS))
    wanted = by_hand(graph, bodies, (given_by(7)[0], theirs))
    assert all(torch.equal(a.cpu(), b) for a, b in zip(found, wanted, strict=True))
    assert shape.fixed == [False, True], "x has a slot now; the state is changed where it is"


def test_a_state_that_moves_at_every_call_ends_the_captures(device, runtime):
    graph, bodies = diamond()
    plan = planned(spread, 2, graph, accelerator)
    program = runtime.compile(plan, bodies)
    kept = []
    for number in range(MAX_CAPTURES + 4):
        x, state = given_by(number)
        kept.append([device.put(x), device.put(state)])
        found = runtime.run(program, kept[-1], (0, ROWS))
        wanted = by_hand(graph, bodies, (x, state))
        assert all(torch.equal(a.cpu(), b) for a, b in zip(found, wanted, strict=True))
        assert torch.equal(kept[-1][1].cpu(), state)
    assert set(runtime.reasons) == {MOVES}


def test_another_number_of_rows_has_another_graph(device, runtime):
    graph, bodies = diamond()
    plan = planned(spread, 2, graph, accelerator)
    program = runtime.compile(plan, bodies)
    for rows in (8, 16, 8, 16, 8, 16):
        x, state = (tensor[:rows].clone() for tensor in inputs())
        found = runtime.run(program, [device.put(x), device.put(state)], (0, rows))
        wanted = by_hand(graph, bodies, (x, state))
        assert all(torch.equal(a.cpu(), b) for a, b in zip(found, wanted, strict=True))
    assert len(runtime.graphs.shapes) == 2


def test_the_same_bytes_with_other_strides_and_inference_mode_have_graphs_of_their_own(
    device, runtime
):
    graph, bodies = diamond()
    plan = planned(sequential, 1, graph, accelerator)
    program = runtime.compile(plan, bodies)
    square, state = torch.randn(16, 16), torch.zeros(16, 16)
    held = device.put(square)
    for number in range(12):
        ours, theirs = device.put(state), state.clone()
        x, given = (square.t(), held.t()) if number % 3 == 1 else (square, held)
        with torch.inference_mode(number % 3 == 2):
            found = runtime.run(program, [given, ours], (0, 16))
        wanted = by_hand(graph, bodies, (x, theirs))
        assert torch.equal(found[0].cpu(), wanted[0])
    assert len(runtime.graphs.shapes) == 3


def test_calls_from_two_streams_do_not_get_into_each_other(device, runtime):
    graph, bodies = diamond()
    plan = planned(spread, 2, graph, accelerator)
    program = runtime.compile(plan, bodies)
    states = device.put(inputs()[1]), inputs()[1]
    kept, first, second = [], device.new_stream("one"), device.new_stream("two")
    for number in range(8):
        device.current = second if number % 2 else first
        device.current.wait_stream(first if number % 2 else second)  # they share the state
        x = given_by(number)[0]
        device.late = device.current
        found = runtime.run(program, [device.put(x), states[0]], (0, ROWS))
        kept.append((device.current, found, by_hand(graph, bodies, (x, states[1]))))
    for stream, found, wanted in kept:
        device.current = stream
        assert all(torch.equal(a.cpu(), b) for a, b in zip(found, wanted, strict=True))


def test_outputs_that_share_bytes_and_makes_that_are_no_tensors_are_refused(device, runtime):
    rows = Size.of("s0")
    values = (
        Value("x", (rows,), batch=Batch(0)),
        Value("n", (), "opaque"),
        Value("y", (rows,), batch=Batch(0)),
        Value("view", (rows,), batch=Batch(0), alias_of="y"),
    )
    ops = (
        Op("count", ("x",), ("n",), rows="mixing"),
        Op("add", ("x", "n"), ("y",)),
        Op("look", ("y",), ("view",), rows="mixing"),
    )
    bodies = {
        "count": NoGraph(lambda x: (3,)),
        "add": lambda x, n: (x + n,),
        "look": lambda y: (y.view_as(y),),
    }
    for outputs, reason in ((("y", "view"), ALIAS), (("y",), OPAQUE)):
        graph = Graph("odd", values, ops, ("x",), outputs, "s0")
        plan = planned(sequential, 1, graph, accelerator)
        program = runtime.compile(plan, bodies)
        for number in range(4):
            x = given_by(number)[0][:, 0].clone()
            found = runtime.run(program, [device.put(x)], (0, ROWS))
            assert torch.equal(found[0].cpu(), x + 3)
        assert runtime.reasons[-1] == reason


# The rules of a capture: each is broken once.


def broken_capture(runtime, device, program, bounds):
    for _ in range(2):
        runtime.run(program, [device.put(tensor) for tensor in inputs()], bounds)


def test_a_host_that_waits_in_a_capture_is_told_which_op_and_the_cure(device, runtime):
    graph, bodies = diamond()
    plan = planned(spread, 2, graph, accelerator)

    def waits(left, right, third):
        return (left + right * third * (1 + 0 * left.sum().item()),)

    program = runtime.compile(plan, {**bodies, "join": waits})
    with pytest.raises(RunError, match=r"join cannot be captured.*host waits.*graph=False"):
        broken_capture(runtime, device, program, (0, ROWS))
    assert device.capturing is None
    assert device.current is device.default
    good = runtime.compile(plan, bodies)
    for _ in range(3):
        given = [device.put(tensor) for tensor in inputs()]
        assert torch.equal(
            runtime.run(good, given, (0, ROWS))[0].cpu(), by_hand(graph, bodies, inputs())[0]
        )


def lacking(plan, bodies, which):
    """The program of a plan with one kind of wait less: its first fork, or its first join."""
    whole = dispatch(plan)
    last = len(whole.items) - 1
    pairs = [(at, wait) for at, item in enumerate(whole.items) for wait in item.waits]
    at, wait = next(
        pair for pair in pairs if (pair[1] == 0 if which == "fork" else pair[0] == last)
    )
    return write_streams(without(whole, at, wait), bodies)


def forked():
    """A plan whose second lane starts from an input and ends in an output."""
    rows, wide = Size.of("s0"), Size.of(16)
    values = [Value(name, (rows, wide), batch=Batch(0)) for name in ("x", "state", "y", "z")]
    ops = (Op("left", ("x",), ("y",)), Op("right", ("state",), ("z",)))
    graph = Graph("forked", tuple(values), ops, ("x", "state"), ("y", "z"), "s0")

    def both(s):
        s.run("left", lane="compute")
        s.run("right", lane="compute1")

    return planned(both, 2, graph, accelerator), {
        "left": lambda x: (x + 1,),
        "right": lambda state: (state * 2,),
    }


def test_a_stream_that_was_not_forked_allocates_outside_the_pool(device, runtime):
    with pytest.raises(RunError, match="allocation outside the pool"):
        broken_capture(runtime, device, lacking(*forked(), "fork"), (0, ROWS))
    assert device.capturing is None


def test_a_stream_that_is_not_joined_ends_the_capture_with_an_error(device, runtime):
    with pytest.raises(RunError, match="unjoined"):
        broken_capture(runtime, device, lacking(*forked(), "join"), (0, ROWS))
    assert device.capturing is None


def test_an_event_from_outside_is_refused_in_a_capture(device, runtime):
    plan, bodies = forked()
    outside = device.default.record_event()

    def waits(x):
        device.current.wait_event(outside)
        return (x + 1,)

    program = runtime.compile(plan, {**bodies, "left": waits})
    with pytest.raises(RunError, match="recorded outside the capture"):
        broken_capture(runtime, device, program, (0, ROWS))


def test_bytes_freed_in_a_capture_while_another_stream_uses_them_are_noticed(
    device, runtime, monkeypatch
):
    graph, bodies = diamond()
    plan = planned(scatter, 3, graph, accelerator)
    program = runtime.compile(plan, bodies)
    monkeypatch.setattr("device.DeviceTensor.record_stream", lambda tensor, stream: None)
    with pytest.raises(RunError, match="freed while"):
        broken_capture(runtime, device, program, plan.cut.bounds(ROWS))


def test_the_device_knows_the_other_rules_too(device):
    stream, graph = device.new_stream(), torch_like(device).cuda.CUDAGraph()
    with pytest.raises(RuleError, match="default stream"):
        graph.capture_begin()
    device.current = stream
    graph.capture_begin()
    with pytest.raises(RuleError, match="underway"):
        torch_like(device).cuda.CUDAGraph().capture_begin()
    inside = stream.record_event()
    graph.capture_end()
    with pytest.raises(RuleError, match="has ended"):
        stream.wait_event(inside)


def scaled():
    """x * scale, where the scale is a number on the host."""
    rows = Size.of("s0")
    values = (
        Value("x", (rows,), batch=Batch(0)),
        Value("scale", ()),
        Value("y", (rows,), batch=Batch(0)),
    )
    graph = Graph(
        "scaled", values, (Op("mul", ("x", "scale"), ("y",)),), ("x", "scale"), ("y",), "s0"
    )
    return graph, {"mul": lambda x, scale: (x * scale.item(),)}


def test_a_number_on_the_host_is_not_frozen_at_the_capture(device, runtime):
    graph, bodies = scaled()
    program = runtime.compile(planned(sequential, 1, graph, accelerator), bodies)
    for scale in range(1, 6):
        (y,) = runtime.run(
            program, [device.put(torch.ones(ROWS)), torch.tensor(float(scale))], (0, ROWS)
        )
        assert torch.equal(y.cpu(), torch.full((ROWS,), float(scale)))
    assert set(runtime.reasons) == {FROZEN}


def test_a_constant_on_the_host_may_be_captured(device):
    found, reasons = Accelerator(device.device, torch_like(device)), []
    runtime = Runtime(found, Graphs(found, reasons.append, ["scale"]))
    graph, bodies = scaled()
    program = runtime.compile(planned(sequential, 1, graph, accelerator), bodies)
    for _ in range(4):
        (y,) = runtime.run(program, [device.put(torch.ones(ROWS)), torch.tensor(3.0)], (0, ROWS))
        assert torch.equal(y.cpu(), torch.full((ROWS,), 3.0))
    assert runtime.graphs.num_replays and not reasons


def test_weights_are_not_part_of_the_key_of_a_replay(device, runtime, monkeypatch):
    graph, bodies = diamond()
    program = runtime.compile(planned(sequential, 1, graph, accelerator), bodies)
    looked = []
    monkeypatch.setattr(graphs_module, "_facts", lambda item: looked.append(item))
    weight = torch.nn.Parameter(device.put(inputs()[1]), requires_grad=False)
    for seed in range(3):
        x = device.put(given_by(seed)[0])
        runtime.run(program, [x, weight], program.plan.cut.bounds(ROWS))
        assert len(looked) == seed + 1 and looked[-1] is x


@pytest.mark.parametrize("lacks", ["graphs", "notes"])
def test_a_device_that_lacks_something_falls_back(lacks, device):
    api = torch_like(device)
    if lacks == "graphs":
        api.accelerator.Graph = raising("there are no graphs")
    else:
        api.empty = raising("there is no record_stream")
    found = Accelerator(device.device, api)
    assert ("there are no graphs" in found.no_graphs) == (lacks == "graphs")
    assert ("record_stream" in found.one_stream) == (lacks == "notes")
    graph, bodies = diamond()
    runtime = Runtime(found)
    program = runtime.compile(planned(scatter, 3, graph, accelerator), bodies)
    assert (len(program.dispatch.streams) == 1) == (lacks == "notes")
    check_calls(runtime, device, planned(scatter, 3, graph, accelerator), bodies)


def raising(text):
    def raises(*args, **kwargs):
        raise NotImplementedError(text)

    return raises


def test_all_graphs_of_a_process_have_one_accelerator():
    place = torch.device("meta")
    assert accelerator_of(place) is accelerator_of(torch.device("meta"))


def test_what_a_forward_has_saved_is_not_written_over_while_it_is_wanted(device):
    graph, bodies = diamond()
    found, reasons = Accelerator(device.device, torch_like(device)), []
    runtime = Runtime(found, Graphs(found, reasons.append, saved=graph.outputs))
    plan = planned(sequential, 1, graph, accelerator)
    program = runtime.compile(plan, bodies)
    plain = {name: getattr(body, "function", body) for name, body in bodies.items()}

    ours, theirs = device.put(inputs()[1]), inputs()[1]

    def forward(seed):
        x = given_by(seed)[0]
        saved = runtime.run(program, [device.put(x), ours], (0, ROWS))
        return saved, by_hand(graph, plain, (x, theirs))

    for number in range(5):
        saved, wanted = forward(number)
        assert all(torch.equal(a.cpu(), b) for a, b in zip(saved, wanted, strict=True))
        places = [each.data_ptr() for each in saved]
        del saved
    assert runtime.graphs.num_replays and not reasons
    first, wanted = forward(7)
    assert [each.data_ptr() for each in first] == places, "it stays where the graph has made it"
    second, other = forward(8)
    assert reasons == [WANTED]
    for saved, right in ((first, wanted), (second, other)):
        assert all(torch.equal(a.cpu(), b) for a, b in zip(saved, right, strict=True))

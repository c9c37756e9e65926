"""Side state in parts: what a host keeps beside the arguments is cut with the batch."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
from torch import nn

import torchweft as weft
from torchweft.api import session_of
from torchweft.capture.splitters import (
    Parts,
    Splitter,
    blocks_touched,
    by_requests,
    by_rows,
    each_value,
    entering,
    keep_source,
    shared,
    source_of,
    switch_for,
)
from torchweft.errors import RefusedError, StateError, StrategyError, WeftError
from torchweft.plan.context import Context

HIDDEN = 4


@dataclass
class State:
    """What the toy host keeps beside the arguments, as serving engines do."""

    slots: torch.Tensor
    """For each token the slot of the cache that it is written to."""
    starts: list[int]
    """For each request its first slot."""
    owners: torch.Tensor
    """For each token its request, counted from `first`."""
    first: int = 0
    scale: float = 0.5


class Host:
    """One global context and one cache, which all layers write and read, or one for each layer."""

    def __init__(self) -> None:
        self.state: State | None = None
        self.cache = torch.zeros(64, HIDDEN)
        self.by_layer: dict[str, torch.Tensor] = {}
        self.seen: list[int] = []


HOST = Host()


@torch.library.custom_op("toy_host::attend", mutates_args=())
def attend(x: torch.Tensor, layer: str) -> torch.Tensor:
    """Writes its rows into the cache, then each row adds up all of its request up to itself."""
    state = HOST.state
    assert state is not None, "the host sets a state before it calls the model"
    HOST.seen.append(len(x))
    cache = HOST.cache if not HOST.by_layer else HOST.by_layer[layer]
    cache[state.slots] = x
    rows = []
    for slot, owner in zip(state.slots.tolist(), state.owners.tolist(), strict=True):
        start = state.starts[owner - state.first]
        rows.append(cache[start : slot + 1].sum(0) * state.scale)
    return torch.stack(rows)


@attend.register_fake
def _(x: torch.Tensor, layer: str) -> torch.Tensor:
    return torch.empty_like(x)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(HIDDEN, HIDDEN) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for number, layer in enumerate(self.layers):
            x = torch.tanh(layer(attend(layer(x), f"layer{number}")))
        return x


def firsts_of(value: Any, parts: Parts) -> list[int]:
    return [start for start, _ in parts.requests]


FIELDS = {
    "slots": by_rows, "starts": by_requests, "owners": by_rows, "first": firsts_of,
    "scale": shared,
}  # fmt: skip


def enforce(state: State) -> None:
    HOST.state = state


def splitter(**changes: Any) -> Splitter:
    made = Splitter("forward", r"toy_host\.attend", lambda: HOST.state, enforce, FIELDS)
    return replace(made, **changes)


def state_of(tokens: list[int]) -> State:
    """Requests one after another in the cache, each with room for 8 tokens."""
    starts = [8 * number for number in range(len(tokens))]
    slots = [start + at for start, count in zip(starts, tokens, strict=True) for at in range(count)]
    owners = [number for number, count in enumerate(tokens) for _ in range(count)]
    return State(torch.tensor(slots), starts, torch.tensor(owners))


@pytest.fixture(autouse=True)
def clean() -> Iterator[None]:
    torch._dynamo.reset()
    HOST.state, HOST.seen, HOST.by_layer = None, [], {}
    HOST.cache = torch.zeros(64, HIDDEN)
    yield
    HOST.state = None


RULES = [weft.row_wise(r"toy_host\.attend")]


def run(model: Any, tokens: list[int], x: torch.Tensor, **told: Any) -> torch.Tensor:
    HOST.state = state_of(tokens)
    HOST.cache = torch.zeros(64, HIDDEN)
    with torch.no_grad(), weft.context(tokens_per_request=tokens, **told):
        found: torch.Tensor = model(x)
    return found


def compiled(strategy: Any = "overlap", **options: Any) -> tuple[Model, Any]:
    torch.manual_seed(0)
    plain = Model()
    made = Model()
    made.load_state_dict(plain.state_dict())
    options = {"splitters": [splitter()], "rules": RULES, **options}
    return plain, weft.compile(made, strategy, **options)


@pytest.mark.parametrize("tokens", [[3, 5, 2], [8], [2, 2, 2, 2], [2, 7]])
@pytest.mark.parametrize("parts", [2, 3])
@pytest.mark.parametrize("at", [None, "requests"])
def test_parts_see_their_own_rows_of_the_state(
    tokens: list[int], parts: int, at: str | None
) -> None:
    plain, model = compiled(weft.overlap(parts=parts, at=at))
    for number in range(3):  # the second call is traced, the third takes the way of steady calls
        x = torch.randn(sum(tokens), HIDDEN)
        want = run(plain, tokens, x)
        cache, HOST.seen = HOST.cache, []
        got = run(model, tokens, x)
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(HOST.cache, cache, rtol=1e-5, atol=1e-6)
        cuts = at is None or len(tokens) >= parts
        assert (max(HOST.seen) < sum(tokens)) == cuts, f"call {number}"
    assert HOST.state is not None and len(HOST.state.slots) == sum(tokens), "the whole is back"


def test_a_wrong_state_is_noticed() -> None:
    """The negative control: parts that get each other's state give other results."""

    def swapped(value: Any, parts: Parts) -> list[Any]:
        return list(by_rows(value, parts))[::-1]

    plain, model = compiled(splitters=[splitter(fields={**FIELDS, "slots": swapped})])
    x = torch.randn(8, HIDDEN)
    assert not torch.allclose(run(model, [4, 4], x), run(plain, [4, 4], x))


def test_an_unknown_field_is_an_error_that_names_it() -> None:
    known = {name: rule for name, rule in FIELDS.items() if name != "owners"}
    _, model = compiled(splitters=[splitter(fields=known)])
    with pytest.raises(StateError, match="field 'owners' of 'forward'") as caught:
        run(model, [4, 4], torch.randn(8, HIDDEN))
    assert caught.value.field == "owners"


def test_a_rule_that_makes_too_few_values_is_an_error() -> None:
    _, model = compiled(splitters=[splitter(fields={**FIELDS, "scale": lambda v, parts: [v]})])
    with pytest.raises(StateError, match="made 1 values for 2 parts"):
        run(model, [4, 4], torch.randn(8, HIDDEN))


def test_without_state_the_call_runs_whole_and_is_counted() -> None:
    plain, model = compiled(splitters=[splitter(current=lambda: None)])
    x = torch.randn(8, HIDDEN)
    torch.testing.assert_close(run(model, [4, 4], x), run(plain, [4, 4], x))
    assert dict(weft.report(model).fallbacks) == {"state: there is no 'forward' in this call": 1}


def test_a_read_of_what_another_part_writes_forbids_the_split() -> None:
    def crossing(state: State, parts: Parts) -> list[tuple[set[int], set[int]]]:
        writes = [set(state.slots[start:stop].tolist()) for start, stop in parts.rows]
        return [(set(), writes[0]), ({0}, writes[1])]

    plain, model = compiled(splitters=[splitter(touched=crossing)])
    x = torch.randn(8, HIDDEN)
    torch.testing.assert_close(run(model, [4, 4], x), run(plain, [4, 4], x))
    (reason,) = dict(weft.report(model).fallbacks)
    assert "a part reads what another part writes in the same call" in reason
    assert max(HOST.seen) == 8


def test_under_fallback_error_a_refusal_raises() -> None:
    _, model = compiled(splitters=[splitter(current=lambda: None)], fallback="error")
    with pytest.raises(StrategyError, match="there is no 'forward'"):
        run(model, [4, 4], torch.randn(8, HIDDEN))


def test_every_call_that_is_refused_is_counted() -> None:
    _, model = compiled(splitters=[splitter(current=lambda: None)])
    for _ in range(5):
        run(model, [4, 4], torch.randn(8, HIDDEN))
    ((reason, count),) = weft.report(model).fallbacks
    assert "there is no 'forward'" in reason and count == 5


def test_ops_that_touch_the_state_keep_part_order() -> None:
    """A strategy that runs a later part first is stopped where it does."""

    def backwards(s: Any) -> None:
        s.split(2)
        for op in s.graph.ops:
            for part in (1, 0):
                s.run(op, part)
        s.merge()

    _, model = compiled(backwards, fallback="error")
    with pytest.raises(StrategyError, match=r"\[0\] first"):
        run(model, [4, 4], torch.randn(8, HIDDEN))


def test_an_exception_leaves_the_whole_state_in_force() -> None:
    @dataclass
    class Failing:
        calls: int = field(default=0)

        def __call__(self, state: State) -> None:
            HOST.state = state
            self.calls += 1
            if self.calls == 2:
                raise RuntimeError("the host is gone")

    failing = Failing()
    _, model = compiled(splitters=[splitter(enforce=failing)])
    with pytest.raises(WeftError, match="the host is gone"):
        run(model, [4, 4], torch.randn(8, HIDDEN))
    assert HOST.state is not None and len(HOST.state.slots) == 8


def test_lanes_with_threads_do_not_share_a_state() -> None:
    """Two compute lanes would put their states in force over each other."""
    machine = weft.cpu(2)

    def two_lanes(s: Any) -> None:
        s.split(2)
        lanes = [lane.name for lane in s.machine.lanes if "compute" in lane.uses]
        while ready := s.ready():
            for op, part in ready:
                s.run(op, part, lane=lanes[part or 0])
        s.merge()

    plain, model = compiled(two_lanes, machine=machine)
    x = torch.randn(8, HIDDEN)
    torch.testing.assert_close(run(model, [4, 4], x), run(plain, [4, 4], x))
    (reason,) = dict(weft.report(model).fallbacks)
    assert "a plan with splitters must use one lane" in reason


def test_the_state_is_switched_only_where_the_part_changes() -> None:
    count = [0]

    def counting(state: State) -> None:
        HOST.state = state
        count[0] += 1

    _, model = compiled(splitters=[splitter(enforce=counting)])
    run(model, [4, 4], torch.randn(8, HIDDEN))
    (plan,) = [plan for plan in weft.plans(model) if plan.num_parts > 1]
    parts = [step.parts for step in plan.steps if step.kind in ("run", "issue")]
    changes = sum(a != b for a, b in zip([None, *parts], parts, strict=False))
    assert count[0] == changes + 1  # and the whole at the end


def test_a_splitter_whose_calls_match_nothing_is_an_error() -> None:
    _, model = compiled(splitters=[splitter(calls=r"other\.attend")])
    HOST.state = replace(state_of([1]), slots=torch.tensor([0]))
    with torch.no_grad(), pytest.raises(WeftError, match="matched nothing"):
        model(torch.randn(1, HIDDEN))


def test_the_backend_takes_splitters_as_an_option() -> None:
    torch.manual_seed(0)
    plain = Model()
    options = {"strategy": "overlap", "splitters": [splitter()], "rules": RULES}
    model = torch.compile(plain, backend="weft", dynamic=True, options=options)
    x = torch.randn(8, HIDDEN)
    want = run(plain, [3, 5], x)
    HOST.seen = []
    torch.testing.assert_close(run(model, [3, 5], x), want)
    assert max(HOST.seen) == 4


def test_merged_runs_get_the_state_of_their_range() -> None:
    whole = state_of([3, 3, 3])
    HOST.state = whole
    context = Context(9, 9, (3, 3, 3))
    switch = switch_for([splitter()], context, (0, 2, 4, 9), [(0, 2), (1, 3)])
    with switch:
        switch(1)
        assert HOST.state.slots.tolist() == [0, 1, 2, 8]
        assert HOST.state.starts == [0, 8]
        switch(2)
        assert HOST.state.slots.tolist() == [2, 8, 9, 10, 16, 17, 18]
        assert HOST.state.starts == [0, 8, 16]
    assert HOST.state is whole


def test_a_call_without_state_is_cut_only_where_the_splitter_says_so() -> None:
    call = Context(9), (0, 4, 9), [(0, 1), (1, 2)]
    with pytest.raises(RefusedError, match="there is no 'forward' in this call"):
        switch_for([splitter()], *call)
    with switch_for([splitter(may_be_absent=True)], *call) as switch:
        for number in range(3):
            switch(number)
            assert HOST.state is None


def test_calls_that_an_argument_tells_apart_share_an_op() -> None:
    """Each layer has a cache of its own, so a part may go through several layers at once."""
    plain, model = compiled(splitters=[splitter(by="layer")])
    x = torch.randn(8, HIDDEN)
    HOST.by_layer = {f"layer{number}": torch.zeros(64, HIDDEN) for number in range(3)}
    want = run(plain, [3, 5], x)
    caches = {name: cache.clone() for name, cache in HOST.by_layer.items()}
    for cache in HOST.by_layer.values():
        cache.zero_()
    torch.testing.assert_close(run(model, [3, 5], x), want)
    assert all(torch.allclose(caches[name], HOST.by_layer[name]) for name in caches)
    graph = session_of(model).pieces[0].graph
    assert max(len(op.mutates) for op in graph.ops) == 3
    assert {name for name in graph.inputs if name.startswith("state.")} == {
        "state.forward.0", "state.forward.1", "state.forward.2",
    }  # fmt: skip


def test_two_splitters_of_one_name_are_an_error() -> None:
    with pytest.raises(WeftError, match="different names"):
        compiled(splitters=[splitter(), splitter()])


def test_the_report_lists_the_state_as_an_input_of_the_graph() -> None:
    _, model = compiled()
    run(model, [4, 4], torch.randn(8, HIDDEN))
    graph = session_of(model).pieces[0].graph
    assert "state.forward" in graph.inputs
    touching = [op for op in graph.ops if "state.forward" in op.mutates]
    assert len(touching) == 3 and all(op.rows == "row-wise" for op in touching)


def parts_of(*tokens: int, at: int) -> Parts:
    """Two parts of requests with these tokens."""
    rows = sum(tokens)
    return Parts(Context(rows, tokens_per_request=tokens), ((0, at), (at, rows)))


def test_a_value_under_several_keys_is_cut_once() -> None:
    calls = []

    def cut(key: str, value: list[int], parts: Parts) -> list[list[int]]:
        calls.append(key)
        return [value[start:stop] for start, stop in parts.rows]

    one, two = [1, 2, 3], [4, 5, 6]
    first, second = each_value(cut)({"a": one, "b": two, "c": one}, parts_of(2, 1, at=2))
    assert first == {"a": [1, 2], "b": [4, 5], "c": [1, 2]} and first["a"] is first["c"]
    assert second == {"a": [3], "b": [6], "c": [3]} and len(calls) == 2
    with pytest.raises(RefusedError, match="a list is there, and not a mapping"):
        each_value(cut)([one], parts_of(2, 1, at=2))


def test_a_context_manager_of_the_host_puts_states_in_force() -> None:
    stack = ["whole"]

    @contextmanager
    def override(state: str) -> Iterator[None]:
        stack.append(state)
        yield
        stack.pop()

    enforce = entering(lambda: stack[-1], override)
    for state in ("first", "second", "second", "whole", "first"):
        enforce(state)
        assert stack == (["whole"] if state == "whole" else ["whole", state])


def test_blocks_that_one_part_reads_and_another_fills_are_told() -> None:
    """Two requests of 6 tokens, in blocks of 4; the second begins with what the first has."""
    whole = ([[7, 8], [7, 9]], [6, 6], 4)
    for new, reads in (((6, 2), [set(), {7}]), ((2, 2), [{7}, {7}]), ((6, 6), [set(), set()])):
        found = blocks_touched([whole], parts_of(*new, at=new[0]))
        assert [each for each, _ in found] == reads
        assert found[0][1] == ({7, 8} if new[0] == 6 else {8})
    more = blocks_touched([whole, ([[1], [2]], [6, 6], 16)], parts_of(6, 2, at=6))
    assert more == [(set(), {7, 8, 1}), ({7}, {9, 2})]


class Host:
    """A host that makes what lies on a device of what lies on the CPU."""

    def make(self, given, kind):
        return kind()


class Slots:
    __slots__ = ()


def test_what_a_host_makes_knows_what_it_was_made_of():
    class Made: ...

    for _ in range(2):  # once is enough, twice does no harm
        keep_source(f"{__name__}:Host.make")
    host = Host()
    made = host.make("batch", Made)
    assert source_of(made) == (host, "batch")
    assert source_of(copy.copy(made)) == (None, None)  # whoever copied it may have changed it
    assert source_of(host.make("batch", Slots)) == (None, None)
    assert source_of("anything else") == (None, None)

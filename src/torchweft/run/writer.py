"""The `Writer`: a verified plan comes in, straight-line Python goes out, one function a lane.

    plan --compile_program--> source --exec--> functions        no step is interpreted at run time

The source holds only identifiers of our own (`v12_0_1`: value 12, parts 0 to 1); everything from
graphs and plans enters as numbers or through the namespace:

    def lane0(x, z, c, e, w, s, b, d):
        (v0, v1,) = x                          the inputs
        (b0, b1, b2,) = b                      the row borders of the parts
        v0_0_1 = t0(v0, b2, b0, b1)            split
        v9(1)                                  side state of this part, where it is another
        (v3_0_1,) = f0(v0_0_1, v1, z[0])       run; z: sizes that bodies need, by part
        h1_0_1 = i1(v3_0_1)                    issue
        (v4_0_1,) = g1(h1_0_1)                 complete
        e[0].set()                             somebody waits for this step
        w(e[1])                                wait
        v3_0_1 = None                          free

v12 is value 12 whole, v12_0_1 its rows of part 0, p12 the whole in its place, m12 the room of that
place, h4_0_1 a flight. Values that cross lanes live in the list `c`, all others in local variables.

A part of a value is a view wherever torch has one (outer == 1; its dim has outer * rows * inner
entries), else a copy. A place is made by the first part that comes: parts write into it themselves,
so that its shape is known before (`room_for`), or are copied into it (`whole_like`).
"""

from __future__ import annotations

import contextlib
import random
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch

from torchweft.capture.rows.axes import Order, rows_apart
from torchweft.capture.splitters import STATE
from torchweft.errors import PlanError
from torchweft.plan.graph import Batch, Value
from torchweft.plan.kernels.fitting import given_to, makes_of
from torchweft.plan.kernels.kernel import Kernel
from torchweft.plan.plan import Plan, Range, Step, holds
from torchweft.plan.sizes import Size
from torchweft.plan.trace import SPANS
from torchweft.private.core import RecordFunctionFast
from torchweft.run.kernels import KernelRun
from torchweft.run.program import Body, Delay, Mark, Program
from torchweft.source import Source

Take = Callable[[Any, int, int, int], Any]
"""(tensor, rows it has, first row, end row) -> those rows of it."""


def taker(value: Value) -> Take:
    """The function that takes rows of a value (or of a room)."""
    batch = _batch(value)
    dim = batch.dim

    def narrow(tensor: Any, rows: int, start: int, stop: int) -> Any:
        inner = tensor.shape[dim] // rows
        return tensor.narrow(dim, start * inner, (stop - start) * inner)

    def outer(tensor: Any, rows: int, start: int, stop: int) -> Any:
        apart = rows_apart(tensor, batch, rows)
        return apart.narrow(dim + 1, start, stop - start).flatten(dim, dim + 2)

    return narrow if batch.outer.constant == 1 else outer


def putter(value: Value) -> Callable[[Any, Any, int, int, int], None]:
    """The function that puts rows of a value into its whole: (whole, part, rows, start, stop)."""
    batch, take = _batch(value), taker(value)

    def put(whole: Any, part: Any, rows: int, start: int, stop: int) -> None:
        take(whole, rows, start, stop).copy_(part)

    def put_outer(whole: Any, part: Any, rows: int, start: int, stop: int) -> None:
        if start == stop:
            return
        into = rows_apart(whole, batch, rows).narrow(batch.dim + 1, start, stop - start)
        into.copy_(rows_apart(part, batch, stop - start))

    return put if batch.outer.constant == 1 else put_outer


def _batch(value: Value) -> Batch:
    assert value.batch is not None, "only values with a batch have rows"
    return value.batch


def fill(lock: threading.Lock, cells: list[Any], at: int, make: Callable[[], Any]) -> None:
    """Fill a cell once, whoever comes first."""
    with lock:
        if cells[at] is None:
            cells[at] = make()


def room_for(room: Any, *, poison: bool = False) -> Callable[..., Any]:
    """The function that makes a room of a body (see `capture.outs`): (*shape) -> empty tensor.

    poison: fill it with NaN, so that a read that comes too early cannot find the right numbers of
    an earlier call.
    """
    order, options = room.order, {"dtype": room.dtype, "device": room.device}

    def make(*shape: int) -> Any:
        return _poisoned(torch.empty_permuted(shape, order, **options), poison)

    return make


def whole_like(
    value: Value, lies: Order | None = None, *, poison: bool = False
) -> Callable[[Any, int, int], Any]:
    """The function that makes room for all rows: (a part, its rows, all rows) -> empty tensor.

    Dims lie in memory in the part's order, so a transposed part gives a transposed whole. Of a part
    with a single entry there, where its rows lie cannot be seen: then it is as the whole `lies`.
    How large the whole is, a part without rows does not show: the graph says it.
    """
    dim = _batch(value).dim
    size = value.shape[dim]

    def make(part: Any, part_rows: int, rows: int) -> Any:
        shape = list(part.shape)
        order = sorted(range(part.dim()), key=lambda d: (-part.stride(d), d))
        order = list(lies) if lies is not None and shape[dim] < 2 else order
        known = shape[dim] // part_rows * rows if part_rows else None
        shape[dim] = size.evaluate(dict.fromkeys(size.symbols, rows)) if known is None else known
        room = torch.empty_permuted(shape, order, dtype=part.dtype, device=part.device)
        return _poisoned(room, poison)

    return make


def _poisoned(room: Any, poison: bool) -> Any:
    return room.fill_(float("nan")) if poison and room.is_floating_point() else room


def into_of(body: Any, op: str) -> Any:
    """The form of a body that writes into rooms. Raises `PlanError` if it has none."""
    into = getattr(body, "into", None)
    if into is None:
        raise PlanError(f"memory: op {op!r} is to write into places, but its body cannot.")
    return into


def landed(marks: list[Mark], index: int, flight: Any) -> None:
    """Note when the flight of an issue step ends: a mark with the step's number inverted.

    What c10d has no work or no future for ends, as far as the trace knows, where it is completed.
    """

    def note(_: object) -> None:
        now_s = time.perf_counter()
        marks.append((~index, now_s, now_s))

    work = getattr(flight, "work", None)
    if work is not None:
        with contextlib.suppress(RuntimeError):  # a backend without futures
            work.get_future().add_done_callback(note)


MAX_JITTER_S = 0.002


def compile_program(
    plan: Plan, bodies: Mapping[str, Body], *, traced: bool = False, jitter: Delay = False
) -> Program:
    """Turn a plan into Python functions. The plan should have been verified.

    bodies: for each op its function, reads in, makes out. It may have `sizes`, which are passed
    behind the reads, and for a two-phase op `issue` and `complete`.
    traced: every step leaves (step, start, end). jitter: every step is delayed at random, or by
    what a function says, in seconds, and room for whole values starts as NaN.
    """
    return Writer(plan, bodies, traced, jitter).program()


class Writer:
    """Writes the source of one program. Lines are templates: `{v3_0_1}` is a variable.

    Here each lane is a function for a thread of its own; a layout of another kind (`streams.py`)
    has other parameters, another number of functions, and other entries in each.
    """

    threads = True
    parameters = "x, z, c, e, w, s, b, d"

    def __init__(self, plan: Plan, bodies: Mapping[str, Body], traced: bool, jitter: Delay) -> None:
        self.plan, self.graph = plan, plan.graph
        self.index = {value.name: number for number, value in enumerate(self.graph.values)}
        self.placed = {place.value for place in plan.places}
        self.source = Source("program")
        self.space = self.source.names
        self.made: dict[str, list[Range | None]] = {}
        self.split: dict[str, set[Range]] = {}
        self.aliases: dict[str, list[str]] = {}
        self.users: dict[str, set[int]] = {}
        self.sizes: dict[tuple[Size, int, int], int] = {}
        self.lane = 0
        self._look()
        self.bodies, self.traced, self.jitter = bodies, traced, jitter
        self.op_index = {op.name: number for number, op in enumerate(self.graph.ops)}
        self.space |= {"j": time.sleep, "now": time.perf_counter, "r": random.random}
        self.space |= {"named": RecordFunctionFast, "landed": landed}
        self.space["first"] = partial(fill, threading.Lock())
        self.lanes = tuple(dict.fromkeys(step.lane for step in plan.steps)) or ("compute",)
        self.num_functions = len(self.lanes)
        self.events: dict[str, int] = {}
        self.runs: dict[object, Any] = {}  # of kernels
        self.labels = [step.label for step in plan.steps]
        for step in plan.steps:
            if step.target is not None:
                self.events.setdefault(step.target, len(self.events))
        self.first = {label: at for at, label in reversed(list(enumerate(self.labels)))}
        states = [name for name in self.graph.inputs if name.startswith(STATE)]
        self.switch = f"v{self.index[states[0]]}" if states else ""
        self.ranges: dict[Range | None, int] = {None: 0}
        self.in_force: Range | None = None

    def program(self) -> Program:
        """All lanes' functions. The first ends the call: it joins the others and returns."""
        lines, step_at = self._functions()
        shared = [name for name, lanes in self.users.items() if len(lanes) > 1]
        cells = {name: number for number, name in enumerate(shared)}
        names = {name: f"c[{cells[name]}]" if name in cells else name for name in self.users}
        names |= {f"at_{name}": str(cells.get(name)) for name in self.users}
        source, written = self.source, [line.format_map(names) for line in lines]
        functions = source.build(written, *(f"lane{n}" for n in range(self.num_functions)))
        return Program(
            self.plan, self.lanes, functions, source.text, source.filename, step_at,
            len(cells), len(self.events), tuple(self.sizes), tuple(filter(None, self.ranges)),
        )  # fmt: skip

    def _functions(self) -> tuple[list[str], dict[int, int]]:
        """The lines of all functions, and for each line of a step (from 1) which step it is."""
        lines: list[str] = []
        step_at: dict[int, int] = {}
        for number in range(self.num_functions):
            self.lane = number
            lines.append(f"def lane{number}({self.parameters}):")
            for index, written in ((None, self._head()), *self._entries(), (None, self._tail())):
                for line in written:
                    lines.append(f"    {line}")
                    if index is not None:
                        step_at[len(lines)] = index
        return lines, step_at

    def _entries(self) -> Iterator[tuple[int | None, list[str]]]:
        for index, step in enumerate(self.plan.steps):
            if step.lane == self.lanes[self.lane]:
                yield index, self._lines(index, step)

    def _head(self) -> list[str]:
        names = [f"v{self.index[name]}" for name in self.graph.inputs]
        bounds = [f"b{number}" for number in range(self.plan.num_parts + 1)]
        head = [f"({', '.join(names)},) = x"] if names else []
        return [*head, f"({', '.join(bounds)},) = b"]

    def _tail(self) -> list[str]:
        """The first function ends the call."""
        if self.lane > 0:
            return []
        return [*(["d()"] if len(self.lanes) > 1 else []), f"return {self._outputs()}"]

    def _lines(self, index: int, step: Step) -> list[str]:
        body = self._body(step)
        if len(self.lanes) > 1:
            body = [f"s[{self.lane}] = {index}", *body]
        body = self._delay(step) + body
        if self.traced:
            body = ["q = now()", *body, f"s[-1].append(({index}, q, now()))"]
            body = self._named(index, step, body)
        label = self.labels[index]
        if label in self.events and self.first[label] == index:
            body.append(f"e[{self.events[label]}].set()")
        return body

    def _named(self, index: int, step: Step, body: list[str]) -> list[str]:
        """A traced step as a profiler of torch sees it too; a flight notes when it has landed."""
        if step.kind not in SPANS:
            return body
        if step.kind == "issue":
            body = [*body, f"landed(s[-1], {index}, {self._flight(step)})"]
        ops = step.names if step.kind in ("run", "issue", "complete") else ()
        uses = self.graph.op[ops[0]].uses if ops else "memory"
        name = self.source.constant(f"weft {step.kind} {uses} {step.lane} {self.labels[index]}")
        return [f"n = named({name})", "n.__enter__()", *body, "n.__exit__(None, None, None)"]

    def _body(self, step: Step) -> list[str]:
        if step.target is not None:
            return [f"w(e[{self.events[step.target]}])"]
        if step.kind == "split":
            return self._split(step)
        if step.kind == "copy":
            return self._copy(step)
        if step.kind == "free":
            return self._free(step)
        if step.kind == "merge":
            return []  # the value is whole already: its parts are slices of one place
        return [*self._force(step), *self._op(step)]

    def _force(self, step: Step) -> list[str]:
        """Put the side state of a step's parts in force, where another is."""
        if not self.switch or step.kind == "complete" or step.parts == self.in_force:
            return []
        self.in_force = step.parts
        return [f"{self.switch}({self.ranges.setdefault(step.parts, len(self.ranges))})"]

    def _delay(self, step: Step) -> list[str]:
        if callable(self.jitter):
            return [f"j({float(self.jitter(step))!r})"]
        return [f"j(r() * {MAX_JITTER_S})"] if self.jitter else []

    # Ops: what they read and make, and the function that does it.

    def _op(self, step: Step) -> list[str]:
        which, before = self._function(step)
        flight = self._flight(step)
        if step.kind == "complete":  # what has landed holds nothing any more
            landed = self._assign(step, f"g{which}({', '.join([*before, flight])})")
            return [*landed, *self._drop(flight)]
        reads = before + [self._read(name, step.parts) for name in self._given(step)]
        if step.parts is not None and self._written(step):
            return self._into(step, reads)
        sizes = getattr(self.bodies[step.names[0]], "sizes", ()) if step.by is None else ()
        parts = step.parts or (0, self.plan.num_parts)
        arguments = reads + [self._numbers([size], parts) for size in sizes]
        if step.kind == "issue":
            return [f"{flight} = i{which}({', '.join(arguments)})"]
        return self._assign(step, f"f{which}({', '.join(arguments)})", arguments)

    def _flight(self, step: Step) -> str:
        start, stop = step.parts or (0, self.plan.num_parts)
        return self._use(f"h{self.op_index[step.names[0]]}_{start}_{stop}")

    def _written(self, step: Step) -> set[str]:
        """What a step makes straight into its place."""
        return self.placed.difference(self.plan.copied).intersection(self._makes(step))

    def _into(self, step: Step, reads: list[str]) -> list[str]:
        """A run that writes its part of whole values into their rooms."""
        op, written, parts = step.names[0], self._written(step), step.parts or (0, 0)
        number, makes = self.op_index[op], self._makes(step)
        into = into_of(self.bodies[op], op)
        self.space[f"o{number}"], slices = into.function, []
        for at, room in enumerate(into.rooms):
            name, views = f"m{number}_{at}", written.intersection(makes[n] for n in room.views)
            self.space[f"n{name}"] = room_for(room, poison=bool(self.jitter))
            if views:
                self.space[f"t{name}"] = taker(Value(name, room.shape, batch=room.batch))
                rows = f"b{self.plan.num_parts}, b{parts[0]}, b{parts[1]}"
                slices.append(f"t{name}({self._use(f'm{self.index[min(views)]}')}, {rows})")
            else:
                slices.append(f"n{name}({self._numbers(room.shape, parts)})")
        targets = ["_" if n in written else self._use(self._variable(n, parts)) for n in makes]
        given = [*reads, self._numbers(into.sizes, parts), *slices]
        call = f"({', '.join(targets)},) = o{number}({', '.join(filter(None, given))})"
        return [*self._rooms(step), call, "_ = None"]

    def _rooms(self, step: Step) -> list[str]:
        """The rooms that a step writes into, and the whole values in them, made if it is first."""
        op, written, lines = step.names[0], self._written(step), []
        into, makes = into_of(self.bodies[op], op), self._makes(step)
        steps = self._steps_of(step)
        all_parts = (0, self.plan.num_parts)
        for at, room in enumerate(into.rooms):
            views = {makes[n]: view for n, view in room.views.items() if makes[n] in written}
            name = f"m{self.index[min(views)]}" if views else ""
            make = f"nm{self.op_index[op]}_{at}({self._numbers(room.shape, all_parts)})"
            lines += self._once(name, make, step, steps) if views else []
            for value in sorted(views):
                self.space[f"y{self.index[value]}"] = views[value] or _same
                arguments = f"{self._use(name)}, {self._numbers(into.sizes, all_parts)}"
                whole = f"y{self.index[value]}({arguments})"
                lines += self._once(f"p{self.index[value]}", whole, step, steps)
        return lines

    def _steps_of(self, step: Step) -> list[Step]:
        """All steps of this kind with the same names, whatever their parts."""
        return [s for s in self.plan.steps if s.kind == step.kind and s.names == step.names]

    def _once(self, variable: str, make: str, step: Step, steps: list[Step]) -> list[str]:
        """Fill a variable by the first of several steps; on several lanes by any of them."""
        held = self._use(variable)
        if self.threads and len({other.lane for other in steps}) > 1:
            return [f"first(c, {{at_{variable}}}, lambda: {make})"]
        return [f"{held} = {make}"] if steps[0] is step else []

    def _assign(self, step: Step, call: str, arguments: Sequence[str] | None = None) -> list[str]:
        """The makes of a step from a call, or, with its arguments, from the calls in its body."""
        names = self._makes(step)
        if not names:
            return [call]
        placed = self._written(step) if step.parts is None else ()  # made whole: its own place
        targets = [
            self._use(
                f"p{self.index[name]}"
                if name in placed
                else self._variable(name, self._piece(name, step.parts))
            )
            for name in names
        ]
        adds = self.graph.op[step.names[0]].rows == "additive" and step.parts is not None
        if adds and step.parts is not None and step.parts[0] > 0:
            terms = [self._add(target, f"a[{at}]") for at, target in enumerate(targets)]
            return [f"a = {call}", *(line for lines in terms for line in lines)]
        write = getattr(self.bodies[step.names[0]], "write_calls", None)
        lines: list[str] | None = None
        if write is not None and step.by is None and arguments is not None:
            lines = write(arguments, targets, self.source.constant)
        return lines if lines is not None else [f"({', '.join(targets)},) = {call}"]

    def _add(self, target: str, term: str) -> list[str]:
        return [f"{target} = {target} + {term}"]

    def _function(self, step: Step) -> tuple[str, list[str]]:
        """Put the step's function into the namespace: its number, and what it takes first."""
        if step.by is not None:
            return self._kernel(step, step.by)
        which, body = f"{self.op_index[step.names[0]]}", self.bodies.get(step.names[0])
        if body is None:
            text = f"kernel: no function is known for op {step.names[0]!r}."
            raise PlanError(text, rule="kernel")
        self.space[f"f{which}"] = function = getattr(body, "function", body)
        self.space[f"i{which}"] = getattr(body, "issue", None) or function
        self.space[f"g{which}"] = getattr(body, "complete", None) or _same
        return which, []

    def _kernel(self, step: Step, by: str) -> tuple[str, list[str]]:
        """The run of a kernel, which its issue and its complete share; it takes sizes first."""
        kernel, key = self.plan.kernels.get(by), (by, step.names, step.parts)
        if kernel is None:
            cure = f"Give it by its name: kernels={{{by!r}: ...}}."
            raise PlanError(f"kernel: no function is known for 'by {by}'. {cure}", rule="kernel")
        if key not in self.runs:
            is_plain = isinstance(kernel, Kernel)  # else it sees to all of that itself
            self.runs[key] = KernelRun(self.plan, step, kernel) if is_plain else kernel
        run, which = self.runs[key], f"_{[*self.runs].index(key)}"
        self.space |= {f"f{which}": run.run, f"i{which}": run.issue, f"g{which}": run.complete}
        sizes = self._numbers(run.sizes, step.parts or (0, self.plan.num_parts))
        return which, [f"({sizes}{',' if sizes else ''})"]

    def _given(self, step: Step) -> list[str]:
        """The values that a step's function takes."""
        return given_to(self.graph, step.names, self.plan.declaration.get(step.by or ""))

    def _makes(self, step: Step) -> list[str]:
        """What a step's function gives."""
        by = step.by is not None
        return makes_of(self.graph, step.names) if by else list(self.graph.op[step.names[0]].makes)

    def _split(self, step: Step) -> list[str]:
        name = step.names[0]
        whole, last = self._variable(name, None), f"b{self.plan.num_parts}"
        lines = []
        for start, stop in sorted(self.split.get(name, ())):
            target = self._use(self._variable(name, (start, stop)))
            lines.append(f"{target} = {self._taker(name)}({whole}, {last}, b{start}, b{stop})")
        return lines

    def _copy(self, step: Step) -> list[str]:
        if step.on is not None:
            raise PlanError(f"device: this runtime has one device; {step.label}.", rule="device")
        name, number = step.names[0], self.index[step.names[0]]
        value = self.graph.value[name]
        room = whole_like(value, self._order(name), poison=bool(self.jitter))
        self.space |= {f"u{number}": putter(value), f"n{number}": room}
        piece = next(p for p in self.made[name] if holds(p, step.parts))
        part = self._take(name, self._variable(name, piece), piece, step.parts)
        start, stop = step.parts or (0, self.plan.num_parts)
        last = f"b{self.plan.num_parts}"
        place = self._use(f"p{number}")
        make = f"n{number}({part}, b{stop} - b{start}, {last})"
        lines = self._once(f"p{number}", make, step, self._steps_of(step))
        put = f"u{number}({place}, {part}, {last}, b{start}, b{stop})"
        dead = [self._use(self._variable(name, piece))] if piece == step.parts else []
        return [*lines, put, *self._drop(*dead)]

    def _order(self, name: str) -> Order | None:
        """How a value lies in memory when it is made whole, if its maker's body knows."""
        maker = self.graph.maker[name]
        orders = getattr(self.bodies.get(maker.name), "orders", ())
        return orders[maker.makes.index(name)] if orders else None

    def _free(self, step: Step) -> list[str]:
        gone = []
        for name in self.aliases[step.names[0]]:
            if name in self.placed and step.parts is None:  # else other parts still live there
                gone.append(f"p{self.index[name]}")
                gone += [f"m{self.index[name]}"] if name not in self.plan.copied else []
            for piece in self.made.get(name, ()):
                if step.parts is None or piece == step.parts:
                    gone.append(self._variable(name, piece))
        return self._drop(*map(self._use, gone))

    def _drop(self, *variables: str) -> list[str]:
        """Let go of what some variables hold together."""
        return [f"{variable} = None" for variable in variables]

    def _outputs(self) -> str:
        outputs = [self._read(name, None) for name in self.graph.outputs]
        return f"({', '.join(outputs)}{',' if outputs else ''})"

    # Variables: which of them holds a piece of a value, and the rows to take of it.

    def _look(self) -> None:
        """Note which pieces are made of each value, and which ranges of each input are read."""
        for name, root in self.graph.root.items():
            self.aliases.setdefault(root, []).append(name)
        for step in self.plan.steps:
            if step.kind not in ("run", "issue"):
                continue
            for op in step.names:
                for name in self.graph.op[op].makes:
                    pieces = self.made.setdefault(name, [])
                    piece = self._piece(name, step.parts)
                    if piece not in pieces:
                        pieces.append(piece)
            if step.parts is not None:
                for name in self._given(step):
                    if name in self.graph.inputs:
                        self.split.setdefault(name, set()).add(step.parts)

    def _numbers(self, sizes: Sequence[Size], parts: Range) -> str:
        keys = [(size, *parts) for size in sizes]
        return ", ".join(f"z[{self.sizes.setdefault(key, len(self.sizes))}]" for key in keys)

    def _piece(self, name: str, parts: Range | None) -> Range | None:
        return None if self.graph.value[name].batch is None else parts

    def _variable(self, name: str, parts: Range | None) -> str:
        return f"v{self.index[name]}" + (f"_{parts[0]}_{parts[1]}" if parts else "")

    def _use(self, variable: str) -> str:
        self.users.setdefault(variable, set()).add(self.lane)
        return f"{{{variable}}}"

    def _read(self, name: str, parts: Range | None) -> str:
        parts = self._piece(name, parts)
        if name in self.graph.inputs:
            # Every lane gets the inputs whole; their parts come from the split.
            whole = self._variable(name, None)
            return whole if parts is None else self._use(self._variable(name, parts))
        if name in self.placed:
            return self._take(name, f"p{self.index[name]}", None, parts)
        for piece in self.made[name]:
            if holds(piece, parts):
                return self._take(name, self._variable(name, piece), piece, parts)
        raise PlanError(f"memory: {name!r} is in no single piece for {parts}.", rule="memory")

    def _take(self, name: str, variable: str, piece: Range | None, parts: Range | None) -> str:
        held = self._use(variable)
        if piece == parts:
            return held
        start, stop = piece or (0, self.plan.num_parts)
        first, last = parts or (0, self.plan.num_parts)
        rows = f"b{stop} - b{start}, b{first} - b{start}, b{last} - b{start}"
        return f"{self._taker(name)}({held}, {rows})"

    def _taker(self, name: str) -> str:
        self.space[f"t{self.index[name]}"] = taker(self.graph.value[name])
        return f"t{self.index[name]}"


def _same(result: Any, *others: Any) -> Any:
    return result

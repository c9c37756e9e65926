"""`Options`: how a model is compiled, as one frozen value that every door takes.

    weft.compile(model, "overlap", fallback="error")
    torch.compile(model, backend="weft", options={"strategy": "overlap"})      one Options
    weft.check(model, x, fallback="sequential")                                each
    '{"weft": {"watchdog_s": 10}}' of a host

An option is a field here, with a line in the docstring and a check in `_check`, and nowhere else:
the doors take their parameters from the fields.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field, fields, replace
from functools import cached_property
from importlib import import_module
from pathlib import Path
from types import MappingProxyType
from typing import Any, Self

from torchweft.capture.marks import INNERS, MarkRule, touches_state
from torchweft.capture.splitters import Splitter, check_splitters
from torchweft.errors import StrategyError, unknown
from torchweft.plan.graph import NAME
from torchweft.plan.improve.predict import auto
from torchweft.plan.kernels.kernel import as_kernel
from torchweft.plan.machine import Costs, Machine, cpu
from torchweft.plan.plan import Plan
from torchweft.plan.rewrite import Rewrite
from torchweft.plan.write.strategy import Strategy, Way, as_strategy
from torchweft.private.core import has_mkldnn
from torchweft.ranks.ranks import WATCHDOG_S
from torchweft.ranks.speakers import number_of

MAX_SIZES = 64
CHOICES: Mapping[str, tuple[str, tuple[str | None, ...]]] = MappingProxyType(
    {
        "inner": ("inner compiler", INNERS),
        "fallback": ("fallback", ("sequential", "error")),
        "level": ("level", ("torch", "aten", None)),
        "capture": ("way to capture", ("graph", "boundary")),
    }
)
IN_BOUNDARY_MODE = MappingProxyType({"inner": "eager", "level": None, "graphs": False})


@dataclass(frozen=True)
class Options:
    """How a model is compiled. Raises `StrategyError` for a value that cannot be.

    strategy: what writes the plans: a name, a strategy with options (`weft.overlap(parts=4)`), or
        any function of a scheduler; or a plan, several, or the path of a plan file, which is
        verified and run. "auto" finds out by itself, and is never slower than the model.
    rules: marks from outside the model.
    inner: what runs the calls inside an op, "eager", "onednn" or "inductor".
    fallback: what happens to a call that cannot run as the strategy says, "sequential" (counted,
        with its reason) or "error".
    strict: whether ops without a row rule run whole; with False they are split if the first
        call's rows show no difference.
    batch: the dim of the inputs that a split cuts (0), or the name of its symbol.
    machine: lanes and rates (`weft.cpu()`).
    num_threads: intra-op threads of lanes beside the caller's; by default as many as the caller's.
    jitter: whether every step is delayed at random, to test that nothing depends on luck.
    shadow: compare every N-th call with eager; 0 compares none, and 0.02 as many as cost 2 % of the
        time (not for models that talk with other ranks, whose clocks differ).
    level: where graphs are captured, "torch" or "aten"; by default "aten" for DTensors and where
        gradients are wanted, else "torch".
    watchdog_s: how long a rank waits for the others.
    graphs: on an accelerator, capture each plan in a device graph and replay it; a list of sizes of
        the batch has calls filled up to the next of them, so that few graphs serve all.
    blocks: whether repeated modules, such as the layers of a transformer, are captured once. For
        `weft.compile`: a backend of `torch.compile` gets a graph that has been traced already.
    zero_copy: whether parts write their rows of whole values in place; else copies join them.
    capture: "graph", through Dynamo, or "boundary": the eager model itself runs once a part, and
        control passes at marks and collectives.
    splitters: what cuts the side state that calls touch beside their arguments; see `Splitter`.
    kernels: by name, the functions or declared kernels that a strategy, or a plan's text, names.
    rewrites: changes of the graph, such as `weft.chunk("down_proj", 4)`, before plans are written.
    remember: whether choices of "auto" are kept on disk for the next process.
    costs: what ops take, for strategies that ask: the path of a file of `torchweft profile`, or the
        `Costs` of one, equal on all ranks; by default what calls show, agreed between ranks.
    loads: whether weights that `weft.offload` put on disk are brought in by ops of the graph, each
        block by one that uses io; else they are read as they are touched. By default under the
        strategy `prefetch`, which keeps such ops from filling the memory.
    """

    strategy: Way = "auto"
    _: KW_ONLY
    rules: Sequence[MarkRule] = ()
    inner: str = "eager"
    fallback: str = "sequential"
    strict: bool = True
    batch: int | str | None = None
    machine: Machine | None = None
    num_threads: int | None = None
    jitter: bool = False
    shadow: float = 0
    level: str | None = None
    watchdog_s: float = WATCHDOG_S
    graphs: bool | Sequence[int] = False
    blocks: bool = True
    zero_copy: bool = True
    capture: str = "graph"
    splitters: Sequence[Splitter] = ()
    kernels: Mapping[str, Any] = field(default_factory=dict, hash=False)
    rewrites: Sequence[Rewrite] = ()
    remember: bool = True
    loads: bool | None = None
    costs: str | Path | Costs | None = None

    def __post_init__(self) -> None:
        _check(self)
        kernels = {**_kernels_of(self.strategy), **self.kernels}
        frozen = {
            "strategy": as_strategy(self.strategy),
            "rules": tuple(self.rules),
            "splitters": check_splitters(self.splitters),
            "graphs": self.graph_sizes or bool(self.graphs),
            "rewrites": tuple(self.rewrites),
            "costs": _costs_of(self.costs),
            "kernels": {name: as_kernel(own).called(name) for name, own in kernels.items()},
        }
        for name, value in frozen.items():
            object.__setattr__(self, name, value)

    @classmethod
    def of(cls, *strategy: Any, **given: Any) -> Self:
        """The options of these names. Raises `StrategyError` for one that does not exist."""
        check_names(given, cls.names())
        return cls(*strategy, **given)

    def but(self, **given: Any) -> Self:
        """These options, but for some."""
        check_names(given, self.names())
        return replace(self, **given)

    @classmethod
    def names(cls) -> set[str]:
        return {field.name for field in fields(cls)}

    # What follows from the options.

    @property
    def resolved_strategy(self) -> Strategy:
        """The strategy itself, whose name may have been given."""
        return as_strategy(self.strategy)

    @property
    def has_loads(self) -> bool:
        """Whether ops of the graph bring in the weights that are on disk."""
        return self.resolved_strategy.name == "prefetch" if self.loads is None else self.loads

    @cached_property
    def resolved_machine(self) -> Machine:
        """The machine that plans are written for."""
        known = self.costs.machine if isinstance(self.costs, Costs) else None
        return self.machine or known or cpu()

    @cached_property
    def resolved_costs(self) -> Costs:
        """What ops take before calls have shown it."""
        machine = self.resolved_machine
        known = self.costs if isinstance(self.costs, Costs) else Costs(machine)
        return replace(known, machine=machine)

    @cached_property
    def costs_number(self) -> int:
        """What ranks with equal costs have in common; 0 without costs of one's own."""
        own = self.costs
        if not isinstance(own, Costs):
            return 0
        return number_of(repr((own.machine, own.table.entries, own.call_s, own.factors.entries)))

    @property
    def costs_name(self) -> str:
        """The costs as errors of ranks that differ name them."""
        number = self.costs_number
        return f", costs {number:016x} ({self.resolved_costs.about})" if number else ""

    @property
    def is_auto(self) -> bool:
        """Whether the way that calls run is found out."""
        return self.resolved_strategy == auto

    @cached_property
    def all_rules(self) -> tuple[MarkRule, ...]:
        """The rules, with those that follow from the splitters."""
        return (*self.rules, *(touches_state(s.name, s.calls, s.by) for s in self.splitters))

    @property
    def batch_dim(self) -> int:
        """The dim of the inputs that a split cuts."""
        return self.batch if isinstance(self.batch, int) else 0

    @property
    def graph_sizes(self) -> tuple[int, ...]:
        """The sizes of the batch that device graphs are captured for, ascending, if some are."""
        return () if isinstance(self.graphs, bool) else tuple(sorted(set(self.graphs)))


def _kernels_of(strategy: object) -> dict[str, Any]:
    """The kernels that plans, given as a strategy, bring with them."""
    plans = strategy if isinstance(strategy, list | tuple) else [strategy]
    return {n: k for each in plans if isinstance(each, Plan) for n, k in each.kernels.items()}


def _costs_of(given: object) -> Costs | None:
    """The costs of a file. Raises `MachineError` for one that is none."""
    if not isinstance(given, str | Path):
        return given if isinstance(given, Costs) else None
    files = import_module("torchweft_tools.formats.weft_files")
    costs: Costs = files.load_measured(given)
    return replace(costs, about=f"of {Path(given).name}")


def is_disabled() -> bool:
    """Whether the environment says that every model stays as it is."""
    return os.environ.get("WEFT_DISABLE") == "1"


def check_names(given: Iterable[str], known: Iterable[str]) -> None:
    """Raise `StrategyError` for an option that does not exist; it lists those that do."""
    for name in given:
        if name not in known:
            raise _wrong(f"options: {unknown('option', name, known)}")


def _wrong(text: str) -> StrategyError:
    return StrategyError(text, rule="option")


def _is_flag(value: object) -> bool:
    return isinstance(value, bool)


def _is_count(value: object, least: int = 1) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def _is_batch(value: object) -> bool:
    return value is None or (isinstance(value, int | str) and not _is_flag(value))


def _are_rules(value: object) -> bool:
    return isinstance(value, Iterable) and all(isinstance(rule, MarkRule) for rule in value)


def _are_rewrites(value: object) -> bool:
    return isinstance(value, Iterable) and all(isinstance(each, Rewrite) for each in value)


def _are_kernels(value: object) -> bool:
    if not isinstance(value, Mapping):
        return False
    return all(NAME.fullmatch(str(name)) and callable(given) for name, given in value.items())


def _are_graphs(value: object) -> bool:
    sizes = value if isinstance(value, Sequence) and not isinstance(value, str) else ()
    return _is_flag(value) or (0 < len(sizes) <= MAX_SIZES and all(map(_is_count, sizes)))


FLAGS = ("strict", "jitter", "blocks", "zero_copy", "remember")
CHECKS: Mapping[str, tuple[Callable[[Any], bool], str]] = MappingProxyType(
    {
        **dict.fromkeys(FLAGS, (_is_flag, "True or False")),
        "rules": (_are_rules, "marks, such as [weft.mark_module(Attention, 'attention')]"),
        "rewrites": (_are_rewrites, "rewrites, such as [weft.chunk('down_proj', 4)]"),
        "kernels": (_are_kernels, "functions by name, such as {'fused': fused}"),
        "batch": (_is_batch, "a dim of the inputs, or the name of a symbol"),
        "machine": (lambda m: m is None or isinstance(m, Machine), "a Machine, as weft.cpu() is"),
        "num_threads": (lambda n: n is None or _is_count(n), "a positive number of threads"),
        "shadow": (
            lambda n: _is_count(n, least=0) or (isinstance(n, float) and 0 < n < 1),
            "a number of calls, 0 for none, or a share of the time such as 0.02",
        ),
        "costs": (
            lambda c: c is None or isinstance(c, str | Path | Costs),
            "the path of a file of `torchweft profile`, or Costs",
        ),
        "loads": (lambda v: v is None or _is_flag(v), "True, False or None"),
        "watchdog_s": (
            lambda s: isinstance(s, int | float) and s > 0, "a positive number of seconds"
        ),
        "graphs": (
            _are_graphs,
            f"True, False or 1 to {MAX_SIZES} sizes of the batch, such as [1, 2, 4, 8, 16]",
        ),
    }
)  # fmt: skip
"""What an option must be; `CHOICES` has those that are one of a few words."""


def _check(options: Options) -> None:
    """Raise `StrategyError` for a value that an option cannot have."""
    for name, (what, choices) in CHOICES.items():
        if (value := getattr(options, name)) not in choices:
            raise _wrong(f"{name}: {unknown(what, value, filter(None, choices))}")
    if options.inner == "onednn" and not has_mkldnn:
        raise _wrong("inner: this build of torch has no oneDNN. Take inner='eager'.")
    for name, (is_good, wanted) in CHECKS.items():
        if not is_good(value := getattr(options, name)):
            raise _wrong(f"{name} must be {wanted}; got {value!r:.80}")
    if options.capture == "boundary":
        for name, only in IN_BOUNDARY_MODE.items():
            if getattr(options, name) != only:
                raise _wrong(f"{name}: boundary mode has only {name}={only!r}.")
        if options.rewrites:
            raise _wrong(
                "rewrites: boundary mode has no graph to rewrite: the model itself runs. "
                "Take capture='graph'."
            )
        if isinstance(options.batch, str):
            raise _wrong("batch: boundary mode has no symbols; give a dim.")

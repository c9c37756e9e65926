"""A `Strategy`: a named function that writes a plan, with its options.

    @strategy
    def overlap(s, *, parts=2): ...          registered as "overlap"

    overlap(parts=4)                         the same strategy with other options; nothing runs yet
    get_strategy("overlap")                  by name; unknown names list the choices

The function gets a `Scheduler`, the recorder; keyword-only arguments are its options.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from torchweft.errors import StrategyError, unknown
from torchweft.plan.graph import NAME


@dataclass(frozen=True)
class Strategy:
    """A function that writes plans, and the options it is called with."""

    name: str
    function: Callable[..., None]
    options: Mapping[str, Any] = field(default_factory=dict, hash=False)

    def __call__(self, **options: Any) -> Strategy:
        """The same strategy with these options. Raises `StrategyError` for one it does not have."""
        known = option_defaults(self.function)
        for name in options:
            if name not in known:
                raise StrategyError(
                    f"strategy {self.name!r}: {unknown('option', name, known)}", rule="option"
                )
        return replace(self, options={**self.options, **options})

    def __str__(self) -> str:
        chosen = {**option_defaults(self.function), **self.options}
        return f"{self.name}({', '.join(f'{name}={value!r}' for name, value in chosen.items())})"


def option_defaults(function: Callable[..., object]) -> dict[str, Any]:
    """The options of a strategy function and their defaults."""
    parameters = inspect.signature(function).parameters.values()
    return {item.name: item.default for item in parameters if item.kind is item.KEYWORD_ONLY}


_REGISTRY: dict[str, Strategy] = {}


def strategy(function: Callable[..., None]) -> Strategy:
    """Register a function as a strategy under its own name (a decorator)."""
    made = as_strategy(function)
    if made.name in _REGISTRY and _REGISTRY[made.name].function.__module__ != function.__module__:
        raise StrategyError(f"strategy: there is already one named {made.name!r}.", rule="name")
    _REGISTRY[made.name] = made
    return made


def as_strategy(what: str | Strategy | Callable[..., None]) -> Strategy:
    """A strategy from its name, from itself, or from any function of a scheduler."""
    if isinstance(what, Strategy):
        return what
    if isinstance(what, str):
        return get_strategy(what)
    if not callable(what):
        raise StrategyError(f"strategy: {what!r} is neither a name nor a function.", rule="name")
    name = getattr(what, "__name__", type(what).__name__)
    if not NAME.fullmatch(name):
        name = "unnamed"
    parameters = list(inspect.signature(what).parameters.values())
    if not parameters or parameters[0].kind is parameters[0].KEYWORD_ONLY:
        raise StrategyError(
            f"strategy {name!r}: its first argument is the scheduler.", rule="signature"
        )
    if any(p.kind is p.KEYWORD_ONLY and p.default is p.empty for p in parameters):
        raise StrategyError(f"strategy {name!r}: every option needs a default.", rule="signature")
    return Strategy(name, what)


def get_strategy(name: str) -> Strategy:
    """The registered strategy of this name. Raises `StrategyError` listing the choices."""
    if name not in _REGISTRY:
        raise StrategyError(f"strategy: {unknown('strategy', name, _REGISTRY)}", rule="name")
    return _REGISTRY[name]


def strategy_names() -> list[str]:
    """The names of all registered strategies."""
    return sorted(_REGISTRY)

"""The fast way to record: a function of fixed arity that knows a module's cells.

Recording is Python at every op, so it decides how small an op may be. For calls that were seen
before, with lazy values as positional arguments and one or two results, the code below does no
more than look up the cell and write down numbers; everything else goes the slow way.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from torchweft.dynamic.lazy import Lazy

MAX_ARGS = 8
_TEMPLATE = """
def call({params}, *more, **options):
    try:
        used, bases, append, extend, first, second = table[{specs}, module.training]
    except (KeyError, AttributeError):
        return slow(*[each for each in ({names},) if each is not missing], *more, **options)
    home = state.recording
    if home is None or {homes} or more or options:
        return slow({names}, *more, **options)
    if not bases:
        home.used.append(used)
    number = home.next
    append(number)
    extend(({ids},))
    one = new(Lazy)
    one.id = number
    one.spec = first
    one.home = home
    if second is None:
        home.next = number + 1
        return one
    home.next = number + 2
    two = new(Lazy)
    two.id = number + 1
    two.spec = second
    two.home = home
    return one, two
"""


def fast_call(
    state: Any, module: nn.Module, slow: Callable[..., Any], table: dict[Any, Any], num_args: int
) -> Callable[..., Any]:
    """A call of a module with `num_args` arguments; `table` is filled by `fast_row`."""
    names = [f"a{number}" for number in range(num_args)]
    source = _TEMPLATE.format(
        params=", ".join(f"{name}=missing" for name in names),
        names=", ".join(names),
        specs=", ".join(f"{name}.spec" for name in names),
        ids=", ".join(f"{name}.id" for name in names),
        homes=" or ".join(f"{name}.home is not home" for name in names),
    )
    space: dict[str, Any] = {
        "table": table, "slow": slow, "state": state, "module": module, "Lazy": Lazy,
        "missing": object(), "new": object.__new__,
    }  # fmt: skip
    exec(compile(source, "<weft fast call>", "exec"), space)
    call: Callable[..., Any] = space["call"]
    return call


def fast_row(entry: Any) -> tuple[Any, ...] | None:
    """What the fast way needs of a cell's entry; None if it must go the slow way."""
    makes = entry.cell.makes
    flat = entry.unflatten is None or (entry.unflatten is tuple and len(makes) == 2)
    if not flat or len(makes) > 2 or not 0 < len(entry.cell.reads) <= MAX_ARGS:
        return None
    second = makes[1] if len(makes) == 2 else None
    return entry, entry.bases, entry.bases.append, entry.args.extend, makes[0], second

"""The fast way to record: a function of fixed arity that knows a module's cells.

Recording is Python at every op, so it decides how small an op may be. For calls that were seen
before, with lazy values as positional arguments and one or two results, the code below does no
more than look up the cell and write down numbers; everything else goes the slow way.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from torchweft.dynamic.book import CellEntry
from torchweft.dynamic.lazy import Lazy
from torchweft.source import Source

MAX_ARGS = 8
_TEMPLATE = """
def call(module, {params}, *more, **options):
    try:
        home, used, ops, extend, first, second = table[{kinds}, module.training]
    except (KeyError, AttributeError):
        home = None
    if home is None or more or options:
        return unseen(*[each for each in ({names},) if each is not missing], *more, **options)
    if not ops:
        home.used.append(used)
    number = home.next
    extend((number, {ids}))
    one = new(Lazy)
    one.id = number
    one.kind = first
    if second is None:
        home.next = number + 1
        return one
    home.next = number + 2
    two = new(Lazy)
    two.id = number + 1
    two.kind = second
    return one, two
"""


class Fast:
    """The fast way of one module: entries by the specs of their arguments, for good; and `table`
    by their kinds, for one recording."""

    def __init__(self, module: nn.Module, slow: Callable[..., Any], num_args: int) -> None:
        self.module, self.slow, self.num_args = module, slow, num_args
        self.entries: dict[Any, Any] = {}
        self.table: dict[Any, Any] = {}
        self.lookups: dict[Any, Any] = {}  # entries of lookups, by the dtype of words
        self.own = type(module)
        self.worn = _class(self)

    def wear(self, recording: bool) -> None:
        """Give the module its class: the fast one while there is a recording, else its own."""
        self.table.clear()
        object.__setattr__(self.module, "__class__", self.worn if recording else self.own)

    def learn(self, entry: CellEntry, words: torch.dtype | None = None) -> None:
        """Let calls of an entry go the fast way, if they can; words: lookups of this dtype, too."""
        if words is not None:
            self.lookups[words, self.module.training] = entry
        makes = entry.cell.makes
        flat = entry.unflatten is None or (entry.unflatten is tuple and len(makes) == 2)
        if flat and len(makes) <= 2 and len(entry.cell.reads) == self.num_args:
            self.entries[(*entry.cell.reads, self.module.training)] = entry

    def unseen(self, *args: Any, **options: Any) -> Any:
        """A call that is not in the table: put it there, or go the slow way."""
        if options or len(args) != self.num_args or any(type(arg) is not Lazy for arg in args):
            return self.slow(*args, **options)
        home, training = args[0].home, self.module.training
        if not home.open or any(arg.home is not home for arg in args):
            return self.slow(*args)
        entry = self.entries.get((*[arg.spec for arg in args], training))
        if entry is not None:
            kinds = [home.kind(spec) for spec in entry.cell.makes]
            row = home, entry, entry.ops, entry.ops.extend, *kinds, None
            self.table[(*[arg.kind for arg in args], training)] = row[:6]
        elif self.lookups and len(args[0].spec.shape) == 1 and len(args[0]):
            entry = self.lookups.get((args[0].spec.dtype, training))
            if entry is not None:
                return home.each(entry, args[0])
        return self.slow(*args)


def _class(fast: Fast) -> type[nn.Module]:
    """The class of a module while it is recorded. It changes its class, as modules under FSDP do,
    because the call of `nn.Module` alone would take half of the time."""
    names = [f"a{number}" for number in range(fast.num_args)]
    source = _TEMPLATE.format(
        params=", ".join(f"{name}=missing" for name in names),
        names=", ".join(names),
        kinds=", ".join(f"{name}.kind" for name in names),
        ids=", ".join(f"{name}.id" for name in names),
    )
    space: dict[str, Any] = {
        "table": fast.table, "unseen": fast.unseen, "Lazy": Lazy, "missing": object(),
        "new": object.__new__,
    }  # fmt: skip
    (call,) = Source("fast call", space).build(source.splitlines(), "call")
    own = fast.own
    return type(own.__name__, (own,), {"__call__": call, "__module__": own.__module__})

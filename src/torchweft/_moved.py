"""Old import paths, kept for one release: each gives its new module and a `DeprecationWarning`."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Sequence
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

MOVED = {
    "torchweft.plan": "blueprint context cost graph machine precedence sizes strategies trace "
    "verify runtimes.simulator",
    "torchweft.plan.write": "scheduler strategy write",
    "torchweft.plan.lower": "lower",
    "torchweft.placement.planners": "placement.annealing placement.cp_sat placement.exhaustive "
    "placement.lists placement.portfolio placement.stages placement.tree_dp",
    "torchweft.placement.learn": "placement.learned placement.learner placement.policy "
    "placement.served",
    "torchweft.ranks": "runtimes.ranks runtimes.speakers runtimes.talk capture.flights",
    "torchweft.capture": "marks splitters",
    "torchweft.run": "runtimes.cpu runtimes.kernels runtimes.program runtimes.writer",
    "torchweft.run.accelerator": "runtimes.accelerator runtimes.cuda runtimes.graphs "
    "runtimes.streams",
    "torchweft.run.eager": "boundary",
    "torchweft.run.workers": "dynamic.cell dynamic.channel dynamic.graphing dynamic.grouping "
    "dynamic.operators dynamic.pool dynamic.program dynamic.recorded dynamic.store dynamic.worker",
    "torchweft.run.driver": "dynamic.drift dynamic.executor dynamic.feed dynamic.learning "
    "dynamic.placing dynamic.prices dynamic.traffic",
    "torchweft.serve": "gate piece reporting session trials",
    "torchweft_tools.formats": "placement.read_any placement.read_dnn placement.read_stg "
    "placement.read_trees placement.work",
    "torchweft_tools.train": "placement.cases placement.environment placement.training",
    "torchweft_tools.cli": "doctor subject",
}
JOINED = {
    "torchweft.plan.context": "bucket cut",
    "torchweft.plan.graph": "graph_file",
    "torchweft.plan.precedence": "conflicts",
    "torchweft.plan.lower.lower": "memory",
    "torchweft.placement.planners.lists": "placement.simple",
    "torchweft_tools.cli.app": "cli",
}
"""Rooms that modules have moved to, and modules that others have become a part of."""
NEW = {
    f"torchweft.{old}": f"{room}.{old.rpartition('.')[2]}"
    for room, names in MOVED.items()
    for old in names.split()
} | {f"torchweft.{old}": module for module, names in JOINED.items() for old in names.split()}


class _Finder(MetaPathFinder, Loader):
    """Finds what has moved."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """The place of a module that has moved; None for any other name."""
        if name == "torchweft.runtimes":  # a package that is gone; its modules are asked for next
            return ModuleSpec(name, self, is_package=True)
        if name not in NEW:
            return None
        text = f"{name} has moved to {NEW[name]}; the old path goes with the next release"
        warnings.warn(text, DeprecationWarning, stacklevel=2)
        return ModuleSpec(name, self)

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        """The module itself, from where it is now."""
        if spec.name not in NEW:
            return ModuleType(spec.name)
        module = import_module(NEW[spec.name])
        spec.loader_state = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        """Give it back what the import system has put over its own."""
        spec = module.__spec__
        if spec is not None and spec.loader_state is not None:
            module.__spec__ = spec.loader_state


def install() -> None:
    """From now on old paths are found, behind all others."""
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.append(_Finder())

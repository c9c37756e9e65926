"""Old import paths, kept for one release: each gives its new module and a `DeprecationWarning`."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Sequence
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

HOUSE = "torchweft"
MOVED = {
    "plan": "blueprint bucket context cost cut graph graph_file machine precedence sizes "
    "strategies trace verify runtimes.simulator",
    "plan.write": "scheduler strategy write",
    "plan.lower": "conflicts lower memory",
    "placement.planners": "placement.annealing placement.cp_sat placement.lists placement.tree_dp",
    "placement.learn": "placement.learned placement.learner placement.policy placement.served",
    "ranks": "runtimes.ranks runtimes.speakers runtimes.talk capture.flights",
    "capture": "marks splitters",
    "run": "runtimes.cpu runtimes.program runtimes.writer",
    "run.accelerator": "runtimes.accelerator runtimes.cuda runtimes.graphs runtimes.streams",
    "run.eager": "boundary",
    "run.workers": "dynamic.cell dynamic.channel dynamic.grouping dynamic.pool "
    "dynamic.program dynamic.recorded dynamic.worker",
    "run.driver": "dynamic.executor dynamic.feed dynamic.placing dynamic.prices",
    "serve": "gate piece reporting session trials",
}
NEW = {
    f"{HOUSE}.{old}": f"{HOUSE}.{room}.{old.rpartition('.')[2]}"
    for room, names in MOVED.items()
    for old in names.split()
}
NEW |= {
    f"{HOUSE}.placement.{name}": f"{HOUSE}_tools.{room}.{name}"
    for room, names in {
        "formats": "read_any read_dnn read_stg read_trees work",
        "train": "cases environment training",
    }.items()
    for name in names.split()
}
NEW |= {
    f"{HOUSE}.{old}": f"{HOUSE}{new}"
    for new, names in {
        ".placement.planners.lists": "placement.simple placement.stages",
        ".placement.planners.planner": "placement.portfolio",
        ".run.program": "runtimes.kernels",
        ".run.driver.executor": "dynamic.traffic",
        ".run.driver.placing": "dynamic.learning",
        ".run.driver.prices": "dynamic.drift",
        ".run.workers.cell": "dynamic.operators",
        ".run.workers.program": "dynamic.graphing",
        ".run.workers.recorded": "dynamic.store",
        "_tools.bench.oracle.exhaustive": "placement.exhaustive",
        "_tools.cli.app": "cli",
        "_tools.cli.doctor": "doctor",
        "_tools.cli.explain": "placement.explain",
        "_tools.cli.subject": "subject",
    }.items()
    for old in names.split()
}


class _Finder(MetaPathFinder, Loader):
    """Finds what has moved."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """The place of a module that has moved; None for any other name."""
        if name == f"{HOUSE}.runtimes":  # a package that is gone; its modules are asked for next
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

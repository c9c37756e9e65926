"""Old import paths, kept for one release (`moved.txt`): each gives its new module and a warning."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Sequence
from functools import cache
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType


@cache
def moved() -> dict[str, str]:
    """Where modules are now, by their old paths."""
    paths: dict[str, str] = {}
    for line in Path(__file__).with_name("moved.txt").read_text(encoding="utf-8").splitlines():
        new, *old = line.split()
        for name in old if new != "#" else ():
            in_room = new + name.rpartition(".")[2] if new.endswith(".") else new
            paths[f"torchweft.{name}"] = in_room
    return paths


class _Finder(MetaPathFinder, Loader):
    """Finds what has moved."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """The place of a module that has moved; None for any other name."""
        if name == "torchweft.runtimes":  # a package that is gone; its modules are asked for next
            return ModuleSpec(name, self, is_package=True)
        if not name.startswith("torchweft.") or name not in moved():
            return None
        text = f"{name} has moved to {moved()[name]}; the old path goes with the next release"
        warnings.warn(text, DeprecationWarning, stacklevel=2)
        return ModuleSpec(name, self)

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        """The module itself, from where it is now."""
        if spec.name not in moved():
            return ModuleType(spec.name)
        module = import_module(moved()[spec.name])
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

"""What Python reads first in a program under the dry run: it observes torch once it is imported.

Its folder is first on PYTHONPATH, so the program's own `sitecustomize`, if any, is imported after.
"""

import atexit
import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

HERE = str(Path(__file__).parent)


class TorchLoader(importlib.abc.Loader):
    """Loads torch as its own loader does, and begins to watch."""

    def __init__(self, loader: Any) -> None:
        self.loader = loader

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        """As torch's own loader."""
        made: ModuleType | None = self.loader.create_module(spec)
        return made

    def exec_module(self, module: ModuleType) -> None:
        """As torch's own loader; then the watch begins."""
        self.loader.exec_module(module)
        foreign = load("foreign")
        foreign.explain_at_exit()
        load("watch").begin(load("integers").compute, foreign.instead)


def load(name: str) -> Any:
    """A module of this folder, which is not on `sys.path`."""
    path = Path(HERE) / f"{name}.py"
    spec = importlib.util.spec_from_file_location(f"weft_dryrun_{name}", path)
    if spec is None or spec.loader is None:
        raise ImportError(f"{path} cannot be loaded")
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class TorchFinder(importlib.abc.MetaPathFinder):
    """Finds torch once, through the other finders."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """The spec of torch, with a loader that begins to watch."""
        if name != "torch":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        if spec is not None:
            spec.loader = TorchLoader(spec.loader)
        return spec


def end() -> None:
    """Registered before the program registers anything, so it comes last."""
    watch = sys.modules.get("weft_dryrun_watch")
    if watch is not None:
        watch.end()


atexit.register(end)
sys.meta_path.insert(0, TorchFinder())

sys.path.remove(HERE)
sys.modules.pop("sitecustomize", None)
try:
    importlib.import_module("sitecustomize")
except ImportError:
    sys.modules["sitecustomize"] = ModuleType("sitecustomize")

"""A `Subject`: a model with example inputs, named on the command line.

    torchweft check my_model.py:build --strategy overlap      def build(): return model, (x, y)
    torchweft trace package.module:build                      inputs: a tensor, a tuple or a dict

The file is the user's own and is run as Python, as `python my_model.py` would.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch

from torchweft.api import arguments_of, check, compile, report, session_of, trace, warmup
from torchweft.errors import WeftError, unknown
from torchweft.plan.trace import Trace
from torchweft.plan.write.strategy import Strategy
from torchweft.run.compare import Check
from torchweft.serve.session import Session


class Subject(NamedTuple):
    """A model (or function) and the inputs of one call, as `weft.check` takes them."""

    model: Callable[..., Any]
    inputs: Any

    def compiled(self, strategy: str | Strategy) -> Subject:
        """The same, with its model compiled."""
        return self._replace(model=compile(self.model, strategy))

    @property
    def session(self) -> Session:
        """The session of a compiled model."""
        return session_of(self.model)

    # All calls are made without gradients.

    @torch.no_grad()
    def call(self) -> Any:
        """The outputs of one call."""
        args, kwargs = arguments_of(self.inputs)
        return self.model(*args, **kwargs)

    @torch.no_grad()
    def trace(self) -> Trace:
        """What happened on the lanes of one call of a compiled model."""
        args, kwargs = arguments_of(self.inputs)
        return trace(self.model, *args, **kwargs)

    def tune(self, progress: Callable[[int, int], None]) -> list[str]:
        """The choice for the inputs of the model, made and kept, with what else was tried."""
        tuned = self.compiled("auto")
        warmup(tuned.model, [self.inputs], progress=progress)
        return list(report(tuned.model).choices)

    @torch.no_grad()
    def check(self, strategy: Strategy, tolerance: float | None) -> Check:
        """The model under a strategy against plain PyTorch."""
        return check(self.model, self.inputs, strategy=strategy, tolerance=tolerance)


def load_subject(text: str) -> Subject:
    """Call the function that `text` names. Raises `WeftError` if it gives no model and inputs."""
    where, _, name = text.rpartition(":")
    if not where or not name:
        raise WeftError(f"model: {text!r} is not FILE.py:FUNCTION or MODULE:FUNCTION.")
    module = _module(where)
    build = getattr(module, name, None)
    if not callable(build):
        functions = [n for n, item in vars(module).items() if callable(item) and n[0] != "_"]
        raise WeftError(f"model: {unknown('function', name, functions)}", rule="model")
    built = build()
    if not isinstance(built, tuple) or len(built) != 2 or not callable(built[0]):
        raise WeftError(f"model: {text} must return (model, inputs).", rule="model")
    return Subject(*built)


def _module(where: str) -> Any:
    if not where.endswith(".py"):
        try:
            return importlib.import_module(where)
        except ModuleNotFoundError as error:
            raise WeftError(f"model: there is no module {error.name!r}.", rule="model") from None
    path = Path(where)
    if not path.exists():
        raise WeftError(f"model: there is no file {where}.", rule="model")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None, "a .py file has a loader"
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module  # so that its classes can be found again
    spec.loader.exec_module(module)
    return module

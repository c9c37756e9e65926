"""A `Subject`: a model with example inputs, named on the command line.

    torchweft check my_model.py:build --strategy overlap      def build(): return model, (x, y)
    torchweft trace package.module:build                      inputs: a tensor, a tuple or a dict

The file is the user's own and is run as Python, as `python my_model.py` would.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from torchweft.errors import WeftError, unknown


@dataclass(frozen=True)
class Subject:
    """A model (or function) and the inputs of one call."""

    name: str
    model: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]

    @property
    def inputs(self) -> Any:
        """The inputs as `weft.check` takes them."""
        return dict(self.kwargs) if self.kwargs else self.args

    def __call__(self) -> Any:
        """One call, without gradients."""
        with torch.no_grad():
            return self.model(*self.args, **self.kwargs)


def load_subject(text: str) -> Subject:
    """Call the function that `text` names. Raises `WeftError` if it gives no model and inputs."""
    where, _, name = text.rpartition(":")
    if not where or not name:
        raise WeftError(
            f"model: {text!r} is not FILE.py:FUNCTION or MODULE:FUNCTION.", rule="model"
        )
    module = _module(where)
    build = getattr(module, name, None)
    if not callable(build):
        functions = [n for n, item in vars(module).items() if callable(item) and n[0] != "_"]
        raise WeftError(f"model: {unknown('function', name, functions)}", rule="model")
    found = build()
    if not isinstance(found, tuple) or len(found) != 2 or not callable(found[0]):
        raise WeftError(f"model: {text} must return (model, inputs).", rule="model")
    model, inputs = found
    args = () if isinstance(inputs, dict) else inputs if isinstance(inputs, tuple) else (inputs,)
    return Subject(name, model, args, inputs if isinstance(inputs, dict) else {})


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

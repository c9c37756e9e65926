"""Dynamic models: each input's own graph, recorded, grouped, and run here or by `run/driver`.

model --record--> Recording --take--> RecordedPart --group--> groups --> outputs

The package itself can be called: `weft.dynamic(model)` is `dynamic.model.Dynamic(model)`.
"""

import sys
from importlib import import_module
from types import ModuleType
from typing import Any


class _DynamicRoom(ModuleType):
    """The package as a function of the same name."""

    def __call__(self, model: Any, **options: Any) -> Any:
        """A model whose graph depends on its input, batched and placed; see `model.Dynamic`."""
        return import_module("torchweft.dynamic.model").Dynamic(model, **options)


sys.modules[__name__].__class__ = _DynamicRoom

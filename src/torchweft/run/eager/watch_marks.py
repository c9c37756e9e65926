"""The `MarkWatch`: tells the listener of a thread when its eager model enters or leaves a mark.

    watch = MarkWatch(model, rules)          hooks on the modules that a rule is about
    with watch: model(x)                     the listener of this thread is told

Marks in model code tell by themselves. Hooks stay on the model until `close` and do nothing outside
of `with`. Functions are seen by the interpreter's profile of the thread, which costs about a tenth
of a microsecond for every Python call of the model, and only where there is such a rule.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from torch import nn

from torchweft.capture.marks import MarkRule, listener
from torchweft.errors import CaptureError

FORMS = ("module", "path", "function")
SILENT = ("rows", "state")
"""Forms that make no op: nothing has to match them where no calls are captured."""


class MarkWatch:
    """What rules say of a model, where no graph is captured."""

    def __init__(self, model: Callable[..., Any], rules: Sequence[MarkRule]) -> None:
        self.hooks: list[Any] = []
        self.local = threading.local()
        self.codes: dict[int, MarkRule] = {}
        self.silent = [rule for rule in rules if rule.form in SILENT]
        for rule in rules:
            if rule.form not in FORMS + SILENT:
                raise CaptureError(
                    f"mark: boundary mode captures no calls, so {rule} has nothing to match. "
                    "Use mark, mark_module, mark_path or mark_function.",
                    rule="mark",
                )
            if rule.form == "function":
                self.codes.setdefault(id(getattr(rule.wanted, "__code__", rule.wanted)), rule)
        if isinstance(model, nn.Module):
            for path, module in model.named_modules():
                about = [rule for rule in rules if _is_about(rule, path, module)]
                for rule in about[:1]:  # of two rules the first wins
                    self._hook(module, rule)

    def _hook(self, module: nn.Module, rule: MarkRule) -> None:
        def hook(what: str, *_: Any) -> None:
            if getattr(self.local, "inside", False):  # modules may be shared with other models
                tell(what, rule)

        self.hooks.append(module.register_forward_pre_hook(partial(hook, "enter")))
        self.hooks.append(module.register_forward_hook(partial(hook, "leave")))

    def close(self) -> None:
        """Take the hooks off the model."""
        for hook in self.hooks:
            hook.remove()
        self.hooks.clear()

    def __enter__(self) -> None:
        self.local.inside = True
        if self.codes:
            self.local.before = sys.getprofile()
            sys.setprofile(self._profile)

    def __exit__(self, *error: object) -> None:
        self.local.inside = False
        if self.codes:
            sys.setprofile(self.local.before)

    def _profile(self, frame: Any, event: str, function: Any) -> None:
        what = function if event.startswith("c_") else frame.f_code
        rule = self.codes.get(id(what))
        if rule is not None:
            tell("enter" if event.endswith("call") else "leave", rule)


def tell(what: str, rule: MarkRule) -> None:
    """Tell who listens that the model enters or leaves the mark of a rule."""
    heard = listener()
    if heard is not None:
        heard.stop(f"{what} {rule.mark.name}", rule)


def _is_about(rule: MarkRule, path: str, module: nn.Module) -> bool:
    if rule.form == "path":
        return bool(rule.wanted.fullmatch(path))
    is_class = isinstance(rule.wanted, type)
    return rule.form == "module" and (
        isinstance(module, rule.wanted) if is_class else module is rule.wanted
    )

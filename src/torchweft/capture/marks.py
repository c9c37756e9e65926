"""The `Mark`: a user's note that makes an op: a name, and what the op `uses`.

Inside model code, a context manager or a decorator:

    with mark("attention", uses="memory"):
        y = attend(q, k, v)

From outside of it, rules that are handed to `capture`:

    mark_module(LlamaAttention, "attention")      a class, or one instance
    mark_function(rotate, "rope")                 a Python function, or a torch function
    mark_path(r"layers\\.\\d+\\.mlp", "mlp")         a regular expression on the module's path
    mark_op(r"my_lib\\.all_reduce", uses="network") a regular expression on the call's target

A mark adds no graph break. In model code the innermost mark wins; a rule wins over model code,
and of two rules the first. `rows` is a declaration: the user vouches that the op is row-wise.
With `graph=False` a device graph leaves the op out: it runs anew at every replay.
`inner` is what runs the calls inside the op, such as "eager" where the model is under "inductor".

Without a graph, an eager model tells by itself which marks it comes to, if somebody listens:

    with listening(part):       in the thread that runs the model
        model(x)                marks and collectives inside call part.stop(...), part.talk(...)
"""

from __future__ import annotations

import contextlib
import re
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from types import CodeType
from typing import Any, Literal, Protocol, TypedDict, Unpack

import torch
from torch import fx

from torchweft.errors import CaptureError, clip, unknown
from torchweft.plan.graph import NAME, ROWS, USES
from torchweft.private.core import OpOverload, OpOverloadPacket, has_mkldnn

KEY = "weft"
INNERS = ("eager", "inductor", "onednn")
Form = Literal["module", "function", "path", "op", "name", "rows", "state"]
FRAME = re.compile(r'File "(?P<file>[^"\n]*)", line (?P<line>\d+), in (?P<name>\S+)')


@dataclass(frozen=True, slots=True)
class Mark:
    """A name for an op, what it uses, how it treats rows (None: find out), what compiles it.

    graph: whether a device graph may hold it; not if it waits for the device or decides by values.
    """

    name: str
    uses: str | None = None
    rows: str | None = None
    graph: bool = True
    inner: str | None = None

    def __post_init__(self) -> None:
        _check(self.name, self.uses, self.rows, self.inner)


class MarkFacts(TypedDict, total=False):
    """What rules may say of their op; see `Mark`."""

    uses: str | None
    rows: str | None
    graph: bool
    inner: str | None


@dataclass(frozen=True, slots=True)
class MarkRule:
    """A mark given from outside: `form` says how `wanted` is looked for.

    Forms "rows" and "state" make no op: they only say how calls treat rows, or that they touch the
    side state which the mark names; `by` is the argument that tells such states apart.
    """

    mark: Mark
    form: Form
    wanted: Any = field(hash=False)
    text: str = ""
    by: str = ""

    def __str__(self) -> str:
        return f"mark {self.mark.name!r} on {self.form} {self.text}"


class Listener(Protocol):
    """Who is told of the boundaries that an eager model comes to."""

    def stop(self, text: str, mark: Any) -> None:
        """The model enters or leaves a mark."""

    def talk(self, caught: Any) -> Any:
        """The model calls a collective; what is returned here is what it gets."""


_here = threading.local()


def listener() -> Listener | None:
    """Who listens to the model of this thread, if anybody does."""
    return getattr(_here, "listener", None)


@contextlib.contextmanager
def listening(to: Listener | None) -> Iterator[None]:
    """Tell this listener of the boundaries inside; None: tell nobody."""
    before = listener()
    _here.listener = to
    try:
        yield
    finally:
        _here.listener = before


@contextlib.contextmanager
def mark(
    name: str,
    uses: str | None = None,
    rows: str | None = None,
    *,
    graph: bool = True,
    inner: str | None = None,
) -> Iterator[None]:
    """Make one op of the calls inside; also a decorator.

    >>> with mark("attention", uses="memory"):
    ...     y = x + 1
    """
    _check(name, uses, rows, inner)
    told = (uses or "", rows or "", "" if graph else "no graph", inner or "")
    heard = None if torch.compiler.is_dynamo_compiling() else listener()
    if heard is not None:
        heard.stop(f"enter {name}", Mark(name, uses, rows, graph, inner))
    with torch.fx.traceback.annotate({KEY: "|".join((name, *told))}):
        yield
    if heard is not None:
        heard.stop(f"leave {name}", None)


def mark_module(
    module: type[torch.nn.Module] | torch.nn.Module,
    name: str | None = None,
    **facts: Unpack[MarkFacts],
) -> MarkRule:
    """A rule: what a module class (or one instance) computes is one op a call."""
    is_class = isinstance(module, type) and issubclass(module, torch.nn.Module)
    if not is_class and not isinstance(module, torch.nn.Module):
        raise CaptureError(
            f"mark_module: {clip(module)} is neither a module nor a class of modules."
        )
    text = module.__name__ if isinstance(module, type) else type(module).__name__
    return MarkRule(Mark(name or text, **facts), "module", module, text)


def mark_function(
    function: Callable[..., Any], name: str | None = None, **facts: Unpack[MarkFacts]
) -> MarkRule:
    """A rule: what a Python function (or a torch function) computes is one op a call."""
    if not callable(function):
        raise CaptureError(f"mark_function: {clip(function)} is not a function.")
    text = getattr(function, "__name__", type(function).__name__)
    plain = re.sub(r"\W", "_", text)
    return MarkRule(Mark(name or plain, **facts), "function", function, text)


def mark_path(pattern: str, name: str, **facts: Unpack[MarkFacts]) -> MarkRule:
    """A rule: what a module computes whose path matches the whole regular expression."""
    return MarkRule(Mark(name, **facts), "path", _compiled(pattern), pattern)


def mark_op(pattern: str, name: str | None = None, **facts: Unpack[MarkFacts]) -> MarkRule:
    """A rule: each call whose target (such as `aten.mm.default`) matches the regular expression."""
    plain = re.sub(r"\W+", "_", pattern).strip("_") or "op"
    return MarkRule(Mark(name or plain, **facts), "op", _compiled(pattern), pattern)


def row_wise(pattern: str) -> MarkRule:
    """A rule: calls whose target matches treat every row by itself; they make no op of their own.

    For custom operators, which no table knows: the user vouches for them.
    """
    return MarkRule(Mark("rows", rows="row-wise"), "rows", _compiled(pattern), pattern)


def touches_state(name: str, pattern: str, by: str = "") -> MarkRule:
    """A rule: calls whose target matches touch the side state of this name; see `splitters`."""
    return MarkRule(Mark(name), "state", _compiled(pattern), pattern, by)


def told_of(node: fx.Node, rules: Sequence[MarkRule], form: Form) -> list[MarkRule]:
    """The rules of form "rows" or "state" that are about a call."""
    target = target_name(node) if node.op.startswith("call_") else ""
    return [rule for rule in rules if rule.form == form and target and rule.wanted.search(target)]


def marks_of(
    graph: fx.Graph, rules: Sequence[MarkRule]
) -> tuple[dict[fx.Node, tuple[Mark, object]], set[MarkRule]]:
    """For each marked call its mark and a key of the marked stretch, and the rules that matched."""
    marked: dict[fx.Node, tuple[Mark, object]] = {}
    matched: set[MarkRule] = set()
    first: tuple[Mark, fx.Node, int] | None = None
    for number, node in enumerate(graph.nodes):
        if node.op not in ("call_function", "call_method", "call_module"):
            continue
        noted, key = _mark_of(node, rules)
        if isinstance(noted, MarkRule):
            matched.add(noted)
        matched.update(*(told_of(node, rules, form) for form in ("rows", "state")))
        mark = noted.mark if isinstance(noted, MarkRule) else noted
        if mark is None:
            first = None
            continue
        if key is None:  # no instance is known: a stretch ends where its first call comes again
            if first is None or first[0] != mark or _comes_again(first[1], node):
                first = (mark, node, number)
            key = ("stretch", first[2])
        marked[node] = (mark, (mark.name, key))
    return marked, matched


def require_matched(rules: Iterable[MarkRule], matched: Iterable[MarkRule]) -> None:
    """Raise `CaptureError` for a rule that matched nothing."""
    done = set(matched)
    for rule in rules:
        if rule not in done:
            raise CaptureError(
                f"mark: {rule} matched nothing in the captured graph. "
                "Is it called with the inputs that were given?",
                rule="mark",
            )


def _mark_of(node: fx.Node, rules: Sequence[MarkRule]) -> tuple[MarkRule | Mark | None, object]:
    for rule in rules:
        hit, key = _hit(node, rule) if rule.form not in ("rows", "state") else (False, None)
        if hit:
            return rule, key
    custom = node.meta.get("custom") or {}
    if KEY not in custom:
        return None, None
    name, uses, rows, graph, inner = str(custom[KEY]).split("|")
    return Mark(name, uses or None, rows or None, not graph, inner or None), None


def _hit(node: fx.Node, rule: MarkRule) -> tuple[bool, object]:
    """Whether a rule is about this call, and a key of the instance if one is known."""
    if rule.form == "op":
        return bool(rule.wanted.search(target_name(node))), node.name
    if rule.form == "function":
        if (
            node.target is rule.wanted
            or getattr(node.target, "overloadpacket", None) is rule.wanted
        ):
            return True, node.name
        code = getattr(rule.wanted, "__code__", None)
        return isinstance(code, CodeType) and _inside(node, code), None
    for key, (path, kind) in (node.meta.get("nn_module_stack") or {}).items():
        if rule.form == "path" and rule.wanted.fullmatch(module_path(path or "")):
            return True, key
        if rule.form == "module" and isinstance(rule.wanted, type) and _is_class(kind, rule.wanted):
            return True, key
        if rule.form == "module" and str(key).split("@")[0] == str(id(rule.wanted)):
            return True, key
    return False, None


def module_path(text: str) -> str:
    """The path of a module, `layers.3.mlp`, from what Dynamo calls it: `L['self'].layers[3].mlp`.

    A model that a function finds outside of itself is part of the path: `model.layers.3.mlp`.
    """
    inner = re.sub(r"^(?:.*\.(?:cell_contents|__self__)|L\['\w+'\]|G\['__import_\w+'\])", "", text)
    named = re.sub(r"^G\['(\w+)'\]", r"\1", inner)
    return re.sub(r"(?:\._modules)?\['?([^'\]]+)'?\]", r".\1", named).strip(".")


def _is_class(kind: Any, wanted: type) -> bool:
    if isinstance(kind, type):
        return issubclass(kind, wanted)
    return str(kind) == f"{wanted.__module__}.{wanted.__qualname__}"


def _inside(node: fx.Node, code: CodeType) -> bool:
    """Whether the call was written inside of a function, directly or deeper."""
    first, names = code.co_firstlineno, (code.co_name, code.co_qualname)
    last = max((line for *_, line in code.co_lines() if line is not None), default=first)
    for frame in FRAME.finditer(node.meta.get("stack_trace") or ""):
        same = frame["file"] == code.co_filename and frame["name"] in names
        if same and first <= int(frame["line"]) <= last:
            return True
    return False


def _comes_again(first: fx.Node, node: fx.Node) -> bool:
    same_line = first.meta.get("stack_trace") == node.meta.get("stack_trace")
    stacks = [list(item.meta.get("nn_module_stack") or {}) for item in (first, node)]
    return same_line and stacks[0] != stacks[1] and str(first.target) == str(node.target)


def target_name(node: fx.Node) -> str:
    """The call's target as a readable, stable name: `torch.nn.functional.linear`, `view`."""
    target = node.target
    if isinstance(target, str):
        return target
    if isinstance(target, OpOverload | OpOverloadPacket):
        return str(target)
    module = getattr(target, "__module__", None) or "torch"
    name = str(getattr(target, "__qualname__", None) or getattr(target, "__name__", target))
    if "pybind11" in name:  # the class in which bindings keep their functions
        name = name.split(".")[-1]
    return f"{module}.{name.removeprefix('_VariableFunctionsClass.')}"


def _compiled(pattern: str) -> re.Pattern[str]:
    try:
        return re.compile(pattern)
    except (re.error, TypeError) as error:
        raise CaptureError(f"mark: {clip(pattern)} is not a regular expression: {error}.") from None


def _check(name: str, uses: str | None, rows: str | None, inner: str | None) -> None:
    if not isinstance(name, str) or not NAME.fullmatch(name):
        raise CaptureError(
            f"mark: {clip(name)} is not a name. Use letters, digits, '_', '.' and '$'."
        )
    if uses is not None and uses not in USES:
        raise CaptureError(f"mark: {unknown('resource', uses, USES)}")
    if rows is not None and rows not in ROWS:
        raise CaptureError(f"mark: {unknown('kind of rows', rows, ROWS)}")
    if inner is not None and inner not in INNERS:
        raise CaptureError(f"mark: {unknown('inner compiler', inner, INNERS)}")
    if inner == "onednn" and not has_mkldnn:
        raise CaptureError("mark: this build of torch has no oneDNN. Take inner='eager'.")

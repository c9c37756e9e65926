"""The `Watch`: makes Dynamo compile the calls of a model as capture needs it.

    watch = Watch(partial(compile_by, backend, call), model, blocks=Blocks(model))
    watch(args, kwargs)     # equal to call(*args, **kwargs)

Settings and marks are made when Dynamo starts to compile, and taken back at its end. A frame that
Dynamo cannot compile is tried without blocks, then for one number of rows, and else runs as it is.

To guard the empty hooks of every module takes as long as all other guards. So a model without hooks
is compiled without those guards, and once more if torch has made a handle since and a module has a
hook then.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar
from functools import partial
from pathlib import Path
from traceback import walk_stack
from types import CodeType
from typing import Any, NoReturn

import torch
from torch.utils.hooks import RemovableHandle

from torchweft.capture.blocks.blocks import Blocks
from torchweft.capture.dynamo import MARKED, mark_batch
from torchweft.capture.failures import as_own, breaks_since, first_line
from torchweft.capture.ops.units import TORCH
from torchweft.capture.rows.axes import tensors_in
from torchweft.errors import WeftError
from torchweft.private.core import tree_leaves
from torchweft.private.dynamo import (
    CallbackArgs,
    FrameAction,
    FrameExecStrategy,
    InternalTorchDynamoError,
    TorchDynamoException,
    TorchRuntimeError,
    Unsupported,
    UserError,
    callback_handler,
    convert_frame,
    dynamo_config,
    fx_config,
    graph_break_reasons,
    set_code_exec_strategy,
)

log = logging.getLogger("torchweft")
PLAIN = (str, bytes, int, float, bool, type, type(None), torch.nn.Module)
HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
MAX_DEPTH = 4
MAX_HELD = 10_000
RECOMPILE_LIMIT = 128
CHECK, COMPILE = "exceeds_recompile_limit", "_compile"
FRAME = convert_frame._compile.__code__
SOFT = (Unsupported, UserError)  # by these Dynamo says that a frame runs as it is
NOT_TRACED = (TorchRuntimeError, InternalTorchDynamoError)
AS_EVER = FrameExecStrategy(FrameAction.DEFAULT, FrameAction.DEFAULT)
ONLY_KNOWN = FrameExecStrategy(FrameAction.RUN_ONLY, FrameAction.RUN_ONLY)


class _TracedCall:
    """One call of a model: what Dynamo compiles for it, and what went wrong."""

    def __init__(self, watch: Watch, inputs: Any) -> None:
        self.watch, self.inputs = watch, inputs
        self.failures: dict[str, None] = {}
        self.closed: list[CodeType] = []  # code that is not to be compiled again in this call
        self.constant = False  # whether Dynamo is told to take the number of rows for a constant


_calling: ContextVar[_TracedCall | None] = ContextVar("weft calling", default=None)


class Watch:
    """Makes Dynamo compile the calls of a model; one that is compiled pays almost nothing."""

    def __init__(
        self,
        make: Callable[[], Callable[..., Any]],
        model: object = None,
        *,
        dim: int = 0,
        blocks: Blocks | None = None,
        fall_back: Callable[[str], None] = log.warning,
    ) -> None:
        """make: what compiles the call; `model`: whose hooks count, if it is a module."""
        self.make, self.dim, self.blocks, self.fall_back = make, dim, blocks, fall_back
        self.model = model if isinstance(model, torch.nn.Module) else None
        self.compiled = make()
        self.news = True
        self._guards_hooks = self.model is None  # whose modules are not known
        self._num_handles = -1
        self.breaks: list[str] = []
        self._limited: set[CodeType] = set()
        self._constant: set[CodeType] = set()  # traced for one number of rows at a time
        self._untraced: Counter[CodeType] = Counter()  # compilations asked for since the last good
        self._reasons: dict[CodeType, str] = {}
        self._settings = contextlib.ExitStack()
        self._num_breaks = 0

    def __call__(self, args: Any, kwargs: Any) -> Any:
        if RemovableHandle.next_id != self._num_handles:
            self._look_for_hooks()
        if _begin not in callback_handler.start_callbacks:  # torch._dynamo.reset forgets them
            callback_handler.register_start_callback(_begin)
            callback_handler.register_end_callback(_end)
            _watch_frames()
        call = _TracedCall(self, (args, kwargs))
        token = _calling.set(call)
        try:
            outputs = self.compiled(*args, **kwargs)
        except WeftError:
            for reason in call.failures:  # perhaps the reason for the other
                self.fall_back(reason)
            raise
        finally:
            _calling.reset(token)
            for code in call.closed:  # so that the next call past the limit is noticed too
                set_code_exec_strategy(code, AS_EVER)
        for reason in call.failures:
            self.fall_back(reason)
        return outputs

    def _look_for_hooks(self) -> None:
        self._num_handles = RemovableHandle.next_id
        modules = () if self.model is None or self._guards_hooks else self.model.modules()
        if any(vars(module).get(name) for module in modules for name in HOOKS):
            self._guards_hooks = True
            self.compiled = self.make()

    def begin(self, call: _TracedCall) -> None:
        """Dynamo starts to compile: dims of equal size stay apart, the batch gets a symbol."""
        self.news = True
        self._num_breaks = len(graph_break_reasons)
        self._settings.enter_context(fx_config.patch(use_duck_shape=False))  # type: ignore[attr-defined]
        seen = {"specialize_float": True, "skip_nnmodule_hook_guards": not self._guards_hooks}
        # Messages between two ranks are captured; under gradients they stay breaks, and on
        # accelerators, where ranks match them by the order of their streams alone.
        given = (each for each in tree_leaves(call.inputs) if isinstance(each, torch.Tensor))
        on_cpu = all(tensor.device.type == "cpu" for tensor in given)
        seen["enable_p2p_compilation"] = on_cpu and not torch.is_grad_enabled()
        if call.constant:  # another number of rows would make Dynamo try a symbol by itself
            seen["automatic_dynamic_shapes"] = False
        self._settings.enter_context(dynamo_config.patch(seen))
        if not gc.get_freeze_count():  # to look through all that is there again and again is slow
            gc.freeze()
            self._settings.callback(gc.unfreeze)
        try:
            make_dynamic(call.inputs, None if call.constant else self.dim)
            if self.blocks is not None:
                self.blocks.wrap(at_start=_is_start())
        except Exception as error:  # Dynamo would wrap what is raised
            call.failures[first_line(as_own(error, "capture"))] = None

    def limit(self, call: _TracedCall, code: CodeType, number: int) -> None:
        """A call past a limit of Dynamo: this frame of it runs without plans.

        Dynamo warns of it; once will do, so from then on we end its attempt as it does itself.
        """
        call.closed.append(code)
        where = f"{code.co_name} ({Path(code.co_filename).name}:{code.co_firstlineno})"
        self.fall_back(
            f"recompile limit: Dynamo has compiled {where} {number} times, for its guards differ "
            "from call to call, and runs it without plans now. TORCH_LOGS=recompiles names the "
            "guards: give what changes as a tensor, or keep it."
        )
        if code in self._limited and not dynamo_config.fail_on_recompile_limit_hit:
            raise _as_it_is("recompile limit")
        self._limited.add(code)

    def compile_frame(self, call: _TracedCall, code: CodeType, trace: Callable[[], Any]) -> Any:
        """Compile a frame. What cannot be compiled is tried without blocks, then for this number of
        rows alone: some operators of PyTorch cannot be traced in any other way.

        A frame that fails all the same runs as it is, so that a mistake of the user's comes out as
        in eager. Perhaps it can be traced later: it is tried at its 1st, 2nd, 3rd, 5th, 9th call.
        """
        tries = self._untraced[code]
        if tries & (tries - 1):
            self._leave(call, code)
        call.constant = code in self._constant
        why = ""
        while True:
            try:
                made = trace()
            except TorchDynamoException as error:
                if isinstance(error, SOFT):
                    raise
                if self.blocks is not None and self.blocks.refuse(error):
                    continue
                if not isinstance(error, NOT_TRACED):
                    raise
                why = why or str(error).strip().splitlines()[0]
                if call.constant:
                    self._reasons[code] = f"capture: {why}"
                    self._leave(call, code, error)
                call.constant = True
            else:
                break
        self._untraced.pop(code, None)
        if why:
            self._constant.add(code)
            self.breaks.append(f"traced for one number of rows, so nothing is split: {why}")
        return made

    def _leave(
        self, call: _TracedCall, code: CodeType, error: TorchDynamoException | None = None
    ) -> NoReturn:
        """Have Dynamo run a frame as it is, counted with the reason why it cannot be traced."""
        self._untraced[code] += 1
        call.failures[self._reasons[code]] = None
        call.closed.append(code)
        raise _as_it_is("runs as it is") from error

    def end(self, call: _TracedCall) -> None:
        """Dynamo has compiled, or failed to."""
        self._settings.close()
        try:
            if self.blocks is not None:
                self.blocks.unwrap()
            self.breaks += breaks_since(self._num_breaks)
        except Exception as error:
            call.failures[first_line(as_own(error, "capture"))] = None


def _as_it_is(why: str) -> Unsupported:
    """What tells Dynamo to run a frame as it is, or as it has been compiled before."""
    known = Unsupported(why)
    known.frame_exec_strategy = ONLY_KNOWN
    return known


def _begin(_: CallbackArgs) -> None:
    if (call := _calling.get()) is not None:
        call.watch.begin(call)


def _end(_: CallbackArgs) -> None:
    if (call := _calling.get()) is not None:
        call.watch.end(call)


def _watch_frames() -> None:
    """Have Dynamo tell the call of a limit (nobody else hears of it but its log), and have a frame
    that it could not compile tried again before anything of it has run.

    To begin the whole call again would run once more what stands before a graph break.
    """
    check, stock = getattr(convert_frame, CHECK), getattr(convert_frame, COMPILE)

    def exceeds(*given: Any) -> tuple[bool, str]:
        exceeded, limit = check(*given)
        if exceeded and (call := _calling.get()) is not None:
            code = sys._getframe(1).f_locals["code"]
            call.watch.limit(call, code, getattr(dynamo_config, limit))
        return exceeded, limit

    def compile_frame(code: CodeType, *given: Any, **named: Any) -> Any:
        if (call := _calling.get()) is None:
            return stock(code, *given, **named)
        return call.watch.compile_frame(call, code, partial(stock, code, *given, **named))

    for name, ours in ((CHECK, exceeds), (COMPILE, compile_frame)):
        if getattr(convert_frame, name).__module__ != __name__:
            setattr(convert_frame, name, ours)


def _is_start() -> bool:
    """Whether Dynamo compiles what the user called, and not something that this has come to."""
    for frame, _ in walk_stack(sys._getframe()):
        if frame.f_code is Watch.__call__.__code__:
            return True
        if not frame.f_code.co_filename.startswith((TORCH, __file__, contextlib.__file__)):
            return False
    raise AssertionError("only a watched call is compiled here")


def compile_by(
    backend: Callable[..., Any], model: Callable[..., Any], *, fullgraph: bool = False
) -> Callable[..., Any]:
    """The model under a backend of ours; each is its own, but models of a class share a cache."""
    compiled: Callable[..., Any] = torch.compile(  # type: ignore[call-overload]
        model, backend=partial(backend), fullgraph=fullgraph, recompile_limit=RECOMPILE_LIMIT
    )
    return compiled


def make_dynamic(inputs: Any, dim: int | None = 0) -> None:
    """Ask Dynamo for a symbol where the batch of each tensor is (and not for its other dims).

    Tensors inside objects (a KV cache) count if they have as many rows as the plain inputs. Behind
    a graph break those count that the frame has got, wherever their rows are. dim: None takes back
    what was asked for.
    """
    if dim is None:
        for leaf in tensors_in((inputs, _locals())):
            vars(leaf).pop(MARKED, None)
        return
    batches, got = _batches(inputs, dim), _locals()
    given = tensors_in(inputs) + _held(inputs, batches, dim)
    for leaf in given:
        if leaf.dim() > dim and leaf.shape[dim] > 1:
            mark_batch(leaf, dim)
    known = {id(leaf) for leaf in given}
    for leaf in tensors_in(got) + _held(got, batches, dim):
        seen = id(leaf) in known or hasattr(leaf, MARKED) or isinstance(leaf, torch.nn.Parameter)
        at = None if seen else _rows_at(leaf.shape, batches, dim)
        if at is not None:
            mark_batch(leaf, at)


def _batches(inputs: Any, dim: int) -> set[int]:
    """How many rows a call may have: the sizes of its tensors, or the commonest inside objects."""
    if sizes := {leaf.shape[dim] for leaf in tensors_in(inputs) if leaf.dim() > dim}:
        return sizes
    counts = Counter(leaf.shape[dim] for leaf in _held(inputs, None, dim))
    return {size for size in counts if counts[size] == max(counts.values())}


def _rows_at(shape: Sequence[int], batches: set[int], dim: int) -> int | None:
    """The dim of a shape where the rows are: `dim` itself, else the only such one, or a multiple.

    A wrong guess costs parts, and no number: the row rules look at what is done with that dim.
    """
    known = batches - {0, 1}
    equal = [at for at, size in enumerate(shape) if size in known]
    if dim in equal or (len(shape) > dim and not equal and any(shape[dim] % n == 0 for n in known)):
        return dim
    return equal[0] if len(equal) == 1 else None


def _locals() -> Mapping[str, Any]:
    """What the frame that Dynamo compiles has got."""
    stack = (frame for frame, _ in walk_stack(sys._getframe()) if frame.f_code is FRAME)
    return next((frame.f_locals["locals"] for frame in stack), {})


def _held(thing: Any, batches: set[int] | None, dim: int) -> list[torch.Tensor]:
    """Tensors of the same batch (None: of any) in the attributes of objects, a few levels deep."""
    tensors: list[torch.Tensor] = []
    waiting = [(leaf, 0) for leaf in tree_leaves(thing)]
    seen: set[int] = set()
    while waiting and len(seen) < MAX_HELD:
        item, depth = waiting.pop()
        if id(item) in seen or isinstance(item, PLAIN) or depth > MAX_DEPTH:
            continue
        seen.add(id(item))
        if isinstance(item, torch.Tensor):
            if depth and item.dim() > dim and (batches is None or item.shape[dim] in batches):
                tensors.append(item)
            continue
        inside = list(vars(item).values()) if hasattr(item, "__dict__") else []
        slots = [name for kind in type(item).__mro__ for name in getattr(kind, "__slots__", ())]
        inside += [getattr(item, name, None) for name in slots]
        waiting += [(leaf, depth + 1) for leaf in tree_leaves(inside)]
    return tensors

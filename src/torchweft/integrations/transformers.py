"""Transformers: a model of the library runs by plans; `generate()` and all the rest stay its own.

    from torchweft.integrations.transformers import weave

    model = AutoModelForCausalLM.from_pretrained(..., distributed_config=DistributedConfig("auto"))
    weave(model)                         # in place
    model.generate(**inputs)             # the same tokens; static and dynamic caches, encoders too

Prefill and decode, and batches and lengths by powers of two, are kinds of calls with a strategy
each: the first calls of a kind try the library's own way, whole and in parts by plans, then the
fastest stays (`trials`).
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from typing import Any, TypeVar

import torch

from torchweft.api import compile, session_of
from torchweft.plan.strategies import overlap, sequential
from torchweft.serve.trials import Trials, Wanted

Model = TypeVar("Model", bound=torch.nn.Module)
Kind = tuple[str, int, int]
STRATEGIES = (None, sequential, overlap(parts=2, min_tokens=1), overlap(parts=4, min_tokens=1))


def weave(model: Model, strategies: Sequence[Wanted] = STRATEGIES, **options: Any) -> Model:
    """Run a model by plans, in place; each kind of call by the fastest of these strategies.

    strategies: None stands for the library's own way.
    options: those of `weft.compile`. With WEFT_DISABLE=1 the model comes back untouched.
    """
    options = {"strategy": sequential} | options
    call = getattr(compile(model, **options), "_compiled_call_impl", None)
    if call is None:
        return model
    stock, trials = model._call_impl, Trials(session_of(model), strategies)

    @functools.wraps(call)
    def told(*args: Any, **kwargs: Any) -> Any:
        kind = kind_of(args, kwargs)
        return trials.call(kind, stock, call, args, kwargs, phase=kind[0])

    told.trials = trials  # type: ignore[attr-defined]
    model._compiled_call_impl = told
    return model


def kind_of(args: Sequence[Any], kwargs: dict[str, Any]) -> Kind:
    """The phase of a call, and its rows and positions as powers of two."""
    tensors = (item for item in (*args, *kwargs.values()) if isinstance(item, torch.Tensor))
    shape = next((item.shape for item in tensors if item.dim() > 1), torch.Size((0, 0)))
    rows, positions = shape[0], shape[1]
    cached = kwargs.get("past_key_values") is not None
    phase = "decode" if cached and positions == 1 else "prefill"
    return phase, rows.bit_length(), positions.bit_length()


def warm(model: Any, shapes: Iterable[tuple[int, int]], **options: Any) -> None:
    """Let calls of these (rows, positions) make their choices ahead of traffic.

    options: those of `generate`, such as cache_implementation="static".
    """
    if (call := model._compiled_call_impl) is None:  # WEFT_DISABLE=1
        return
    num_calls = call.trials.num_calls
    options |= {"max_new_tokens": 2, "min_new_tokens": 2, "do_sample": False}
    for shape in shapes:
        tokens = torch.ones(shape, dtype=torch.long, device=model.device)
        for _ in range(num_calls):
            if model.can_generate():
                model.generate(tokens, attention_mask=tokens, **options)
            else:
                with torch.no_grad():
                    model(tokens, attention_mask=tokens)

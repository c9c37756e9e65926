"""What vLLM's configuration makes of our option, in a process of its own; facts go out as JSON.

    python vllm_config.py FOLDER_OF_THE_MODEL

First nothing is asked for, and classes and environment are looked at before and after; then wrong
options are given to `LLM`, which must not start, and right ones to a configuration.
"""

from __future__ import annotations

import json
import os
import sys
from dataclasses import fields
from types import FunctionType

from vllm import LLM
from vllm.config import CompilationMode
from vllm.engine.arg_utils import EngineArgs
from vllm.forward_context import ForwardContext
from vllm.platforms import current_platform
from vllm.plugins import load_general_plugins

MARK = "@facts "
PHASES = ("prefill", "decode", "mixed")
WRONG = {
    "key": {"prefil": "overlap"},
    "strategy": {"prefill": "overlapp"},
    "strategy's option": {"decode": {"overlap": {"part": 2}}},
    "type": "overlap",
    "strategy's type": {"mixed": ["overlap"]},
    "option's type": {"mixed": {"overlap": 4}},
    "none": {"mixed": {}},
    "value": {"fallback": "eager"},
    "value's type": {"watchdog_s": "long"},
    "ours": {"splitters": []},
    "capture": {"capture": "graphs"},
}


def functions() -> dict[tuple[str, str], int]:
    """All functions of all classes of vLLM: which they are."""
    classes = {
        found
        for name, module in list(sys.modules.items())
        if name.startswith("vllm")
        for found in list(vars(module).values())
        if isinstance(found, type)
    }
    return {
        (f"{found.__module__}.{found.__qualname__}", name): id(value)
        for found in (*classes, type(current_platform))
        for name, value in vars(found).items()
        if isinstance(value, FunctionType | classmethod | staticmethod)
    }


def settings(model: str, extra: dict, **more) -> dict:
    """What a configuration says of how models are run."""
    config = EngineArgs(model, dtype="float32", additional_config=extra, **more)
    found = config.create_engine_config()
    found.__post_init__()  # as the engine does in a process of its own
    return {
        "mode": CompilationMode(found.compilation_config.mode).name,
        "backend": found.compilation_config.backend,
        "worker": found.parallel_config.worker_cls,
        "extension": found.parallel_config.worker_extension_cls,
        "aot": os.environ.get("VLLM_USE_AOT_COMPILE"),
    }


def refused(model: str, weft: object, **more) -> list[str]:
    """The error of an engine with these options: its class, and what it says."""
    try:
        LLM(model, dtype="float32", additional_config={"weft": weft}, **more)
    except Exception as error:
        return [type(error).__name__, str(error)]
    return ["none", "the engine has started"]


def main(model: str) -> None:
    os.environ.pop("VLLM_USE_AOT_COMPILE", None)
    environment, before = dict(os.environ), functions()
    load_general_plugins()
    after = functions()
    facts = {
        "found": "torchweft.integrations.vllm" in sys.modules,
        "environment": dict(os.environ) == environment,
        "replaced": sorted(" ".join(key) for key, value in before.items() if after[key] != value),
        "functions": len(before),
        "fields": sorted(item.name for item in fields(ForwardContext)),
        "unasked": [settings(model, {}), settings(model, {"other": {"prefill": "overlap"}})],
        "wrong": {name: refused(model, weft) for name, weft in WRONG.items()},
    }
    facts["wrong"]["eager"] = refused(model, {}, enforce_eager=True)
    boundary, ranks = {"capture": "boundary"}, {"tensor_parallel_size": 2}
    facts["wrong"]["ranks"] = refused(model, boundary)
    facts["wrong"]["worker"] = refused(model, boundary, worker_cls="my.Worker", **ranks)
    facts["still"] = settings(model, {})
    os.environ["WEFT_DISABLE"] = "1"
    facts["disabled"] = settings(model, {"weft": dict.fromkeys(PHASES, "auto")})
    del os.environ["WEFT_DISABLE"]
    facts["graph"] = settings(model, {"weft": dict.fromkeys(PHASES, "auto")})
    facts["boundary"] = settings(model, {"weft": boundary}, **ranks)
    sys.stdout.write(f"\n{MARK}{json.dumps(facts)}\n")


if __name__ == "__main__":
    main(sys.argv[1])

"""Commands of `torchweft` that run a model: run, check, trace, and show of a model's graphs.

It needs torch, so `cli.py` loads it only when one of these is called.
"""

from __future__ import annotations

import time
from dataclasses import asdict, replace
from pathlib import Path

import torch

from torchweft.api import check, compile, report, session_of, trace
from torchweft.cli.subject import Subject, load_subject
from torchweft.cli.text import say, say_json
from torchweft.plan.strategies import sequential
from torchweft.plan.write.strategy import Strategy


def show_model(name: str) -> None:
    """Print the graphs that a model is captured as."""
    subject = _compiled(load_subject(name), sequential)
    subject()
    for piece in session_of(subject.model).pieces:
        say(str(piece.graph))
        for op, reason in piece.captured.reasons.items():
            say(f"  {op} runs whole: {reason}")


def run_model(name: str, strategy: Strategy, num_calls: int, *, as_json: bool) -> None:
    """Call a model under a strategy and tell what became of it."""
    subject = _compiled(load_subject(name), strategy)
    times_s = []
    for _ in range(num_calls):
        start = time.perf_counter()
        subject()
        times_s.append(time.perf_counter() - start)
    found = report(subject.model)
    if as_json:
        say_json(
            {
                "strategy": found.strategy,
                "pieces": len(found.pieces),
                "split_share": found.split_share,
                "copies": found.num_copies,
                "fallbacks": dict(found.fallbacks),
                "first_s": times_s[0],
                "last_s": times_s[-1],
            }
        )
        return
    say(str(found))
    say(f"first call {times_s[0]:.3f} s, last of {num_calls} calls {times_s[-1]:.6f} s")


def check_model(name: str, strategy: Strategy, tolerance: float | None, *, as_json: bool) -> bool:
    """Compare a model under a strategy with eager; whether they are equal."""
    subject = load_subject(name)
    with torch.no_grad():
        verdict = check(subject.model, subject.inputs, strategy=strategy, tolerance=tolerance)
    if as_json:
        say_json(asdict(verdict))
    else:
        say(str(verdict))
    return bool(verdict)


def trace_model(name: str, strategy: Strategy, output: Path | None) -> None:
    """Run a model and draw what happened on its lanes."""
    subject = _compiled(load_subject(name), strategy)
    with torch.no_grad():
        found = trace(subject.model, *subject.args, **subject.kwargs)
    say(found.to_text())
    if output is not None:
        found.save(output)


def _compiled(subject: Subject, strategy: Strategy) -> Subject:
    return replace(subject, model=compile(subject.model, strategy))

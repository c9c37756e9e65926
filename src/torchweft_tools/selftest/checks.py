"""The checks of one rank: a rig comes in; figures go out, or `CheckError`, or `Skip`.

All ranks run all checks in the same order. A check of `APART` leaves its group broken, or a rank
dead, and has ranks of its own.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from copy import deepcopy
from functools import partial
from random import Random
from typing import Any

import torch
from torch import Tensor, nn

import torchweft as weft
from torchweft.errors import PlanError, WeftError
from torchweft_tools.bench.measure.pairs import ratio
from torchweft_tools.bench.peers.models import Dense, Sizes, inputs
from torchweft_tools.bench.peers.overlap_by_hand import by_hand
from torchweft_tools.bench.players.overlap_race import race
from torchweft_tools.selftest.rig import ZOO, Branches, CheckError, Parallel, Rig, Skip, mlp

Figures = dict[str, Any]
NUM_CALLS = 12
WATCHDOG_S = 3.0
MAX_BIAS = 0.05
MIN_SPEED = 0.5
SIZES = Sizes(num_layers=2, hidden=512, wide=1024)


def lanes(rig: Rig) -> Figures:
    """Two branches on two lanes, again and again: the numbers of eager, and both lanes at work."""
    plain = _model(rig, Branches())
    woven = _woven(rig, plain, weft.branches())
    for number in range(NUM_CALLS):
        x = rig.tensor(16, plain.left.in_features) * (number + 1)
        _same(woven(x), plain(x), f"call {number}")
    (plan,) = weft.plans(woven)
    busy = {step.lane for step in plan.steps if step.kind == "run"}
    if len(busy) < 2:
        raise CheckError(f"the plan runs on {len(busy)} lane, not on two")
    return {"lanes": sorted(busy), "calls": NUM_CALLS}


def lifetimes(rig: Rig) -> Figures:
    """Results stay what they are while later calls and freed memory full of NaN come and go."""
    plain = _model(rig, mlp())
    woven = _woven(rig, plain, weft.overlap(parts=3, min_tokens=1))
    kept: list[tuple[Tensor, Tensor]] = []
    for number in range(NUM_CALLS):
        x = rig.tensor(9 + number % 4, 64) + number
        kept.append((woven(x), plain(x)))
        for length in (64, 96, 3 * 64, 3 * 96, 9 * 64, 9 * 96):
            torch.full((length,), float("nan"), device=rig.device)
    for number, (result, wanted) in enumerate(kept):
        _close(result, wanted, f"the result of call {number}, looked at after the last")
    return {"calls": NUM_CALLS}


def graphs(rig: Rig) -> Figures:
    """Device graphs, collectives inside: a replay reads new inputs and gives the right numbers."""
    if rig.device.type == "cpu":
        raise Skip("a CPU has no device graphs")
    plain = _model(rig, Parallel())
    woven = _woven(rig, plain, weft.overlap(parts=2, min_tokens=1), graphs=True)
    for number in range(NUM_CALLS):
        x = rig.tensor(16, 64) * (number + 1)
        _close(woven(x), plain(x), f"replay {number}")
    return {"calls": NUM_CALLS}


def collectives(rig: Rig) -> Figures:
    """A tensor-parallel model in parts: the numbers of the plain model, on every rank."""
    plain = _model(rig, Parallel())
    woven = _woven(rig, plain, weft.overlap(parts=2, min_tokens=1))
    for number in range(NUM_CALLS):
        x = rig.tensor(8 + number % 3, 64)
        _close(woven(x), plain(x), f"call {number}")
    return {"calls": NUM_CALLS, "parts": max(plan.num_parts for plan in weft.plans(woven))}


def equality(rig: Rig) -> Figures:
    """Models of unlike kinds in parts differ from stock no more than stock from itself.

    Stock is called with all rows, and with the same rows in batches of other sizes.
    """
    figures: Figures = {}
    for name, (build, draw) in ZOO.items():
        for dtype in rig.dtypes:
            plain = _model(rig, build()).to(dtype)
            x = draw(rig)
            x = x.to(dtype) if x.is_floating_point() else x
            woven = _woven(rig, plain, weft.overlap(parts=2, min_tokens=1))
            figures[f"{name} {str(dtype).removeprefix('torch.')}"] = _composition(
                name, plain, woven, x
            )
    return figures


def noise(rig: Rig) -> Figures:
    """The plain model against itself: what this node calls a difference where there is none."""
    model, x = _dense(rig)
    run = partial(_timed, rig, model, x)
    again = partial(_timed, rig, model, x)
    times = _race(rig, {"first": run, "again": again})
    control = ratio([a / b for a, b in zip(times["first"], times["again"], strict=True)])
    if control.low > 1 + MAX_BIAS or control.high < 1 - MAX_BIAS:
        raise CheckError(f"one program is {control} as fast as itself; clocks or cores are biased")
    return {"aa": control.median, "aa_low": control.low, "aa_high": control.high}


def speed(rig: Rig) -> Figures:
    """Overlap by a plan and by hand against the plain model, over the node's own link.

    Figures, not a target; it fails for wrong numbers, for a plan that did not run, and for half
    of the plain model's speed or less.
    """
    model, x = _dense(rig)
    woven = _woven(rig, model, weft.overlap(parts=2, min_tokens=1))
    hand = by_hand(model, 2)
    with torch.no_grad():
        for name, call in (("by hand", hand), ("by plan", woven)):
            _close(call(x), model(x), name)
    runs = {
        "sequential": partial(_timed, rig, model, x),
        "by_hand": partial(_timed, rig, hand, x),
        "weft": partial(_timed, rig, woven, x),
    }
    times = _race(rig, runs)
    figures: Figures = {}
    for name in ("by_hand", "weft"):
        pairs = zip(times["sequential"], times[name], strict=True)
        faster = ratio([plain / other for plain, other in pairs])
        figures |= {name: faster.median, f"{name}_low": faster.low, f"{name}_high": faster.high}
    if fallbacks := list(map(str, weft.report(woven).fallbacks)):
        raise CheckError(f"calls did not run by their plan: {fallbacks[0]}")
    if figures["weft"] < MIN_SPEED:
        raise CheckError(f"{figures['weft']:.2f}x as fast as the plain model")
    return figures


def agreement(rig: Rig) -> Figures:
    """The last rank asks for another number of parts: every rank refuses, and none hangs."""
    parts = 4 if rig.rank == rig.num_ranks - 1 else 2
    plain = _model(rig, Parallel())
    woven = _woven(rig, plain, weft.overlap(parts=parts, min_tokens=1), watchdog_s=WATCHDOG_S)
    start = time.perf_counter()
    try:
        woven(rig.tensor(8, 64))
    except PlanError as error:
        return {"error": str(error).splitlines()[0], "seconds": time.perf_counter() - start}
    raise CheckError("ranks with other plans ran on")


def faults(rig: Rig) -> Figures:
    """The last rank leaves in the middle: the others get an error of ours within seconds."""
    plain = _model(rig, Parallel())
    woven = _woven(rig, plain, weft.overlap(parts=2, min_tokens=1), watchdog_s=WATCHDOG_S)
    x = rig.tensor(8, 64)
    woven(x)
    if rig.rank == rig.num_ranks - 1:
        os._exit(0)
    start = time.perf_counter()
    try:
        for _ in range(3):
            woven(x)
            rig.synchronize()
    except WeftError as error:
        return {"error": str(error).splitlines()[0], "seconds": time.perf_counter() - start}
    raise CheckError("calls went on without the rank that had left")


TOGETHER: Mapping[str, Callable[[Rig], Figures]] = {
    check.__name__: check
    for check in (lanes, lifetimes, graphs, collectives, equality, noise, speed)
}
APART: Mapping[str, Callable[[Rig], Figures]] = {
    check.__name__: check for check in (agreement, faults)
}


def _model(rig: Rig, model: nn.Module) -> Any:
    """A model on its device, with weights that depend on the seed alone."""
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.1)
    return model.to(rig.device).eval().requires_grad_(False)


def _woven(rig: Rig, plain: nn.Module, strategy: Any, **options: Any) -> Any:
    return weft.compile(deepcopy(plain), strategy, machine=rig.machine, fallback="error", **options)


def _dense(rig: Rig) -> tuple[nn.Module, Tensor]:
    model = Dense(SIZES, rank=rig.rank, num_ranks=rig.num_ranks).eval().to(rig.device)
    x = inputs(model, 8, 64, SIZES.hidden, rank=rig.rank).to(rig.device)
    return model, x


def _timed(rig: Rig, call: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    with torch.no_grad():
        result = call(x)
    rig.synchronize()
    return result


def _race(rig: Rig, runs: Mapping[str, Callable[[], Tensor]]) -> dict[str, list[float]]:
    for run in runs.values():
        run()
    return race(
        dict(runs), order=Random(0), num_rounds=rig.num_pairs, num_calls=1, group=rig.side,
        on_round=lambda: None,
    )  # fmt: skip


def _composition(name: str, plain: Any, woven: Any, x: Tensor) -> Figures:
    """How far parts are from stock, and stock from itself under other batches."""
    whole = plain(x)
    others = [torch.cat([plain(part) for part in torch.split(x, rows)]) for rows in (1, 2, 5)]
    scale = float(whole.abs().max())
    stock = max(float((other - whole).abs().max()) for other in others)
    ours = float((woven(x) - whole).abs().max())
    room = max(stock, scale * torch.finfo(whole.dtype).eps)
    if not ours <= room:
        raise CheckError(
            f"{name} in {whole.dtype}: parts differ by {ours:.3g} from the whole batch, and stock "
            f"under other batches by {stock:.3g}"
        )
    return {"weft": ours, "stock": stock, "scale": scale}


def _same(result: Tensor, wanted: Tensor, what: str) -> None:
    if not torch.equal(result, wanted):
        raise CheckError(f"{what}: differs from eager by {_distance(result, wanted):.3g}")


def _close(result: Tensor, wanted: Tensor, what: str) -> None:
    if not _distance(result, wanted) <= 1e-4 * max(1.0, float(wanted.abs().max())):
        raise CheckError(f"{what}: differs from eager by {_distance(result, wanted):.3g}")


def _distance(result: Tensor, wanted: Tensor) -> float:
    if result.shape != wanted.shape:
        return float("inf")
    far = (result.double() - wanted.double()).abs().max()
    return float("inf") if bool(far.isnan()) else float(far)

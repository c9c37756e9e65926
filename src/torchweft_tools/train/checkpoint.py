"""The checkpoint: a training run as files, so that an interrupted run can be resumed.

FOLDER/policy.safetensors      the current policy
FOLDER/best.safetensors        the best policy so far, on the problems set aside
FOLDER/optimizer.safetensors   the state of the optimizer
FOLDER/training.json           settings, steps done, the curve
FOLDER/curve.svg               the curve as a picture
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, replace
from math import isfinite
from pathlib import Path

from safetensors.torch import save

from torchweft.errors import PlacementError, clip
from torchweft.files import write_bytes, write_json, write_text
from torchweft.placement.learn.policy import Policy, read_tensors
from torchweft_tools.formats.read_trees import Tree
from torchweft_tools.formats.reader import Reader, read_json
from torchweft_tools.train.training import Point, Settings, Trainer, moments, remember

VERSION = 1
RUN, POLICY, BEST = "training.json", "policy.safetensors", "best.safetensors"
OPTIMIZER, CURVE = "optimizer.safetensors", "curve.svg"


def save_run(folder: Path, trainer: Trainer, curve: Sequence[Point]) -> None:
    """Write the current state of the run; the file that names all others comes last.

    Raises `WeftError` if the folder cannot be written.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as cause:
        text = f"file: cannot make the folder {folder}: {cause.strerror}."
        raise PlacementError(text, rule="file") from None
    trainer.policy.save(folder / POLICY, seed=trainer.settings.seed, step=trainer.step)
    if curve and min(curve, key=lambda point: point.mean) is curve[-1]:
        trainer.policy.save(folder / BEST, seed=trainer.settings.seed, step=trainer.step)
    write_bytes(folder / OPTIMIZER, save(moments(trainer)))
    write_text(folder / CURVE, picture(curve))
    settings = {k: v for k, v in asdict(trainer.settings).items() if k != "trees"}
    settings["num_trees"] = len(trainer.settings.trees)
    run = {"weft_training": VERSION, "settings": settings, "step": trainer.step}
    write_json(folder / RUN, {**run, "curve": [list(point) for point in curve]})


def load_run(folder: Path, trees: Sequence[Tree]) -> tuple[Trainer, list[Point]]:
    """The run that a folder holds; `trees` must be those that it was started with.

    Raises `PlacementError` if there is none, or if it was started with other trees.
    """
    read = Reader(read_json(folder / RUN, PlacementError, "training"), PlacementError, "training")
    if read.take("weft_training", int, None) != VERSION:
        raise read.fail(f"this is not a training run of version {VERSION}.")
    fields = Reader(read.take("settings", dict), PlacementError, "settings")
    settings = Settings(
        seed=fields.take("seed", int),
        num_imitation=fields.take("num_imitation", int),
        num_steps=fields.take("num_steps", int),
        num_problems=fields.take("num_problems", int),
        num_tries=fields.take("num_tries", int),
        rate=fields.take("rate", float),
    )
    if (num_trees := fields.take("num_trees", int)) != len(trees):
        cure = f"the run draws from {num_trees} trees, not {len(trees)}; give the same --data."
        raise fields.fail(cure)
    fields.done()
    trainer = Trainer(replace(settings, trees=tuple(trees)), Policy.load(folder / POLICY))
    trainer.step = read.take("step", int)
    if not 0 <= trainer.step <= trainer.num_steps:
        raise read.fail(f"step must be from 0 to {trainer.num_steps}; got {clip(trainer.step)}.")
    try:
        curve = [Point(str(p[0]), int(p[1]), *map(float, p[2:])) for p in read.take("curve", list)]
        if not all(isfinite(number) for point in curve for number in point[1:]):
            raise ValueError("a point of its curve is not finite")
        remember(trainer, read_tensors(folder / OPTIMIZER, "optimizer")[0])
    except (OverflowError, TypeError, ValueError, LookupError) as cause:
        raise read.fail(f"it is damaged: {clip(cause)}.") from None
    read.done()
    return trainer, curve


def picture(curve: Sequence[Point], width: int = 720, height: int = 360) -> str:
    """The curve as SVG: mean ratio to the better of heft and peft, alone and with the guard."""
    if not curve:
        return '<svg xmlns="http://www.w3.org/2000/svg" width="1" height="1"/>\n'
    left, right, top, bottom = 60, 20, 40, 50
    numbers = [n for point in curve for n in (point.mean, point.guarded)] + [1.0]
    low, high = min(numbers) - 0.005, max(numbers) + 0.005
    last = max(1, curve[-1].step)

    def place(step: float, ratio: float) -> str:
        across = left + step / last * (width - left - right)
        down = top + (high - ratio) / (high - low) * (height - top - bottom)
        return f"{across:.1f},{down:.1f}"

    def line(which: str, colour: str) -> str:
        points = " ".join(place(point.step, getattr(point, which)) for point in curve)
        return f'<polyline fill="none" stroke="{colour}" stroke-width="2" points="{points}"/>'

    def text(across: float, down: float, words: str, colour: str = "#333") -> str:
        where = f'x="{across:.0f}" y="{down:.0f}" fill="{colour}"'
        return f'<text {where} font-family="sans-serif" font-size="12">{words}</text>'

    start, end = place(0, 1.0), place(last, 1.0)
    marks = [
        text(8, float(place(0, ratio).split(",")[1]) + 4, f"{ratio:.3f}")
        for ratio in (low + 0.005, 1.0, high - 0.005)
    ]
    head = f"mean makespan over the better of heft and peft, {curve[-1].step} steps"
    return "\n".join(
        (
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}">',
            '<rect width="100%" height="100%" fill="white"/>',
            f'<polyline stroke="#999" stroke-dasharray="4" points="{start} {end}"/>',
            line("mean", "#c0392b"),
            line("guarded", "#2471a3"),
            text(left, 24, head),
            text(left, height - 14, "policy, one pass", "#c0392b"),
            text(left + 130, height - 14, "with the guard", "#2471a3"),
            *marks,
            "</svg>\n",
        )
    )

"""The command `torchweft place train`: a policy learns, and goes on where it was broken off.

torchweft place train -o run                          drawn problems alone
torchweft place train -o run --data FOLDER            half of them trees of sst/train.txt
torchweft place train -o run --resume                 go on with the run in the folder
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated

import typer

from torchweft.cli_place import Json, bar
from torchweft.cli_place import app as place
from torchweft.cli_text import say, say_json
from torchweft.errors import PlacementError
from torchweft.placement.cases import sst_trees

EVERY = 25
"""Steps between two points of the curve."""
MAX_TREE = 64


@place.command("train")
def train_command(
    output: Annotated[Path, typer.Option("-o", "--output", help="folder of the run")],
    data: Annotated[
        Path | None, typer.Option("--data", envvar="WEFT_DATA", help="folder with sst/train.txt")
    ] = None,
    seed: Annotated[int, typer.Option("--seed")] = 0,
    steps: Annotated[int, typer.Option("--steps", min=1, help="of reinforcement")] = 600,
    imitation: Annotated[int, typer.Option("--imitation", min=0, help="steps of imitation")] = 10,
    resume: Annotated[bool, typer.Option("--resume", help="go on with the run there")] = False,
    as_json: Json = False,
) -> None:
    """Train a policy for the planners learned, guarded and guided, and draw its curve."""
    from torchweft.placement.checkpoint import BEST, CURVE, RUN, load_run, save_run
    from torchweft.placement.training import Settings, Trainer, held_out

    trees = tuple(t for t in sst_trees(data, "train") if len(t) <= MAX_TREE) if data else ()
    if resume:
        trainer, curve = load_run(output, trees)
    elif (output / RUN).exists():
        cure = "Go on with --resume, or take another folder."
        raise PlacementError(f"train: there is a run in {output}. {cure}", rule="train")
    else:
        settings = Settings(seed=seed, num_imitation=imitation, num_steps=steps, trees=trees)
        trainer, curve = Trainer(settings), []
    began_s = time.perf_counter()
    with bar("training", trainer.num_steps) as step:
        for _ in range(trainer.step):
            step()
        yardstick = held_out(trainer.settings)
        if not curve:
            curve.append(yardstick.measure(trainer.policy, "start", 0))
        while trainer.step < trainer.num_steps:
            stage = trainer.stage
            trainer.advance()
            step()
            if trainer.step % EVERY == 0 or trainer.step == trainer.num_steps:
                curve.append(yardstick.measure(trainer.policy, stage, trainer.step))
                save_run(output, trainer, curve)
    best = min(curve, key=lambda point: point.mean)
    took_s = time.perf_counter() - began_s
    if as_json:
        found = {"folder": str(output), "steps": trainer.step, "seconds": took_s}
        say_json({**found, "best": best._asdict(), "curve": [point._asdict() for point in curve]})
        return
    for point in curve:
        say(f"{point.step:>6}  {point.stage:<14} {point.mean:.4f}  worst {point.worst:.3f}  "
            f"guarded {point.guarded:.4f}")  # fmt: skip
    say(f"{took_s:.0f} s; best after {best.step} steps: {best.mean:.4f} of heft and peft's better")
    say(f"{output / BEST} and {output / CURVE}")

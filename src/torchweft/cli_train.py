"""The command `torchweft place train`: a policy learns, and goes on where it was broken off.

torchweft place train -o run                          drawn problems alone
torchweft place train -o run --data FOLDER            half of them trees of sst/train.txt
torchweft place train -o run --resume                 go on with the run in the folder
torchweft place train -o run --from-traces FOLDER     fine-tune a policy on served runs
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from torchweft.cli_place import Json, bar
from torchweft.cli_place import app as place
from torchweft.cli_text import say, say_json
from torchweft.errors import PlacementError
from torchweft.files import write_text
from torchweft.placement.cases import sst_trees
from torchweft.placement.served import problems_in

if TYPE_CHECKING:
    from torchweft.placement.training import Point

EVERY = 25
"""Steps between two points of the curve."""
MAX_TREE = 96


@place.command("train")
def train_command(
    output: Annotated[Path, typer.Option("-o", "--output", help="folder of the run")],
    data: Annotated[
        Path | None, typer.Option("--data", envvar="WEFT_DATA", help="folder with sst/train.txt")
    ] = None,
    seed: Annotated[int, typer.Option("--seed")] = 0,
    steps: Annotated[
        int | None, typer.Option("--steps", min=1, help="of reinforcement: 600; on traces: 50")
    ] = None,
    imitation: Annotated[int, typer.Option("--imitation", min=0, help="steps of imitation")] = 10,
    resume: Annotated[bool, typer.Option("--resume", help="go on with the run there")] = False,
    from_traces: Annotated[
        Path | None, typer.Option("--from-traces", help="fine-tune on the served runs of a folder")
    ] = None,
    policy: Annotated[
        Path | None, typer.Option("--policy", help="fine-tune this one, not the package's")
    ] = None,
    as_json: Json = False,
) -> None:
    """Train a policy for the planners learned, guarded and guided, and draw its curve."""
    if from_traces is not None:
        return _tune(output, from_traces, policy, steps or 50, seed, resume, as_json)
    if policy is not None:
        raise PlacementError("train: --policy goes with --from-traces.", rule="train")
    from torchweft.placement.checkpoint import RUN, load_run, save_run
    from torchweft.placement.training import Settings, Trainer, held_out

    trees = tuple(t for t in sst_trees(data, "train") if len(t) <= MAX_TREE) if data else ()
    if resume:
        trainer, curve = load_run(output, trees)
    elif (output / RUN).exists():
        cure = "Go on with --resume, or take another folder."
        raise PlacementError(f"train: there is a run in {output}. {cure}", rule="train")
    else:
        settings = Settings(seed=seed, num_imitation=imitation, num_steps=steps or 600, trees=trees)
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
    _told(output, curve, time.perf_counter() - began_s, as_json)
    return None


def _tune(
    output: Path,
    folder: Path,
    policy: Path | None,
    num_steps: int,
    seed: int,
    resume: bool,
    as_json: bool,
) -> None:
    """Stage 3. Every fifth run is set aside, to measure on; of fewer than five, none."""
    from torchweft.placement.checkpoint import BEST, CURVE, picture
    from torchweft.placement.learned import POLICY
    from torchweft.placement.learner import one_thread
    from torchweft.placement.policy import Policy
    from torchweft.placement.training import Yardstick, fine_tune

    if (output / BEST).exists() and not resume:
        cure = "Go on from it with --resume, or take another folder."
        raise PlacementError(f"train: there is a policy in {output}. {cure}", rule="train")
    began_s = time.perf_counter()
    problems = problems_in(folder)
    tuned = Policy.load(policy or (output / BEST if resume else POLICY))
    yardstick = Yardstick(problems[4::5] or problems)
    kept = [problem for at, problem in enumerate(problems) if at % 5 != 4]
    curve = [yardstick.measure(tuned, "start", 0)]
    output.mkdir(parents=True, exist_ok=True)
    tuned.save(output / BEST, seed=seed, fine_tuned=0)
    with one_thread(), bar("fine-tuning", num_steps) as step:
        for at, _ in enumerate(fine_tune(tuned, kept, num_steps=num_steps, seed=seed), 1):
            step()
            if at % EVERY == 0 or at == num_steps:
                curve.append(yardstick.measure(tuned, "fine-tuning", at))
                if min(curve, key=lambda point: point.mean) is curve[-1]:
                    tuned.save(output / BEST, seed=seed, fine_tuned=at)
    write_text(output / CURVE, picture(curve))
    _told(output, curve, time.perf_counter() - began_s, as_json)


def _told(output: Path, curve: Sequence[Point], took_s: float, as_json: bool) -> None:
    from torchweft.placement.checkpoint import BEST, CURVE

    best = min(curve, key=lambda point: point.mean)
    if as_json:
        found = {"folder": str(output), "steps": curve[-1].step, "seconds": took_s}
        say_json({**found, "best": best._asdict(), "curve": [point._asdict() for point in curve]})
        return
    for point in curve:
        say(f"{point.step:>6}  {point.stage:<14} {point.mean:.4f}  worst {point.worst:.3f}  "
            f"guarded {point.guarded:.4f}")  # fmt: skip
    say(f"{took_s:.0f} s; best after {best.step} steps: {best.mean:.4f} of heft and peft's better")
    say(f"{output / BEST} and {output / CURVE}")

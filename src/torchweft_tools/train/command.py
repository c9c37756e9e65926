"""The command `torchweft place train`: trains a policy, or resumes an interrupted training.

torchweft place train -o run                          drawn problems alone
torchweft place train -o run --data FOLDER            half of them trees of sst/train.txt
torchweft place train -o run --resume                 resume the run in the folder
torchweft place train -o run --from-traces FOLDER     fine-tune a policy on served runs
torchweft place plan --graph FILE --planner learned --policy run/best.safetensors
"""

from __future__ import annotations

import copy
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from torchweft.errors import PlacementError
from torchweft.files import write_text
from torchweft_tools.cli.place import app as place
from torchweft_tools.cli.place import bar
from torchweft_tools.cli.text import Json, say, say_json
from torchweft_tools.formats.read_trees import Tree
from torchweft_tools.train.cases import problems_in, sst_trees

if TYPE_CHECKING:
    from torchweft_tools.train.training import Point, Trainer

__all__ = ["place"]

EVERY = 25
"""Steps between two points of the curve."""
MAX_TREE = 64
NUM_STEPS, NUM_IMITATION, NUM_TUNED = 1500, 5, 50


@place.command("train")
def train_command(
    output: Annotated[
        Path, typer.Option("-o", "--output", help="folder of the run: policies, curve, state")
    ],
    data: Annotated[
        Path | None,
        typer.Option("--data", envvar="WEFT_DATA", help="folder with sst/train.txt, for its trees"),
    ] = None,
    seed: Annotated[
        int | None, typer.Option("--seed", min=0, max=2**62, help="random seed [0]")
    ] = None,
    steps: Annotated[
        int | None,
        typer.Option("--steps", min=1, help=f"[{NUM_STEPS}; on served runs: {NUM_TUNED}]"),
    ] = None,
    imitation: Annotated[
        int | None, typer.Option("--imitation", min=0, help=f"imitation steps [{NUM_IMITATION}]")
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="resume the run in the folder")] = False,
    from_traces: Annotated[
        Path | None, typer.Option("--from-traces", help="fine-tune on the served runs of a folder")
    ] = None,
    policy: Annotated[
        Path | None, typer.Option("--policy", help="fine-tune this policy, not the package's")
    ] = None,
    as_json: Json = False,
) -> None:
    """Train a policy for the planners learned, guarded and guided, and draw its curve.

    First it imitates plans that annealing found, then it learns by trying, on problems drawn again
    at every step. The folder gets best.safetensors (the best policy on problems set aside),
    curve.svg (its makespan there, against the better of heft and peft) and what --resume needs.
    """
    from torchweft_tools.train.checkpoint import load_run

    if from_traces is not None:
        return _tune(output, from_traces, policy, steps or NUM_TUNED, seed or 0, resume, as_json)
    if policy is not None:
        raise PlacementError("train: --policy needs --from-traces.", rule="train")
    trees = _trees(data)
    if resume:
        if (seed, steps, imitation) != (None, None, None):
            text = "--resume keeps the settings of the run; leave out --seed, --steps and"
            raise PlacementError(f"train: {text} --imitation.", rule="train")
        trainer, curve = load_run(output, trees)
    else:
        trainer, curve = _started(output, trees, seed, steps, imitation)
    began_s = time.perf_counter()
    _train(output, trainer, curve)
    _print_result(output, curve, time.perf_counter() - began_s, as_json)
    return None


def _trees(data: Path | None) -> tuple[Tree, ...]:
    """The trees to train on; none without data. Raises `PlacementError` for data without them."""
    if data is None:
        return ()
    if trees := tuple(tree for tree in sst_trees(data, "train") if len(tree) <= MAX_TREE):
        return trees
    text = f"there are no trees in {data / 'sst' / 'train.txt'}"
    cure = "--data (or WEFT_DATA) must name a folder with that file; leave it out to draw problems"
    raise PlacementError(f"data: {text}. {cure}.", rule="data")


def _started(
    output: Path,
    trees: tuple[Tree, ...],
    seed: int | None,
    steps: int | None,
    imitation: int | None,
) -> tuple[Trainer, list[Point]]:
    from torchweft_tools.train.checkpoint import RUN
    from torchweft_tools.train.training import Settings, Trainer

    if (output / RUN).exists():
        cure = "Resume it with --resume, or choose another folder."
        raise PlacementError(f"train: there is a run in {output}. {cure}", rule="train")
    settings = Settings(
        seed=seed or 0,
        num_imitation=NUM_IMITATION if imitation is None else imitation,
        num_steps=steps or NUM_STEPS,
        trees=trees,
    )
    return Trainer(settings), []


def _train(output: Path, trainer: Trainer, curve: list[Point]) -> None:
    """Do the remaining steps. The run is saved at every point of the curve."""
    from torchweft_tools.train.checkpoint import save_run
    from torchweft_tools.train.training import held_out

    with bar("training", trainer.num_steps) as step:
        for _ in range(trainer.step):
            step()
        yardstick = held_out(trainer.settings)
        if not curve:
            curve.append(yardstick.measure(trainer.policy, "start", 0))
            save_run(output, trainer, curve)  # fail now if the folder cannot be written
        while trainer.step < trainer.num_steps:
            stage = trainer.stage
            trainer.advance()
            step()
            if trainer.step % EVERY == 0 or trainer.step == trainer.num_steps:
                curve.append(yardstick.measure(trainer.policy, stage, trainer.step))
                save_run(output, trainer, curve)


def _tune(
    output: Path,
    folder: Path,
    policy: Path | None,
    num_steps: int,
    seed: int,
    resume: bool,
    as_json: bool,
) -> None:
    """Stage 3. Every fifth run is set aside for measuring, if there are five or more."""
    from torchweft.placement.learn.learner import one_thread
    from torchweft.placement.learn.policy import Policy, default_policy
    from torchweft_tools.train.checkpoint import BEST, CURVE, picture
    from torchweft_tools.train.training import Yardstick, fine_tune

    if (output / BEST).exists() and not resume:
        cure = "Start from it with --resume, or choose another folder."
        raise PlacementError(f"train: there is a policy in {output}. {cure}", rule="train")
    began_s = time.perf_counter()
    problems = problems_in(folder)
    start = policy or (output / BEST if resume else None)
    tuned = copy.deepcopy(default_policy()) if start is None else Policy.load(start)
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
    _print_result(output, curve, time.perf_counter() - began_s, as_json)


def _print_result(output: Path, curve: Sequence[Point], took_s: float, as_json: bool) -> None:
    from torchweft_tools.train.checkpoint import BEST, CURVE

    best = min(curve, key=lambda point: point.mean)
    if as_json:
        facts = {"folder": str(output), "steps": curve[-1].step, "seconds": took_s}
        say_json({**facts, "best": best._asdict(), "curve": [point._asdict() for point in curve]})
        return
    for point in curve:
        say(f"{point.step:>6}  {point.stage:<14} {point.mean:.4f}  worst {point.worst:.3f}  "
            f"guarded {point.guarded:.4f}")  # fmt: skip
    say(f"{took_s:.0f} s; best after {best.step} steps: {best.mean:.4f} of heft and peft's better")
    say(f"{output / BEST} and {output / CURVE}")

"""The command `torchweft dryrun`: a command line comes in, and runs on devices that are not there.

    torchweft dryrun --devices 8 --calls calls.json -- torchrun --nproc-per-node 8 serve.py

Its exit code is the command's; 1 if the command ended well and something was found. Advice does not
count.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from torchweft_tools.dryrun.calls import read_calls, save_calls
from torchweft_tools.dryrun.check import check
from torchweft_tools.dryrun.run import run
from torchweft_tools.dryrun.show import report


def dryrun(
    command: Annotated[
        list[str] | None, typer.Argument(metavar="COMMAND", help="with its own words behind it")
    ] = None,
    devices: Annotated[int, typer.Option(help="CUDA devices that each process sees")] = 1,
    calls: Annotated[
        Path | None, typer.Option(help="write the recorded calls to this file")
    ] = None,
    events: Annotated[
        str, typer.Option(help="lazy: ready when the host has waited; eager")
    ] = "lazy",
    patience: Annotated[
        float, typer.Option(help="seconds to wait for a rank where the host needs its data")
    ] = 60.0,
    lines: Annotated[int, typer.Option(min=1, help="of the timeline")] = 60,
) -> None:
    """Run a PyTorch program for CUDA without a device: streams, collectives, waits and findings."""
    outcome = run(command or (), devices=devices, events=events, patience_s=patience)
    if calls is not None:
        save_calls(calls, outcome.ranks)
    ranks = read_calls(outcome.ranks)
    faults = check(ranks)
    print(report(ranks, faults, max_lines=lines))
    wrong = any(not fault.is_advice for fault in faults)
    raise typer.Exit(outcome.code or int(wrong))

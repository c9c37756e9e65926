"""The commands `torchweft lab`, `dryrun`, `selftest` and `demo`.

    torchweft lab run --link 1gbit -- torchrun --nproc-per-node 2 script.py
    torchweft dryrun --devices 8 --calls calls.json -- torchrun --nproc-per-node 8 serve.py

The exit code is that of the command that was run; 127 means that there is no such command. A dry
run exits with 1 if the command itself succeeded but mistakes were found. Advice does not count.
"""

from __future__ import annotations

import json
from importlib import import_module
from pathlib import Path
from typing import Annotated

import typer

from torchweft import lab
from torchweft_tools.cli.text import Json, bar, say, say_json
from torchweft_tools.dryrun.calls import read_calls, save_calls
from torchweft_tools.dryrun.check import check
from torchweft_tools.dryrun.run import run
from torchweft_tools.dryrun.show import report

AS_IS = {"allow_interspersed_args": False}  # what follows the command belongs to the command
lab_app = typer.Typer(no_args_is_help=True, help="Run a command over a link of a chosen rate.")
Words = Annotated[
    list[str] | None, typer.Argument(metavar="COMMAND", help="the command to run, with arguments")
]


@lab_app.callback()
def _lab() -> None:
    """Run a command over a link of a chosen rate."""


@lab_app.command("run", context_settings=AS_IS)
def lab_command(
    command: Words = None,
    link: Annotated[str, typer.Option(help="such as 500mbit or 2.5gbit, or none")] = "1gbit",
    duplex: Annotated[
        str, typer.Option(help="half: directions share the rate; full: two sides, as two nodes")
    ] = "",
    require: Annotated[
        bool, typer.Option("--require", help="fail where the link cannot be limited")
    ] = False,
) -> None:
    """Run a command over a limited link, in a private network namespace; needs no root."""
    wanted = lab.LabLink.parse(link, duplex or None)
    raise typer.Exit(lab.run(command or (), link=wanted, require=require))


def dryrun_command(
    command: Words = None,
    devices: Annotated[int, typer.Option(help="CUDA devices that each process sees")] = 1,
    calls: Annotated[
        Path | None, typer.Option(help="write the recorded calls to this file")
    ] = None,
    events: Annotated[
        str, typer.Option(help="when events are ready. lazy: once the host has waited; eager: now")
    ] = "lazy",
    patience: Annotated[
        float, typer.Option(help="seconds to wait for a rank where the host needs its data")
    ] = 60.0,
    lines: Annotated[int, typer.Option(min=1, help="lines of the timeline")] = 60,
) -> None:
    """Run a PyTorch program for CUDA without a device: streams, collectives, waits and findings."""
    outcome = run(command or (), devices=devices, events=events, patience_s=patience)
    if calls is not None:
        save_calls(calls, outcome.ranks)
    ranks = read_calls(outcome.ranks)
    faults = check(ranks)
    code = outcome.code
    print(report(ranks, faults, max_lines=lines, code=code))
    wrong = any(not fault.is_advice for fault in faults)
    raise typer.Exit((128 - code if code < 0 else code) or int(wrong))  # as a shell tells signals


def selftest_command(
    device: Annotated[str, typer.Option(help="cpu or cuda")] = "cpu",
    ranks: Annotated[int, typer.Option(help="processes that take part, one a device")] = 2,
    dryrun: Annotated[
        bool, typer.Option("--dryrun", help="no device: judge what would be asked of one")
    ] = False,
    only: Annotated[str, typer.Option(help="names of checks, with commas between")] = "",
    pairs: Annotated[int, typer.Option(min=3, help="timed rounds of each race")] = 30,
    bundle: Annotated[Path | None, typer.Option(help="write all outcomes to this file")] = None,
    as_json: Json = False,
) -> None:
    """Try this node: lanes, lifetimes, graphs, agreement, faults, equal numbers, noise, speed."""
    selftest = import_module("torchweft_tools.selftest.selftest")
    chosen = [word.strip() for word in only.split(",") if word.strip()]
    with bar("selftest") as progress:
        outcomes = selftest.run(
            device=device, num_ranks=ranks, dryrun=dryrun, only=chosen, num_pairs=pairs,
            progress=progress,
        )  # fmt: skip
    if bundle is not None:
        bundle.write_text(json.dumps(outcomes, indent=1) + "\n", encoding="utf-8")
    if as_json:
        say_json(outcomes)
    else:
        say(selftest.summary(outcomes))
    raise typer.Exit(int(bool(outcomes["failed"])))


def demo_command(
    folder: Annotated[Path | None, typer.Option(help="save a trace here, for Perfetto")] = None,
    quick: Annotated[bool, typer.Option("--quick", help="only what needs no torch")] = False,
    race: Annotated[bool, typer.Option(help="two ranks over a link: two minutes more")] = True,
) -> None:
    """Plan, simulate and draw a transformer; run small models; race two ranks over a link."""
    for text in import_module("torchweft_tools.demo.demo").story():
        say(text)
    if not quick:
        for text in import_module("torchweft_tools.demo.run").story(folder):
            say(text)
    if race and not quick:
        for text in import_module("torchweft_tools.demo.race").story():
            say(text)

"""The commands `torchweft lab ...`: a command line comes in, and runs over a limited link.

    torchweft lab run --link 1gbit -- torchrun --nproc-per-node 2 script.py
    torchweft lab run --link 1gbit --duplex full -- torchrun --nproc-per-node 1 script.py

Its exit code is the command's; 127: there is no such command.
"""

from __future__ import annotations

from typing import Annotated

import typer

from torchweft import lab

app = typer.Typer(no_args_is_help=True, help="Run a command over a link of a chosen rate.")


@app.callback()
def _lab() -> None:
    """Run a command over a link of a chosen rate."""


@app.command("run", context_settings={"allow_interspersed_args": False})
def run_command(
    command: Annotated[
        list[str] | None, typer.Argument(metavar="COMMAND", help="with its own words behind it")
    ] = None,
    link: Annotated[str, typer.Option(help="such as 500mbit or 2.5gbit, or none")] = "1gbit",
    duplex: Annotated[
        str, typer.Option(help="half: directions share the rate; full: two sides, as two nodes")
    ] = "",
    require: Annotated[
        bool, typer.Option("--require", help="an error where the link cannot be limited")
    ] = False,
) -> None:
    """Run a command over a limited link, in a private network namespace; needs no root."""
    wanted = lab.LabLink.parse(link, duplex or None)
    raise typer.Exit(lab.run(command or (), link=wanted, require=require))

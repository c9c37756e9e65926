"""What one rank of a fault case does; see test_faults.py. Says one JSON object a line."""

from __future__ import annotations

import json
import os
import threading
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

import torchweft as weft

WIDE = 64
options: dict = {}
rank = 0
slow_s = 0.0
angry = False


def say(at: str, **more: object) -> None:
    with Path(options["said"]).open("a") as file:
        file.write(json.dumps({"at": at, "when": time.time(), **more}) + "\n")


@torch.library.custom_op("faults::touch", mutates_args=())
def touch(x: torch.Tensor) -> torch.Tensor:
    time.sleep(slow_s)
    if angry:
        raise ValueError("this op does not like it")
    return x + 1


@touch.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


class Shard(nn.Module):
    """A few row-parallel layers."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDE, WIDE, bias=False) for _ in range(3))

    def forward(self, x):
        for layer in self.layers:
            y = layer(touch(x)) * 0.01
            dist.all_reduce(y)
            x = x + y
        return x


class Mesh(nn.Module):
    """A sum over the rows of a 2 x 2 mesh of ranks, then one over its columns."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDE, WIDE, bias=False)
        groups = {ranks: dist.new_group(ranks) for ranks in ((0, 1), (2, 3), (0, 2), (1, 3))}
        self.row, self.column = [group for ranks, group in groups.items() if rank in ranks]

    def forward(self, x):
        y = self.layer(touch(x)) * 0.01
        dist.all_reduce(y, group=self.row)
        z = y * 0.01
        dist.all_reduce(z, group=self.column)
        return z


class Exchange(nn.Module):
    """What each rank makes goes to the other; the one that is slow keeps the other waiting."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDE, WIDE, bias=False)

    def forward(self, x):
        y, buffer = self.layer(touch(x)) * 0.01, torch.empty_like(x)
        sent, received = dist.isend(y, 1 - rank), dist.irecv(buffer, 1 - rank)
        received.wait()
        sent.wait()
        return buffer + x


def sockets() -> int:
    """Connections to the peer that are still open."""
    ours = {str(f.readlink()) for f in Path("/proc/self/fd").iterdir() if os.path.lexists(f)}
    lines = Path("/proc/self/net/tcp").read_text().splitlines()[1:]
    established = {f"socket:[{line.split()[9]}]" for line in lines if line.split()[3] == "01"}
    return len(ours & established)


def attempt(model: nn.Module, x: torch.Tensor, at: str = "failed", times: int = 1) -> bool:
    """Call, and say how it failed; whether it went well."""
    began = time.time()
    try:
        for _ in range(times):
            model(x)
    except BaseException as error:
        rule = getattr(error, "rule", "")
        took_s = time.time() - began
        say(at, kind=type(error).__name__, text=str(error), rule=rule, took_s=took_s)
        return False
    return True


def compiled(parts: int = 2, **more: object) -> nn.Module:
    torch.manual_seed(0)
    more = {"rules": [], "watchdog_s": options.get("watchdog_s", 60.0), **more}
    return weft.compile(Shard().eval(), weft.overlap(parts=parts), **more)


def loop(model, x):
    """Calls without end, until the peer is gone."""
    if attempt(model, x):
        say("looping")
        attempt(model, x, times=10**9)
    attempt(model, x, "again")


def mesh(model, x):
    loop(weft.compile(Mesh().eval(), weft.overlap(), watchdog_s=options["watchdog_s"]), x)


def messages(model, x):
    """Rank 1 is killed, or stopped, in the midst of a call: rank 0 waits for its message."""
    global slow_s
    watchdog_s = options.get("watchdog_s", 60.0)
    model = weft.compile(Exchange().eval(), weft.overlap(), watchdog_s=watchdog_s)
    model(x)
    slow_s = 1.0 if rank == 1 else 0.0
    loop(model, x)


def slow(model, x):
    global slow_s
    model(x)
    slow_s = 3.0 if rank == 1 else 0.0
    attempt(model, x)
    attempt(model, x, "again")


def raising(model, x):
    global angry
    for _ in range(3):
        model(x)
    angry = rank == 1
    attempt(model, x)
    attempt(model, x, "again")


def refuse(model, x):
    """At the fourth call the strategy of rank 1 has nothing to say; then it has again."""
    model = compiled(fallback="error" if rank == 1 else "sequential")
    for _ in range(3):
        model(x)
    few = x[:3] if rank == 1 else x[:4]
    with weft.context(strategy=weft.overlap(parts=2 if rank == 0 else 7)):
        attempt(model, few)
    say("recovered", well=attempt(model, x))


def disagree(model, x):
    for _ in range(2):
        model(x)
    if rank == 1:  # cold, and of another mind
        torch._dynamo.reset()
        strategy = "sequential" if options["other"] == "sequential" else weft.overlap(parts=4)
        weft.compile(model, strategy)
    attempt(model, x)


def cold(model, x):
    for _ in range(2):
        model(x)
    if rank == 1:
        torch._dynamo.reset()
        weft.compile(model, weft.overlap(parts=2))
    if attempt(model, x, times=2):
        say("went on")


def threads(model, x):
    global slow_s
    model(x)
    slow_s = 0.3
    thread = threading.Thread(target=torch.no_grad()(model), args=(x,))
    thread.start()
    time.sleep(0.1)
    attempt(model, x, "second")
    thread.join()


def interrupt(model, x):
    global slow_s
    model(x)
    slow_s = 3.0 if rank == 1 else 0.0
    say("waiting")
    attempt(model, x)
    attempt(model, x, "again")


def interrupt_message(model, x):
    """Rank 0 waits for a message that rank 1 has yet to make; it is interrupted, and lives on."""
    global slow_s
    model = weft.compile(Exchange().eval(), weft.overlap(), watchdog_s=60.0)
    for _ in range(3):
        model(x)
    slow_s = 8.0 if rank == 1 else 0.0
    say("waiting")
    attempt(model, x)
    attempt(model, x, "again")


CASES = {
    "loop": loop, "slow": slow, "raise": raising, "refuse": refuse, "disagree": disagree,
    "mesh": mesh, "cold": cold, "threads": threads, "interrupt": interrupt,
    "messages": messages, "interrupt_message": interrupt_message,
}  # fmt: skip


def main(number: int, port: int, told: dict) -> None:
    """One rank, in a process of its own."""
    global options, rank
    options, rank = told, number
    with Path(f"{options['said']}.errors").open("w") as errors:
        os.dup2(errors.fileno(), 2)
    os.environ |= {"GLOO_SOCKET_IFNAME": "lo", "MASTER_ADDR": "127.0.0.1"}
    os.environ |= {"MASTER_PORT": str(port), "RANK": str(rank)}
    os.environ["WORLD_SIZE"] = str(options["size"])
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    dist.barrier()
    before = sockets()
    model, x = compiled(), torch.ones(16, WIDE)
    say("compiling")
    with torch.no_grad():
        CASES[options["case"]](model, x)
    time.sleep(0.2)
    say("left", sockets=sockets() - before)
    dist.destroy_process_group()

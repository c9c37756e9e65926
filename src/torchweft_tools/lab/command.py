"""A command in the lab: a command line and a link come in; a running command goes out.

The lab process starts `inside.py`, in namespaces of its own if the link is limited, and holds one
end of a pipe to it. Each byte in the pipe is a signal for the command. When the pipe closes, for
whatever reason, the command and everything that it started are ended:

    lab --pipe--> unshare --> inside (process 1 of its namespace) --> the command, or its ranks
"""

from __future__ import annotations

import json
import logging
import os
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

from torchweft.errors import MachineError, WeftError
from torchweft_tools.lab.link import LabLink

log = logging.getLogger("torchweft")

INSIDE = Path(__file__).with_name("inside.py")
TOOLS = ("unshare", "ip", "tc")
SBIN = ("/usr/sbin", "/sbin")  # where ip and tc are; not on every user's PATH
SIGNALS = tuple(
    getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name)
)
FROM_TERMINAL = 0x80  # si_code SI_KERNEL: a Ctrl-C, which the terminal has given to the command too
LOOK_S = 0.5  # poll this often: another thread of ours may have received SIGCHLD
GRACE_S = 5.0  # how long the others may take to end when one has failed
FIRST, PORT = "10.77.0.1", 29500

# Ways into the namespaces, the best first. With a process namespace, the kernel itself ends what
# is left; it needs its own /proc, or process ids inside and outside would disagree.
_PROCESSES = ("--pid", "--fork", "--kill-child", "--mount-proc")
WAYS = (("-Ur", "--net", "--mount", *_PROCESSES), ("-Ur", "--net", "--mount"))
ROOT_WAY = ("--net", "--mount", *_PROCESSES)  # where user namespaces are forbidden even to root


class Command:
    """A command that runs in the lab; leaving its `with` ends it and all that it started."""

    def __init__(self, link: LabLink, way: Sequence[str], spec: dict[str, Any], **options: Any):
        self.link = link
        reader, writer = os.pipe()
        self._control = os.fdopen(writer, "wb", buffering=0)
        words = [*way, sys.executable, "-I", "-S", str(INSIDE), str(reader)]
        os.set_inheritable(reader, True)
        try:
            with _blocked():  # or a signal could end unshare before it starts the command
                self._process = subprocess.Popen(words, close_fds=False, text=True, **options)
        except BaseException:
            self._control.close()
            raise
        finally:
            os.close(reader)
        with suppress(BrokenPipeError):
            self._control.write(json.dumps(spec).encode() + b"\n")

    @property
    def label(self) -> str:
        """The link that it really runs over, as text to print with its results."""
        return self.link.label

    @property
    def stdout(self) -> IO[str]:
        """The lines it prints (of ranks: those of rank 0), if it was started with a pipe."""
        assert self._process.stdout is not None, "not started with stdout=PIPE"
        return self._process.stdout

    def poll(self) -> int | None:
        """Its exit code, or None while it runs."""
        code = self._process.poll()
        return 128 - code if code is not None and code < 0 else code

    def wait(self, timeout_s: float | None = None) -> int:
        """Wait until it ends; its exit code, or 128 + N if signal N ended it.

        Of several ranks, the first that failed decides.

        Raises `subprocess.TimeoutExpired` if it still runs.
        """
        code = self._process.wait(timeout_s)
        return 128 - code if code < 0 else code

    def send_signal(self, number: int) -> None:
        """Send a signal to all of its processes."""
        with suppress(BrokenPipeError, ValueError):
            self._control.write(bytes([number]))

    def close(self) -> None:
        """End it if it still runs, and everything that it started."""
        self._control.close()
        self._process.wait()
        if self._process.stdout is not None:
            self._process.stdout.close()

    def __enter__(self) -> Command:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def check(link: str = "1gbit") -> str:
    """The reason why links cannot be limited here; empty if they can."""
    return _find_way(LabLink.parse(link))[1]


def start(
    argv: Sequence[str],
    *,
    link: str | LabLink,
    env: Mapping[str, str] | None = None,
    stdout: int | IO[Any] | None = None,
    require: bool = False,
) -> Command:
    """Start a command over a link. Full duplex starts it on both sides, as two torchrun nodes.

    `env` is added to the environment. Where the link cannot be limited, `require=True` raises
    `MachineError`; otherwise the reason is logged and the command runs over plain loopback.
    """
    wanted = LabLink.parse(link) if isinstance(link, str) else link
    way, granted = _way(wanted, require=require)
    if wanted.duplex == "half":
        members = [_member(0, {})]
    else:
        address, port = _meeting_point(granted)
        common = {"MASTER_ADDR": address, "PET_MASTER_ADDR": address, "PET_NNODES": "2"}
        common |= {"MASTER_PORT": port, "PET_MASTER_PORT": port}
        sides = [{"NODE_RANK": str(side), "PET_NODE_RANK": str(side)} for side in (0, 1)]
        members = [_member(side, {**common, **sides[side]}) for side in (0, 1)]
    return _launch(argv, granted, way, members, env, stdout=stdout)


def spawn_ranks(
    argv: Sequence[str],
    *,
    link: str | LabLink,
    num_ranks: int = 2,
    env: Mapping[str, str] | None = None,
    require: bool = False,
) -> Command:
    """Start a command as several ranks over a link, without torchrun.

    Each gets RANK, LOCAL_RANK, WORLD_SIZE, LOCAL_WORLD_SIZE, MASTER_ADDR and MASTER_PORT.
    `stdout` gives what rank 0 prints; what the others print goes to stderr. If a rank fails, the
    others are ended a few seconds later, and `wait` returns the exit code of that rank.
    """
    if num_ranks < 1:
        raise WeftError(f"lab: num_ranks must be 1 or more; got {num_ranks}.")
    wanted = LabLink.parse(link) if isinstance(link, str) else link
    way, granted = _way(wanted, require=require)
    num_sides = 2 if granted.bits_per_s and granted.duplex == "full" else 1
    address, port = _meeting_point(granted)
    side_of = [rank * num_sides // num_ranks for rank in range(num_ranks)]
    members = []
    for rank, side in enumerate(side_of):
        places = {"RANK": rank, "LOCAL_RANK": rank - side_of.index(side)}
        sizes = {"WORLD_SIZE": num_ranks, "LOCAL_WORLD_SIZE": side_of.count(side)}
        variables = {name: str(number) for name, number in {**places, **sizes}.items()}
        variables |= {"MASTER_ADDR": address, "MASTER_PORT": port}
        members.append(_member(side, variables, quiet=rank > 0))
    options = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE}
    return _launch(argv, granted, way, members, env, **options)


def run(argv: Sequence[str], *, link: str | LabLink, require: bool = False) -> int:
    """Run a command in this terminal until it ends, and pass signals on; its exit code."""
    signals = {number for number in SIGNALS if signal.getsignal(number) != signal.SIG_IGN}
    with start(argv, link=link, require=require) as command, _blocked(*signals, signal.SIGCHLD):
        while sys.platform == "linux" and command.poll() is None:
            got = signal.sigtimedwait({*signals, signal.SIGCHLD}, LOOK_S)
            if got is None or got.si_signo not in signals:
                continue
            if got.si_signo != signal.SIGINT or got.si_code != FROM_TERMINAL:
                command.send_signal(got.si_signo)
        return command.wait()


def _way(wanted: LabLink, *, require: bool) -> tuple[Sequence[str], LabLink]:
    """The words in front of the command, and the link it really gets."""
    if sys.platform == "win32":
        raise MachineError(
            "lab: commands cannot run here: the lab ends their processes by signals, which Windows "
            "does not have. Use Linux, or macOS for plain loopback.",
            rule="system",
        )
    way, reason = _find_way(wanted)
    if not reason:
        return way, wanted
    if require:
        raise MachineError(f"lab: no link limit: {reason}.", rule="lab")
    log.warning("lab: no link limit: %s; runs over plain loopback", reason)
    return (), LabLink(0, wanted.duplex)


def _find_way(link: LabLink) -> tuple[Sequence[str], str]:
    """A way into namespaces with this link, tried for real, or the reason why there is none."""
    if not link.bits_per_s:
        return (), ""
    if sys.platform != "linux":
        return (), f"network namespaces need Linux, and this is {sys.platform}"
    missing = [tool for tool in TOOLS if _tool(tool) is None]
    if missing:
        verb = "are" if len(missing) > 1 else "is"
        return (), f"{' and '.join(missing)} {verb} not installed"
    reason = ""
    for flags in (*WAYS, ROOT_WAY) if os.geteuid() == 0 else WAYS:
        way = (str(_tool("unshare")), *flags)
        empty = {"stdin": subprocess.DEVNULL, "stdout": subprocess.DEVNULL}
        with Command(link, way, _spec(link, [], []), **empty, stderr=subprocess.PIPE) as probe:
            _, said = probe._process.communicate()
            if probe.wait() == 0:
                return way, ""
        lines = said.strip().splitlines() or ["refused without a message"]
        why = lines[-1].replace("unshare: unshare failed:", "the kernel refuses namespaces:")
        reason = reason or why.removeprefix("lab: ").rstrip(".")
    return (), reason


def _launch(
    argv: Sequence[str],
    link: LabLink,
    way: Sequence[str],
    members: list[dict[str, Any]],
    env: Mapping[str, str] | None,
    **options: Any,
) -> Command:
    words = [str(word) for word in argv]
    if not words or not words[0]:
        cure = "Give one, such as: torchweft lab run --link 1gbit -- torchrun train.py"
        raise WeftError(f"lab: there is no command to run. {cure}", rule="lab")
    variables = {**os.environ, **(env or {}), "WEFT_LINK": link.label}
    if sys.platform == "linux":
        joined = bool(link.bits_per_s) and link.duplex == "full"
        variables.setdefault("GLOO_SOCKET_IFNAME", "weft0" if joined else "lo")
    return Command(link, way, _spec(link, words, members), env=variables, **options)


def _spec(link: LabLink, words: list[str], members: list[dict[str, Any]]) -> dict[str, Any]:
    facts = {"bits_per_s": link.bits_per_s, "duplex": link.duplex, "grace_s": GRACE_S}
    return {**facts, "ip": _tool("ip"), "tc": _tool("tc"), "argv": words, "members": members}


def _member(side: int, env: dict[str, str], *, quiet: bool = False) -> dict[str, Any]:
    return {"side": side, "env": env, "quiet": quiet}


def _meeting_point(link: LabLink) -> tuple[str, str]:
    """Address and port where ranks meet; in a namespace of our own, every port is free."""
    if link.bits_per_s:
        return (FIRST if link.duplex == "full" else "127.0.0.1"), str(PORT)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return "127.0.0.1", str(probe.getsockname()[1])


def _tool(name: str) -> str | None:
    return shutil.which(name, path=os.pathsep.join((os.environ.get("PATH", ""), *SBIN)))


@contextmanager
def _blocked(*numbers: int) -> Iterator[None]:
    """Signals stay pending inside; what is started inside begins with them blocked."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, numbers or SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)

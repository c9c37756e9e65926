"""The inside of the lab: makes the link, runs the command, and ends when all of it has ended.

This file runs by itself, with the standard library only. It reads a pipe:

    one line of JSON    bits_per_s, duplex, ip, tc, grace_s, argv, members (side, env, quiet)
    each further byte   a signal for every process of the command
    end of file         the lab is gone or wants to stop: everything is killed

Every process that the command starts is a descendant of this one, orphans too, so that none can
escape. In a process namespace this is process 1, and the kernel ends its descendants as well.
"""

from __future__ import annotations

import ctypes
import json
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

NEW_NET = 0x40000000  # CLONE_NEWNET
BIND = 4096  # MS_BIND
CHILD_SUBREAPER = 36  # PR_SET_CHILD_SUBREAPER
MIN_BURST = 66_000  # bytes: a packet of loopback with its headers
JOINT = "weft0"  # the name of the interface on either side
KILLED = 128 + 9  # SIGKILL; Windows, which reads this file too, has no such name


class LinkError(Exception):
    """The link could not be made."""


def main() -> int:
    """Run the command that the pipe describes; its exit code."""
    control = int(sys.argv[1])
    os.set_inheritable(control, False)
    line = os.fdopen(control, "rb", buffering=0, closefd=False).readline()
    if not line.endswith(b"\n"):
        return KILLED
    spec = json.loads(line)
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(CHILD_SUBREAPER, 1, 0, 0, 0)
    try:
        sides = make_link(spec)
    except (LinkError, OSError) as error:
        sys.stderr.write(f"lab: {error}\n")
        return 1
    bell, ringer = os.pipe()
    os.set_blocking(ringer, False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(ringer)
    early: set[int] = signal.sigpending()  # arrived before the command was started
    if early:
        return 128 + int(min(early))
    try:
        running, code = spawn(spec, sides)
        return code or watch(running, control, bell, spec["grace_s"])
    finally:
        end_all()


def make_link(spec: dict[str, Any]) -> list[int]:
    """Limit the link; file descriptors of both sides' network namespaces, if there are two."""
    ip, tc, bits_per_s = spec["ip"], spec["tc"], spec["bits_per_s"]
    if not bits_per_s:
        return []
    name_addresses()
    if spec["duplex"] == "half":
        _tell(ip, "link", "set", "lo", "up")
        limit(tc, "lo", bits_per_s)
        return []
    first = os.open("/proc/self/ns/net", os.O_RDONLY)
    _system("unshare", NEW_NET)
    second = os.open("/proc/self/ns/net", os.O_RDONLY)
    joint = ["link", "add", JOINT, "type", "veth", "peer", "name", JOINT]
    _tell(ip, *joint, "netns", f"/proc/self/fd/{first}", keep=first)
    for side, net in enumerate((first, second)):
        _system("setns", net, NEW_NET)
        _tell(ip, "link", "set", "lo", "up")
        _tell(ip, "address", "add", f"10.77.0.{side + 1}/24", "dev", JOINT)
        _tell(ip, "link", "set", JOINT, "up")
        limit(tc, JOINT, bits_per_s)
    return [first, second]


def limit(tc: str, interface: str, bits_per_s: int) -> None:
    """Let an interface send no more than this; raises `LinkError`.

    What passes at once behind a pause is a millisecond of traffic, a packet at least: were it more,
    the link would catch up with what it did not send while the ranks computed.
    """
    burst = max(MIN_BURST, bits_per_s // 8 // 1000)
    bucket = ["rate", f"{bits_per_s}bit", "burst", str(burst), "latency", "100ms"]
    _tell(tc, "qdisc", "replace", "dev", interface, "root", "tbf", *bucket)


def name_addresses() -> None:
    """Name the link's addresses in an /etc/hosts of our own: there is no name server inside.

    Libraries look up this host's own name, and c10d warns about every address without one. Where
    the file cannot be mounted they warn; nothing else depends on it.
    """
    lines = [f"127.0.0.1 localhost {socket.gethostname()}", "::ffff:127.0.0.1 localhost"]
    for side in (0, 1):
        address = f"10.77.0.{side + 1}"
        lines += [f"{address} side{side}", f"::ffff:{address} side{side}"]
    with suppress(OSError), tempfile.NamedTemporaryFile("w") as file:
        before = Path("/etc/hosts").read_text(encoding="utf-8", errors="replace")
        file.write("\n".join([*lines, before]))
        file.flush()
        Path(file.name).chmod(0o644)
        ctypes.CDLL(None).mount(file.name.encode(), b"/etc/hosts", None, BIND, None)


def _tell(*words: str, keep: int | None = None) -> None:
    kept = () if keep is None else (keep,)
    done = subprocess.run(words, capture_output=True, text=True, check=False, pass_fds=kept)
    if done.returncode:
        why = (done.stderr.strip().splitlines() or ["failed without a message"])[-1]
        raise LinkError(f"{Path(words[0]).name} {words[1]}: {why}")


def _system(name: str, *numbers: int) -> None:
    """A system call that Python itself offers only from 3.12 on."""
    if getattr(ctypes.CDLL(None, use_errno=True), name)(*numbers):
        number = ctypes.get_errno()
        raise LinkError(f"{name}: {os.strerror(number)}")


def spawn(spec: dict[str, Any], sides: list[int]) -> tuple[list[int], int]:
    """Start the command for each member: process numbers, and a code if it cannot be started."""
    running: list[int] = []
    for number, member in enumerate(spec["members"]):
        actions: list[tuple[Any, ...]] = []
        if number:
            actions.append((os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0))
        if member["quiet"]:
            actions.append((os.POSIX_SPAWN_DUP2, 2, 1))
        if sides:
            _system("setns", sides[member["side"]], NEW_NET)
        try:
            pid = os.posix_spawnp(
                spec["argv"][0], spec["argv"], {**os.environ, **member["env"]},
                file_actions=actions, setsigmask=[], setsigdef=[signal.SIGPIPE, signal.SIGXFSZ],
            )  # fmt: skip
        except OSError as error:
            missing = isinstance(error, FileNotFoundError)
            why = "command not found" if missing else error.strerror
            sys.stderr.write(f"lab: {spec['argv'][0]!r}: {why}\n")
            return running, 127 if missing else 126
        running.append(pid)
    return running, 0


def watch(pids: list[int], control: int, bell: int, grace_s: float) -> int:
    """Wait until all have ended, passing signals on; the exit code of the first that failed."""
    running, code = set(pids), 0
    endings: list[tuple[float, int]] = []  # when to send which signal, once one has failed
    while running:
        left_s = None if not endings else max(0.0, endings[0][0] - time.monotonic())
        ready, _, _ = select.select([control, bell], [], [], left_s)
        if control in ready:
            numbers = os.read(control, 64)
            if not numbers:
                return KILLED
            for number in numbers:
                send_all(number)
        if bell in ready:
            os.read(bell, 4096)
        for pid, ended in reap():
            if pid not in running:
                continue
            running.remove(pid)
            if ended and not code:
                code, now = ended, time.monotonic()
                endings = [(now + grace_s, signal.SIGTERM), (now + 2 * grace_s, signal.SIGKILL)]
        if endings and time.monotonic() >= endings[0][0]:
            send_all(endings.pop(0)[1])
    return code


def reap() -> Iterator[tuple[int, int]]:
    """Children and orphans that have ended, each with its exit code."""
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if not pid:
            return
        code = os.waitstatus_to_exitcode(status)
        yield pid, code if code >= 0 else 128 - code


def end_all() -> None:
    """Kill all descendants; give up after 5 s on those that cannot be killed."""
    latest = time.monotonic() + 5
    while send_all(signal.SIGKILL) and time.monotonic() < latest:
        list(reap())
        time.sleep(0.005)


def send_all(number: int) -> int:
    """Send a signal to every descendant; how many there are."""
    pids = descendants()
    for pid in pids:
        try:
            os.kill(pid, number)
        except (ProcessLookupError, PermissionError):
            continue
    return len(pids)


def descendants() -> list[int]:
    """All processes below this one, read from /proc; none where there is no /proc."""
    children: dict[int, list[int]] = {}
    for file in Path("/proc").glob("[0-9]*/stat"):
        try:
            facts = file.read_text(errors="replace").rpartition(")")[2].split()
        except OSError:
            continue  # it has ended meanwhile
        children.setdefault(int(facts[1]), []).append(int(file.parent.name))
    pids = [os.getpid()]
    for pid in pids:
        pids.extend(children.get(pid, ()))
    return pids[1:]


if __name__ == "__main__":
    sys.exit(main())

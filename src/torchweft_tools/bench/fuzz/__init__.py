"""The fuzz bench: damaged files of every format; each raises our error or is read right, in bounds.

    example --damage--> file --read--> our error | a value that is equal once written and read back

Bytes are flipped, cut off and doubled; numbers are blown up, values replaced, keys repeated, lists
repeated and nested deeply, text laced with zeros and surrogates, and files swapped for those of
another format. A case is `foreign` if it raises anything else or does not end, `slow` above two
seconds of CPU, `heavy` above 500 MB more than the process had before.
"""

from __future__ import annotations

import copy
import gc
import json
import random
import re
import signal
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torchweft.errors import WeftError
from torchweft_tools import need_linux
from torchweft_tools.bench.fuzz.files import Format, formats

MAX_S, MAX_BYTES = 2.0, 500 * 10**6
GIVEN_UP_S = 20.0
MAX_FILE = 4 * 10**6
COLUMNS = ("format", "files", "own_error", "read", "foreign", "slow", "heavy", "longest_s")
NUMBER = re.compile(rb"-?[0-9]+(?:\.[0-9]+)?(?:e-?[0-9]+)?")
NUMBERS = (
    b"0", b"-1", b"1e999", b"-1e999", b"1e-999", b"NaN", b"Infinity", b"9" * 18, b"9" * 19,
    b"9" * 39, b"9" * 400, b"9" * 5000, b"1" + b"0" * 310, b"2147483648", b"9223372036854775808",
    b"1.5", b"true", b"null", b'"1"', b"[]", b"0x10", b"1_000", b"1e308", b"99999999",
)  # fmt: skip
PIECES = (
    b"\0", b"\xff\xfe", b"\\ud800", b"\\u0000", "\u202e\ufeff".encode(), b"\xed\xa0\x80", b"\r",
    "\U0001f600".encode() * 9, b"[" * 100_000, b'{"a":' * 20_000, b"(" * 50_000, b"\n" * 50_000,
    b"a" * 100_000, b'"', b"__import__('os').system('true')", b"%s%n", b"../../../etc/passwd", b"#",
)  # fmt: skip
ODD: tuple[Any, ...] = (
    None, True, 0, -1, 1 << 62, 1 << 63, 10**39, 10**400, 1.5, float("nan"), float("inf"), -1e308,
    "", "x", "\ud800", "\0", "a" * 10_000, "s0", "s0**8", "(s0//0)", "max(1,s0)*s0", [], {},
    [[]], {"a": 1}, [1, 2], ["x"] * 5000, "torch.float32", "aten.from_file.default", "float64",
)  # fmt: skip
Rng = random.Random
Row = dict[str, Any]


class _LateError(BaseException):
    """Raised in a case that takes too long."""


def run(
    *,
    num_files: int = 5000,
    seed: int = 0,
    quick: bool = False,
    progress: Callable[[int, int], None] | None = None,
) -> tuple[list[Row], Row]:
    """A row for each format, and one for each case that went wrong.

    num_files: damaged files of each format.
    seed: the random seed.
    quick: few files, to check that everything runs.
    """
    need_linux("bench fuzz", "it reads /proc for the bytes that a file takes")
    num_files = 300 if quick else num_files
    rng, kinds = Rng(seed), formats()
    rows = {kind.name: _row(kind.name) for kind in kinds}
    cases: list[Row] = []
    with tempfile.TemporaryDirectory() as folder, _frozen():
        for kind in kinds:  # so that no case pays for what is cached at first use
            right = _judge(kind, kind.data, Path(folder))
            assert right["result"] == "read", f"an example cannot be read: {right}"
        for number in range(num_files):
            kind = kinds[number % len(kinds)]
            how, data = damaged(kind, rng)
            case = {**_judge(kind, data, Path(folder)), "seed": seed, "number": number, "how": how}
            row = rows[kind.name]
            row["files"] += 1
            row["longest_s"] = max(row["longest_s"], case["seconds"])
            row["largest_bytes"] = max(row["largest_bytes"], case["bytes"])
            row[case["result"]] += 1
            row["slow"] += case["seconds"] > MAX_S
            row["heavy"] += case["bytes"] > MAX_BYTES
            if case["result"] == "foreign" or case["seconds"] > MAX_S or case["bytes"] > MAX_BYTES:
                cases.append({"row": "case", **case})
            if progress is not None:
                progress(number + 1, num_files)
    return [*rows.values(), *({**_row(case["format"]), **case} for case in cases)], {
        "files": num_files,
        **{name: sum(row[name] for row in rows.values()) for name in ("own_error", "read")},
        "foreign": [_story(case) for case in cases if case["result"] == "foreign"],
        "slow": [_story(case) for case in cases if case["seconds"] > MAX_S],
        "heavy": [_story(case) for case in cases if case["bytes"] > MAX_BYTES],
    }


def _row(name: str) -> Row:
    counts = dict.fromkeys(("files", "own_error", "read", "foreign", "slow", "heavy"), 0)
    return {"format": name, **counts, "longest_s": 0.0, "largest_bytes": 0}


def _story(case: Row) -> str:
    facts = f"{case['seconds']:.2f} s, {case['bytes'] / 1e6:.0f} MB, {case['error']}"
    return f"{case['format']}, case {case['number']} ({case['how']}): {facts}"


def _judge(kind: Format, data: bytes, folder: Path) -> Row:
    """What reading one file gave: result, seconds, bytes."""
    path = folder / kind.name
    path.write_bytes(data)
    for name, other in kind.beside:
        (folder / name).write_bytes(other)
    error, result = "", "read"
    with _watched() as watch:
        try:
            kind.read(path)
        except WeftError as caught:
            result, error = "own_error", str(caught)[:300]
        except (Exception, _LateError) as caught:
            result, error = "foreign", f"{type(caught).__name__}: {str(caught)[:300]}"
    return {"format": kind.name, "result": result, "error": error, **watch}


@contextmanager
def _frozen() -> Iterator[None]:
    """Make garbage collections look only at objects made from now on."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


@contextmanager
def _watched() -> Iterator[Row]:
    """Measure the seconds and bytes of the block, and interrupt it after `GIVEN_UP_S`."""

    def late(*_: object) -> None:
        raise _LateError(f"not done after {GIVEN_UP_S:g} s")

    gc.collect()
    watch: Row = {"seconds": 0.0, "bytes": 0}
    before = _resident(reset=True)
    old = signal.signal(signal.SIGALRM, late)
    signal.setitimer(signal.ITIMER_REAL, GIVEN_UP_S)
    began_s = time.process_time()
    try:
        yield watch
    finally:
        watch["seconds"] = time.process_time() - began_s
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, old)
        watch["bytes"] = max(0, _resident() - before)


def _resident(*, reset: bool = False) -> int:
    """The most bytes that this process has held since the last call with `reset`."""
    if reset:
        try:
            Path("/proc/self/clear_refs").write_text("5")
        except OSError:
            import resource  # not on every system

            return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    status = Path("/proc/self/status").read_text()
    return int(re.search(r"VmHWM:\s+([0-9]+) kB", status)[1]) * 1024  # type: ignore[index]


# How files are damaged.


def damaged(kind: Format, rng: Rng) -> tuple[str, bytes]:
    """The names of the damages, and the damaged file."""
    names, data = [], kind.data
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        name = rng.choice(tuple(DAMAGE))
        names.append(name)
        data = DAMAGE[name](data, rng)[:MAX_FILE]
    return ", ".join(names), data


def _flip(data: bytes, rng: Rng) -> bytes:
    made = bytearray(data)
    for _ in range(rng.choice((1, 1, 2, 8, 64))):
        if made:
            made[rng.randrange(len(made))] = rng.randrange(256)
    return bytes(made)


def _cut(data: bytes, rng: Rng) -> bytes:
    return data[: rng.randrange(len(data) + 1)]


def _drop(data: bytes, rng: Rng) -> bytes:
    start = rng.randrange(len(data) + 1)
    return data[:start] + data[start + rng.randrange(200) :]


def _double(data: bytes, rng: Rng) -> bytes:
    start = rng.randrange(len(data) + 1)
    piece = data[start : start + rng.randrange(1, 400)]
    times = rng.choice((2, 3, 20, 20_000 if len(piece) < 100 else 500))
    return data[:start] + piece * times + data[start:]


def _blow_up(data: bytes, rng: Rng) -> bytes:
    numbers = list(NUMBER.finditer(data))
    for place in sorted(
        rng.sample(numbers, min(len(numbers), rng.choice((1, 1, 3)))), key=_from_end
    ):
        data = data[: place.start()] + rng.choice(NUMBERS) + data[place.end() :]
    return data


def _from_end(place: re.Match[bytes]) -> int:
    return -place.start()


def _lace(data: bytes, rng: Rng) -> bytes:
    at = rng.randrange(len(data) + 1)
    return data[:at] + rng.choice(PIECES) + data[at:]


def _repeat_line(data: bytes, rng: Rng) -> bytes:
    lines = data.split(b"\n")
    at = rng.randrange(len(lines))
    times = min(rng.choice((2, 100, 20_000)), 1 + MAX_FILE // (1 + len(lines[at])))
    return b"\n".join(lines[:at] + lines[at : at + 1] * times + lines[at:])


def _say_twice(data: bytes, rng: Rng) -> bytes:
    keys = list(re.finditer(rb'"[a-z_A-Z]+": ', data))
    if not keys:
        return _double(data, rng)
    key = rng.choice(keys)
    value = json.dumps(rng.choice(ODD[:-1])).encode()
    return data[: key.start()] + key.group() + value + b", " + data[key.start() :]


def _replace(data: bytes, rng: Rng) -> bytes:
    others = (b"", b"\0" * 1000, rng.randbytes(1000), b"{}", b"[]", b"null", b"1", b'"x"')
    return rng.choice((*others, *(kind.data for kind in formats())))


def _change(data: bytes, rng: Rng) -> bytes:
    """Change the data of a JSON file, or of one with JSON behind a length, as policies have."""
    start = max(0, data.find(b"{"))
    try:
        content, end = json.JSONDecoder().raw_decode(data[start:].decode("latin-1"))
    except (ValueError, RecursionError):
        return _flip(data, rng)
    for _ in range(rng.choice((1, 1, 2, 4))):
        _change_one(content, rng)
    made = json.dumps(content).encode()
    if start not in (8, 16) or rng.random() < 0.1:
        return data[:start] + made + data[start + end :]
    old, new = (bytes(-size % start) for size in (end, len(made)))  # filled up to whole words
    return len(made).to_bytes(start, "little") + made + new + data[start + end + len(old) :]


def _change_one(content: Any, rng: Rng) -> None:
    parent: Any = None
    key: Any = None
    here = content
    while isinstance(here, dict | list) and here and (parent is None or rng.random() < 0.8):
        parent, key = here, rng.choice(list(here) if isinstance(here, dict) else range(len(here)))
        here = parent[key]
    if parent is None:
        return
    what = rng.randrange(6)
    if what == 0:
        del parent[key]
    elif what == 1 and isinstance(here, list) and len(here) < 500:
        parent[key] = [copy.copy(item) for item in here for _ in range(rng.choice((2, 50, 2000)))]
    elif what == 2 and isinstance(here, int | float):
        parent[key] = rng.choice((here * 10**9, -here, here + 1, str(here), [here]))
    elif what == 3 and isinstance(parent, dict):
        parent[rng.choice(("name", "\0", "x", "a" * 1000, *parent))] = parent.pop(key)
    elif what == 4 and len(parent) > 1:
        other = rng.choice(list(parent) if isinstance(parent, dict) else range(len(parent)))
        parent[key], parent[other] = parent[other], parent[key]
    else:
        parent[key] = copy.deepcopy(rng.choice(ODD))


DAMAGE: dict[str, Callable[[bytes, Rng], bytes]] = {
    "flip": _flip, "cut": _cut, "drop": _drop, "double": _double, "blow up": _blow_up,
    "lace": _lace, "repeat": _repeat_line, "twice": _say_twice, "replace": _replace,
    "change": _change, "change more": _change, "change most": _change,
}  # fmt: skip

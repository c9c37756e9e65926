"""A dry run as text: calls and findings come in; one text goes out.

It has the streams side by side, one line per call, in the order of issue; collectives by
communicator and stream; the Python lines where the host waited for the device; findings.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import groupby

from torchweft_tools.dryrun.calls import ON_STREAM, DeviceCall, RankCalls
from torchweft_tools.dryrun.check import Fault, synchronisations

WIDTH = 30
VALUES = "Numbers mean nothing in a dry run: an error about values is not one of the program."


def report(
    ranks: Sequence[RankCalls], faults: Sequence[Fault], *, max_lines: int = 60, code: int = 0
) -> str:
    """The whole text. The timeline shows the end of the first rank, where it is steady.

    `code` is how the program ended; below 0, by a signal.
    """
    what = f"{len(ranks)} rank{'s' * (len(ranks) != 1)}; nothing was computed"
    lines = [f"dry run: {what if ranks else 'no process asked a device for work'}"]
    if ranks:
        lines += ["", *timeline(ranks[0], max_lines=max_lines)]
    lines += ["", *_collectives(ranks), "", *_syncs(ranks), "", *_faults(faults)]
    if code:
        how = f"signal {-code}" if code < 0 else f"exit code {code}"
        lines += [f"the program ended with {how}. {VALUES}"]
    return "\n".join(lines)


def timeline(rank: RankCalls, *, max_lines: int = 60) -> Iterator[str]:
    """The streams of a rank as columns; equal calls in a row are one line."""
    shown = [c for c in rank.calls if c.kind in (*ON_STREAM, "record", "wait", "sync", "mark")]
    rows = ((call.stream, _word(call)) for call in shown)
    merged = [(stream, word, len(list(same))) for (stream, word), same in groupby(rows)]
    last = merged[-max_lines:]
    # Streams in the order of their first use, of those that are shown.
    columns = {s: i for i, s in enumerate(dict.fromkeys(s for s, _, _ in last if s >= 0))}
    yield f"rank {rank.rank}, streams in the order of issue"
    yield "  ".join(f"stream {s}".ljust(WIDTH) for s in columns).rstrip()
    if len(merged) > max_lines:
        yield f"... {len(merged) - max_lines} lines before these; --lines shows more"
    for stream, word, times in last:
        text = word if times == 1 else f"{word} x{times}"
        if stream < 0:
            yield f"-- {text}"
        else:
            yield "  ".join([" " * WIDTH] * columns[stream] + [text])


def _word(call: DeviceCall) -> str:
    if call.kind == "record":
        return f"record {call.event}"
    if call.kind == "wait":
        return f"wait {call.event}"
    if call.kind == "sync":
        return f"host waits: {call.place}"
    if call.kind == "collective":
        return f"{call.name}({call.data['in'] or call.data['out']})"
    if call.kind == "launch":
        return f"launch graph {call.data['graph']}"
    if call.kind == "mark":
        return f"mark {call.name}"
    word = call.name.removeprefix("aten.")
    return (word if len(word) <= WIDTH else word[: WIDTH - 3] + "...") + (
        f" [graph {call.graph}]" if call.graph else ""
    )


def _collectives(ranks: Sequence[RankCalls]) -> Iterator[str]:
    def row(call: DeviceCall) -> str:
        return f"{call.data['comm'][:6]}  stream {call.stream}  {call.name}"

    talks = [[row(c) for c in rank.calls if c.kind == "collective"] for rank in ranks]
    yield "collectives by communicator and stream" if any(talks) else "no collectives"
    yield from _table(ranks, talks)


def _syncs(ranks: Sequence[RankCalls]) -> Iterator[str]:
    def row(call: DeviceCall) -> str:
        what = call.data["what"]
        by = "" if call.name == what else f" in {call.name}"
        return f"{what}{by}  {call.line or '(no Python line)'}"

    waits = [[row(call) for call in synchronisations(rank)] for rank in ranks]
    yield "where the host waited for the device" if any(waits) else "the host never waited"
    yield from _table(ranks, waits)


def _table(ranks: Sequence[RankCalls], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """Equal rows once, with how often they occur on a rank, and on which ranks."""
    where: dict[tuple[str, int], list[int]] = {}
    for rank, own in zip(ranks, rows, strict=True):
        for row, times in Counter(own).items():
            where.setdefault((row, times), []).append(rank.rank)
    for (row, times), numbers in where.items():
        first, last = numbers[0], numbers[-1]
        is_run = len(numbers) > 2 and numbers == list(range(first, last + 1))
        named = f"{first} to {last}" if is_run else ", ".join(map(str, numbers))
        yield f"  rank {named}: {row} x{times}"


def _faults(faults: Sequence[Fault]) -> Iterator[str]:
    wrong = [fault for fault in faults if not fault.is_advice]
    advice = [fault for fault in faults if fault.is_advice]
    yield f"findings: {len(wrong)}" if wrong else "no findings"
    yield from (f"  {fault}" for fault in wrong)
    if advice:
        yield f"advice: {len(advice)}"
        yield from (f"  {fault}" for fault in advice)

"""A timeline: bars on rows over one time axis, drawn as text.

             |0            |1            |2 ms
    compute  ▐█attn0[0]██▐█attn0[1]█···········▐█mlp0[0]█    74 %
    network               ╞═══reduce0[0]══════                45 %

A row has a name, bars, and a note behind it. A bar shorter than half a column shows as one column
if nothing else is there. A label stands in its bar where it fits.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

EDGES = {"█": "▐", "▓": "▐", "═": "╞", "─": "╟"}
_LEVELS = "▁▂▃▄▅▆▇█"


class Bar(NamedTuple):
    """One bar: from when to when, what it is called, and the character that fills it."""

    start_s: float
    end_s: float
    label: str
    fill: str


class Row(NamedTuple):
    """One line of a timeline: bars, or a curve of (time, height) samples."""

    name: str
    bars: Sequence[Bar] = ()
    note: str = ""
    curve: Sequence[tuple[float, float]] = ()


def format_s(seconds: float) -> str:
    """Seconds to read: `1.24 ms`."""
    for factor, unit in ((1, "s"), (1e3, "ms")):
        if seconds * factor >= 1:
            return f"{seconds * factor:.3g} {unit}" if seconds < 1000 else f"{seconds:.0f} s"
    return f"{seconds * 1e6:.3g} us"


def format_bytes(num_bytes: int) -> str:
    """Bytes to read: `12.5 MiB`."""
    for power, unit in ((3, "GiB"), (2, "MiB"), (1, "KiB")):
        if num_bytes >= 1024**power:
            return f"{num_bytes / 1024**power:.1f} {unit}"
    return f"{num_bytes} B"


def draw(rows: Sequence[Row], end_s: float, *, width: int) -> list[str]:
    """The lines of a timeline from 0 to `end_s`: the axis, then one line a row."""
    wide = min(24, max((len(row.name) for row in rows), default=0)) + 2
    notes = max((len(row.note) for row in rows), default=0) + 2
    columns = max(20, width - wide - notes)
    lines = [" " * wide + _axis(end_s, columns)]
    for row in rows:
        cells = _curve(row.curve, end_s, columns) if row.curve else _bars(row.bars, end_s, columns)
        lines.append(f"{row.name[: wide - 2]:<{wide}}{''.join(cells)}{row.note:>{notes}}")
    return [line.rstrip() for line in lines]


def _axis(end_s: float, columns: int) -> str:
    """Ticks at 1, 2 or 5 times a power of ten, at least 12 columns apart."""
    if end_s <= 0:
        return "|0"
    least = 12 * end_s / columns
    power = 10.0 ** math.floor(math.log10(least))
    step = next(power * factor for factor in (1, 2, 5, 10) if power * factor >= least * (1 - 1e-9))
    factor, unit = next(((f, u) for f, u in ((1, "s"), (1e3, "ms")) if end_s * f >= 1), (1e6, "us"))
    line = ""
    for tick in range(math.floor(end_s / step) + 1):
        label = f"|{tick * step * factor:.6g}" + (f" {unit}" if tick == 0 else "")
        line = line.ljust(round(tick * step / end_s * columns)) + label
    return line if len(line) <= columns else line[: line.rindex("|")].rstrip()


def _bars(bars: Iterable[Bar], end_s: float, columns: int) -> list[str]:
    cells = [" "] * columns
    scale = columns / end_s if end_s > 0 else 0.0
    for bar in bars:
        first, last = round(bar.start_s * scale), round(bar.end_s * scale)
        if last <= first:
            first = min(first, columns - 1)
            cells[first] = bar.fill if cells[first] == " " else cells[first]
            continue
        text = bar.fill * (last - first)
        if edge := EDGES.get(bar.fill):
            text = edge + text[1:]
            room = len(text) - 1 - len(bar.label)
            if bar.label and room >= 0:
                before = 1 + room // 2
                text = text[:before] + bar.label + text[before + len(bar.label) :]
        cells[first:last] = text
    return cells


def _curve(samples: Sequence[tuple[float, float]], end_s: float, columns: int) -> list[str]:
    """The highest sample that holds in each column, as a block of that height."""
    heights = [0.0] * columns
    scale = columns / end_s if end_s > 0 else 0.0
    ends = [time_s for time_s, _ in samples[1:]] + [end_s]
    for (start_s, height), until_s in zip(samples, ends, strict=True):
        first = min(int(start_s * scale), columns - 1)
        for column in range(first, min(max(first + 1, math.ceil(until_s * scale)), columns)):
            heights[column] = max(heights[column], height)
    top = max(heights) or 1.0
    return [_LEVELS[math.ceil(height / top * 8) - 1] if height > 0 else " " for height in heights]

"""The picture of a `Trace`: an SVG timeline, a row a lane, a bar a span; for pages and papers.

    trace --picture--> <svg ...>          `torchweft plan graph.json --batch 64 --svg plan.svg`

It says of itself whether the trace was simulated or measured. A lane with several flights at once
has a row for each. Bars carry their label where it fits, and always as a tooltip.
"""

from __future__ import annotations

from html import escape

from torchweft.plan.trace import MAX_FLIGHTS, Span, Trace, format_s

WIDE, LEFT, ROW, TOP = 960, 100, 26, 48
COLOURS = {"compute": "#4c78a8", "memory": "#72b7b2", "network": "#f58518", "io": "#54a24b"}
WAITING = "#dddddd"
LETTER = 6.2  # of the labels, in pixels


def picture(trace: Trace) -> str:
    """The trace as the text of an SVG file."""
    how = "simulated" if trace.simulated else "measured"
    head = f"{trace.name} ({how}): {format_s(trace.makespan_s)}"
    lines, y = list[str](), TOP
    for lane, _ in trace.lanes:
        rows = [row for row in trace.rows(lane)[:MAX_FLIGHTS] if row]
        if not rows:
            continue
        lines.append(f'<text x="4" y="{y + 17}">{escape(lane)}</text>')
        for row in rows:
            lines += [_bar(span, y, trace.makespan_s) for span in row]
            y += ROW
    used = {span.uses for span in trace.spans if span.kind in ("run", "transfer")}
    for number, uses in enumerate(uses for uses in COLOURS if uses in used):
        x = LEFT + 110 * number
        lines.append(f'<rect x="{x}" y="{y + 10}" width="12" height="12" fill="{COLOURS[uses]}"/>')
        lines.append(f'<text x="{x + 17}" y="{y + 20}">{uses}</text>')
    size = f'width="{WIDE}" height="{y + 32}" viewBox="0 0 {WIDE} {y + 32}"'
    style = 'font-family="sans-serif" font-size="11"'
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" {size} {style}>',
            f'<rect width="{WIDE}" height="{y + 32}" fill="white"/>',
            f'<text x="4" y="18" font-size="13">{escape(head)}</text>',
            f'<text x="{LEFT}" y="{TOP - 6}">0</text>',
            f'<text x="{WIDE - 4}" y="{TOP - 6}" text-anchor="end">'
            f"{format_s(trace.makespan_s)}</text>",
            *lines,
            "</svg>\n",
        ]
    )


def _bar(span: Span, y: int, end_s: float) -> str:
    """One span: a bar with its label."""
    scale = (WIDE - LEFT - 4) / (end_s or 1.0)
    x, wide = LEFT + span.start_s * scale, max((span.end_s - span.start_s) * scale, 0.5)
    waits = span.kind in ("wait", "complete", "issue")
    colour = WAITING if waits else COLOURS.get(span.uses, WAITING)
    title = f"{span.label}: {format_s(span.end_s - span.start_s)}"
    bar = f'<rect x="{x:.1f}" y="{y + 2}" width="{wide:.1f}" height="{ROW - 5}" fill="{colour}"'
    text = f'{bar} stroke="white" stroke-width="0.5"><title>{escape(title)}</title></rect>'
    if not waits and len(span.label) * LETTER < wide:
        at = f'x="{x + wide / 2:.1f}" y="{y + 17}"'
        text += f'<text {at} text-anchor="middle" fill="white">{escape(span.label)}</text>'
    return text

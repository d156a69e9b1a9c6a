"""The cost of each turn, drawn into one file without anything outside it."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path

WIDTH, HEIGHT, LEFT, BOTTOM, TOP = 900, 360, 60, 40, 20
PAGE = """<!doctype html><meta charset="utf-8"><title>Gateway: cost of a turn</title>
<style>body{{font:14px system-ui,sans-serif;margin:2em;color:#222}}svg text{{font-size:12px;fill:#555}}</style>
<h1>Cost of a turn, by turn</h1>
<p>Milliseconds of a turn beyond the engine's own time, the median of each ten turns.</p>
{svg}
<p><span style="color:#1f77b4">■</span> gateway &nbsp; <span style="color:#999">■</span> a server that only receives and
parses the same bytes</p>
"""


def write_chart(path: Path, costs: Sequence[float], reading: Sequence[float], group: int = 10) -> None:
    """Write the page; `costs` and `reading` are in seconds, one a turn."""
    lines = [(_grouped(reading, group), "#999"), (_grouped(costs, group), "#1f77b4")]
    top = 1.05 * max(max(values) for values, _ in lines)
    parts = []
    for i in range(6):
        y = HEIGHT - BOTTOM - i / 5 * (HEIGHT - BOTTOM - TOP)
        parts.append(f'<line x1="{LEFT}" x2="{WIDTH}" y1="{y:.1f}" y2="{y:.1f}" stroke="#ddd"/>')
        parts.append(f'<text x="{LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{top * i / 5:.1f} ms</text>')
    count = len(costs)
    for i in range(6):
        x = LEFT + i / 5 * (WIDTH - LEFT)
        parts.append(f'<text x="{x:.1f}" y="{HEIGHT - 15}" text-anchor="middle">{count * i // 5}</text>')
    for values, colour in lines:
        points = " ".join(
            f"{LEFT + (i + 0.5) / len(values) * (WIDTH - LEFT):.1f},"
            f"{HEIGHT - BOTTOM - v / top * (HEIGHT - BOTTOM - TOP):.1f}"
            for i, v in enumerate(values)
        )
        parts.append(f'<polyline fill="none" stroke="{colour}" stroke-width="1.5" points="{points}"/>')
    svg = f'<svg viewBox="0 0 {WIDTH + 20} {HEIGHT}" width="{WIDTH}" xmlns="http://www.w3.org/2000/svg">'
    path.write_text(PAGE.format(svg=svg + "".join(parts) + "</svg>"), encoding="utf-8")


def _grouped(values: Sequence[float], group: int) -> list[float]:
    return [1000 * statistics.median(values[i : i + group]) for i in range(0, len(values), group)]

"""Small drawings as inline SVG text. Widths and heights in pixels; every text is escaped."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

WIDTH = 860
_LEFT, _RIGHT, _TOP, _BOTTOM = 52, 12, 10, 26


@dataclass(frozen=True)
class Series:
    """A line: points (x, y), drawn in `colour`."""

    name: str
    colour: str
    points: list[tuple[float, float]]
    dots: bool = True


@dataclass(frozen=True)
class Bar:
    """A stretch of one row of a timeline or stack."""

    begin: float
    end: float
    colour: str
    title: str


def line_chart(series: Sequence[Series], x_label: str, height: int = 240) -> str:
    """Lines over a common x axis; y runs from 0 to 1, as rewards and shares do."""
    xs = [x for s in series for x, _ in s.points]
    low, high = (min(xs), max(xs)) if xs else (0.0, 1.0)
    high = high if high > low else low + 1.0

    def px(x: float) -> float:
        return _LEFT + (x - low) / (high - low) * (WIDTH - _LEFT - _RIGHT)

    def py(y: float) -> float:
        return height - _BOTTOM - max(0.0, min(1.0, y)) * (height - _TOP - _BOTTOM)

    parts = []
    for tick in (0.0, 0.25, 0.5, 0.75, 1.0):
        parts.append(f'<line class="grid" x1="{_LEFT}" x2="{WIDTH - _RIGHT}" y1="{py(tick):.1f}" y2="{py(tick):.1f}"/>')
        parts.append(f'<text x="{_LEFT - 8}" y="{py(tick) + 4:.1f}" text-anchor="end">{tick:.2f}</text>')
    for x in (t for t in ticks(low, high) if t == int(t)):  # there is no half a step
        parts.append(f'<text x="{px(x):.1f}" y="{height - 8}" text-anchor="middle">{x:g}</text>')
    parts.append(f'<text x="{_LEFT - 8}" y="{height - 8}" text-anchor="end">{escape(x_label)}</text>')
    for s in series:
        path = " ".join(f"{px(x):.1f},{py(y):.1f}" for x, y in s.points)
        parts.append(f'<polyline fill="none" stroke="{s.colour}" stroke-width="2" points="{path}"/>')
        for x, y in s.points if s.dots else ():
            title = f"<title>{escape(s.name)}: {y:.3f} at {x:g}</title>"
            parts.append(f'<circle cx="{px(x):.1f}" cy="{py(y):.1f}" r="3.5" fill="{s.colour}">{title}</circle>')
    return picture(height, parts)


def timeline(rows: Sequence[tuple[str, Sequence[Bar]]], end: float, marks: Sequence[tuple[float, str]] = ()) -> str:
    """One row of bars a name over a time axis in seconds; `marks` are thin vertical lines with a text on top."""
    row_height, top = 30, 26
    height = top + row_height * max(1, len(rows)) + _BOTTOM
    left = 96
    scale = (WIDTH - left - _RIGHT - 24) / (end or 1.0)
    parts = []
    for n, (at, name) in enumerate(marks):
        x = left + at * scale
        parts.append(f'<line class="mark" x1="{x:.1f}" x2="{x:.1f}" y1="{top - 6}" y2="{height - _BOTTOM}"/>')
        # Every text would not fit where steps are short.
        if len(marks) <= 16 or n % (len(marks) // 16 + 1) == 0:
            parts.append(f'<text x="{x + 2:.1f}" y="{top - 10}">{escape(name)}</text>')
    for n, (name, bars) in enumerate(rows):
        y = top + n * row_height
        parts.append(f'<text x="{left - 8}" y="{y + 19}" text-anchor="end">{escape(name)}</text>')
        for bar in bars:
            width = max(0.5, (bar.end - bar.begin) * scale)
            parts.append(
                f'<rect x="{left + bar.begin * scale:.1f}" y="{y + 4}" width="{width:.1f}" height="{row_height - 8}"'
                f' fill="{bar.colour}"><title>{escape(bar.title)}</title></rect>'
            )
    for x in ticks(0.0, end or 1.0):
        parts.append(f'<text x="{left + x * scale:.1f}" y="{height - 8}" text-anchor="middle">{x:g} s</text>')
    return picture(height, parts)


def stacks(rows: Sequence[tuple[str, Sequence[Bar]]], unit: str = "s") -> str:
    """One stack of bars a name, all to one scale."""
    end = max((bar.end for _, bars in rows for bar in bars), default=1.0)
    row_height, left = 24, 96
    height = row_height * max(1, len(rows)) + _BOTTOM
    scale = (WIDTH - left - _RIGHT - 72) / (end or 1.0)
    parts = []
    for n, (name, bars) in enumerate(rows):
        y = n * row_height
        parts.append(f'<text x="{left - 8}" y="{y + 16}" text-anchor="end">{escape(name)}</text>')
        for bar in bars:
            parts.append(
                f'<rect x="{left + bar.begin * scale:.1f}" y="{y + 3}" width="{(bar.end - bar.begin) * scale:.2f}"'
                f' height="{row_height - 6}" fill="{bar.colour}"><title>{escape(bar.title)}</title></rect>'
            )
        total = max((bar.end for bar in bars), default=0.0)
        parts.append(f'<text x="{left + total * scale + 6:.1f}" y="{y + 16}">{total:.1f} {escape(unit)}</text>')
    return picture(height, parts)


def legend(entries: Sequence[tuple[str, str, str]]) -> str:
    """(name, colour, meaning) as a list of coloured squares."""
    items = "".join(
        f'<li><span class="key" style="background:{colour}"></span><b>{escape(name)}</b> {escape(meaning)}</li>'
        for name, colour, meaning in entries
    )
    return f'<ul class="legend">{items}</ul>'


def picture(height: int, parts: Sequence[str]) -> str:
    """The parts as one drawing, so many pixels high and WIDTH wide."""
    body = "".join(parts)
    return f'<svg viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}" role="img">{body}</svg>'


def alone(drawing: str, style: str) -> str:
    """A drawing as a file of its own, on white: what its page's style gave it goes with it."""
    head = '<svg xmlns="http://www.w3.org/2000/svg" color="#1c1f24" '
    white = '<rect width="100%" height="100%" fill="#ffffff"/>'
    tag, rest = drawing.removeprefix("<svg ").split(">", 1)
    return f"{head}{tag}><style>{style}</style>{white}{rest}\n"


def ticks(low: float, high: float, about: int = 8) -> list[float]:
    """Round numbers between `low` and `high`, about so many."""
    span = high - low
    step = next(
        base * 10.0**power for power in range(-3, 12) for base in (1, 2, 5) if span / (base * 10.0**power) <= about
    )
    first = -(-low // step) * step
    return [round(first + k * step, 6) for k in range(int((high - first) / step + 1e-9) + 1)]

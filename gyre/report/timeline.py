"""The cells over time: the whole run in one row a cell, and one step close up."""

from __future__ import annotations

import datetime as dt
from collections.abc import Callable, Sequence
from html import escape
from itertools import groupby

from gyre.report import svg
from gyre.store.close_up import CloseUp, Stretch
from gyre.store.report import RoleSpan, StepFacts

COLOURS = {
    "rollout": "#2f6db5",
    "train": "#b5559b",
    "to_train": "#d9622b",
    "to_rollout": "#e8a07a",
    "down": "#c0392b",
    "to_down": "#c0392b",
    "call": "#9cc3ea",
    "micro-batch": "#b5559b",
    "optimizer step": "#7a3b78",
    "weights": "#4f2a5c",
}
PHASES = ("unroute", "drain", "kv", "release", "wake", "load", "push", "sleep", "resume", "report")
"""Phases of a change of role, in the order in which they happen."""

_Scale = Callable[[dt.datetime], float]
"""From a time to a place on the picture."""
_LEFT, _RIGHT, _TOP = 96, 36, 12
_LEVEL, _ROW = 84, 62


def whole_run(roles: Sequence[RoleSpan], steps: Sequence[StepFacts], began: dt.datetime, seconds: float) -> str:
    """Each cell's role over the run; the marks are the beginnings of steps, counted from 1."""
    rows = []
    for cell in dict.fromkeys(span.cell for span in roles):
        bars = [
            svg.Bar(_s(x.started_at, began), _s(x.ended_at, began), COLOURS.get(x.role, "#888"), _role_title(x))
            for x in roles
            if x.cell == cell
        ]
        rows.append((cell, bars))
    return svg.timeline(rows, seconds, [(_s(s.started_at, began), str(s.step + 1)) for s in steps])


def one_step(step: CloseUp, roles: Sequence[RoleSpan]) -> str:
    """The end of a step, from a while before the first cell leaves serving: above, how many of its rollouts are not
    settled; below, a row a cell with its role (changes by phase) and what it does in it: calls that run, and
    micro-batches. Seconds count from the step's beginning."""
    mine = [x for x in roles if x.ended_at > step.began and x.started_at < step.ended]
    begin, end = _stretch(step, mine), (step.ended - step.began).total_seconds()
    scale = (svg.WIDTH - _LEFT - _RIGHT) / ((end - begin) or 1.0)
    height = _TOP + _LEVEL + _ROW * max(1, len(step.slots)) + 30

    def px(at: dt.datetime) -> float:
        return _LEFT + (min(max(begin, _s(at, step.began)), end) - begin) * scale

    calls = {cell: _running([x for x in step.work if x.kind == "call" and x.cell == cell]) for cell in step.slots}
    most = max((n for changes in calls.values() for _, n in changes), default=1)
    parts = _level(step, px)
    for row, cell in enumerate(sorted(step.slots, key=lambda name: (name != step.central, name))):
        y = _TOP + _LEVEL + row * _ROW
        parts.append(f'<text x="{_LEFT - 8}" y="{y + 20}" text-anchor="end">{escape(cell)}</text>')
        if cell != step.central and not any(x.cell == cell for x in mine):
            continue
        for span in (x for x in mine if x.cell == cell):
            parts += _role_bar(span, y + 8, px)
        title = f"calls that {cell} runs; the highest is {most} at once, of {step.slots[cell]} slots"
        parts.append(_area([(px(at), n / most) for at, n in calls[cell]], y + 26, 24, COLOURS["call"], title))
        for x in (x for x in step.work if x.cell == cell and x.kind != "call"):
            title = f"{x.kind}, {(x.ended - x.began).total_seconds():.2f} s"
            title += "" if x.tokens is None else f", {x.tokens:,} tokens"
            if px(x.ended) > px(x.began):
                parts.append(_rect(px(x.began), px(x.ended), y + 26, 24, COLOURS[x.kind], title, gap=0.6))
    for at, label, y in (
        (step.rollouts_done, "last rollout settled", _TOP + 10),
        (step.ended, "weights published", _TOP + 24),
    ):
        parts.append(f'<line class="mark" x1="{px(at):.1f}" x2="{px(at):.1f}" y1="{_TOP}" y2="{height - 24}"/>')
        parts.append(f'<text x="{px(at) - 4:.1f}" y="{y}" text-anchor="end">{label}</text>')
    for tick in svg.ticks(begin, end):
        place = _LEFT + (tick - begin) * scale
        parts.append(f'<text x="{place:.1f}" y="{height - 8}" text-anchor="middle">{tick:g} s</text>')
    return svg.picture(height, parts)


def _stretch(step: CloseUp, roles: Sequence[RoleSpan]) -> float:
    """From which second on the step is drawn: what happens after the first cell's leaving takes a third of it."""
    left = [_s(x.started_at, step.began) for x in roles if x.role == "to_train" and x.started_at > step.began]
    end = (step.ended - step.began).total_seconds()
    return max(0.0, end - 3 * (end - min(left))) if left else 0.0


def in_words(step: CloseUp, roles: Sequence[RoleSpan]) -> str:
    """What the close-up shows, as a sentence a cell that moved while rollouts were live."""
    said = [f"Step {step.step + 1}, {(step.ended - step.began).total_seconds():.1f} s."]
    for x in roles:
        if x.role != "to_train" or not step.began <= x.started_at < step.rollouts_done:
            continue
        live = sum(1 for _, settled in step.lives if settled > x.started_at)
        mine = [b for b in step.work if b.cell == x.cell and b.kind == "micro-batch" and b.began >= x.started_at]
        early = sum(b.ended <= step.rollouts_done for b in mine)
        said.append(
            f"{x.cell} left serving after {_s(x.started_at, step.began):.1f} s, with {live} rollouts still live,"
            f" changed in {(x.ended_at - x.started_at).total_seconds():.2f} s and trained {len(mine)}"
            f" micro-batch{'' if len(mine) == 1 else 'es'}, {early} of them before the last rollout was settled."
        )
    if len(said) == 1:
        said.append("No cell left serving before the last rollout was settled.")
    return " ".join(said)


def key() -> str:
    """The colours."""
    return svg.legend(
        [
            ("rollout", COLOURS["rollout"], "serves model calls"),
            ("train", COLOURS["train"], "takes micro-batches"),
            ("to train", COLOURS["to_train"], "on the way: drains, wakes the trainer"),
            ("to rollout", COLOURS["to_rollout"], "on the way back: pushes, loads weights"),
        ]
    )


def key_of_close_up() -> str:
    """The colours of the lower lanes."""
    return svg.legend(
        [
            ("calls", COLOURS["call"], "that the cell runs at once"),
            ("micro-batch", COLOURS["micro-batch"], "one block each"),
            ("optimizer step", COLOURS["optimizer step"], "after the last gradient"),
            ("weights", COLOURS["weights"], "the new version is published"),
        ]
    )


def _level(step: CloseUp, px: _Scale) -> list[str]:
    """The rollouts that are not settled, as an area; its top is their number as the picture begins."""
    top, height = _TOP + 4, _LEVEL - 16
    changes = [(step.began, len(step.lives))]
    for settled in sorted(settled for _, settled in step.lives):
        changes.append((settled, changes[-1][1] - 1))
    first = next((n for (at, _), (_, n) in zip(changes[1:], changes, strict=False) if px(at) > _LEFT), 1)
    points = [(px(at), min(n, first) / first) for at, n in changes]
    middle = top + height // 2
    return [
        _area(points, top, height, "#c3c9d1", "rollouts of the step that are queued or run"),
        f'<text x="{_LEFT - 8}" y="{top + 8}" text-anchor="end">{first}</text>',
        f'<text x="{_LEFT - 8}" y="{middle + 2}" text-anchor="end">rollouts</text>',
        f'<text x="{_LEFT - 8}" y="{middle + 15}" text-anchor="end">to settle</text>',
        f'<text x="{_LEFT - 8}" y="{top + height}" text-anchor="end">0</text>',
    ]


def _running(calls: Sequence[Stretch]) -> list[tuple[dt.datetime, int]]:
    """How many calls run from when on."""
    running, changes = 0, []
    for at, change in sorted([(c.began, 1) for c in calls] + [(c.ended, -1) for c in calls]):
        running += change
        changes.append((at, running))
    return changes


def _area(steps: Sequence[tuple[float, float]], y: float, height: float, colour: str, title: str) -> str:
    """A curve that keeps each value (0..1) from its place on, filled down to its foot."""
    if not steps:
        return ""
    foot = y + height
    points = [(steps[0][0], foot)]
    for x, value in steps:
        points += [(x, points[-1][1]), (x, foot - value * height)]
    points.append((points[-1][0], foot))
    # Many lie left of the picture, on its edge: each place is said once.
    path = " ".join(place for place, _ in groupby(f"{x:.1f},{py:.1f}" for x, py in points))
    return f'<polygon points="{path}" fill="{colour}"><title>{escape(title)}</title></polygon>'


def _role_bar(span: RoleSpan, y: float, px: _Scale) -> list[str]:
    begin, end = px(span.started_at), px(span.ended_at)
    whole = [_rect(begin, end, y, 16, COLOURS.get(span.role, "#888"), _role_title(span))]
    names = sorted(span.phases, key=lambda n: (PHASES.index(n) if n in PHASES else len(PHASES), n))
    total = sum(span.phases.values())
    at = begin
    for n, name in enumerate(names):
        width = (end - begin) * span.phases[name] / total if total else 0.0
        if n % 2 and width > 0:  # every second phase a shade darker
            whole.append(_rect(at, at + width, y, 16, "#00000040", f"{name} {span.phases[name]:.2f} s", least=0.0))
        at += width
    return whole


def _rect(
    begin: float, end: float, y: float, height: float, colour: str, title: str, *, least: float = 1.0, gap: float = 0.0
) -> str:
    width = max(least, end - begin - gap)
    return (
        f'<rect x="{begin:.1f}" y="{y:.0f}" width="{width:.1f}" height="{height:.0f}" fill="{colour}">'
        f"<title>{escape(title)}</title></rect>"
    )


def _role_title(span: RoleSpan) -> str:
    names = sorted(span.phases, key=lambda n: (PHASES.index(n) if n in PHASES else len(PHASES), n))
    phases = ", ".join(f"{name} {span.phases[name]:.2f} s" for name in names)
    seconds = (span.ended_at - span.started_at).total_seconds()
    return f"{span.role}, {seconds:.2f} s" + "".join(f"; {x}" for x in (span.reason, phases) if x)


def _s(at: dt.datetime, began: dt.datetime) -> float:
    return (at - began).total_seconds()

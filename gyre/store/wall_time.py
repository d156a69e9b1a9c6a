"""Whose wall time a second was, when many things go on at once. Pure."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate

IDLE = "orchestration"


@dataclass(frozen=True)
class Span:
    """A stretch in which one instance of `activity` went on, in seconds of any one clock."""

    activity: str
    began: float
    ended: float


def attribute(spans: Iterable[Span], began: float, ended: float) -> dict[str, float]:
    """Divide the time from `began` to `ended` among activities; the parts sum to `ended - began`.

    An instant belongs in equal parts to the kinds of activity that go on in it, however many instances each has. An
    instant in which nothing goes on is `orchestration`: everybody waits for a workflow, a database or a process to
    start. Raises ValueError when `ended` is before `began`.
    """
    if ended < began:
        raise ValueError(f"wall time: ends at {ended}, before it begins at {began}")
    turns: dict[float, Counter[str]] = defaultdict(Counter)
    for span in spans:
        a, b = max(span.began, began), min(span.ended, ended)
        if a < b:
            turns[a][span.activity] += 1
            turns[b][span.activity] -= 1
    parts: dict[str, float] = defaultdict(float)
    running: Counter[str] = Counter()
    at = began
    for moment in [*sorted(turns), ended]:
        active = [activity for activity, n in running.items() if n > 0] or [IDLE]
        for activity in active:
            parts[activity] += (moment - at) / len(active)
        at = moment
        for activity, n in turns.get(moment, Counter()).items():  # subtract() keeps what falls to zero; so do sums
            running[activity] += n
    return {activity: seconds for activity, seconds in parts.items() if seconds > 0}


def by_window(spans: Iterable[Span], windows: Sequence[tuple[float, float]]) -> list[list[Span]]:
    """For each window (began, ended) the spans that reach into it; windows must be in order of their beginnings.

    One pass, since a long run has a million spans and many steps.
    """
    begins = [began for began, _ in windows]
    latest = list(accumulate((ended for _, ended in windows), max))
    found: list[list[Span]] = [[] for _ in windows]
    for span in spans:
        for i in range(bisect_left(begins, span.ended) - 1, -1, -1):
            if latest[i] <= span.began:
                break  # no earlier window lasts until this span
            if windows[i][1] > span.began:
                found[i].append(span)
    return found

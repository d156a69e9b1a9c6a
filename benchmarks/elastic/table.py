"""What the bench prints: seconds a step by policy, ratios, the simulator beside them, where the cells' time went."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rich.console import Console
from rich.table import Table

from benchmarks.elastic.reading import STATES, Reading


@dataclass(frozen=True)
class Measured:
    """A way's runs, one a round, and the seconds a step that the simulator gives for the trace of each; empty where
    it was not asked."""

    readings: Sequence[Reading]
    simulated: Sequence[float]


def show(title: str, ways: Mapping[str, Measured], ours: str, cores: int) -> None:
    """Print all tables."""
    out = Console(width=150, highlight=False)
    out.print(_steps(title, ways, ours))
    out.print(_idle(ways))
    out.print(_cost(ways, cores))


def _steps(title: str, ways: Mapping[str, Measured], ours: str) -> Table:
    columns = ("policy", "runs", "s a step", "min-max", f"{ours} is faster by", "after the first step", "faster by")
    table = Table(*columns, "simulated s a step", "live differs by", title=title)
    for column in table.columns[1:]:
        column.justify = "right"
    own = ways.get(ours)
    for name, way in ways.items():
        whole, steady = [r.step_s for r in way.readings], [r.steady_s for r in way.readings]
        middle = statistics.median(whole)
        simulated = statistics.median(way.simulated) if way.simulated else None
        # Each run against the trace of itself: rounds differ in what else the machine did.
        apart = [r.step_s / s - 1 for r, s in zip(way.readings, way.simulated, strict=True)] if simulated else []
        table.add_row(
            name,
            str(len(whole)),
            f"{middle:.1f}",
            f"{min(whole):.1f}-{max(whole):.1f}",
            _ratio([r.step_s for r in own.readings] if own else [], whole),
            f"{statistics.median(steady):.1f}",
            _ratio([r.steady_s for r in own.readings] if own else [], steady),
            "" if simulated is None else f"{simulated:.1f}",
            "" if not apart else f"{statistics.median(apart):+.1%}",
        )
    return table


def _ratio(own: Sequence[float], other: Sequence[float]) -> str:
    """Of medians, with the smallest and the largest of the rounds' own ratios."""
    if not own:
        return ""
    middle = statistics.median(other) / statistics.median(own)
    each = [b / a for a, b in zip(own, other, strict=False)]
    return f"{middle:.2f}x ({min(each):.2f}-{max(each):.2f})"


def _idle(ways: Mapping[str, Measured]) -> Table:
    table = Table("policy", *STATES, "role changes", "calls moved", "at the limit", title="Where the cells' time went")
    for column in table.columns[1:]:
        column.justify = "right"
    for name, way in ways.items():
        whole = sum(sum(r.cell_s.values()) for r in way.readings)
        shares = [f"{sum(r.cell_s[state] for r in way.readings) / whole:.0%}" for state in STATES]
        counts = [
            f"{statistics.mean(values):.0f}"
            for values in (
                [r.switches for r in way.readings],
                [r.moved for r in way.readings],
                [r.timeouts for r in way.readings],
            )
        ]
        table.add_row(name, *shares, *counts)
    return table


def _cost(ways: Mapping[str, Measured], cores: int) -> Table:
    """Latencies of the control plane, and whether the machine was the bottleneck."""
    names = list(next(iter(ways.values())).readings[0].latency)
    table = Table(
        "policy", *names, f"CPU of {cores} cores", "most of it", title="Medians in seconds; CPU of all processes"
    )
    for column in table.columns[1:]:
        column.justify = "right"
    for name, way in ways.items():
        found = [[r.latency[n] for r in way.readings if n in r.latency] for n in names]
        middles = [f"{statistics.median(values):.2f}" if values else "-" for values in found]
        used = [sum(r.cpu.values()) / r.seconds / cores for r in way.readings]
        total: dict[str, float] = {}
        for r in way.readings:
            for component, seconds in r.cpu.items():
                total[component] = total.get(component, 0.0) + seconds
        most = sorted(total, key=lambda c: -total[c])[:3]
        parts = ", ".join(f"{c} {total[c] / sum(total.values()):.0%}" for c in most)
        table.add_row(name, *middles, f"{statistics.mean(used):.0%}", parts)
    return table

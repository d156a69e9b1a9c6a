"""Ratios of interleaved measurements, as a table."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping

from rich.console import Console
from rich.table import Table


def interleave(ways: Mapping[str, Callable[[], float]], rounds: int) -> dict[str, list[float]]:
    """Run all ways in turn, `rounds` times, so that what else the machine does meets all of them alike."""
    results: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(rounds):
        for name, way in ways.items():
            results[name].append(way())
    return results


def show(title: str, unit: str, results: Mapping[str, list[float]], ours: str, *, more_is_better: bool) -> None:
    """Minimum, median and maximum of each way, and the factor by which `ours` is better, by medians."""
    table = Table("way", "min", "median", "max", f"{ours} is better by", title=f"{title} ({unit})")
    own = statistics.median(results[ours])
    for name, values in results.items():
        other = statistics.median(values)
        factor = own / other if more_is_better else other / own
        table.add_row(name, f"{min(values):.4g}", f"{other:.4g}", f"{max(values):.4g}", f"{factor:.2f}x")
    Console().print(table)

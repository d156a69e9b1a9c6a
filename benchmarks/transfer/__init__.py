"""Pulls of weights over loopback, both backends against a raw socket: `python -m benchmarks.transfer [MB …]`.

Publisher and puller are two processes. What is raw: one TCP stream into a buffer that exists, nothing checked. What is
ours: double-buffered on both sides and checksummed, whole `pull()` calls. The raw transfers lie between ours, round by
round, and the ratio is of the pull and the raw transfers right before and after it, since the machine's speed drifts.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence

SIZES_MB = (20, 500, 2000)
BACKENDS = ("mooncake", "socket")


def main(sizes_mb: Sequence[int] = SIZES_MB) -> None:
    from rich.console import Console
    from rich.table import Table

    from benchmarks.transfer.peer import TENSOR
    from benchmarks.transfer.pulls import measure

    table = Table(title="Weight pulls over loopback", caption="ratio: pull / raw, median (least to most) of the rounds")
    for name in ("MB", "backend", "raw GB/s", "pull GB/s", "ratio", "first pull s", "publish s"):
        table.add_column(name, justify="left" if name == "backend" else "right")
    for mb in sizes_mb:
        for backend in BACKENDS:
            found = measure(backend, mb * 10**6 // TENSOR * TENSOR, rounds=max(5, min(40, 6000 // mb)))
            ratios = found.ratios()
            table.add_row(
                str(mb),
                backend,
                f"{statistics.median(found.raw):.2f}",
                f"{statistics.median(found.ours):.2f}",
                f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})",
                f"{found.cold_s:.3f}",
                f"{statistics.median(found.publish_s):.3f}",
            )
    Console(width=110).print(table)

"""`python -m benchmarks.transfer [MB …]`: pulls over loopback, both backends against a raw socket.

Publisher and puller are two processes. What is raw: one TCP stream into a buffer that exists, nothing checked. What is
ours: double-buffered on both sides and checksummed, whole `pull()` calls. The raw transfers lie between ours, round by
round, and the ratio is of the pull and the raw transfers right before and after it, since the machine's speed drifts.
"""

from __future__ import annotations

import json
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from rich.console import Console
from rich.table import Table

from benchmarks.transfer.peer import TENSOR
from gyre.transfer import Ticket, open_puller

SIZES_MB = (20, 500, 2000)
BACKENDS = ("mooncake", "socket")
PIECE = 1 << 20
"""Bytes that the raw transfer asks of the kernel at once; larger ones were slower here."""


@dataclass
class Found:
    """GB/s of each round; `raw` has one more than `ours`. Seconds of the first pull, and of each publication."""

    cold_s: float
    raw: list[float] = field(default_factory=list)
    ours: list[float] = field(default_factory=list)
    publish_s: list[float] = field(default_factory=list)

    def ratios(self) -> list[float]:
        """Of each pull to the mean of the raw transfers around it."""
        around = [(a + b) / 2 for a, b in zip(self.raw, self.raw[1:], strict=False)]
        return [ours / raw for ours, raw in zip(self.ours, around, strict=True)]


def main(sizes_mb: tuple[int, ...] = SIZES_MB) -> None:
    table = Table(
        title="Weight pulls over loopback", caption="ratio: pull / raw socket, median (least to most) of rounds"
    )
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


def measure(backend: str, nbytes: int, rounds: int) -> Found:
    argv = [sys.executable, "-m", "benchmarks.transfer.peer", backend, str(nbytes)]
    peer = subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert peer.stdin is not None and peer.stdout is not None
    try:
        said, port = json.loads(peer.stdout.readline())
        target = torch.ones(nbytes, dtype=torch.uint8)
        began = time.perf_counter()
        puller = open_puller(Ticket.from_json(said))
        puller.pull()
        found = Found(cold_s=time.perf_counter() - began)
        puller.pull()  # the second buffer
        raw(port, target)

        def rate(work: Callable[[], object]) -> float:
            began = time.perf_counter()
            work()
            return nbytes / 1e9 / (time.perf_counter() - began)

        found.raw.append(rate(lambda: raw(port, target)))
        for _ in range(rounds):
            print(file=peer.stdin, flush=True)
            found.publish_s.append(float(peer.stdout.readline()))
            found.ours.append(rate(puller.pull))
            found.raw.append(rate(lambda: raw(port, target)))
        puller.close()
        return found
    finally:
        peer.kill()
        peer.wait()


def raw(port: int, target: torch.Tensor) -> None:
    view, done = target.numpy().data, 0
    with socket.create_connection(("127.0.0.1", port)) as connection:
        while done < len(view):
            n = connection.recv_into(view[done : done + PIECE])
            if not n:
                raise ConnectionError(f"the peer ended after {done} bytes")
            done += n


if __name__ == "__main__":
    main(tuple(int(a) for a in sys.argv[1:]) or SIZES_MB)

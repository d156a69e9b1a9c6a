"""One backend's pulls between two processes, and raw transfers between them."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from gyre.transfer import Ticket, open_puller

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

"""The gateway: what a turn costs at 200,000 tokens and over 1,000 turns, and calls a second beside a peer.

`python -m benchmarks.gateway [turns] [peer]`. The engine is a stand-in that takes constant time, so that all else is
the gateway's; tokenizer, Postgres and the gateway's process are the real ones.
"""

from __future__ import annotations

import importlib
import sys

PARTS = ("turns", "peer")


def main(names: list[str] | None = None) -> None:
    if unknown := [name for name in names or () if name not in PARTS]:
        sys.exit(f"benchmarks.gateway has no part {unknown[0]!r}; there are {', '.join(PARTS)}")
    for name in names or PARTS:
        importlib.import_module(f"benchmarks.gateway.{name}").main()

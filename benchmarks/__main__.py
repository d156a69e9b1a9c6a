"""`python -m benchmarks [NAME …]`: every benchmark, or the named ones."""

from __future__ import annotations

import importlib
import sys

NAMES = ("gateway", "harness", "kv", "objective", "store", "streaming", "trainer", "transfer", "trees")


def main(names: list[str]) -> None:
    unknown = [name for name in names if name not in NAMES]
    if unknown:
        sys.exit(f"no benchmark is called {unknown[0]!r}; there are {', '.join(NAMES)}")
    for name in names or NAMES:
        importlib.import_module(f"benchmarks.{name}").main()


if __name__ == "__main__":
    main(sys.argv[1:])

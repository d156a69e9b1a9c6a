"""`python -m benchmarks.kv [first_token | routes] [ROUNDS]`."""

from __future__ import annotations

import sys

from benchmarks.kv import first_token, main, routes

if __name__ == "__main__":
    which, rounds = sys.argv[1] if len(sys.argv) > 1 else "", int(sys.argv[2]) if len(sys.argv) > 2 else 3
    {"first_token": lambda: first_token.main(rounds), "routes": routes.main, "": main}[which]()

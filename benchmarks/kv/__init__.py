"""Keys and values on the move: first-token time with them against without, and the ways their pages could take."""

from __future__ import annotations


def main() -> None:
    from benchmarks.kv.first_token import main as first_token
    from benchmarks.kv.routes import main as routes

    routes()
    first_token()

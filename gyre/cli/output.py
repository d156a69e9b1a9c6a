"""The console of the commands."""

from __future__ import annotations

from rich.console import Console


def console() -> Console:
    """As wide as the terminal; without one so wide that every row stays on one line, as pipes want it."""
    made = Console(highlight=False)
    if not made.is_terminal:
        made.width = 10_000
    return made

"""What a starting or stopping stack waits for: a live table on a terminal, a plain line a change elsewhere."""

from __future__ import annotations

import time
from types import TracebackType

from rich.console import Console
from rich.live import Live
from rich.table import Table

from gyre.cli.stackfile import ProcessState, StackState

_MARKS = {
    "ready": "[green]●[/]",
    "starting": "[yellow]◐[/]",
    "restarting": "[red]↻[/]",
    "failed": "[red]✗[/]",
    "stopping": "[yellow]◑[/]",
    "stopped": "[dim]○[/]",
    "waiting": "[dim]·[/]",
}


class StackProgress:
    """A context manager; `show` takes every new state."""

    def __init__(self, console: Console, verb: str = "ready") -> None:
        self._console = console
        self._verb = verb
        self._begin = time.time()
        self._told: dict[str, str] = {}
        self._live = Live(console=console, refresh_per_second=8, transient=True) if console.is_terminal else None

    def __enter__(self) -> StackProgress:
        if self._live:
            self._live.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        if self._live:
            self._live.stop()

    def show(self, state: StackState) -> None:
        """Draw the state, or say what has changed since the last one."""
        if self._live:
            self._live.update(process_table(state))
            return
        for process in state.processes:
            told, now = self._told.get(process.name), process.state
            if now != told and now in (self._verb, "restarting", "failed"):
                said = f": {process.detail}" if process.detail and now != self._verb else ""
                self._console.print(
                    f"[{time.time() - self._begin:5.1f} s] {process.name} {now}{said}",
                    markup=False, highlight=False, soft_wrap=True,
                )  # fmt: skip
            self._told[process.name] = now


def process_table(state: StackState) -> Table:
    """One row a process: mark, name, state, seconds in it, how often it was started again, what it waits for."""
    table = Table(box=None, padding=(0, 1), show_header=False)
    for process in state.processes:
        table.add_row(
            _MARKS[process.state], process.name, process.state, _age(process), _restarts(process), process.detail
        )  # fmt: skip
    return table


def _restarts(process: ProcessState) -> str:
    return "" if process.restarts == 0 else f"{process.restarts} restart{'s' if process.restarts > 1 else ''}"


def _age(process: ProcessState) -> str:
    return "" if process.since == 0 else f"{max(0.0, time.time() - process.since):.0f} s"

"""`gyre doctor`: what is there, what is missing, and how to get it."""

from __future__ import annotations

from rich.table import Table

from gyre.cli.checks import ALL
from gyre.cli.errors import CliError
from gyre.cli.output import console

_MARKS = {"ok": "[green]ok[/]", "warn": "[yellow]note[/]", "fail": "[red]missing[/]"}


def doctor() -> None:
    """Check this machine and this environment. Exit code 1 when something that Gyre needs is missing."""
    table = Table(box=None, padding=(0, 2, 0, 0), show_header=False)
    failed = 0
    for check in ALL:
        for finding in check():
            failed += finding.state == "fail"
            table.add_row(_MARKS[finding.state], finding.what, finding.found)
            if finding.remedy:
                table.add_row("", "", f"[bold]-> {finding.remedy}[/]")
    out = console()
    out.print(table)
    if failed:
        raise CliError(f"{failed} thing{'s' if failed > 1 else ''} missing; see the lines with ->")

"""`gyre prune`: what a run no longer needs."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table
from sqlalchemy import Engine, select

from gyre.cli.data import DataOption, data_folder, open_database
from gyre.cli.errors import CliError
from gyre.cli.output import console
from gyre.config.run import RetentionConfig, RunConfig
from gyre.store.db import transaction
from gyre.store.models import Run
from gyre.store.queries import retention as r


@dataclass(frozen=True)
class Removal:
    """Something that may go, and how."""

    what: str
    count: int
    size: int
    remove: Callable[[], object]


def prune(
    folders: Annotated[
        int | None, typer.Option(min=0, help="Keep rollouts' folders of so many trained steps (and evaluations).")
    ] = None,
    requests: Annotated[int | None, typer.Option(min=0, help="Keep raw request messages of so many.")] = None,
    cpu_days: Annotated[float | None, typer.Option(min=0, help="Keep CPU samples for so many days.")] = None,
    log_mb: Annotated[int | None, typer.Option(min=1, help="Keep the last so many MB of each log.")] = None,
    run: Annotated[
        str | None, typer.Option("--run", help="Only this run. Default: every run, each by its own file.")
    ] = None,
    yes: Annotated[bool, typer.Option("--yes", help="Remove. Default: only show what would go.")] = False,
    data: DataOption = None,
) -> None:
    """Remove what a run no longer needs: by these options, else by `retention` of its run file."""
    folder = data_folder(data)
    engine = open_database(folder)
    given = {"folders": folders, "requests": requests, "cpu_days": cpu_days, "log_mb": log_mb}
    rules = _rules(engine, run, {k: v for k, v in given.items() if v is not None})
    found = [x for name, rule in rules.items() for x in _of_run(engine, folder, name, rule)]
    found += _logs(folder / "logs", [x.log_mb for x in rules.values() if x.log_mb is not None])
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
    for name in ("what", "how many", "MB"):
        table.add_column(name, justify="left" if name == "what" else "right")
    for item in found:
        if yes:
            item.remove()
        table.add_row(item.what, str(item.count), f"{item.size / 1e6:.1f}")
    out = console()
    if not any(rule != RetentionConfig() for rule in rules.values()):
        out.print("Nothing says what may go: name it (gyre prune --help), or set `retention` in the run file.")
        return
    out.print(table)
    out.print("removed" if yes else "nothing was removed; --yes removes it")


def _rules(engine: Engine, run: str | None, given: dict[str, float]) -> dict[str, RetentionConfig]:
    """What each run keeps."""
    with transaction(engine) as session:
        runs = session.scalars(select(Run).where(Run.id == run) if run else select(Run).order_by(Run.id)).all()
    if not runs:
        raise CliError(f"no run {run!r}" if run else "no run yet")
    # An import's settings may be of another version; it has no folders here.
    own = {
        x.id: RunConfig.model_validate(x.config).retention if x.state != "archived" else RetentionConfig() for x in runs
    }
    return {name: RetentionConfig.model_validate({**rule.model_dump(), **given}) for name, rule in own.items()}


def _of_run(engine: Engine, data: Path, run: str, rule: RetentionConfig) -> list[Removal]:
    found = []
    with transaction(engine) as s:
        if rule.folders is not None:
            there = [
                f for rollout in r.old_rollouts(s, run, rule.folders) for f in _folders(data / "rollouts", rollout)
            ]
            found.append(
                Removal(f"{run}: rollouts' folders", len(there), sum(map(_size, there)), lambda: _remove(there))
            )
        if (keep := rule.requests) is not None:
            amount = r.old_requests(s, run, keep)
            found.append(
                Removal(
                    f"{run}: calls' request messages", amount.rows, amount.size, lambda: _requests(engine, run, keep)
                )
            )
        if (days := rule.cpu_days) is not None:
            amount = r.old_cpu_samples(s, run, days)
            found.append(
                Removal(f"{run}: CPU samples", amount.rows, amount.size, lambda: _cpu_samples(engine, run, days))
            )
    return found


def _folders(root: Path, rollout: str) -> list[Path]:
    """The folder of each attempt at a rollout: `<id>`, `<id>.a2` …"""
    first = root / rollout
    return [f for f in (first, *first.parent.glob(f"{first.name}.a*")) if f.is_dir() and not f.is_symlink()]


def _size(folder: Path) -> int:
    """Bytes on disk below a folder; links are not followed."""
    total = 0
    for here, _, files in os.walk(folder):
        total += sum(os.lstat(os.path.join(here, name)).st_blocks * 512 for name in files)
    return total


def _remove(folders: list[Path]) -> None:
    for folder in folders:
        shutil.rmtree(folder)


def _requests(engine: Engine, run: str, keep: int) -> None:
    with transaction(engine) as s:
        r.prune_requests(s, run, keep)
    _vacuum(engine, "calls")


def _cpu_samples(engine: Engine, run: str, days: float) -> None:
    with transaction(engine) as s:
        r.prune_cpu_samples(s, run, days)
    _vacuum(engine, "cpu_samples")


def _vacuum(engine: Engine, table: str) -> None:
    """Make the room usable for new rows at once; the files themselves do not shrink."""
    with engine.connect().execution_options(isolation_level="AUTOCOMMIT") as c:
        c.exec_driver_sql(f"VACUUM {table}")


def _logs(folder: Path, limits: list[int]) -> list[Removal]:
    """Logs above the largest of the runs' limits: they belong to the stack, not to one run."""
    if not limits:
        return []
    limit = max(limits) * 1_000_000
    large = [f for f in sorted(folder.glob("*.log")) if f.stat().st_size > limit]
    return [Removal(f"{f.name}: its beginning", 1, f.stat().st_size - limit, lambda f=f: _cut(f, limit)) for f in large]  # type: ignore[misc]


def _cut(log: Path, limit: int) -> None:
    """Keep the end of a log, from a whole line on. Its process goes on: logs are opened to append.

    The end is copied over the beginning while the process still appends behind both, and so is what it appended
    meanwhile. Only what it writes between the last look and the system call that follows is lost.
    """
    with log.open("rb") as source, log.open("r+b") as file:
        source.seek(-limit, os.SEEK_END)
        source.readline()
        while rest := source.read(1 << 20):
            file.write(rest)
            file.flush()
        file.truncate()

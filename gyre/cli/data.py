"""The data folder, and the options that most commands share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from sqlalchemy import Engine

from gyre.cli.errors import CliError
from gyre.cli.stackfile import StackState
from gyre.store.db import make_engine

DataOption = Annotated[
    Path | None, typer.Option("--data", help="Data folder. Default: .gyre at the root of the repository.")
]
RunOption = Annotated[str | None, typer.Option("--run", help="Run, e.g. quickstart-s0. Default: the newest one.")]


def data_folder(given: Path | None, near: Path | None = None) -> Path:
    """`given`, or `.gyre` in the closest folder above `near` that has one or is a repository.

    `near` is a run file or a folder; default: the working directory.
    """
    if given is not None:
        return given.expanduser().resolve()
    start = (near or Path.cwd()).resolve()
    start = start.parent if start.is_file() else start
    for folder in (start, *start.parents):
        if (folder / ".gyre").is_dir() or (folder / ".git").exists():
            return folder / ".gyre"
    return start / ".gyre"


def living_stack(data: Path) -> StackState:
    """The stack that runs on `data`. Raises CliError where none does."""
    state = StackState.read(data)
    if state is None:
        raise CliError(f"no stack has run on {data} yet; start one with `gyre train RUN.toml` or name it with --data")
    if not state.alive:
        raise CliError(f"the stack on {data} is down; `gyre up --data {data}` starts its database and Temporal")
    return state


def open_database(data: Path) -> Engine:
    """An engine on the living stack's database. Raises CliError where the stack is down."""
    return make_engine(living_stack(data).database_url, pool_size=1)

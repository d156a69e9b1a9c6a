"""The data folder, and the options that most commands share."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer
from sqlalchemy import Engine
from sqlalchemy.engine import make_url
from sqlalchemy.exc import ArgumentError

from gyre.cli.errors import CliError
from gyre.cli.stackfile import StackState
from gyre.store.db import make_engine

DataOption = Annotated[
    Path | None, typer.Option("--data", help="Data folder. Default: .gyre at the root of the repository.")
]
RunOption = Annotated[str | None, typer.Option("--run", help="Run, e.g. quickstart-s0. Default: the newest one.")]


def data_folder(given: Path | None, near: Path | None = None) -> Path:
    """`given`, or `.gyre` in the closest folder above `near` that has one or is a repository.

    `near` is a run file or a folder; default: the working directory. Where the environment names the database it names
    the folder too, if it has GYRE_DATA.
    """
    if given is not None:
        return given.expanduser().resolve()
    if near is None and "GYRE_DATA" in os.environ and environment_database(given):
        return Path(os.environ["GYRE_DATA"])
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


def environment_database(data: Path | None) -> str | None:
    """GYRE_DATABASE_URL, which stands in for a stack's file where no data folder is named.

    Containers of compose.yaml have it, and nothing there writes `stack.json`. Raises CliError where it is no URL.
    """
    url = os.environ.get("GYRE_DATABASE_URL")
    if data is not None or not url:
        return None
    try:
        known = make_url(url).drivername == "postgresql+psycopg"
    except ArgumentError:
        known = False
    if not known:
        raise CliError("GYRE_DATABASE_URL: must be postgresql+psycopg://user:password@host:port/name; or unset it")
    return url


def open_database(data: Path) -> Engine:
    """An engine on the living stack's database, to change it. Raises CliError where the stack is down."""
    return make_engine(living_stack(data).database_url, pool_size=1)


def read_database(data: Path | None) -> Engine:
    """An engine for verbs that only look: on the database that the environment names, else on the living stack's."""
    url = environment_database(data)
    return make_engine(url, pool_size=1) if url else open_database(data_folder(data))

"""`gyre status`: the stack and the newest run, once."""

from __future__ import annotations

import os
import shlex

from rich.console import Console
from sqlalchemy.engine import make_url
from sqlalchemy.exc import ProgrammingError

from gyre.cli.data import DataOption, RunOption, data_folder, environment_database, living_stack
from gyre.cli.errors import CliError
from gyre.cli.live import draw
from gyre.cli.progress import process_table
from gyre.cli.snapshot import newest_run, take_snapshot
from gyre.cli.stackfile import StackState
from gyre.store.db import make_engine


def status(run: RunOption = None, data: DataOption = None) -> None:
    """Show the stack's processes and how far the run is."""
    console = Console(highlight=False)
    state: StackState | None = None
    if url := environment_database(data):
        temporal = os.environ.get("GYRE_TEMPORAL_ADDRESS", "not in GYRE_TEMPORAL_ADDRESS")
        where = make_url(url)
        console.print(f"database {where.host}:{where.port}   Temporal {temporal}", soft_wrap=True)
    else:
        state = living_stack(data_folder(data))
        url = state.database_url
        console.print(f"stack {state.state} (pid {state.pid})   Temporal UI {state.ui_url}", soft_wrap=True)
        console.print(process_table(state))
    engine = make_engine(url, pool_size=1)
    try:
        run_id = run or newest_run(engine)
        snapshot = take_snapshot(engine, run_id) if run_id else None
    except ProgrammingError as error:
        raise CliError("the database has no tables yet; wait until the stack is ready") from error
    if snapshot is not None:
        console.print(draw(snapshot, None))
        away = [cell.name for cell in snapshot.cells if cell.remote and cell.missing]
        if away and state is not None and state.run_id == run_id:
            how = shlex.join(["gyre", "cells", "--data", str(data_folder(data))])
            console.print(f"Started by you on other machines: {', '.join(away)}. How: {how}", soft_wrap=True)
    elif run_id:
        raise CliError(f"no run {run_id!r}; `gyre sql 'SELECT id FROM runs'` lists them")
    else:
        console.print("no run yet")

"""`gyre up` and `gyre down`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from gyre.cli.data import DataOption, data_folder
from gyre.cli.errors import CliError
from gyre.cli.launch import say_who_is_let_in, start_supervisor, stop_supervisor, wait_ready, write_run_config
from gyre.cli.runfile import read_run_file
from gyre.cli.stackfile import StackState


def up(
    run: Annotated[Path | None, typer.Argument(help="Run file; none: Postgres and Temporal alone.")] = None,
    seed: Annotated[int | None, typer.Option(help="Seed instead of the run file's.")] = None,
    data: DataOption = None,
) -> None:
    """Start the local stack in the background."""
    console = Console(highlight=False)
    folder = data_folder(data, run)
    before = StackState.read(folder)
    if before is not None and before.alive:
        raise CliError(f"a stack already runs on {folder} (pid {before.pid}); `gyre down --data {folder}` stops it")
    config = None
    if run is not None:
        config = write_run_config(folder, read := read_run_file(run, seed=seed))
        say_who_is_let_in(read, folder, console)
    supervisor = start_supervisor(folder, config, tied=False)
    try:
        state = wait_ready(folder, supervisor, console)
    except KeyboardInterrupt:
        stop_supervisor(folder, console, started=supervisor)
        raise CliError("interrupted; the stack was stopped", code=130) from None
    console.print(f"The stack runs on {folder} (pid {state.pid}). `gyre down` stops it.", soft_wrap=True)
    console.print(f"Temporal UI  {state.ui_url}")
    if state.run_id:
        console.print(f"Gateway      {state.gateway_url}")


def down(data: DataOption = None) -> None:
    """Stop the local stack and every process of it."""
    folder = data_folder(data)
    if stop_supervisor(folder, Console(highlight=False)):
        print(f"The stack on {folder} is stopped.")
    else:
        print(f"No stack runs on {folder}.")

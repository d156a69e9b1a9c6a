"""`gyre report`: the report of a run, now."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from gyre.cli.data import DataOption, RunOption, data_folder, read_database
from gyre.cli.errors import CliError
from gyre.cli.snapshot import newest_run
from gyre.report import ReportError, write_close_up, write_report


def report(
    run: RunOption = None,
    step: Annotated[
        int | None, typer.Option(min=1, help="Step to show close up (default: where cells move most).")
    ] = None,
    svg: Annotated[Path | None, typer.Option(help="Write the close-up alone, as a drawing, to this file.")] = None,
    data: DataOption = None,
) -> None:
    """Write report.html of a run as it stands, also in the midst of it."""
    folder = data_folder(data)
    engine = read_database(data)
    run_id = run or newest_run(engine)
    if run_id is None:
        raise CliError("no run is recorded yet; start one with `gyre train RUN.toml`")
    index = None if step is None else step - 1
    try:
        if svg is not None:
            print(write_close_up(engine, run_id, svg, index))
        print(write_report(engine, run_id, folder / "runs" / run_id / "report.html", index))
    except ReportError as error:
        raise CliError(str(error)) from error

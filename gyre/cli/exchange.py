"""`gyre export` and `gyre import`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from gyre.cli.data import DataOption, RunOption, data_folder, open_database, read_database
from gyre.cli.errors import CliError
from gyre.cli.snapshot import newest_run


def export(
    folder: Annotated[Path, typer.Argument(help="A new folder for the files.")],
    format: Annotated[
        Literal["parquet", "atif"], typer.Option(help="parquet: one file a table. atif: one trajectory file a rollout.")
    ] = "parquet",
    run: RunOption = None,
    step: Annotated[int | None, typer.Option(min=1, help="Only this step, counted from 1.")] = None,
    rollout: Annotated[str | None, typer.Option(help="Only this rollout, e.g. quickstart-s0/s3/02/05.")] = None,
    prompt_ids: Annotated[
        bool, typer.Option("--prompt-ids", help="atif: also each call's whole prompt as ids. Large for long rollouts.")
    ] = False,
    data: DataOption = None,
) -> None:
    """Write a run, a step or a rollout to files that other programs read."""
    from gyre.export import ExportError, Scope, export_atif, export_parquet  # pyarrow: 0.3 s that only this needs

    if step is not None and rollout is not None:
        raise CliError("--step and --rollout: name one of them", code=2)
    engine = read_database(data)
    run_id = run or (rollout.split("/")[0] if rollout else newest_run(engine))
    if run_id is None:
        raise CliError("no run yet")
    scope = Scope(run_id, None if step is None else step - 1, rollout)
    try:
        # One snapshot for all tables: rollouts may be going on.
        with engine.execution_options(isolation_level="REPEATABLE READ").begin() as connection:
            if format == "parquet":
                _say(export_parquet(connection, scope, folder), f"{run_id} is in {folder}")
            else:
                print(f"{len(export_atif(connection, scope, folder, prompt_ids=prompt_ids))} rollouts are in {folder}")
    except ExportError as error:
        raise CliError(str(error)) from error


def import_(
    path: Annotated[Path, typer.Argument(help="What `gyre export` wrote: a folder, or one ATIF file.")],
    name: Annotated[str | None, typer.Option("--as", help="Name of the run here. Default: as it was.")] = None,
    data: DataOption = None,
) -> None:
    """Read an exported run into the database, archived: it can be asked about, and is not trained."""
    from gyre.export import ExportError, import_atif, import_parquet

    if not path.exists():
        raise CliError(f"{path} does not exist")
    read = import_parquet if (path / "runs.parquet").exists() else import_atif
    try:
        with open_database(data_folder(data)).begin() as connection:
            run_id, counts = read(connection, path, name)
    except ExportError as error:
        raise CliError(str(error)) from error
    _say(counts, f"{run_id} is in the database")


def _say(counts: dict[str, int], where: str) -> None:
    print(f"{where}: " + ", ".join(f"{n} {table}" for table, n in counts.items() if n))

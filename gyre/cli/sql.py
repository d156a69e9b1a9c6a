"""`gyre sql`: any query on the run's database."""

from __future__ import annotations

import csv
import sys
from typing import Annotated, Any

import typer
from rich.table import Table
from rich.text import Text
from sqlalchemy.exc import DBAPIError, OperationalError

from gyre.cli.data import DataOption, read_database
from gyre.cli.errors import CliError
from gyre.cli.output import console


def sql(
    query: Annotated[str, typer.Argument(help="SQL; docs/sql.md has the views and functions.")],
    write: Annotated[bool, typer.Option("--write", help="Allow changes (default: a read-only transaction).")] = False,
    as_csv: Annotated[bool, typer.Option("--csv", help="Print CSV.")] = False,
    data: DataOption = None,
) -> None:
    """Run a query, read-only unless told otherwise."""
    engine = read_database(data)
    try:
        # Without parameters the driver takes % as it is.
        with engine.execution_options(no_parameters=True).begin() as c:
            if not write:
                # The second one is for a query that ends this transaction and begins another.
                c.exec_driver_sql("SET TRANSACTION READ ONLY")
                c.exec_driver_sql("SET SESSION CHARACTERISTICS AS TRANSACTION READ ONLY")
            result = c.exec_driver_sql(query)
            rows = result.fetchall() if result.returns_rows else None
            names, changed = (list(result.keys()) if rows is not None else []), result.rowcount
    except OperationalError:
        raise  # the database is not there: the query is not to blame
    except DBAPIError as error:
        raise CliError(_one_line(error)) from error
    if rows is None:
        print(f"{max(changed, 0)} rows changed")
    elif as_csv:
        writer = csv.writer(sys.stdout)
        writer.writerow(names)
        writer.writerows(rows)
    else:
        _print(names, [tuple(row) for row in rows])


def _print(names: list[str], rows: list[tuple[Any, ...]]) -> None:
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
    for i, name in enumerate(names):
        numbers = rows and all(isinstance(row[i], int | float) or row[i] is None for row in rows)
        table.add_column(name, justify="right" if numbers else "left")
    for row in rows:
        table.add_row(*(Text(_cell(value)) for value in row))
    out = console()
    out.print(table)
    out.print(f"({len(rows)} rows)" if len(rows) != 1 else "(1 row)")


def _cell(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, float):
        return f"{value:.6g}"
    if isinstance(value, bytes):
        return f"<{len(value)} bytes>"
    return str(value)


def _one_line(error: DBAPIError) -> str:
    diagnostics = getattr(error.orig, "diag", None)
    message = getattr(diagnostics, "message_primary", None) or " ".join(str(error.orig).split())
    hint = getattr(diagnostics, "message_hint", None)
    if "read-only transaction" in message:
        hint = "add --write to change the database"
    return f"{message} ({hint})" if hint else str(message)

"""The command `gyre`. One module a command; an error of the user is one line."""

from __future__ import annotations

import sys

import typer
from sqlalchemy.exc import OperationalError
from typer.exceptions import Abort, TyperException

from gyre.cli.cells import cells
from gyre.cli.control import pause, resume, stop
from gyre.cli.doctor import doctor
from gyre.cli.errors import CliError
from gyre.cli.exchange import export, import_
from gyre.cli.prune import prune
from gyre.cli.report import report
from gyre.cli.rollouts import rollouts
from gyre.cli.simulate import simulate_command
from gyre.cli.sql import sql
from gyre.cli.status import status
from gyre.cli.train import train
from gyre.cli.tree import tree
from gyre.cli.up import down, up

app = typer.Typer(
    name="gyre",
    help="Elastic online RL for long-horizon agents, driven by unmodified harnesses.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
)
for command in (train, up, down, pause, resume, stop, status, rollouts, tree, sql, report, prune, cells, doctor):
    app.command()(command)
app.command("export")(export)
app.command("import")(import_)
app.command("simulate")(simulate_command)


def run_command(arguments: list[str] | None = None) -> int:
    """Run one command line (default: this process's) and return its exit code; errors are printed, in one line."""
    try:
        code = app(arguments, standalone_mode=False)
    except CliError as error:
        print(f"gyre: {error}", file=sys.stderr)
        return error.code
    except OperationalError as error:
        why = str(error.orig).splitlines()[0]
        print(f"gyre: the database does not answer ({why}); `gyre status` shows the stack", file=sys.stderr)
        return 1
    except TyperException as error:  # a wrong use of the command line
        print(f"gyre: {' '.join(error.format_message().split())} (gyre --help)", file=sys.stderr)
        return error.exit_code
    except (Abort, KeyboardInterrupt):
        return 130
    return code if isinstance(code, int) else 0


def main() -> None:
    """Entry point."""
    sys.exit(run_command())


if __name__ == "__main__":
    main()

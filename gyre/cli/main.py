"""The command `gyre`. One module a command; an error of the user is one line."""

from __future__ import annotations

import sys

import typer
from typer.exceptions import Abort, TyperException

from gyre.cli.errors import CliError
from gyre.cli.train import train
from gyre.cli.up import down, up

app = typer.Typer(
    name="gyre",
    help="Elastic online RL for long-horizon agents, driven by unmodified harnesses.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
)
for command in (train, up, down):
    app.command()(command)


def main() -> None:
    """Entry point."""
    try:
        code = app(standalone_mode=False)
    except CliError as error:
        print(f"gyre: {error}", file=sys.stderr)
        sys.exit(error.code)
    except TyperException as error:  # a wrong use of the command line
        print(f"gyre: {' '.join(error.format_message().split())} (gyre --help)", file=sys.stderr)
        sys.exit(error.exit_code)
    except Abort:
        sys.exit(130)
    sys.exit(code if isinstance(code, int) else 0)


if __name__ == "__main__":
    main()

"""The command `gyre`. One module a command; an error of the user is one line."""

from __future__ import annotations

import sys

import typer

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
        app()
    except CliError as error:
        print(f"gyre: {error}", file=sys.stderr)
        sys.exit(error.code)


if __name__ == "__main__":
    main()

"""`gyre cells`: the commands that start every cell's processes, machine by machine."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from gyre.cli.data import DataOption, data_folder, living_stack
from gyre.cli.errors import CliError
from gyre.cli.runfile import read_run_file
from gyre.cli.stackfile import StackState
from gyre.config import CellConfig, RunConfig
from gyre.serving.launch import EngineStartError, sglang_command
from gyre.training.launch import trainer_command

TRAINER_MODULE = "workers.trainer"


def cells(
    run_file: Annotated[
        Path | None, typer.Argument(metavar="[RUN.toml]", help="The run file; none: the run that the stack is up for.")
    ] = None,
    port: Annotated[
        int, typer.Option(min=1, max=65535, help="Port of the servers; a cell's agent takes a free one.")
    ] = 30000,
    seed: Annotated[int | None, typer.Option(help="Seed instead of the run file's.")] = None,
    data: DataOption = None,
) -> None:
    """Print how every cell's server and trainer are started: on its own machine by its agent, on others by you.

    For the cells of stack.remote_cells: how their agents are started, which is all that you start of them.
    """
    folder = data_folder(data, run_file)
    if run_file is None and seed is not None:
        raise CliError("--seed: name a run file, too", code=2)
    run = _run_of_stack(folder) if run_file is None else read_run_file(run_file, seed=seed)
    console = Console(highlight=False, soft_wrap=True, markup=False)
    try:
        for line in lines(run, folder / "sockets", port):
            console.print(line)
        for line in agents(run, StackState.read(folder)):
            console.print(line)
    except EngineStartError as error:
        raise CliError(str(error)) from error


def _run_of_stack(folder: Path) -> RunConfig:
    stack = living_stack(folder)
    if stack.run_config is None:
        raise CliError(f"the stack on {folder} is up without a run; name a run file")
    return RunConfig.model_validate_json(Path(stack.run_config).read_bytes())


def lines(run: RunConfig, sockets: Path, port: int) -> Iterator[str]:
    """A comment for each machine of each cell, then its server's and its trainer's command for a shell.

    Without the first machines of the cells whose agents run elsewhere: there the agent starts both.
    """
    for cell in run.cells:
        for node, machine in enumerate(cell.nodes or ["this machine"]):
            if node == 0 and cell.name in run.stack.remote_cells:
                continue
            yield f"# {cell.name}{' (central)' if cell.central else ''}, {machine}, {_devices(cell)}"
            yield _shell(
                *sglang_command(run.policy.path, port, run.serving, cell, context=run.policy.context, node=node)
            )
            yield _shell(*trainer_command(TRAINER_MODULE, cell, sockets / f"trainer-{cell.name}-0.sock", node=node))


def agents(run: RunConfig, stack: StackState | None) -> Iterator[str]:
    """For each cell of another machine a comment, then its agent's command; without a stack, what to do first."""
    for cell in run.stack.remote_cells:
        yield f"# agent of {cell}: on its machine, in a checkout of this code; for ADDRESS put that machine's address"
        if stack is None or not stack.alive or stack.run_id != run.run_id:
            now = f"; now one is up for {stack.run_id or 'no run'}" if stack is not None and stack.alive else ""
            yield f"# its variables are known once the stack of {run.run_id} is up (gyre train, gyre up){now}"
        else:
            argv = [".venv/bin/python", "-m", "workers.cell_agent", "--cell", cell]
            yield _shell(argv, stack.environment | {"GYRE_HOST": "ADDRESS"})


def _devices(cell: CellConfig) -> str:
    if cell.devices:
        return f"CUDA {', '.join(map(str, cell.devices))}"
    return f"CPU {', '.join(map(str, cell.cpus))}" if cell.cpus else "CPU"


def _shell(argv: list[str], env: dict[str, str]) -> str:
    return shlex.join([*(["env", *(f"{name}={value}" for name, value in env.items())] if env else []), *argv])

"""`gyre pause`, `gyre resume` and `gyre stop`: what a run that is running can be told."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Annotated

import typer

from gyre.cli.data import DataOption, data_folder, environment_database, living_stack
from gyre.cli.errors import CliError
from gyre.cli.launch import SOURCE


def pause(data: DataOption = None) -> None:
    """Hold the run: no new step, no new rollout. Rollouts that live go on to their end."""
    run_id, _ = _tell(data, "pause")
    print(f"{run_id} is paused: what lives goes on to its end, nothing new starts. `gyre resume` goes on.")


def resume(data: DataOption = None) -> None:
    """Let a paused run go on."""
    run_id, state = _tell(data, "resume")
    print(f"{run_id} is {state}.")


def stop(
    finish_steps: Annotated[
        bool, typer.Option("--finish-steps", help="Let the open steps end first. Default: end their rollouts at once.")
    ] = False,
    data: DataOption = None,
) -> None:
    """End the run, not the stack (`gyre down`). `gyre train` of the same run file goes on with it."""
    run_id, state = _tell(data, "stop", *(["--finish-steps"] if finish_steps else []))
    how = "when its open steps have ended" if finish_steps else "its live rollouts are ended"
    print(f"{run_id} is {state}: {how}. `gyre train` of its run file goes on with it.")


def _tell(data: Path | None, verb: str, *options: str) -> tuple[str, str]:
    """Tell the run of the stack; its id and its state afterwards. A process of its own speaks to Temporal, not this."""
    told: dict[str, str] = {}
    if environment_database(data) is None:  # else the environment says as much as a stack would
        folder = data_folder(data)
        stack = living_stack(folder)
        if stack.run_id is None:
            raise CliError(f"no run is running: the stack on {folder} is up without one; `gyre train RUN.toml` has one")
        told = stack.environment
    done = subprocess.run(
        [sys.executable, "-m", "workers.tell", verb, *options],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        env={**os.environ, **told, "PYTHONPATH": str(SOURCE)},
    )
    if done.returncode != 0:
        said = [line for line in done.stderr.splitlines() if line.strip()]
        raise CliError(said[-1].removeprefix("gyre: ") if said else f"workers.tell ended with {done.returncode}")
    run_id, state = done.stdout.split()
    return run_id, state

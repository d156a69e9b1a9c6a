"""`gyre train RUN.toml`: the stack, the run, the live view, and the end."""

from __future__ import annotations

import signal
import time
from pathlib import Path
from types import FrameType
from typing import Annotated, NoReturn

import typer
from rich.console import Console
from rich.live import Live
from sqlalchemy import Engine
from sqlalchemy.exc import DBAPIError

from gyre.cli.data import DataOption, data_folder
from gyre.cli.errors import CliError
from gyre.cli.launch import say_who_is_let_in, start_supervisor, stop_supervisor, wait_ready, write_run_config
from gyre.cli.live import PlainView, draw
from gyre.cli.runfile import read_run_file
from gyre.cli.snapshot import RunSnapshot, take_snapshot
from gyre.cli.stackfile import StackState
from gyre.cli.submission import Submission
from gyre.cli.summary import print_summary
from gyre.config import RunConfig
from gyre.store.db import make_engine


def train(
    run_file: Annotated[Path, typer.Argument(metavar="RUN.toml", help="The run file.")],
    seed: Annotated[int | None, typer.Option(min=0, help="Seed instead of the run file's.")] = None,
    steps: Annotated[int | None, typer.Option(min=1, help="Optimizer steps instead of the run file's.")] = None,
    data: DataOption = None,
    keep: Annotated[bool, typer.Option("--keep", help="Leave the stack running at the end.")] = False,
) -> None:
    """Train: start the stack if it is not up, start the run or join it, show it, and report at the end."""
    run = read_run_file(run_file, seed=seed, steps=steps)
    folder = data_folder(data, run_file)
    console = Console(highlight=False)
    signal.signal(signal.SIGTERM, _interrupt)  # ended from outside: the same orderly way as Ctrl-C
    again = f"gyre train {run_file}" + (f" --seed {seed}" if seed is not None else "")
    again += (f" --steps {steps}" if steps is not None else "") + (f" --data {data}" if data else "")
    owned = False
    try:
        say_who_is_let_in(run, folder, console)
        stack, owned = _stack(folder, run, console, keep=keep)
        failed = _follow(folder, stack, run, console)
    except KeyboardInterrupt:
        if owned or not _is_up(folder):
            stop_supervisor(folder, console)
            raise CliError(f"stopped; nothing finished is lost. Go on with: {again}", code=130) from None
        raise CliError(f"left; the run goes on in the stack. Watch it with: {again}", code=130) from None
    except BaseException:
        if owned and not keep:
            stop_supervisor(folder, console)
        raise
    if owned and not keep:
        stop_supervisor(folder, console)
        console.print(f"The stack is stopped; `gyre up --data {folder}` brings database and UI back.", soft_wrap=True)
    if failed:
        raise CliError(failed)


def _interrupt(_number: int, _frame: FrameType | None) -> NoReturn:
    raise KeyboardInterrupt


def _is_up(data: Path) -> bool:
    state = StackState.read(data)
    return state is not None and state.alive and state.state == "ready"


def _stack(data: Path, run: RunConfig, console: Console, *, keep: bool) -> tuple[StackState, bool]:
    """The stack of the run, and whether it was started here."""
    state = StackState.read(data)
    if state is not None and state.alive:
        if state.run_id != run.run_id:
            other = f"the run {state.run_id}" if state.run_id else "its database alone"
            raise CliError(f"the stack on {data} is up for {other}; stop it first: gyre down --data {data}")
        if state.state != "ready":
            raise CliError(f"the stack on {data} is {state.state}; try again in a moment")
        return state, False
    config = write_run_config(data, run)
    console.print(f"{run.run_id}: starting the local stack in {data}", soft_wrap=True)
    supervisor = start_supervisor(data, config, tied=not keep)
    try:
        return wait_ready(data, supervisor, console), True
    except KeyboardInterrupt:
        stop_supervisor(data, console, started=supervisor)
        raise


def _follow(data: Path, stack: StackState, run: RunConfig, console: Console) -> str:
    """Submit the run and show it until it ends; then report. Returns why it failed, '' where it did not."""
    engine = make_engine(stack.database_url, pool_size=1)
    submission = Submission(data, stack)
    plain = PlainView(console)
    live = Live(console=console, refresh_per_second=4) if console.is_terminal else None
    snapshot: RunSnapshot | None = None
    try:
        if live:
            live.start()
        while True:
            ended, began = submission.ended, time.monotonic()
            snapshot = _look(engine, run.run_id) or snapshot
            now = StackState.read(data)
            if snapshot and live:
                live.update(draw(snapshot, now))
            elif snapshot:
                plain.show(snapshot)
            if ended:
                break
            if now is None or not now.alive:
                raise CliError(f"the stack has ended: {now.message if now and now.message else 'it was stopped'}")
            # A run of many steps is dear to look at: looking takes a twentieth of a core at most.
            time.sleep(min(15.0, max(1.0, 20 * (time.monotonic() - began))))
    finally:
        if live:
            live.stop()
        submission.abandon()
    failure = submission.failure()
    if snapshot is not None:
        print_summary(engine, snapshot, stack, data, console)
    engine.dispose()
    return failure


def _look(engine: Engine, run_id: str) -> RunSnapshot | None:
    try:
        return take_snapshot(engine, run_id)
    except DBAPIError:
        return None  # Postgres is being restarted: the view stays as it was

"""One run of a bench: the stack of a policy, started, waited for, read and ended."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from gyre.cli.launch import start_supervisor, stop_supervisor, wait_ready, write_run_config
from gyre.cli.stackfile import StackState
from gyre.cli.submission import Submission
from gyre.config import RunConfig


@dataclass(frozen=True)
class Way:
    """A policy in one configuration."""

    name: str
    policy: str
    staleness: int
    train_cells: tuple[str, ...] = ()
    rollouts_per_slot: float = 1.0

    def of(self, run: RunConfig) -> RunConfig:
        """The run under this policy."""
        rollouts = run.rollouts.model_copy(update={"max_staleness": self.staleness})
        settings = {
            "policy": self.policy,
            "train_cells": list(self.train_cells),
            "rollouts_per_slot": self.rollouts_per_slot,
        }
        scheduling = run.scheduling.model_copy(update=settings)
        return run.model_copy(update={"rollouts": rollouts, "scheduling": scheduling})


def async_way(train: int, cells: int, staleness: int = 1) -> Way:
    """A fixed split: the first `train` of `cells` cells train."""
    names = tuple(f"c{i}" for i in range(train))
    return Way(f"async {train} of {cells} train, staleness {staleness}", "async", staleness, names)


class RunFailed(RuntimeError):
    """A run that did not end well; the message says why, and where its logs are."""


def live_run(run: RunConfig, data: Path, agent: str | None, limit_s: float) -> StackState:
    """Start a stack in `data`, run `run` to its end, and leave the stack up: `end` ends it. Raises RunFailed."""
    quiet = Console(quiet=True)
    supervisor = start_supervisor(data, write_run_config(data, run), tied=True, agent=agent)
    try:
        stack = wait_ready(data, supervisor, quiet)
        submission = Submission(data, stack)
        give_up = time.monotonic() + limit_s
        try:
            while not submission.ended:
                now = StackState.read(data)
                if now is None or not now.alive:
                    why = now.message if now else "it is gone"
                    raise RunFailed(f"the stack has ended: {why}; logs: {data / 'logs'}")
                if time.monotonic() > give_up:
                    raise RunFailed(f"{run.run_id}: not done after {limit_s:.0f} s; logs: {data / 'logs'}")
                time.sleep(0.25)
        finally:
            submission.abandon()
        if failure := submission.failure():
            raise RunFailed(f"{run.run_id}: {failure}; logs: {data / 'logs'}")
    except BaseException:
        stop_supervisor(data, quiet, started=supervisor)
        raise
    return stack


def end(data: Path) -> None:
    """Stop the stack in `data`."""
    stop_supervisor(data, Console(quiet=True), limit_s=120.0)

"""A trainer of several ranks: rank 0 leads, the others do as it says.

Every rank has a `Trainer` of its part of the model. `LeadingTrainer` is a `Trainer` to whoever uses it: each call goes
to the followers first (`follow` runs there), and all compute it together. What can fail for one rank alone (files, a
socket, a database) happens on rank 0, before the others hear of it; what remains fails on all of them alike, or ends
them all: a rank that fails alone leaves the others inside a collective, which nothing but their end would free.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from torch import Tensor

from gyre.config import LayoutConfig, RunConfig
from gyre.training import parallel
from gyre.training.batch import BatchError, PackedBatch
from gyre.training.metrics import MicroBatchMetrics
from gyre.training.outcome import NonFiniteError, StepResult
from gyre.training.trainer import Trainer

Result = TypeVar("Result")

log = logging.getLogger("gyre.trainer")

_ALIKE = (BatchError, NonFiniteError)
"""Failures that every rank comes to by itself, from the same data or because `StreamingStep` tells it."""


def _end() -> NoReturn:
    os._exit(1)


class LeadingTrainer(Trainer):
    """Rank 0's trainer, with followers. `fail` ends the process after a failure that the followers do not share."""

    fail: Callable[[], NoReturn] = staticmethod(_end)

    def load(self, version: int, source: Path | Mapping[str, Tensor]) -> None:
        weights, state = self.read(version, source)
        self._together("take", (version, None, None), lambda: self.take(version, weights, state))

    def begin(self) -> None:
        self._together("begin", (), super().begin)

    def micro_batch(self, batch: PackedBatch, name: str) -> MicroBatchMetrics:
        work = super().micro_batch
        return self._together("micro_batch", (batch, name), lambda: work(batch, name))

    def gradient(self) -> Tensor:
        return self._together("gradient", (), super().gradient)

    def absorb(self, gradient: Tensor | None) -> None:
        assert gradient is not None, "rank 0 has the gradient"
        self.checked_gradient(gradient)
        work = super().absorb
        self._together("absorb", (None,), lambda: work(gradient))

    def optimizer_step(self, divisor: int) -> StepResult:
        work = super().optimizer_step
        return self._together("optimizer_step", (divisor,), lambda: work(divisor))

    def export_hf(self) -> dict[str, Tensor]:
        return self._together("export_hf", (), super().export_hf)

    def export_optimizer(self) -> dict[str, Any]:
        return self._together("export_optimizer", (), super().export_optimizer)

    def sleep(self) -> None:
        self._together("sleep", (), super().sleep)

    def wake(self) -> None:
        self._together("wake", (), super().wake)

    def _together(self, method: str, arguments: tuple[Any, ...], work: Callable[[], Result]) -> Result:
        try:
            parallel.broadcast((method, arguments))
            return work()
        except _ALIKE:
            raise
        except BaseException:
            log.exception("rank 0: %s failed; the trainer ends", method)
            self.fail()


def open_trainer(run: RunConfig, cell: str) -> Trainer:
    """The trainer of a cell on rank 0. With a layout of several ranks it waits for the followers."""
    layout = layout_of(run, cell)
    kind = Trainer if layout.ranks == 1 else LeadingTrainer
    return kind(run.policy.path, run.trainer, run.objective, seed=run.seed, layout=layout)


def follow_leader(run: RunConfig, cell: str) -> NoReturn:
    """The life of another rank. Raises what ends it."""
    follow(Trainer(run.policy.path, run.trainer, run.objective, seed=run.seed, layout=layout_of(run, cell)))


def layout_of(run: RunConfig, cell: str) -> LayoutConfig:
    """The layout of the cell of that name."""
    return next(c.layout for c in run.cells if c.name == cell)


def follow(trainer: Trainer) -> NoReturn:
    """Do what rank 0 does, for ever. Raises what ends this rank."""
    while True:
        method, arguments = parallel.broadcast(None)
        try:
            getattr(trainer, method)(*arguments)
        except _ALIKE as error:
            log.debug("rank %d: %s: %s", parallel.rank(), method, error)  # rank 0 tells whoever asked

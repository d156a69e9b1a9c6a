"""How training work ends: a step that was taken, a number that was refused. Free of engines."""

from __future__ import annotations

from dataclasses import dataclass


class NonFiniteError(Exception):
    """A loss or gradient that is not a finite number: the step is refused."""


@dataclass(frozen=True)
class StepResult:
    """An optimizer step that was taken. `grad_norm` is of the step's gradient before clipping."""

    version: int
    grad_norm: float
    lr: float

"""What the newest steps took, for who has to say what can wait."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from gyre.scheduling.types import Pace


@dataclass(frozen=True)
class StepEnd:
    """When a step ended, in seconds from any beginning, and the seconds that its longest rollout ran."""

    at: float
    longest_s: float


KEPT = 3
"""Ends that a pace is read from. With a staleness, steps may end in pairs, so that one distance says little."""


def pace_of(ends: Sequence[StepEnd]) -> Pace | None:
    """The pace of the newest `KEPT` of the steps that have ended, in order; None where there are not two."""
    newest = ends[-KEPT:]
    if len(newest) < 2:
        return None
    return Pace((newest[-1].at - newest[0].at) / (len(newest) - 1), max(end.longest_s for end in newest[1:]))

"""What a simulated run says of itself."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

STATES = ("serve", "serve idle", "to train", "train", "train idle", "optimizer", "to rollout")


@dataclass(frozen=True)
class Span:
    """What a cell did from `start` to `end` seconds."""

    cell: int
    state: str
    start: float
    end: float


@dataclass(frozen=True)
class Outcome:
    """A simulated run. `cell_s` sums the cells' seconds by state; of each step, `begins` says when it opened, `settled`
    when the last of its rollouts was, and `ends` when its optimizer step was done; `spans` is the timeline, where it
    was asked for."""

    seconds: float
    begins: tuple[float, ...]
    settled: tuple[float, ...]
    ends: tuple[float, ...]
    cell_s: Mapping[str, float]
    switches: int
    moved: int
    """Rollouts that a leaving cell handed to another."""
    events: int
    trained_tokens: float
    """Of all micro-batches that were computed."""
    sampled_tokens: float
    """Of all rollouts that were over; `surplus_tokens` of them by those that their groups did without."""
    surplus_tokens: float
    spans: tuple[Span, ...] = ()

    def breakdown(self) -> dict[str, float]:
        """`cell_s`, with the part of "serve" that sampled what nobody trains as "surplus", by tokens."""
        wasted = self.surplus_tokens / self.sampled_tokens if self.sampled_tokens > 0 else 0.0
        serve = self.cell_s["serve"]
        return {**self.cell_s, "serve": serve * (1 - wasted), "surplus": serve * wasted}

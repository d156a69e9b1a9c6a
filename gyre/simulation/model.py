"""What is simulated: the work of each step, and what one cell does with it in a second."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class CostModel:
    """Speeds of one cell, all in seconds and tokens.

    One decode step of a batch of b rollouts takes `decode_s + decode_s_per_rollout * b`, and gives each one token.
    """

    # Read from files by pydantic (gyre.simulation.trace), which shall refuse what it does not know.
    __pydantic_config__: ClassVar[dict[str, object]] = {"extra": "forbid", "allow_inf_nan": False}

    slots: int
    """Rollouts that a cell holds at once (its KV room)."""
    decode_s: float
    """Seconds of a decode step, whatever the batch."""
    decode_s_per_rollout: float
    """Seconds that each rollout of the batch adds to a decode step."""
    prefill_tokens_s: float
    """Tokens a second of prefill: what a rollout pays for its context on a cell that does not have it."""
    train_tokens_s: float
    """Tokens a second of forward and backward of one cell."""
    micro_batch_tokens: float
    """Tokens of a micro-batch: a cell leaves training only between two."""
    to_train_s: float
    """Seconds of a change to training."""
    to_rollout_s: float
    """Seconds of a change to serving."""
    optimizer_s: float
    """Seconds from a step's last gradient to the weights of the next version on the serving cells."""

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if not value >= 0 or (value == 0 and name not in ("to_train_s", "to_rollout_s", "optimizer_s",
                                                              "decode_s", "decode_s_per_rollout")):  # fmt: skip
                raise ValueError(f"cost model: {name} must be positive, got {value}")

    def token_s(self, rollouts: float) -> float:
        """Seconds a token of each of `rollouts` in one batch."""
        return self.decode_s + self.decode_s_per_rollout * rollouts


@dataclass(frozen=True)
class StepWork:
    """The rollouts of one step, arrays [groups, G].

    A rollout waits `tool_s` seconds in all for its tools and samples `tokens` tokens; it ends at the time limit at the
    latest. `context` is the length of its prompt when it is moved to another cell (its mean over the rollout), and
    `trained` the tokens that training it computes.
    """

    tool_s: Floats
    tokens: Floats
    context: Floats
    trained: Floats

    def __post_init__(self) -> None:
        shape = self.tool_s.shape
        for name, array in vars(self).items():
            if array.ndim != 2 or array.shape != shape or not array.size:
                raise ValueError(f"step: {name} must be [groups, G], got {array.shape} beside {shape}")
            if not np.isfinite(array).all() or array.min() < 0:
                raise ValueError(f"step: {name} must be finite and not negative")

    def seconds(self, token_s: float, limit_s: float) -> Floats:
        """Seconds of each rollout [groups, G] at `token_s` seconds a token, cut at the limit."""
        return np.minimum(self.tool_s + self.tokens * token_s, limit_s)


@dataclass(frozen=True)
class Scenario:
    """A whole run: `cells` equal cells, the first of them central, and the work of its steps in order."""

    name: str
    cells: int
    cost: CostModel
    steps: Sequence[StepWork]
    time_limit_s: float

    def __post_init__(self) -> None:
        if self.cells < 1 or not self.steps or not self.time_limit_s > 0:
            raise ValueError(f"scenario {self.name}: needs a cell, a step and a time limit")

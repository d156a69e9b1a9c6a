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

    One decode step of a batch of b takes `decode_s + decode_s_per_rollout * b`, and gives each of them one token. A
    batch holds who generates; who waits for a tool holds its slot (its KV) and costs the others nothing.
    """

    # Read from files by pydantic (gyre.simulation.trace), which shall refuse what it does not know.
    __pydantic_config__: ClassVar[dict[str, object]] = {"extra": "forbid", "allow_inf_nan": False}

    slots: int
    """Rollouts that a cell holds at once (its KV room), and largest batch."""
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
    micro_batch_s: float = 0.0
    """Seconds of a micro-batch beside its tokens: claim, packing, launch."""
    handout_s: float = 0.0
    """Seconds from a group's last settled member to its micro-batches in the queue."""
    open_s: float = 0.0
    """Seconds from the end of a step to the first launches of the step that it makes room for."""

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if not value >= 0 or (value == 0 and name in _POSITIVE):
                raise ValueError(f"cost model: {name} must be positive, got {value}")

    def token_s(self, batch: float) -> float:
        """Seconds a token of each of `batch` rollouts that generate; of more than `slots`, each waits for its turn."""
        full = self.decode_s + self.decode_s_per_rollout * min(batch, self.slots)
        return full * max(1.0, batch / self.slots)


_POSITIVE = ("slots", "prefill_tokens_s", "train_tokens_s", "micro_batch_tokens")


@dataclass(frozen=True)
class StepWork:
    """The rollouts of one step, arrays [groups, G], in the order of their launch.

    From its launch a rollout takes `before_s` seconds until it needs a cell. There it waits `tool_s` seconds in all for
    its tools and samples `tokens` tokens, and ends at the time limit at the latest; after `after_s` more (scoring) it
    is settled. `context` is the length of its prompt when it is moved to another cell (its mean over the rollout), and
    `trained` the tokens that training it computes. `rewarded`: 0 where it has no reward in the end, and so does not
    count for a quorum or for a complete group (None: all have one).
    """

    tool_s: Floats
    tokens: Floats
    context: Floats
    trained: Floats
    before_s: Floats | None = None
    after_s: Floats | None = None
    rewarded: Floats | None = None

    def __post_init__(self) -> None:
        shape = self.tool_s.shape
        for name, array in vars(self).items():
            if array is None and name in ("before_s", "after_s", "rewarded"):
                continue
            if array.ndim != 2 or array.shape != shape or not array.size:
                raise ValueError(f"step: {name} must be [groups, G], got {array.shape} beside {shape}")
            if not np.isfinite(array).all() or array.min() < 0:
                raise ValueError(f"step: {name} must be finite and not negative")

    @property
    def aside_s(self) -> Floats | float:
        """Seconds of each rollout without a cell, before and after."""
        return (0.0 if self.before_s is None else self.before_s) + (0.0 if self.after_s is None else self.after_s)

    def in_order(self, groups: Sequence[int]) -> StepWork:
        """The same work, its groups launched in this order (their indices, each once)."""
        if sorted(groups) != list(range(len(self.tokens))):
            raise ValueError(f"step: an order of {len(self.tokens)} groups names each of them once, got {list(groups)}")
        there = {name: array[list(groups)] for name, array in vars(self).items() if array is not None}
        return StepWork(**there)

    def beside(self, more: StepWork) -> StepWork:
        """The same groups, each with the members that `more` has of it, too: they are launched last of their group."""
        both = vars(more)
        there = {k: np.concatenate([a, both[k]], axis=1) for k, a in vars(self).items() if a is not None}
        return StepWork(**there)

    def seconds(self, token_s: float, limit_s: float) -> Floats:
        """Seconds of each rollout [groups, G] on cells, at `token_s` seconds a token, cut at the limit."""
        return np.minimum(self.tool_s + self.tokens * token_s, limit_s)


@dataclass(frozen=True)
class Scenario:
    """A whole run: `cells` equal cells, the first of them central, and the work of its steps in order.

    `window`: rollouts that may be under way at once (`rollouts.max_concurrent`). Without one, so many as the slots of
    the cells that serve: a rollout is launched when a cell has room for it. `drained`: steps that open only when no
    other is open (an evaluation came between). `over_submit`: members of each group that it does without
    (`rollouts.over_submit`): when all but so many are settled with a reward, the others are ended and not trained.
    """

    name: str
    cells: int
    cost: CostModel
    steps: Sequence[StepWork]
    time_limit_s: float
    window: int | None = None
    drained: frozenset[int] = frozenset()
    over_submit: int = 0

    def __post_init__(self) -> None:
        if self.cells < 1 or not self.steps or not self.time_limit_s > 0:
            raise ValueError(f"scenario {self.name}: needs a cell, a step and a time limit")
        if self.window is None and any(s.before_s is not None or s.after_s is not None for s in self.steps):
            raise ValueError(
                f"scenario {self.name}: before_s and after_s need a window, for who is where without a cell"
            )
        if self.window is not None and self.window < 1:
            raise ValueError(f"scenario {self.name}: the window must hold a rollout")
        if not 0 <= self.over_submit < min(s.tokens.shape[1] for s in self.steps):
            raise ValueError(f"scenario {self.name}: over_submit = {self.over_submit} leaves a group no member")

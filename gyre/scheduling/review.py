"""When to ask a policy again though nobody reported anything."""

from __future__ import annotations

from gyre.scheduling.types import ClusterView

LEAST_S, MOST_S = 2.0, 60.0
"""Bounds of the time to the next look."""
SHARE = 0.25
"""Of the expected tail: a decision that hangs on it is at most so much of it late. (The tail grows with the age of the
oldest rollout, so looks grow rarer as it grows older.)"""


def next_look_s(view: ClusterView) -> float | None:
    """Seconds after which the view may have changed so much that a policy decides otherwise; None: only reports count.

    Two things change without a report: the backlog, as trainers work, and the tail, as the oldest rollout grows older.
    They matter while rollouts are live and there is something to train, or somebody trains.
    """
    trainers = sum(c.heading == "train" for c in view.cells)
    if view.steps_open == 0 or view.water_level == 0 or not (view.backlog_tokens or trainers):
        return None
    after = MOST_S
    if view.tail_s is not None:
        after = min(after, view.tail_s * SHARE)
    if view.rates is not None and view.backlog_tokens and trainers:
        after = min(after, view.backlog_tokens / (view.rates.train_tokens_s * trainers))
    return max(LEAST_S, after)

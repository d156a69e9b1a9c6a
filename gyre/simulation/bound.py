"""What no schedule can beat: the work-conserving bound that knows the group barrier."""

from __future__ import annotations

import numpy as np

from gyre.simulation.model import Scenario, StepWork


def lower_bound(scenario: Scenario, *, staleness: int = 0, quorum: int | None = None) -> float:
    """Seconds below which no assignment of roles can finish `scenario`, whatever it knows of the future.

    Two facts hold for every schedule. (1) Work: a rollout of n tokens costs a cell at least `n * token_s(B) / B +
    tool_s / B` of its time, B the slots (a full batch is the cheapest), a trained token `1 / train_tokens_s`; all cells
    together have `cells` seconds a second. (2) Barrier: a group's tokens cannot be trained before its (quorum-th)
    member is settled, at the speed of an empty cell at best; so for every t, a step takes at least t plus the training
    of the groups that are not ready by t, on all cells, plus its optimizer step. With staleness 0 steps follow each
    other, so their bounds add; else s + 1 of them overlap, and (1) holds for the run as a whole while (2) holds for the
    longest chain of every (s + 1)-th step.
    """
    cells, cost = scenario.cells, scenario.cost
    work = [_work_s(step, scenario) / cells for step in scenario.steps]
    barrier = [_barrier_s(step, scenario, quorum) + cost.optimizer_s for step in scenario.steps]
    # The optimizer step occupies the central cell alone; the others have nothing that they may do at staleness 0.
    if staleness == 0:
        return float(sum(max(w + cost.optimizer_s, b) for w, b in zip(work, barrier, strict=True)))
    chains = [sum(barrier[first :: staleness + 1]) for first in range(staleness + 1)]
    return float(max(sum(work) + cost.optimizer_s * len(work) / cells, *chains))


def _work_s(step: StepWork, scenario: Scenario) -> float:
    cost, limit = scenario.cost, scenario.time_limit_s
    full = step.seconds(cost.token_s(cost.slots), limit)
    return float(full.sum() / cost.slots + _trained(step, scenario).sum() / cost.train_tokens_s)


def _trained(step: StepWork, scenario: Scenario) -> np.ndarray:
    """Tokens that will be trained at the least: of a rollout that a full cell would cut at the limit, what it has."""
    cost, limit = scenario.cost, scenario.time_limit_s
    slow = np.maximum(step.tool_s + step.tokens * cost.token_s(cost.slots), 1e-12)
    return step.trained * np.minimum(1.0, limit / slow)


def _barrier_s(step: StepWork, scenario: Scenario, quorum: int | None) -> float:
    cost, limit = scenario.cost, scenario.time_limit_s
    alone = step.seconds(cost.token_s(1), limit)
    order = np.argsort(alone, axis=1)
    seconds, size = np.take_along_axis(alone, order, axis=1), alone.shape[1]
    trained = np.take_along_axis(_trained(step, scenario), order, axis=1)
    first = size if quorum is None else min(quorum, size)
    ready = np.maximum(seconds, seconds[:, first - 1 : first])  # a member trains when it and the quorum are settled
    when, tokens = ready.ravel(), trained.ravel()
    latest = np.argsort(-when)
    after = np.cumsum(tokens[latest]) / (cost.train_tokens_s * scenario.cells)
    return float((when[latest] + after).max())

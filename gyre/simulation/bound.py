"""What no schedule can beat: the work-conserving bound that knows the group barrier."""

from __future__ import annotations

import math

import numpy as np

from gyre.simulation.model import CostModel, Floats, Scenario, StepWork


def lower_bound(scenario: Scenario, *, staleness: int = 0, quorum: int | None = None) -> float:
    """Seconds below which no assignment of roles can finish `scenario`, whatever it knows of the future.

    Two facts hold for every schedule. (1) Work: all cells together have `cells` seconds a second, serving takes at
    least `serving_s` of them and training its own. (2) Barrier: a group's tokens cannot be trained before its
    (quorum-th) member is settled, at the speed of an empty cell at best; so for every t, a step takes at least t plus
    the training of the groups that are not ready by t, on all cells, plus its optimizer step. With staleness 0 steps
    follow each other, so their bounds add; else s + 1 of them overlap, and (1) holds for the run as a whole while (2)
    holds for the longest chain of every (s + 1)-th step. Where there is a window, the rollouts' lives must fit it, too.

    A rollout that a full cell would not finish within the time limit is taken to come as far as a full cell brings it.
    """
    cells, cost = scenario.cells, scenario.cost
    serve = [serving_s(step, scenario) for step in scenario.steps]
    train = [float(_trained(step, scenario).sum()) / cost.train_tokens_s for step in scenario.steps]
    lives = [_lives_s(step, scenario) for step in scenario.steps]
    barrier = [_barrier_s(step, scenario, quorum) + cost.optimizer_s for step in scenario.steps]
    # The optimizer step occupies the central cell alone; the others have nothing that they may do at staleness 0.
    if staleness == 0:
        each = [max((s + t) / cells + cost.optimizer_s, b, w) for s, t, b, w in zip(serve, train, barrier, lives,
                                                                                    strict=True)]  # fmt: skip
        return float(sum(each)) + cost.open_s * (len(each) - 1)
    chains = [sum(barrier[first :: staleness + 1]) for first in range(staleness + 1)]
    work = (sum(serve) + sum(train) + cost.optimizer_s * len(train)) / cells
    return float(max(work, sum(lives), *chains))


def serving_part(scenario: Scenario) -> float:
    """The part of all work's cell-seconds that is serving, at the least that each takes."""
    serve = sum(serving_s(step, scenario) for step in scenario.steps)
    train = sum(float(_trained(step, scenario).sum()) for step in scenario.steps) / scenario.cost.train_tokens_s
    return serve / (serve + train) if serve + train > 0 else 0.0


def serving_s(step: StepWork, scenario: Scenario) -> float:
    """Cell-seconds that serving a step takes at least.

    Of a cell's S slots let b generate, on average over all its time C, and S - b wait for tools. A batch of b gives at
    most b / (d + e b) tokens a second, which is concave in b; so N tokens take C >= N (d + e b) / b, and T seconds of
    tools take C >= T / (S - b). The least C is where both are equal: N e b^2 + (T - N (e S - d)) b - N d S = 0.
    """
    cost = scenario.cost
    part = _part(step, scenario)
    tokens, tools = float((step.tokens * part).sum()), float((step.tool_s * part).sum())
    if scenario.window is not None or tokens == 0:  # slots are for batches only
        least = 0.0 if scenario.window is not None else tools / cost.slots
        return max(least, tokens * cost.token_s(cost.slots) / cost.slots)
    return tokens / _throughput(cost, tokens, tools)


def _throughput(cost: CostModel, tokens: float, tools: float) -> float:
    """Tokens a second of one cell at the best batch for so many tokens and tool seconds."""
    d, e, slots = cost.decode_s, cost.decode_s_per_rollout, cost.slots
    if d == e == 0:
        return math.inf
    linear = tools - tokens * (e * slots - d)
    if tools == 0:
        batch = float(slots)
    elif e == 0:
        batch = tokens * d * slots / linear
    else:
        batch = (math.sqrt(linear * linear + 4 * tokens * tokens * e * d * slots) - linear) / (2 * tokens * e)
    batch = min(max(batch, 1e-12), float(slots))
    return batch / cost.token_s(batch) if batch > 0 else math.inf


def _part(step: StepWork, scenario: Scenario) -> Floats:
    """The part of each rollout that a full cell brings to its end within the limit."""
    slow = np.maximum(step.tool_s + step.tokens * scenario.cost.token_s(scenario.cost.slots), 1e-12)
    if scenario.window is not None:  # a cell may be shared by the whole window
        slow = np.maximum(step.tool_s + step.tokens * scenario.cost.token_s(scenario.window), 1e-12)
    return np.minimum(1.0, scenario.time_limit_s / slow)


def _trained(step: StepWork, scenario: Scenario) -> Floats:
    """Tokens that will be trained at the least."""
    return step.trained * _part(step, scenario)


def _alone_s(step: StepWork, scenario: Scenario) -> Floats:
    """Seconds from each rollout's launch until it is settled, at an empty cell's speed."""
    return step.seconds(scenario.cost.token_s(1), scenario.time_limit_s) + step.aside_s


def _lives_s(step: StepWork, scenario: Scenario) -> float:
    return 0.0 if scenario.window is None else float(_alone_s(step, scenario).sum()) / scenario.window


def _barrier_s(step: StepWork, scenario: Scenario, quorum: int | None) -> float:
    cost, alone = scenario.cost, _alone_s(step, scenario)
    order = np.argsort(alone, axis=1)
    seconds, size = np.take_along_axis(alone, order, axis=1), alone.shape[1]
    trained = np.take_along_axis(_trained(step, scenario), order, axis=1)
    first = size if quorum is None else min(quorum, size)
    ready = np.maximum(seconds, seconds[:, first - 1 : first])  # a member trains when it and the quorum are settled
    when, tokens = ready.ravel() + cost.handout_s, trained.ravel()
    latest = np.argsort(-when)
    after = np.cumsum(tokens[latest]) / (cost.train_tokens_s * scenario.cells)
    return float((when[latest] + after).max())

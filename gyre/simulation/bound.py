"""What no schedule can beat: the work-conserving bound that knows the group barrier."""

from __future__ import annotations

import itertools
import math

import numpy as np
from numpy.typing import NDArray

from gyre.simulation.model import CostModel, Floats, Scenario, StepWork


def lower_bound(scenario: Scenario, *, staleness: int = 0, quorum: int | None = None) -> float:
    """Seconds below which no assignment of roles can finish `scenario`, whatever it knows of the future.

    Two facts hold for every schedule. (1) Work: all cells together have `cells` seconds a second, serving and
    training take at least `_least_s` of them. (2) Barrier: a group's tokens cannot be trained before its
    (quorum-th) member is settled, at the speed of an empty cell at best; so for every t, a step takes at least t plus
    the training of the groups that are not ready by t, on all cells, plus its optimizer step. With staleness 0 steps
    follow each other, so their bounds add; else s + 1 of them overlap, and (1) holds for the run as a whole while (2)
    holds for the longest chain of every (s + 1)-th step. Where there is a window, the rollouts' lives must fit it, too.

    A rollout that a full cell would not finish within the time limit is taken to come as far as a full cell brings it.

    With over-submission (`Scenario.over_submit`) a group may end with any of its members but so many. So of each group
    only those count that take the least, chosen anew for each fact, and the work of the surplus is no part of it: no
    schedule has to start them, and one that knew which are long would not.
    """
    cells, cost = scenario.cells, scenario.cost
    least = [_least_s(step, scenario) for step in scenario.steps]
    lives = [_lives_s(step, scenario) for step in scenario.steps]
    barrier = [_barrier_s(step, scenario, quorum) + cost.optimizer_s for step in scenario.steps]
    # The optimizer step occupies the central cell alone; the others have nothing that they may do at staleness 0.
    if staleness == 0:
        each = [max((s + t) / cells + cost.optimizer_s, b, w) for (s, t), b, w in zip(least, barrier, lives,
                                                                                      strict=True)]  # fmt: skip
        return float(sum(each)) + cost.open_s * (len(each) - 1)
    chains = [sum(barrier[first :: staleness + 1]) for first in range(staleness + 1)]
    work = (sum(s + t for s, t in least) + cost.optimizer_s * len(least)) / cells
    return float(max(work, sum(lives), *chains))


def serving_part(scenario: Scenario) -> float:
    """The part of all work's cell-seconds that is serving, at the least that each takes."""
    least = [_least_s(step, scenario) for step in scenario.steps]
    serve, train = sum(s for s, _ in least), sum(t for _, t in least)
    return serve / (serve + train) if serve + train > 0 else 0.0


def _least_s(step: StepWork, scenario: Scenario) -> tuple[float, float]:
    """Cell-seconds of serving and of training that a step takes at least, together.

    Of a cell's S slots let b generate, on average over all its time C, and S - b wait for tools. So many give at most
    g(b) = b / (D + E b) tokens a second (`_batch_law`), which is concave: no more than g(a) + g'(a) (b - a), whatever
    a. So N tokens and T seconds of tools, T <= (S - b) C, take

        C >= (N + g'(a) T) / (g(a) + g'(a) (S - a)),

    to which each rollout has a price of its own, and of each group those count that have the least prices, training
    included. Every a is right; the best one is where N = g(a) C and T = (S - a) C, which is looked for with the
    members that count.
    """
    part, size = _part(step, scenario), step.tokens.shape[1] - scenario.over_submit
    tokens, tools = step.tokens * part, step.tool_s * part
    train = step.trained * part / scenario.cost.train_tokens_s
    counts, best = np.ones(tokens.shape, bool), (0.0, 0.0)
    for _ in range(1 + (scenario.over_submit > 0)):
        serve = _prices_s(tokens, tools, counts, scenario)
        counts = np.zeros(tokens.shape, bool)
        np.put_along_axis(counts, np.argsort(serve + train, axis=1, kind="stable")[:, :size], True, axis=1)
        best = max(best, (float(serve[counts].sum()), float(train[counts].sum())), key=sum)
    return best


def _prices_s(tokens: Floats, tools: Floats, counts: NDArray[np.bool_], scenario: Scenario) -> Floats:
    """Cell-seconds of serving of each rollout, at the best batch for those that count."""
    slots = float(scenario.cost.slots)
    if scenario.window is not None:  # slots are for batches only
        return tokens * scenario.cost.token_s(slots) / slots
    d, e = _batch_law(scenario.cost)
    if d == e == 0:
        return tools / slots
    batch = _best_batch(d, e, slots, float(tokens[counts].sum()), float(tools[counts].sum()))
    gives, slope = batch / (d + e * batch), d / (d + e * batch) ** 2
    return (tokens + slope * tools) / (gives + slope * (slots - batch))


def _batch_law(cost: CostModel) -> tuple[float, float]:
    """D and E: with b of its rollouts generating on average, a cell's tokens take at least D + E b seconds.

    Who generates meets itself and those of the others that generate, too: with m <= S rollouts a batch of
    1 + (1 - 1/m) b (`CellState.set_speed`). So t_m(b) = d + e + e (1 - 1/m) b, and a full cell has D = d + e and
    E = e (1 - 1/S). One that is not full is faster, and still no better: for prices A a token and B a second of tools
    it earns A b / t_m + B (m - b), which is at most what S rollouts of which b generate earn, A b / t_S + B (S - b), if

        A (1/t_m - 1/t_S) b = A e b^2 (S - m) / (m S t_m t_S) <= B (S - m).

    As b <= m, t_S >= t_m >= d + e b, and (d + e b)^2 >= 4 d e b, that holds where A / B <= 4 d S; and the prices at a
    have A / B = 1 / g'(a) = (D + E a)^2 / D <= (d + e S)^2 / D. Where d is too small for that, D = d and E = e are
    right for every m, since 1 - b/m >= 0.
    """
    d, e, slots = cost.decode_s, cost.decode_s_per_rollout, cost.slots
    if (d + e * slots) ** 2 <= 4 * d * (d + e) * slots:
        return d + e, e * (1 - 1 / slots)
    return d, e


def _best_batch(d: float, e: float, slots: float, tokens: float, tools: float) -> float:
    """The b of N (d + e b) / b = T / (S - b), which is N e b^2 + (T - N (e S - d)) b - N d S = 0."""
    linear = tools - tokens * (e * slots - d)
    if tools == 0:
        return slots
    if tokens == 0 or e == 0:
        batch = tokens * d * slots / linear
    else:
        batch = (math.sqrt(linear * linear + 4 * tokens * tokens * e * d * slots) - linear) / (2 * tokens * e)
    return min(max(batch, 1e-12), slots)


def _part(step: StepWork, scenario: Scenario) -> Floats:
    """The part of each rollout that a full cell brings to its end within the limit."""
    slow = np.maximum(step.tool_s + step.tokens * scenario.cost.token_s(scenario.cost.slots), 1e-12)
    if scenario.window is not None:  # a cell may be shared by the whole window
        slow = np.maximum(step.tool_s + step.tokens * scenario.cost.token_s(scenario.window), 1e-12)
    return np.minimum(1.0, scenario.time_limit_s / slow)


def _alone_s(step: StepWork, scenario: Scenario) -> Floats:
    """Seconds from each rollout's launch until it is settled, at an empty cell's speed."""
    return step.seconds(scenario.cost.token_s(1), scenario.time_limit_s) + step.aside_s


def _lives_s(step: StepWork, scenario: Scenario) -> float:
    if scenario.window is None:
        return 0.0
    alone = np.sort(_alone_s(step, scenario), axis=1)
    return float(alone[:, : alone.shape[1] - scenario.over_submit].sum()) / scenario.window


def _barrier_s(step: StepWork, scenario: Scenario, quorum: int | None) -> float:
    cost, alone = scenario.cost, _alone_s(step, scenario)
    order = np.argsort(alone, axis=1)
    seconds, size = np.take_along_axis(alone, order, axis=1), alone.shape[1] - scenario.over_submit
    trained = np.take_along_axis(step.trained * _part(step, scenario), order, axis=1)
    first = size if quorum is None else min(quorum, size)
    # A member trains when it and the quorum are settled.
    ready = np.maximum(seconds[:, :size], seconds[:, first - 1 : first])
    when, tokens = ready.ravel() + cost.handout_s, _yet_to_train(trained, size).ravel()
    latest = np.argsort(-when)
    after = np.cumsum(tokens[latest]) / (cost.train_tokens_s * scenario.cells)
    return float((when[latest] + after).max())


def _yet_to_train(trained: Floats, size: int) -> Floats:
    """[groups, size]: summed from the i-th on, the tokens that a group trains at least after the moment at which its
    i-th member can be settled. `trained`: of all members, in the order in which they can be.

    Before that moment no more than i (from 0) of the `size` that count are settled, so size - i of those from the i-th
    on are to come: at the least those with the fewest tokens.
    """
    if size == trained.shape[1]:
        return trained
    left = [np.sort(trained[:, i:], axis=1)[:, : size - i].sum(axis=1) for i in range(size)]
    return np.stack([a - b for a, b in itertools.pairwise([*left, np.zeros(len(trained))])], axis=1)

"""Fits: against lines and counts that are known, and the fixed point of a batch's speed."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gyre.simulation import CostModel, StepWork
from gyre.simulation.fit import concurrency, line, union_s
from gyre.simulation.state import TOKENS, TOOL, Arrival, CellState, StepState

spans = st.lists(st.tuples(st.floats(0, 50), st.floats(0.1, 20)), min_size=1, max_size=12)


@given(spans, st.floats(0, 60), st.floats(0.1, 30))
def test_concurrency_is_covered_time(held: list[tuple[float, float]], start: float, length: float) -> None:
    began = np.array([a for a, _ in held])
    ended = began + np.array([d for _, d in held])
    covered = sum(max(0.0, min(b, start + length) - max(a, start)) for a, b in zip(began, ended, strict=True))
    found = concurrency(began, ended, np.array([start]), np.array([start + length]))
    assert found[0] == pytest.approx(covered / length, abs=1e-6)


@given(spans)
def test_a_union_is_what_is_covered(held: list[tuple[float, float]]) -> None:
    ticks = np.arange(0, 71, 0.01)
    covered = np.zeros(len(ticks), bool)
    for a, d in held:
        covered |= (ticks >= a) & (ticks < a + d)
    assert union_s([(a, a + d) for a, d in held]) == pytest.approx(covered.sum() * 0.01, abs=0.03 * len(held))


@given(st.floats(0, 5), st.floats(0, 5), st.integers(0, 2**32 - 1))
def test_a_line_is_found_again(a: float, b: float, seed: int) -> None:
    rng = np.random.default_rng(seed)
    x, weights = rng.uniform(1, 10, 20), rng.uniform(0.5, 2, 20)
    assert line(x, a + b * x, weights) == pytest.approx((a, b), abs=1e-6)


def test_a_fit_is_never_negative() -> None:
    x = np.array([1.0, 2.0, 3.0])
    ones = np.ones(3)
    assert line(x, np.array([3.0, 2.0, 1.0]), ones) == (2.0, 0.0)  # it falls: the mean
    assert line(x, np.array([0.0, 2.0, 4.0]), ones) == pytest.approx((0.0, 16 / 14))  # it begins below zero
    assert line(np.full(3, 2.0), np.array([1.0, 2.0, 3.0]), ones) == (2.0, 0.0)  # one x says nothing of a slope
    with pytest.raises(ValueError, match="a fit needs points"):
        line(np.empty(0), np.empty(0), np.empty(0))


@settings(max_examples=60)
@given(st.lists(st.tuples(st.floats(0, 1e3), st.floats(0, 1e3)), min_size=1, max_size=20), st.integers(1, 10),
       st.floats(0.001, 1), st.floats(0, 0.5))  # fmt: skip
def test_a_batch_meets_its_own_speed(
    rollouts: list[tuple[float, float]], slots: int, decode_s: float, per_rollout: float
) -> None:
    cost = CostModel(slots, decode_s, per_rollout, 1.0, 1.0, 1.0, 0.0, 0.0, 0.0)
    one = np.ones((1, 1))
    step = StepState(0, StepWork(one, one, one, one), None)
    cell = CellState(0)
    cell.join([Arrival(step, 0, tool, tokens, 1e9) for tool, tokens in rollouts])
    cell.set_speed(cost)
    t, tool, tokens = cell.token_s, cell.work[TOOL], cell.work[TOKENS]
    share = tokens * t / (tool + tokens * t)
    batch = 1 + (1 - 1 / len(rollouts)) * share.sum()
    assert t == pytest.approx(cost.token_s(batch), rel=1e-3)
    assert cost.token_s(1) * 0.999 <= t <= cost.token_s(len(rollouts)) * 1.001

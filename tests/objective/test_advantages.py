from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gyre.config import ObjectiveConfig
from gyre.objective.advantages import group_advantages


def test_one_reward_a_rollout_whatever_its_branches() -> None:
    # Rollout A (reward 1) has three branches and B (reward 0) one: only the two rollouts count.
    result = group_advantages([1.0, 0.0], normalize_std=False)
    assert result.baseline == 0.5
    assert result.advantages == [0.5, -0.5]


@pytest.mark.parametrize("excluded", [0, 1, 2, 3])
def test_an_excluded_member_counts_in_nothing(excluded: int) -> None:
    rewards: list[float | None] = [1.0, 1.0, 0.0, 0.0]
    rewards[excluded] = None
    result = group_advantages(rewards, normalize_std=False)
    others = [r for r in rewards if r is not None]
    assert result.baseline == pytest.approx(sum(others) / 3)
    assert result.advantages[excluded] is None
    expected = [None if r is None else pytest.approx(r - sum(others) / 3) for r in rewards]
    assert result.advantages == expected


def test_the_excluded_second_of_four() -> None:
    result = group_advantages([1.0, None, 0.0, 0.0], normalize_std=False)
    assert result.baseline == pytest.approx(1 / 3)
    assert result.advantages == [pytest.approx(2 / 3), None, pytest.approx(-1 / 3), pytest.approx(-1 / 3)]


@pytest.mark.parametrize("reward", [0.0, 1.0, 0.1, -3.0, 1e12])
@pytest.mark.parametrize("normalize", [True, False])
def test_equal_rewards_give_no_gradient(reward: float, normalize: bool) -> None:
    result = group_advantages([reward] * 7 + [None], normalize)
    assert result.outcome == "no_variance"
    assert result.advantages == [None] * 8
    assert result.baseline == pytest.approx(reward)


def test_rounding_is_not_variance() -> None:
    assert group_advantages([0.1 + 0.2, 0.3], True).outcome == "no_variance"
    assert group_advantages([0.3, 0.3 + 1e-6], True).outcome == "trained"


def test_the_divisor_is_the_deviation_and_a_millionth() -> None:
    result = group_advantages([0.0, 0.01], True)
    assert result.advantages == [pytest.approx(-0.005 / 0.005001, rel=1e-9), pytest.approx(0.005 / 0.005001, rel=1e-9)]


@pytest.mark.parametrize("others", range(1, 16))
def test_one_against_many_is_bounded(others: int) -> None:
    result = group_advantages([0.0] + [0.95] * others, True)
    values = [a for a in result.advantages if a is not None]
    assert result.outcome == "trained"
    assert max(map(abs, values)) <= math.sqrt(others)


@pytest.mark.parametrize("rewards", [[], [None], [None, None], [1.0], [1.0, None], [None, 0.0, None]])
def test_fewer_than_two_valid_rewards(rewards: list[float | None]) -> None:
    result = group_advantages(rewards, True)
    assert result.outcome == "too_few_valid"
    assert result.advantages == [None] * len(rewards)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_what_is_not_a_number_is_never_a_reward(bad: float) -> None:
    with pytest.raises(ValueError, match="not finite"):
        group_advantages([0.0, bad, 1.0], True)


@settings(max_examples=200, deadline=None)
@given(st.lists(st.none() | st.floats(-1e3, 1e3), max_size=20), st.booleans())
def test_advantages_are_centred_ordered_and_finite(rewards: list[float | None], normalize: bool) -> None:
    result = group_advantages(rewards, normalize)
    pairs = [(r, a) for r, a in zip(rewards, result.advantages, strict=True) if a is not None]
    if result.outcome != "trained":
        assert not pairs
        return
    values = np.array([a for _, a in pairs])
    assert len(pairs) == sum(r is not None for r in rewards)
    assert np.isfinite(values).all()
    scale = max(1.0, float(np.abs(values).max()))
    assert abs(values.mean()) < 1e-6 * scale
    assert [a for _, a in sorted(pairs)] == sorted(values)
    if normalize:
        assert np.abs(values).max() <= math.sqrt(len(values) - 1) + 1e-9


@pytest.mark.parametrize("least", [1e-4, 1e-2, 0.3])
@pytest.mark.parametrize("normalize", [True, False])
def test_rewards_that_hardly_differ_give_no_gradient(least: float, normalize: bool) -> None:
    """Just below and just above the least standard deviation: two rewards r, r + 2 std have exactly it."""
    below = group_advantages([0.5, 0.5 + 1.98 * least, None], normalize, least)
    assert (below.outcome, below.advantages) == ("low_variance", [None] * 3)
    assert below.std == pytest.approx(0.99 * least)
    above = group_advantages([0.5, 0.5 + 2.02 * least, None], normalize, least)
    assert above.outcome == "trained"
    if normalize:
        assert above.advantages[:2] == pytest.approx([-1.0, 1.0], rel=0.02)


def test_the_default_takes_no_group_of_zeros_and_ones_away() -> None:
    least = ObjectiveConfig().min_std
    for n in (2, 16, 10_000, 1_000_000):
        assert group_advantages([1.0] + [0.0] * (n - 1), True, least).outcome == "trained"
    assert group_advantages([0.95] * 7 + [0.9501], True, least).outcome == "low_variance"


def test_the_case_of_one_zero_among_equal_rewards() -> None:
    result = group_advantages([0.0] + [0.95] * 7, True, ObjectiveConfig().min_std)
    assert result.advantages[0] == pytest.approx(-math.sqrt(7), rel=1e-4)
    assert result.advantages[1:] == pytest.approx([1 / math.sqrt(7)] * 7, rel=1e-4)

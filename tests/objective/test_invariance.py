"""What must not change a step's gradient: how branches are cut, repeated, ordered and dealt to micro-batches."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gyre.config import ObjectiveConfig
from gyre.objective import divisor
from tests.objective.branches import Branch, ours, random_branches, rollout_targets, step
from tests.objective.test_algorithms import EVERY

CLIP = {"clip_low": 0.02, "clip_high": 0.03}
OPTIONS: list[dict[str, Any]] = [
    *EVERY,
    {"algorithm": "gspo", "correction": "mask", "correction_cap": 1.01, "correction_floor": 0.99},
    {"algorithm": "grpo", "old": "trainer", "correction": "truncate", "correction_level": "token"},
    {"algorithm": "dapo", "correction": "mask", "correction_level": "token", "correction_cap": 1.02},
    {"algorithm": "gspo", "kl": "k3", "kl_coefficient": 0.1},
]

option = st.sampled_from([ObjectiveConfig(**{**CLIP, **o}) for o in OPTIONS])


@settings(max_examples=80, deadline=None)
@given(option, st.integers(0, 10_000), st.data())
def test_any_split_into_micro_batches(config: ObjectiveConfig, seed: int, data: st.DataObject) -> None:
    branches = random_branches(np.random.default_rng(seed), spread=0.05)
    totals = rollout_targets(branches)
    # A unit of work is a branch, or a rollout where its branches must stay together.
    units = [[i] for i in range(len(branches))]
    if config.whole_rollouts:
        units = [[i for i, b in enumerate(branches) if b.rollout == r] for r in totals]
    order = data.draw(st.permutations(units))
    cuts = sorted(data.draw(st.sets(st.integers(1, len(order)), max_size=4)) | {len(order)})
    loss, whole = step(branches, config)
    gradient, parts, begin = np.zeros_like(whole), 0.0, 0
    starts = np.cumsum([0, *(len(b.mu) for b in branches)])
    for end in cuts:
        members = [i for unit in order[begin:end] for i in unit]
        begin = end
        result, part = ours([branches[i] for i in members], config, totals=totals)
        parts += result.loss.item()
        at = 0
        for i in members:
            n = len(branches[i].mu)
            gradient[starts[i] : starts[i + 1]] += part[at : at + n]
            at += n
    d = divisor(config, len(totals), sum(totals.values()))
    assert parts / d == pytest.approx(loss, abs=1e-10)
    np.testing.assert_allclose(gradient / d, whole, atol=1e-10, rtol=0)


@settings(max_examples=60, deadline=None)
@given(option, st.integers(0, 10_000), st.data())
def test_a_rollout_cut_into_branches_at_ratio_one(config: ObjectiveConfig, seed: int, data: st.DataObject) -> None:
    """Case 22. Every cut of its tokens: as many branches as you like, one token each at the most."""
    rng = np.random.default_rng(seed)
    rollouts = []
    for r in range(3):
        mu = -rng.exponential(1.0, int(rng.integers(2, 20)))
        rollouts.append(Branch(r, mu, mu, float(rng.normal())))
    loss, whole = step(rollouts, config)
    pieces = []
    for b in rollouts:
        cuts = sorted(data.draw(st.sets(st.integers(1, len(b.mu) - 1), max_size=5)))
        pieces += [Branch(b.rollout, part, part, b.advantage) for part in np.split(b.mu, cuts)]
    cut, split = step(pieces, config)
    assert cut == pytest.approx(loss, abs=1e-10)
    np.testing.assert_allclose(split, whole, atol=1e-10, rtol=0)


@settings(max_examples=40, deadline=None)
@given(st.sampled_from([c for c in OPTIONS if c["algorithm"] != "dapo"]), st.integers(0, 10_000), st.integers(2, 4))
def test_a_rollouts_branches_that_are_there_several_times(options: dict[str, Any], seed: int, times: int) -> None:
    """Case 22. Its targets multiply, N_r with them, and each copy carries its share: a token's sum is unchanged."""
    config = ObjectiveConfig(**{**CLIP, **options})
    branches = random_branches(np.random.default_rng(seed), spread=0.05)
    copied = [b for b in branches for _ in range(times if b.rollout == 0 else 1)]
    loss, whole = step(branches, config)
    again, gradient = step(copied, config)
    at, sums = 0, []
    for b in branches:
        n, k = len(b.mu), times if b.rollout == 0 else 1
        sums.append(gradient[at : at + k * n].reshape(k, n).sum(0))
        at += k * n
    assert again == pytest.approx(loss, abs=1e-10)
    np.testing.assert_allclose(np.concatenate(sums), whole, atol=1e-10, rtol=0)


@settings(max_examples=40, deadline=None)
@given(option, st.integers(0, 10_000), st.data())
def test_the_order_of_branches(config: ObjectiveConfig, seed: int, data: st.DataObject) -> None:
    branches = random_branches(np.random.default_rng(seed), spread=0.05)
    order = data.draw(st.permutations(range(len(branches))))
    loss, whole = step(branches, config)
    other, gradient = step([branches[i] for i in order], config)
    parts = dict(zip(order, np.split(gradient, np.cumsum([len(branches[i].mu) for i in order])[:-1]), strict=True))
    assert other == pytest.approx(loss, abs=1e-10)
    np.testing.assert_allclose(np.concatenate([parts[i] for i in range(len(branches))]), whole, atol=1e-10, rtol=0)

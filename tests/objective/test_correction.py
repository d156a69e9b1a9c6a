"""Truncated and masked importance correction, and the KL penalty."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from gyre.config import ObjectiveConfig
from tests.objective.branches import Branch, ours, random_branches, rollout_targets, step

WIDE = {"clip_low": 0.9, "clip_high": 9.0}


def flat(branches: list[Branch], of: str) -> np.ndarray:
    return np.concatenate([getattr(b, of) for b in branches])


def weights(branches: list[Branch], level: str, ratio: str = "branch") -> np.ndarray:
    """w of each target, from its definition."""
    if level == "token":
        return np.exp(flat(branches, "logp") - flat(branches, "mu"))
    out = []
    for b in branches:
        same = [b] if ratio == "branch" else [x for x in branches if x.rollout == b.rollout]
        out.append(np.full(len(b.mu), math.exp(float(np.mean(flat(same, "logp") - flat(same, "mu"))))))
    return np.concatenate(out)


def per_target(branches: list[Branch]) -> np.ndarray:
    """A / N_r of each target: minus the plain policy gradient."""
    totals = rollout_targets(branches)
    return np.concatenate([np.full(len(b.mu), b.advantage / totals[b.rollout]) for b in branches])


@pytest.mark.parametrize("ratio", ["branch", "rollout"])
@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("algorithm", ["gspo", "grpo"])
@pytest.mark.parametrize("cap", [0.9, 1.0, 1.1, 1e9])
def test_truncation_weighs_the_policy_gradient(algorithm: str, level: str, ratio: str, cap: float) -> None:
    branches = random_branches(np.random.default_rng(5), spread=0.3)
    config = ObjectiveConfig(
        algorithm=algorithm,
        ratio=ratio,
        old="trainer",
        correction="truncate",
        correction_level=level,
        correction_cap=cap,
    )
    result, gradient = ours(branches, config)
    w = weights(branches, level, ratio)
    np.testing.assert_allclose(gradient, -np.minimum(w, cap) * per_target(branches), atol=1e-12, rtol=0)
    np.testing.assert_array_equal(result.truncated.numpy(), w > cap)
    assert result.kept.all()
    assert not result.clipped.any()


@pytest.mark.parametrize("old", ["trainer", "sampler"])
@pytest.mark.parametrize("ratio", ["branch", "rollout"])
@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("algorithm", ["gspo", "grpo", "dapo"])
def test_the_mask_takes_out_and_moves_no_denominator(algorithm: str, level: str, ratio: str, old: str) -> None:
    branches = random_branches(np.random.default_rng(6), spread=0.3)
    options: dict[str, Any] = {"algorithm": algorithm, "ratio": ratio, "old": old, **WIDE}
    bounds = {"correction_floor": 0.95, "correction_cap": 1.05}
    config = ObjectiveConfig(**options, correction="mask", correction_level=level, **bounds)
    result, gradient = ours(branches, config)
    _, without = ours(branches, ObjectiveConfig(**options))
    w = weights(branches, level, ratio)
    kept = (w >= 0.95) & (w <= 1.05)
    assert 0 < kept.sum() < len(kept)
    np.testing.assert_array_equal(result.kept.numpy(), kept)
    carried = w if old == "trainer" else np.ones_like(w)
    np.testing.assert_allclose(gradient, np.where(kept, without * carried, 0.0), atol=1e-12, rtol=0)


@pytest.mark.parametrize("algorithm", ["gspo", "grpo", "dapo"])
def test_old_is_trainer_means_ratio_one(algorithm: str) -> None:
    """Without a correction: the plain policy gradient, whatever the difference to the sampler."""
    branches = random_branches(np.random.default_rng(7), spread=0.5)
    result, gradient = ours(branches, ObjectiveConfig(algorithm=algorithm, old="trainer"))
    totals = rollout_targets(branches)
    scale = np.concatenate([np.full(len(b.mu), totals[b.rollout] if algorithm == "dapo" else 1) for b in branches])
    np.testing.assert_allclose(gradient, -per_target(branches) * scale, atol=1e-12, rtol=0)
    assert not result.clipped.any()


@pytest.mark.parametrize("correction", ["truncate", "mask"])
def test_without_a_difference_a_correction_changes_nothing(correction: str) -> None:
    branches = [Branch(b.rollout, b.mu, b.mu, b.advantage) for b in random_branches(np.random.default_rng(8))]
    for level in ("token", "sequence"):
        corrected = ObjectiveConfig(old="trainer", correction=correction, correction_level=level)
        plain = ObjectiveConfig(old="sampler")
        assert step(branches, corrected)[0] == pytest.approx(step(branches, plain)[0], abs=1e-14)
        np.testing.assert_allclose(step(branches, corrected)[1], step(branches, plain)[1], atol=1e-14)


@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("bounds", [{"correction_floor": 1.0}, {"correction_cap": 1.0}])
def test_a_weight_on_a_bound_is_inside(level: str, bounds: dict[str, float]) -> None:
    mu = np.full(3, -1.0)
    for correction in ("mask", "truncate"):
        config = ObjectiveConfig(old="trainer", correction=correction, correction_level=level, **bounds)
        result, gradient = ours([Branch(0, mu, mu, 1.0)], config)
        assert result.kept.all() and not result.truncated.any()
        assert gradient == pytest.approx(np.full(3, -1 / 3))


@pytest.mark.parametrize("old", ["sampler", "trainer"])
@pytest.mark.parametrize("difference", [200.0, 1000.0, -1000.0])
@pytest.mark.parametrize("algorithm", ["grpo", "dapo"])
@pytest.mark.parametrize("kl", ["none", "k1", "k2", "k3"])
def test_a_rejected_target_may_be_anything(algorithm: str, difference: float, kl: str, old: str) -> None:
    """Its ratio overflows, and still neither loss nor gradient is touched by it."""
    mu = np.array([-1.0, -1.0 - max(difference, 0), -1.0])
    logp = np.array([-1.0, -1.0 + min(difference, 0), -1.0])
    config = ObjectiveConfig(
        algorithm=algorithm,
        old=old,
        correction="mask",
        correction_level="token",
        correction_floor=0.1,
        kl=kl,
        kl_coefficient=0.1,
    )
    result, gradient = ours([Branch(0, logp, mu, -1.0)], config)
    assert result.kept.tolist() == [True, False, True]
    assert gradient[1] == 0
    assert np.isfinite(gradient).all()
    # What is left: two targets at ratio one and KL zero, weighed as before.
    assert result.loss.item() == pytest.approx(2.0 if algorithm == "dapo" else 2 / 3)
    assert not result.kl.any()


@settings(max_examples=60, deadline=None)
@given(
    st.integers(0, 10_000),
    st.sampled_from(["gspo", "grpo", "dapo"]),
    st.sampled_from(["sampler", "trainer"]),
    st.sampled_from(["token", "sequence"]),
    st.floats(0.5, 3.0),
    st.floats(0.0, 0.99),
)
def test_a_masked_weight_never_leaves_its_bounds(
    seed: int, algorithm: str, old: str, level: str, cap: float, floor: float
) -> None:
    if floor >= cap:
        return
    branches = random_branches(np.random.default_rng(seed), spread=1.0)
    config = ObjectiveConfig(
        algorithm=algorithm,
        old=old,
        correction="mask",
        correction_level=level,
        correction_cap=cap,
        correction_floor=floor,
        **WIDE,
    )
    result, gradient = ours(branches, config)
    w = weights(branches, level)
    np.testing.assert_array_equal(result.kept.numpy(), (w >= floor) & (w <= cap))
    assert not gradient[~result.kept.numpy()].any()
    if old == "trainer":
        scale = np.concatenate([np.full(len(b.mu), rollout_targets(branches)[b.rollout]) for b in branches])
        bound = np.abs(per_target(branches)) * cap * (scale if algorithm == "dapo" else 1)
        assert (np.abs(gradient) <= bound + 1e-12).all()


# ---- KL -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("algorithm", ["gspo", "grpo", "dapo"])
@pytest.mark.parametrize(
    "kl, value, slope",
    [
        ("k1", lambda d: d, lambda d: np.ones_like(d)),
        ("k2", lambda d: d**2 / 2, lambda d: d),
        ("k3", lambda d: np.exp(-d) - 1 + d, lambda d: 1 - np.exp(-d)),
    ],
)
@pytest.mark.parametrize("whose", ["sampler", "initial"])
def test_the_penalty_and_its_gradient(algorithm: str, kl: str, value: Any, slope: Any, whose: str) -> None:
    rng = np.random.default_rng(9)
    branches = random_branches(rng, spread=0.2)
    frozen = flat(branches, "mu") + rng.normal(0, 0.5, len(flat(branches, "mu")))
    reference = flat(branches, "mu") if whose == "sampler" else frozen
    options: dict[str, Any] = {"algorithm": algorithm, **WIDE}
    config = ObjectiveConfig(**options, kl=kl, kl_coefficient=0.3, kl_reference=whose)
    with_kl, gradient = ours(branches, config, reference=frozen)
    without, plain = ours(branches, ObjectiveConfig(**options))
    d = flat(branches, "logp") - reference
    totals = rollout_targets(branches)
    weight = np.concatenate([np.full(len(b.mu), 1 / totals[b.rollout]) for b in branches])
    if algorithm == "dapo":
        weight = np.ones_like(weight)
    np.testing.assert_allclose(with_kl.kl.numpy(), value(d), atol=1e-12)
    assert with_kl.loss.item() - without.loss.item() == pytest.approx(0.3 * float((weight * value(d)).sum()), abs=1e-10)
    np.testing.assert_allclose(gradient - plain, 0.3 * weight * slope(d), atol=1e-12)


def test_k1_and_k3_estimate_the_kl_and_k2_has_its_gradient() -> None:
    """Exactly, by summing over a small vocabulary instead of sampling."""
    rng = np.random.default_rng(10)
    theta, ref = rng.normal(size=7), rng.normal(size=7)
    logp, logr = theta - np.log(np.exp(theta).sum()), ref - np.log(np.exp(ref).sum())
    p, d = np.exp(logp), logp - logr
    kl = float((p * d).sum())
    jacobian = np.eye(7) - p[None, :]  # d log p_i / d theta_j
    exact = (p * d) @ jacobian  # the gradient of the KL by theta
    assert float((p * (np.exp(-d) - 1 + d)).sum()) == pytest.approx(kl)
    np.testing.assert_allclose((p * d) @ jacobian, exact)  # k2: slope d
    np.testing.assert_allclose(p @ jacobian, 0, atol=1e-12)  # k1: slope 1, nothing expected
    other = (p * (1 - np.exp(-d))) @ jacobian  # k3: of KL(ref || pi)
    np.testing.assert_allclose(other, p - np.exp(logr), atol=1e-12)


def test_a_reference_that_is_missing_is_named() -> None:
    branches = random_branches(np.random.default_rng(0))
    with pytest.raises(ValueError, match="kl_reference = 'initial' needs the reference"):
        ours(branches, ObjectiveConfig(kl="k3", kl_reference="initial"))


# ---- what does not go together --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options, says",
    [
        ({"correction": "truncate"}, "needs old ="),
        ({"correction": "mask", "correction_floor": 2.0, "correction_cap": 2.0}, "correction_floor: must be below"),
        ({"algorithm": "dapo", "denominator": "valid"}, "dapo divides by"),
        ({"algorithm": "ppo"}, "gspo"),
    ],
)
def test_options_that_do_not_fit_are_refused(options: dict[str, Any], says: str) -> None:
    with pytest.raises(ValidationError, match=says):
        ObjectiveConfig(**options)


def test_clips_are_the_algorithms_unless_given() -> None:
    clips = {n: (c.clip_low, c.clip_high) for n in ("gspo", "grpo", "dapo") for c in [ObjectiveConfig(algorithm=n)]}
    assert clips == {"gspo": (3e-4, 4e-4), "grpo": (0.2, 0.2), "dapo": (0.2, 0.28)}
    assert ObjectiveConfig(algorithm="dapo", clip_high=0.5).clip_high == 0.5
    again = ObjectiveConfig.model_validate(ObjectiveConfig(algorithm="grpo", clip_low=0.1).model_dump())
    assert (again.clip_low, again.clip_high) == (0.1, 0.2)


@pytest.mark.parametrize(
    "options, whole",
    [
        ({}, False),
        ({"ratio": "rollout"}, True),
        ({"ratio": "rollout", "algorithm": "grpo"}, False),
        ({"ratio": "rollout", "algorithm": "grpo", "correction": "mask"}, True),
        ({"ratio": "rollout", "algorithm": "grpo", "correction": "mask", "correction_level": "token"}, False),
        ({"ratio": "branch", "algorithm": "grpo", "correction": "mask"}, False),
    ],
)
def test_when_a_rollout_must_stay_whole(options: dict[str, Any], whole: bool) -> None:
    assert ObjectiveConfig(**options).whole_rollouts is whole

"""GSPO, GRPO and DAPO against the published formulas, in float64."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

from gyre.config import ObjectiveConfig
from gyre.objective import ALGORITHMS, Targets, policy_loss
from tests.objective.branches import Branch, ours, published, random_branches, step

EVERY: list[dict[str, Any]] = [
    {"algorithm": "gspo", "ratio": "branch"},
    {"algorithm": "gspo", "ratio": "rollout"},
    {"algorithm": "grpo"},
    {"algorithm": "dapo"},
]
CLIP = {"clip_low": 0.01, "clip_high": 0.02}


def random_case(seed: int) -> tuple[list[Branch], dict[str, float]]:
    """Wide and narrow spreads, so that ratios fall on both sides of the clip and inside it."""
    rng = np.random.default_rng(seed)
    branches = random_branches(rng, spread=float(rng.choice([1e-4, 0.02, 0.5])))
    low, high = (float(x) for x in rng.uniform(1e-4, 0.05, 2))
    return branches, {"clip_low": low, "clip_high": high}


@pytest.mark.parametrize("options", EVERY, ids=str)
@pytest.mark.parametrize("seed", range(12))
def test_loss_and_gradient_equal_the_published_formula(seed: int, options: dict[str, Any]) -> None:
    branches, clip = random_case(seed)
    config = ObjectiveConfig(**options, **clip)
    loss, gradient = step(branches, config)
    expected, gradients = published(branches, config)
    assert abs(loss - expected) < 1e-10
    np.testing.assert_allclose(gradient, gradients, atol=1e-10, rtol=0)


@pytest.mark.parametrize("options", EVERY, ids=str)
def test_the_random_cases_meet_every_side_of_the_clip(options: dict[str, Any]) -> None:
    config = ObjectiveConfig(**options, **CLIP)
    seen = set()
    for seed in range(12):
        branches, _ = random_case(seed)
        result, gradient = ours(branches, config)
        advantage = np.repeat([b.advantage for b in branches], [len(b.mu) for b in branches])
        if config.algorithm == "gspo":
            ratios = result.ratios[result.sequence].numpy()
        else:
            ratios = np.exp(np.concatenate([b.logp - b.mu for b in branches]))
        high, low = ratios > 1.02, ratios < 0.99
        np.testing.assert_array_equal(result.clipped.numpy(), np.where(advantage > 0, high, low))
        np.testing.assert_array_equal(gradient == 0, result.clipped.numpy())
        for side, there in (("high", high), ("low", low), ("in", ~high & ~low)):
            seen |= {(side, bool(up)) for up in (advantage > 0)[there]}
    assert seen == {(side, up) for side in ("high", "low", "in") for up in (False, True)}


@pytest.mark.parametrize("n", [1, 2, 99, 100, 101, 5000])
@pytest.mark.parametrize("difference", [0.01, -0.01, 0.0, 0.3])
def test_the_sequence_ratio_is_normalised_by_length(n: int, difference: float) -> None:
    """100 tokens, each with log-ratio .01: the sequence ratio is e^.01, not e^1."""
    mu = np.full(n, -1.0)
    result, gradient = ours([Branch(0, mu + difference, mu, 1.0)], ObjectiveConfig(clip_low=0.5, clip_high=0.5))
    assert result.ratios.item() == pytest.approx(math.exp(difference), abs=1e-12)
    assert gradient == pytest.approx(np.full(n, -math.exp(difference) / n), abs=1e-12)


@pytest.mark.parametrize("algorithm", ["grpo", "dapo"])
def test_a_token_ratio_is_not_averaged(algorithm: str) -> None:
    mu = np.full(2, -1.0)
    config = ObjectiveConfig(algorithm=algorithm, clip_low=0.2, clip_high=0.2)
    result, gradient = ours([Branch(0, mu + np.array([0.5, -0.5]), mu, 1.0)], config)
    assert result.clipped.tolist() == [True, False]
    assert gradient[0] == 0
    assert gradient[1] == pytest.approx(-math.exp(-0.5) * (1.0 if algorithm == "dapo" else 0.5))


def test_the_two_sequence_ratios_differ_for_branches_that_moved_apart() -> None:
    mu = np.full(10, -1.0)
    branches = [Branch(0, mu + 0.1, mu, 1.0), Branch(0, mu - 0.1, mu, 1.0)]
    by_branch, _ = ours(branches, ObjectiveConfig(clip_low=0.05, clip_high=0.05))
    by_rollout, _ = ours(branches, ObjectiveConfig(clip_low=0.05, clip_high=0.05, ratio="rollout"))
    assert by_branch.clipped.tolist() == [True] * 10 + [False] * 10
    assert not by_rollout.clipped.any()
    assert by_rollout.ratios.item() == pytest.approx(1.0)


def test_a_mean_over_rollouts_and_a_mean_over_tokens_weigh_length_differently() -> None:
    short, long = np.full(1, -1.0), np.full(9, -1.0)
    branches = [Branch(0, short, short, 1.0), Branch(1, long, long, 1.0)]
    _, by_rollout = step(branches, ObjectiveConfig(algorithm="grpo"))
    _, by_token = step(branches, ObjectiveConfig(algorithm="dapo"))
    assert by_rollout == pytest.approx([-1 / 2] + [-1 / 18] * 9)
    assert by_token == pytest.approx([-1 / 10] * 10)


@pytest.mark.parametrize("options", EVERY, ids=str)
def test_an_advantage_of_zero_gives_nothing(options: dict[str, Any]) -> None:
    rng = np.random.default_rng(0)
    branches = [Branch(b.rollout, b.logp, b.mu, 0.0) for b in random_branches(rng)]
    result, gradient = ours(branches, ObjectiveConfig(**options, **CLIP))
    assert result.loss.item() == 0
    assert not gradient.any()
    assert not result.clipped.any()


def test_float32_is_near_float64() -> None:
    branches, clip = random_case(3)
    for options in EVERY:
        config = ObjectiveConfig(**options, **clip)
        exact, gradient = ours(branches, config)
        single, rounded = ours(branches, config, dtype=torch.float32)
        assert single.loss.item() == pytest.approx(exact.loss.item(), rel=1e-4)
        np.testing.assert_allclose(rounded, gradient, rtol=1e-4, atol=1e-6)


def test_every_algorithm_of_a_run_file_is_there() -> None:
    assert set(ALGORITHMS) == {o["algorithm"] for o in EVERY}
    for name in ALGORITHMS:
        assert ObjectiveConfig(algorithm=name).algorithm == name


def test_bad_shapes_are_refused() -> None:
    config = ObjectiveConfig()

    def targets(n: int, sequence: list[int], units: int) -> Targets:
        return Targets(torch.zeros(n), torch.tensor(sequence), torch.ones(units), torch.ones(units))

    with pytest.raises(ValueError, match="at least one target"):
        policy_loss(torch.zeros(3), targets(3, [0, 0, 2], 3), config)
    with pytest.raises(ValueError, match=r"sequence: must be in 0\.\.1"):
        policy_loss(torch.zeros(3), targets(3, [0, 1, 2], 2), config)
    with pytest.raises(ValueError, match="behaviour"):
        policy_loss(torch.zeros(4), targets(3, [0, 1, 2], 3), config)

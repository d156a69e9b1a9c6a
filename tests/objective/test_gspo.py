"""GSPO-token against a reference in float64 that is written from the paper's formulas, one token at a time."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from gyre.objective.gspo import GspoTargets, gspo_token_loss


def reference(branches, clip_low, clip_high, by_rollout):
    """Loss and d loss / d logp, as nested lists, of [(rollout, logp, logp_old, advantage, N_r)].

    The gradient is written by hand: where the clip does not take it away, d l_t / d logp_t = -s_i A.
    """
    units: dict[object, list[int]] = {}
    for index, (rollout, *_) in enumerate(branches):
        units.setdefault(rollout if by_rollout else index, []).append(index)
    loss, grads = 0.0, [[0.0] * len(b[1]) for b in branches]
    for members in units.values():
        log_ratio, n = 0.0, 0
        for i in members:
            for new, old in zip(branches[i][1], branches[i][2], strict=True):
                log_ratio += float(new) - float(old)
                n += 1
        s = math.exp(log_ratio / n)
        for i in members:
            _, logp, _, advantage, rollout_targets = branches[i]
            for t in range(len(logp)):
                s_t = s * math.exp(0.0)  # sg[s_i] * exp(logp_t - sg[logp_t])
                bounded = min(max(s_t, 1 - clip_low), 1 + clip_high)
                loss -= min(s_t * advantage, bounded * advantage) / rollout_targets
                if s_t * advantage <= bounded * advantage:  # the unclipped part is the minimum
                    grads[i][t] = -s_t * advantage / rollout_targets
    return loss, grads


def ours(branches, clip_low, clip_high, by_rollout, dtype=torch.float64):
    names = [b[0] if by_rollout else i for i, b in enumerate(branches)]
    order = list(dict.fromkeys(names))
    unit = torch.tensor(np.repeat([order.index(n) for n in names], [len(b[1]) for b in branches]))
    first = [names.index(n) for n in order]
    logp = torch.tensor(np.concatenate([b[1] for b in branches]), dtype=dtype, requires_grad=True)
    targets = GspoTargets(
        behaviour=torch.tensor(np.concatenate([b[2] for b in branches]), dtype=dtype),
        unit=unit,
        advantage=torch.tensor([branches[i][3] for i in first], dtype=dtype),
        weight=torch.tensor([1 / branches[i][4] for i in first], dtype=dtype),
    )
    result = gspo_token_loss(logp, targets, clip_low, clip_high)
    result.loss.backward()
    return result, logp.grad


def random_branches(rng, rollouts=6, most=4, spread=0.02):
    branches = []
    for rollout in range(rollouts):
        lengths = rng.integers(1, 30, rng.integers(1, most + 1))
        advantage = float(rng.normal())
        for n in lengths:
            old = -rng.exponential(1.0, n)
            branches.append((rollout, old + rng.normal(0, spread, n), old, advantage, int(lengths.sum())))
    return branches


@pytest.mark.parametrize("by_rollout", [False, True])
@pytest.mark.parametrize("seed", range(12))
def test_loss_and_gradient_equal_the_reference(seed, by_rollout):
    rng = np.random.default_rng(seed)
    # Wide and narrow spreads, so that units fall on both sides of the clip and inside it.
    branches = random_branches(rng, spread=float(rng.choice([1e-4, 0.02, 0.5])))
    clip_low, clip_high = (float(x) for x in rng.uniform(1e-4, 0.05, 2))
    result, grad = ours(branches, clip_low, clip_high, by_rollout)
    loss, grads = reference(branches, clip_low, clip_high, by_rollout)
    assert abs(result.loss.item() - loss) < 1e-10
    np.testing.assert_allclose(grad.numpy(), np.concatenate(grads), atol=1e-10, rtol=0)


def test_the_random_cases_meet_every_side_of_the_clip():
    seen = set()
    for seed in range(12):
        rng = np.random.default_rng(seed)
        branches = random_branches(rng, spread=float(rng.choice([1e-4, 0.02, 0.5])))
        result, _ = ours(branches, 0.01, 0.01, False)
        for ratio, branch, clipped in zip(result.ratios.tolist(), branches, result.clipped.tolist(), strict=True):
            side = "high" if ratio > 1.01 else "low" if ratio < 0.99 else "in"
            seen.add((side, branch[3] > 0))
            assert clipped == ((side == "high" and branch[3] > 0) or (side == "low" and branch[3] < 0))
    assert seen == {(side, up) for side in ("high", "low", "in") for up in (False, True)}


@pytest.mark.parametrize("by_rollout", [False, True])
def test_one_branch_rollouts_are_plain_gspo(by_rollout):
    """GSPO eq. 5: J = mean_i min(s_i A_i, clip(s_i) A_i), whose gradient is s_i A_i mean_t d logp_t (eq. 10)."""
    rng = np.random.default_rng(3)
    branches = random_branches(rng, rollouts=9, most=1, spread=0.05)
    result, grad = ours(branches, 0.03, 0.04, by_rollout)
    expected, grads = 0.0, []
    for _, new, old, advantage, _ in branches:
        s = math.exp(float(np.mean(new - old)))
        bounded = min(max(s, 0.97), 1.04)
        expected -= min(s * advantage, bounded * advantage)
        free = s * advantage <= bounded * advantage
        grads.append(np.full(len(new), -s * advantage / len(new) if free else 0.0))
    assert abs(result.loss.item() - expected) < 1e-10
    np.testing.assert_allclose(grad.numpy(), np.concatenate(grads), atol=1e-10, rtol=0)


@pytest.mark.parametrize("n", [1, 2, 100, 5000])
@pytest.mark.parametrize("difference", [0.01, -0.01])
def test_the_ratio_is_normalised_by_length(n, difference):
    """100 tokens, each with log-ratio .01: the sequence ratio is e^.01, not e^1."""
    old = np.full(n, -1.0)
    result, _ = ours([(0, old + difference, old, 1.0, n)], 0.2, 0.2, False)
    assert result.ratios.item() == pytest.approx(math.exp(difference), abs=1e-12)


@pytest.mark.parametrize("cut", [1, 7, 19])
def test_a_branch_split_in_two_at_ratio_one_gives_the_same_gradient(cut):
    old = -np.random.default_rng(0).exponential(1.0, 20)
    whole, grad = ours([(0, old, old, 0.7, 20)], 3e-4, 4e-4, False)
    parts, split = ours([(0, old[:cut], old[:cut], 0.7, 20), (0, old[cut:], old[cut:], 0.7, 20)], 3e-4, 4e-4, False)
    assert abs(whole.loss.item() - parts.loss.item()) < 1e-10
    np.testing.assert_allclose(grad.numpy(), split.numpy(), atol=1e-12, rtol=0)


def test_a_branch_that_is_there_twice_gives_the_same_gradient():
    """Twice the targets, so N_r doubles: each copy carries half, and the sum over a token's copies is unchanged."""
    rng = np.random.default_rng(1)
    old = -rng.exponential(1.0, 20)
    new = old + rng.normal(0, 1e-4, 20)
    _, once = ours([(0, new, old, -1.3, 20)], 0.01, 0.01, False)
    _, twice = ours([(0, new, old, -1.3, 40), (0, new, old, -1.3, 40)], 0.01, 0.01, False)
    np.testing.assert_allclose(once.numpy(), twice.numpy().reshape(2, 20).sum(0), atol=1e-12, rtol=0)


def test_the_two_ratios_differ_for_branches_that_moved_apart():
    old = np.full(10, -1.0)
    branches = [(0, old + 0.1, old, 1.0, 20), (0, old - 0.1, old, 1.0, 20)]
    by_branch, _ = ours(branches, 0.05, 0.05, False)
    by_rollout, _ = ours(branches, 0.05, 0.05, True)
    assert by_branch.clipped.tolist() == [True, False]
    assert by_rollout.clipped.tolist() == [False]
    assert by_rollout.ratios.item() == pytest.approx(1.0)


def test_bad_shapes_are_refused():
    targets = GspoTargets(torch.zeros(3), torch.tensor([0, 0, 2]), torch.ones(3), torch.ones(3))
    with pytest.raises(ValueError, match="at least one target"):
        gspo_token_loss(torch.zeros(3), targets, 0.1, 0.1)
    with pytest.raises(ValueError, match="behaviour"):
        gspo_token_loss(torch.zeros(4), targets, 0.1, 0.1)

"""The replica's arithmetic: any split of the work gives the same step, and nothing bad goes in silently."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch

from gyre.training.batch import BatchError, pack_samples
from gyre.training.checkpoint import version_folder
from gyre.training.metrics import MicroBatchMetrics, combine
from gyre.training.outcome import NonFiniteError
from gyre.trajectory.packed import TreeRow
from tests.training.conftest import random_samples


def accumulate(trainer, batches):
    trainer.begin()
    metrics = [trainer.micro_batch(pack_samples(batch), f"micro-batch {i}") for i, batch in enumerate(batches)]
    return trainer.gradient(), combine(metrics)


def test_the_loss_is_the_step_loss_of_the_design(make_trainer):
    """L = (1/R) sum_r (1/N_r) sum_b sum_t l_bt, checked by finite differences of the formula itself."""
    trainer = make_trainer()
    samples = random_samples(0, rollouts=3)
    _, metrics = accumulate(trainer, [samples])

    def part(sample):
        ids = torch.from_numpy(sample.ids).long()
        logits = (
            trainer.policy.logits(TreeRow.sequences([len(ids)]), ids)[sample.targets - 1].detach().double()
            / sample.temperature
        )
        new = torch.log_softmax(logits, -1).gather(1, ids[sample.targets, None]).squeeze(1).numpy()
        s = np.exp(np.mean(new - sample.behaviour))
        bounded = np.clip(s, 0.8, 1.2)
        loss = -len(new) * min(s * sample.advantage, bounded * sample.advantage) / sample.rollout_targets
        return loss, np.abs(new - sample.behaviour)

    parts = [part(s) for s in samples]
    assert metrics.loss == pytest.approx(sum(loss for loss, _ in parts), rel=1e-4)
    assert metrics.figures()["mean_abs_logprob_diff"] == pytest.approx(
        np.concatenate([d for _, d in parts]).mean(), rel=1e-4
    )


@pytest.mark.parametrize("ratio", ["branch", "rollout"])
def test_any_split_into_micro_batches_gives_the_same_gradient(make_trainer, ratio):
    trainer = make_trainer(ratio=ratio)
    samples = random_samples(1, rollouts=6, branches=3)
    whole, expected = accumulate(trainer, [samples])
    assert whole.abs().max() > 1e-4
    rollouts = [[s for s in samples if s.rollout_id == r] for r in dict.fromkeys(s.rollout_id for s in samples)]
    splits = [
        rollouts,
        [[*rollouts[0], *rollouts[1]], [s for r in rollouts[2:] for s in r]],
        [r[::-1] for r in rollouts[::-1]],
    ]
    if ratio == "branch":
        splits += [[[s] for s in samples], [samples[0::3], samples[1::3], samples[2::3]]]
    for split in splits:
        gradient, metrics = accumulate(trainer, split)
        torch.testing.assert_close(gradient, whole, rtol=1e-5, atol=1e-6)
        assert metrics.n_targets == expected.n_targets
        assert metrics.clip_by_length == expected.clip_by_length
        assert metrics.loss == pytest.approx(expected.loss, rel=1e-5)


def test_two_replicas_sum_to_one(make_trainer):
    central, satellite = make_trainer(), make_trainer()
    samples = random_samples(2, rollouts=6)
    whole, _ = accumulate(make_trainer(), [samples])
    accumulate(central, [samples[:5]])
    gradient, _ = accumulate(satellite, [samples[5:8], samples[8:]])
    central.absorb(gradient)
    torch.testing.assert_close(central.gradient(), whole, rtol=1e-5, atol=1e-6)


def test_a_step_after_absorbing_equals_a_step_alone(make_trainer):
    alone, central, satellite = make_trainer(), make_trainer(), make_trainer()
    samples = random_samples(3, rollouts=6)
    accumulate(alone, [samples])
    accumulate(central, [samples[:6]])
    central.absorb(accumulate(satellite, [samples[6:]])[0])
    norms = [t.optimizer_step(6).grad_norm for t in (alone, central)]
    assert norms[0] == pytest.approx(norms[1], rel=1e-5)
    for name, tensor in alone.export_hf().items():
        # Adam's first step is the sign of the gradient: where that is all rounding, the sign is too.
        apart = (tensor - central.export_hf()[name]).abs() > 1e-5
        assert apart.float().mean() < 0.01, name


def test_a_shared_token_split_in_two_branches_at_ratio_one_keeps_its_gradient(make_trainer):
    """The owned spans of one branch as two samples of the same path: same sum, where ratios are 1."""
    trainer = make_trainer()
    sample = random_samples(4, rollouts=1, branches=1)[0]
    ids = torch.from_numpy(sample.ids).long()
    logits = trainer.policy.logits(TreeRow.sequences([len(ids)]), ids)[sample.targets - 1].detach() / sample.temperature
    known = torch.log_softmax(logits, -1).gather(1, ids[sample.targets, None]).squeeze(1).numpy()
    sample = dataclasses.replace(sample, behaviour=known)
    whole, _ = accumulate(trainer, [[sample]])
    halves = [
        dataclasses.replace(sample, targets=sample.targets[part], behaviour=known[part])
        for part in (slice(0, 5), slice(5, None))
    ]
    split, _ = accumulate(trainer, [halves])
    torch.testing.assert_close(split, whole, rtol=1e-4, atol=1e-6)


def test_r_divides_once_whatever_the_number_of_micro_batches(make_trainer):
    samples = random_samples(5)
    norms = []
    for n_valid, batches in ((4, [samples]), (8, [[s] for s in samples])):
        trainer = make_trainer(clip_grad=0.0)
        accumulate(trainer, batches)
        norms.append(trainer.optimizer_step(n_valid).grad_norm)
    assert norms[0] == pytest.approx(2 * norms[1], rel=1e-5)


def test_a_step_without_gradient_keeps_the_weights(make_trainer):
    trainer = make_trainer(weight_decay=0.1)
    accumulate(trainer, [random_samples(1)])
    trainer.optimizer_step(4)  # momentum, which must not move the weights by itself
    before = trainer.export_hf()
    trainer.begin()
    assert trainer.optimizer_step(0).version == 2
    assert all(torch.equal(t, before[n]) for n, t in trainer.export_hf().items())


def test_the_learning_rate_warms_up(make_trainer):
    trainer = make_trainer(lr=1e-3, warmup_steps=3)
    rates = []
    for step in range(5):
        accumulate(trainer, [random_samples(step)])
        rates.append(trainer.optimizer_step(4).lr)
    assert rates == pytest.approx([2.5e-4, 5e-4, 7.5e-4, 1e-3, 1e-3])


def test_a_resumed_run_equals_the_uninterrupted_one(make_trainer, tmp_path):
    straight = make_trainer(warmup_steps=2, weight_decay=0.01)
    resumed = None
    for step in range(4):
        if step == 2:
            straight.save(tmp_path, "run-s0", 7)
            resumed = make_trainer(warmup_steps=2, weight_decay=0.01)
            resumed.load(2, version_folder(tmp_path, 2))
        for trainer in (straight, resumed):
            if trainer is not None:
                accumulate(trainer, [random_samples(step)])
                trainer.optimizer_step(4)
    assert straight.version == resumed.version == 4
    expected = straight.export_hf()
    assert all(torch.equal(t, expected[n]) for n, t in resumed.export_hf().items())


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_loss_that_is_not_finite_is_refused_by_name(make_trainer, bad):
    trainer = make_trainer()
    good, _ = accumulate(trainer, [random_samples(1)])
    broken = random_samples(2)
    broken[3].behaviour[0] = bad
    weights = trainer.export_hf()
    with pytest.raises(NonFiniteError, match=r"micro-batch 17: .*refused.*run/s0/00/0"):
        trainer.micro_batch(pack_samples(broken), "micro-batch 17")
    assert torch.equal(trainer.gradient(), good)
    assert all(torch.equal(t, weights[n]) for n, t in trainer.export_hf().items())


def test_a_gradient_that_is_not_finite_never_becomes_weights(make_trainer):
    trainer = make_trainer()
    accumulate(trainer, [random_samples(1)])
    trainer.stream.buffers()[0][5] = torch.inf
    weights = trainer.export_hf()
    with pytest.raises(NonFiniteError, match="non-finite"):
        trainer.optimizer_step(4)
    assert trainer.version == 0
    assert all(torch.equal(t, weights[n]) for n, t in trainer.export_hf().items())


def test_a_pushed_gradient_is_checked_before_it_is_added(make_trainer):
    trainer = make_trainer()
    gradient, _ = accumulate(trainer, [random_samples(1)])
    with pytest.raises(ValueError, match="expected float32"):
        trainer.absorb(gradient[:-1])
    with pytest.raises(ValueError, match="expected float32"):
        trainer.absorb(gradient.double())
    with pytest.raises(NonFiniteError):
        trainer.absorb(gradient * torch.inf)
    assert torch.equal(trainer.gradient(), gradient)


def test_a_ratio_over_rollouts_needs_them_whole(make_trainer):
    samples = random_samples(1, rollouts=2, branches=3)
    trainer = make_trainer(ratio="rollout")
    with pytest.raises(BatchError, match=r"rollout run/s0/00/01 has .* raise trainer\.micro_batch_tokens"):
        trainer.micro_batch(pack_samples(samples[:5]), "micro-batch 1")
    assert trainer.gradient().abs().max() == 0


def test_metrics_survive_json(make_trainer):
    trainer = make_trainer(clip=1e-4)
    metrics = trainer.micro_batch(pack_samples(random_samples(1)), "micro-batch 1")
    assert MicroBatchMetrics.from_json(metrics.to_json()) == metrics
    figures = metrics.figures()
    assert 0 < figures["clip_fraction"] < 1
    assert figures["max_abs_logprob_diff"] >= figures["mean_abs_logprob_diff"] > 0
    assert 0 < figures["entropy"] < np.log(96)
    assert sum(n for _, n in metrics.clip_by_length.values()) == metrics.n_targets
    assert metrics.sequences == 8


def test_sleep_keeps_what_is_held(make_trainer):
    trainer = make_trainer()
    gradient, _ = accumulate(trainer, [random_samples(1)])
    trainer.sleep()
    trainer.wake()
    assert torch.equal(trainer.gradient(), gradient)

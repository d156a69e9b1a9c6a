"""A sleeping trainer gives its device's memory back, and forgets nothing. On a CPU the same code moves host memory."""

from __future__ import annotations

import pytest
import torch

from gyre.training.batch import pack_samples
from gyre.training.offload import Offload
from gyre.training.trainer import Trainer
from tests.training.conftest import random_samples


def test_views_stay_what_they_are() -> None:
    flat = torch.arange(24.0)
    part, other = flat[4:12].view(2, 4), torch.tensor([7], dtype=torch.int64)
    expected = part.clone()
    offload = Offload(lambda: [flat, part, other, torch.empty(0)])
    assert offload.out() == flat.nbytes + other.nbytes
    assert offload.out() == 0 and flat.untyped_storage().nbytes() == other.untyped_storage().nbytes() == 0
    with offload.resident():
        assert torch.equal(part, expected)
        part += 1  # also what is written meanwhile
    assert offload.is_out and flat.untyped_storage().nbytes() == 0
    offload.back()
    offload.back()
    assert torch.equal(part, expected + 1) and torch.equal(flat[4:12].view(2, 4), part) and other.item() == 7


def train(trainer: Trainer, between: object = None) -> dict[str, torch.Tensor]:
    """Two steps of two micro-batches and an `absorb` each; `between` is called between any two calls."""
    pause = between if callable(between) else lambda: None
    for step in range(2):
        for part in range(2):
            trainer.micro_batch(pack_samples(random_samples(2 * step + part, rollouts=2)), "one")
            pause()
        other = trainer.gradient()
        pause()
        trainer.absorb(0.5 * other)
        pause()
        trainer.optimizer_step(4)
        pause()
    return trainer.export_hf()


def test_a_trainer_that_goes_out_between_any_two_calls_ends_with_the_same_bits(make_trainer) -> None:
    expected, trainer = train(make_trainer()), make_trainer()
    freed = []

    def nap() -> None:
        freed.append(trainer.offload.out())
        if len(freed) % 2:  # else it stays out, and comes in for the next call alone
            trainer.wake()

    found = train(trainer, nap)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    weights = sum(p.nbytes for p in trainer.policy.model.parameters())
    assert (
        min(f for f in freed if f) >= 2 * weights and max(freed) >= 4 * weights
    )  # with gradients; with Adam's moments


def test_sleep_offloads_on_cuda_and_only_there(make_trainer, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = make_trainer()
    trainer.sleep()
    assert trainer.asleep and not trainer.offload.is_out
    trainer.wake()
    monkeypatch.setattr(type(trainer.policy), "device", torch.device("cuda", 0))
    trainer.sleep()
    assert trainer.asleep and trainer.offload.is_out
    trainer.wake()
    assert not trainer.asleep and not trainer.offload.is_out

"""A sleeping trainer gives its device's memory back, and forgets nothing. On a CPU the same code moves host memory."""

from __future__ import annotations

import subprocess
import sys

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


NO_ROOM = """
import resource
import torch
from pathlib import Path
from gyre.training.offload import NoRoomError, Offload

def limit(more):
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + more if more else resource.RLIM_INFINITY, resource.RLIM_INFINITY))

small, large = torch.arange(1000.0), torch.arange(100e6 // 4)
offload = Offload(lambda: [small, large])
limit(50 << 20)
try:
    offload.out()
except NoRoomError as error:
    print(error)
print(offload.is_out, small.sum().item(), large[-1].item())
limit(0)
offload.out()
limit(50 << 20)
try:
    offload.back()
except NoRoomError as error:
    print(error)
print(offload.is_out, small.untyped_storage().nbytes(), large.untyped_storage().nbytes())
limit(0)
offload.back()
print(offload.is_out, small.sum().item(), large[-1].item())
"""


def test_without_room_all_stays_where_it_was_and_the_error_says_what_to_do() -> None:
    ran = subprocess.run([sys.executable, "-c", NO_ROOM], capture_output=True, text=True, timeout=300)
    assert ran.returncode == 0, ran.stderr
    no_way_out, still_in, no_way_back, still_out, back = ran.stdout.splitlines()
    assert no_way_out.startswith("0.10 GB of the trainer do not fit into the host's memory while its cell serves: ")
    assert no_way_back.startswith(
        "0.10 GB of the trainer do not fit on cpu beside its cell's server: lower "
        "cells.serving.memory_fraction, or split the trainer further (cells.layout); "
    )
    assert still_in == back == "False 499500.0 25000000.0"
    assert still_out == "True 0 0"


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

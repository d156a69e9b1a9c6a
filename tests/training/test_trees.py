"""Packed trees against the same branches apart: the loss and every gradient are equal, however the work is cut."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gyre.config import ObjectiveConfig, OptimizerConfig, TrainerConfig
from gyre.training.batch import PackedBatch, pack_rows, pack_samples
from gyre.training.hf_config import read_shape
from gyre.training.model import build_policy
from gyre.training.streaming import StreamingStep
from gyre.training.trainer import Trainer
from gyre.training.weights import read_hf_weights
from gyre.trajectory.cut import cut, micro_batches
from tests.training.trees import Rollout, micro_batch, rollouts

HYPOTHESIS = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
PAIR = st.tuples(rollouts(number=0), rollouts(number=1))


def trainer_of(folder: Path, dtype: torch.dtype, *, ratio: str = "branch", recompute: bool = False) -> Trainer:
    chunk = TrainerConfig(optimizer=OptimizerConfig(lr=1e-2), logprob_chunk=7, recompute=recompute)
    trainer = Trainer(
        folder, chunk, ObjectiveConfig(ratio=ratio, clip_low=0.99, clip_high=99.0)
    )  # nothing is clipped away
    trainer.load(0, folder)
    if dtype != torch.float32:
        trainer.policy = build_policy(read_shape(folder), dtype=dtype, recompute=recompute)
        trainer.policy.load_hf(read_hf_weights(folder))
        trainer.stream = StreamingStep(trainer.policy, trainer.settings.optimizer)
    return trainer


@pytest.fixture(scope="module")
def double(tiny_policy: Path) -> Trainer:
    return trainer_of(tiny_policy, torch.float64)


@pytest.fixture(scope="module")
def single(tiny_policy: Path) -> Trainer:
    return trainer_of(tiny_policy, torch.float32)


def step(trainer: Trainer, batches: list[PackedBatch]) -> tuple[float, dict[str, torch.Tensor]]:
    """Loss and gradient, by parameter, of these micro-batches together."""
    trainer.begin()
    loss = sum(trainer.micro_batch(batch, f"micro-batch {i}").loss for i, batch in enumerate(batches))
    return loss, {name: p.main_grad.clone() for name, p in trainer.policy.model.named_parameters()}


def assert_equal(found: tuple, expected: tuple, tolerance: float, floor: float = 0.01) -> None:
    """To `tolerance` of each parameter's largest gradient, or of `floor` of the largest of all: a gradient in which
    everything cancels is rounding. In float32 the branches' order alone moves a parameter by 2e-7 of its largest."""
    assert found[0] == pytest.approx(expected[0], rel=tolerance, abs=tolerance)
    largest = max(g.abs().max().item() for g in expected[1].values())
    assert largest > 0
    for name, gradient in expected[1].items():
        scale = max(floor * largest, gradient.abs().max().item())
        assert (found[1][name] - gradient).abs().max().item() <= tolerance * scale, name


def branches_apart(trees: tuple[Rollout, ...]) -> list[PackedBatch]:
    return [pack_samples([sample]) for tree in trees for sample in tree.apart()]


@settings(HYPOTHESIS, max_examples=50)
@given(PAIR)
def test_a_row_of_trees_equals_its_branches_apart_in_float64(double: Trainer, trees) -> None:
    packed = pack_rows(micro_batch(list(trees)))
    assert packed.row.tokens <= sum(s.n_tokens for s in packed.samples)
    assert_equal(step(double, [packed]), step(double, branches_apart(trees)), 1e-10)


@settings(HYPOTHESIS, max_examples=30)
@given(PAIR)
def test_a_row_of_trees_equals_its_branches_apart_in_float32(single: Trainer, trees) -> None:
    packed = pack_rows(micro_batch(list(trees)))
    assert_equal(step(single, [packed]), step(single, branches_apart(trees)), 1e-5)


@settings(HYPOTHESIS, max_examples=30)
@given(PAIR, st.integers(1, 60))
def test_any_cut_gives_the_same_gradient(double: Trainer, trees, budget: int) -> None:
    samples = [sample for tree in trees for sample in tree.rows()]
    parts = micro_batches([path for tree in trees for path in tree.paths()], budget)
    batches = [pack_rows(micro_batch(list(trees), [samples[i] for i in part.samples])) for part in parts]
    assert [b.row.tokens for b in batches] == [p.tokens for p in parts]
    assert_equal(step(double, batches), step(double, [pack_rows(micro_batch(list(trees)))]), 1e-10)


@settings(HYPOTHESIS, max_examples=15)
@given(PAIR)
def test_a_ratio_over_rollouts_and_recomputed_activations(tiny_policy: Path, trees) -> None:
    """Trainers are made once an objective; hypothesis would make them once an example otherwise."""
    for ratio, recompute in (("rollout", False), ("branch", True)):
        trainer = _trainers(tiny_policy, ratio, recompute)
        apart = [pack_samples(tree.apart()) for tree in trees]
        assert_equal(step(trainer, [pack_rows(micro_batch(list(trees)))]), step(trainer, apart), 1e-10)


_made: dict[tuple, Trainer] = {}


def _trainers(folder: Path, *key) -> Trainer:
    if (folder, *key) not in _made:
        _made[folder, *key] = trainer_of(folder, torch.float64, ratio=key[0], recompute=key[1])
    return _made[folder, *key]


@settings(HYPOTHESIS, max_examples=25)
@given(rollouts(), st.randoms())
def test_the_order_of_branches_does_not_matter(double: Trainer, tree: Rollout, random) -> None:
    samples = tree.rows()
    shuffled = random.sample(samples, len(samples))
    one = step(double, [pack_rows(micro_batch([tree], samples))])
    assert_equal(step(double, [pack_rows(micro_batch([tree], shuffled))]), one, 1e-10)


def test_random_rollouts_are_of_every_shape() -> None:
    """The generator reaches what the proofs are about."""
    seen = {"deep": False, "wide": False, "fork at a generated node": False, "forest": False, "cut": False}

    @settings(HYPOTHESIS, max_examples=200, database=None, derandomize=True)
    @given(rollouts())
    def look(tree: Rollout) -> None:
        row = pack_rows(micro_batch([tree])).row
        seen["deep"] |= max(len(k.branch.nodes) for k in tree.kept) >= 6
        seen["wide"] |= max(row.parents.count(i) for i in range(len(row.parents))) >= 4
        seen["forest"] |= row.parents.count(-1) > 1
        owned = {n for k in tree.kept for n in k.owned_nodes}
        children = [tree.tree.nodes[n].parent_id for n in owned]
        seen["fork at a generated node"] |= any(children.count(c) > 1 and tree.tree.nodes[c].generated for c in owned)
        seen["cut"] |= len(cut([p.nodes for p in tree.paths()], row.tokens - 1)) > 1

    look()
    assert all(seen.values()), seen

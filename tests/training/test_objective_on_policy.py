"""Objectives on a real (tiny) Megatron policy: what must not change a step's gradient, in float64, and the ledger's
side of denominators and rejected tokens."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sqlalchemy import Engine, text

from gyre.config import ObjectiveConfig, OptimizerConfig, TrainerConfig
from gyre.objective import divisor, target_weight
from gyre.store import queries
from gyre.store.db import transaction
from gyre.store.queries import SampleRow
from gyre.training.batch import PackedBatch, pack_rows, pack_samples
from gyre.training.hf_config import read_shape
from gyre.training.model import build_policy
from gyre.training.reference import FrozenReference
from gyre.training.replica import Replica, ReplicaSettings
from gyre.training.streaming import StreamingStep
from gyre.training.trainer import Trainer
from gyre.training.weights import read_hf_weights
from gyre.trajectory import Node, Tree, select
from gyre.trajectory.cut import micro_batches
from tests.training.conftest import random_samples
from tests.training.test_trees import HYPOTHESIS, PAIR, assert_equal, step
from tests.training.trees import VOCAB, Rollout, micro_batch
from tests.training.world import World, run_config

CLIP = {"clip_low": 0.1, "clip_high": 0.1}
OBJECTIVES: list[dict[str, Any]] = [
    {"algorithm": "gspo", **CLIP},
    {"algorithm": "gspo", "ratio": "rollout", **CLIP},
    {"algorithm": "grpo", **CLIP},
    {"algorithm": "dapo", **CLIP},
    {"algorithm": "gspo", "old": "trainer", "correction": "truncate", "correction_cap": 1.05},
    {"algorithm": "grpo", "correction": "mask", "correction_level": "token", "correction_cap": 1.3, **CLIP},
    {"algorithm": "gspo", "kl": "k3", "kl_coefficient": 0.1, "kl_reference": "initial", **CLIP},
]

_made: dict[str, Trainer] = {}


def trainer_of(folder: Path, options: dict[str, Any]) -> Trainer:
    """A trainer in float64, made once an objective. Where there is a reference, the weights have moved away from it."""
    key = f"{folder} {options}"
    if key not in _made:
        config = TrainerConfig(optimizer=OptimizerConfig(lr=1e-2), logprob_chunk=7)
        trainer = Trainer(folder, config, ObjectiveConfig(**options))
        trainer.load(0, folder)
        trainer.policy = build_policy(read_shape(folder), dtype=torch.float64)
        trainer.policy.load_hf(read_hf_weights(folder))
        trainer.stream = StreamingStep(trainer.policy, trainer.settings.optimizer)
        if trainer.reference is not None:
            trainer.reference = FrozenReference(trainer.policy)
            with torch.no_grad():
                for i, p in enumerate(trainer.policy.model.parameters()):
                    p += 0.02 * torch.randn(p.shape, generator=torch.Generator().manual_seed(i))
        _made[key] = trainer
    return _made[key]


def line(seed: int, number: int = 0, spans: int = 4) -> Rollout:
    """A conversation that never forks: prompt, answer, prompt, answer ..."""
    rng = np.random.default_rng(seed)
    nodes: list[Node] = []
    for i in range(2 * spans):
        above = nodes[-1] if nodes else None
        start = 0 if above is None else above.start + above.length
        parent = None if above is None else above.id
        nodes.append(Node(100 * number + i, parent, i % 2 == 1, start, int(rng.integers(1, 6))))
    tree = Tree.of(nodes)
    return Rollout(
        name=f"run/s0/00/{number:02d}",
        tree=tree,
        kept=select(tree, 5),
        tokens={n.id: rng.integers(0, VOCAB, n.length).astype(np.int32) for n in nodes},
        logprobs={n.id: (-np.log(VOCAB) + rng.normal(0, 0.3, n.length)).astype(np.float32) for n in nodes},
        advantage=float(rng.normal()),
        temperature=0.8,
    )


@settings(HYPOTHESIS, max_examples=12)
@given(PAIR, st.integers(1, 60), st.sampled_from(OBJECTIVES))
def test_any_split_into_micro_batches(tiny_policy: Path, trees: Any, budget: int, options: dict[str, Any]) -> None:
    trainer = trainer_of(tiny_policy, options)
    samples = [sample for tree in trees for sample in tree.rows()]
    paths = [path for tree in trees for path in tree.paths()]
    parts = micro_batches(paths, budget, whole_rollouts=trainer.objective.whole_rollouts)
    batches = [pack_rows(micro_batch(list(trees), [samples[i] for i in part.samples])) for part in parts]
    whole = step(trainer, [pack_rows(micro_batch(list(trees)))])
    if max(g.abs().max() for g in whole[1].values()) == 0:
        return  # everything is clipped or rejected
    assert_equal(step(trainer, batches), whole, 1e-10)


@pytest.mark.parametrize("algorithm", ["gspo", "grpo", "dapo"])
@pytest.mark.parametrize("seed", range(3))
def test_a_branch_split_at_ratio_one(tiny_policy: Path, algorithm: str, seed: int) -> None:
    """Case 22. Its answers as targets of two, three or four samples, each ending where its last answer does.

    old = "trainer" makes the ratio one exactly; a sampler's log-probs are float32.
    """
    trainer = trainer_of(tiny_policy, {"algorithm": algorithm, "old": "trainer"})
    rollout = line(seed)
    [whole] = rollout.rows()
    expected = step(trainer, [pack_rows(micro_batch([rollout]))])
    for cuts in ([2], [1, 3], [1, 2, 3]):
        samples = []
        for part in np.split(np.array(whole.owned_nodes), cuts):
            leaf = rollout.tree.nodes[int(part[-1])]
            samples.append(
                dataclasses.replace(
                    whole,
                    id=leaf.id,
                    leaf_id=leaf.id,
                    owned_nodes=tuple(int(n) for n in part),
                    n_tokens=leaf.start + leaf.length,
                    n_targets=sum(rollout.tree.nodes[int(n)].length for n in part),
                )
            )
        nodes = micro_batch([rollout]).nodes
        together = pack_rows(dataclasses.replace(micro_batch([rollout]), samples=samples, nodes=nodes))
        assert len(together.samples) == len(cuts) + 1
        assert_equal(step(trainer, [together]), expected, 1e-10)


@pytest.mark.parametrize("copies", [2, 3])
@pytest.mark.parametrize("options", [o for o in OBJECTIVES if o["algorithm"] != "dapo"], ids=str)
def test_a_branch_that_is_there_several_times(tiny_policy: Path, options: dict[str, Any], copies: int) -> None:
    """Case 22. At any ratio: N_r counts the copies, each carries its share. Packed on one path, and as other rows."""
    trainer = trainer_of(tiny_policy, options)
    rollout = line(7)
    [sample] = rollout.rows()
    once = step(trainer, [pack_rows(micro_batch([rollout]))])
    many = [dataclasses.replace(sample, rollout_targets=copies * sample.n_targets) for _ in range(copies)]
    on_one_path = pack_rows(dataclasses.replace(micro_batch([rollout]), samples=many))
    assert on_one_path.row.tokens == sample.n_tokens
    assert_equal(step(trainer, [on_one_path]), once, 1e-10)
    [alone] = rollout.apart()
    apart = [dataclasses.replace(alone, rollout_targets=copies * sample.n_targets) for _ in range(copies)]
    assert_equal(step(trainer, [pack_samples(apart)]), once, 1e-10)


@pytest.mark.parametrize("options", OBJECTIVES, ids=str)
def test_the_step_is_the_formula_on_the_models_own_logprobs(tiny_policy: Path, options: dict[str, Any]) -> None:
    """The trainer's loss and gradient against autograd through plain logits, with the formula of docs/objective.md."""
    trainer = trainer_of(tiny_policy, options)
    config = trainer.objective
    samples = random_samples(11, rollouts=2, branches=2)
    found = step(trainer, [pack_samples(samples)])

    def logprobs(sample: Any) -> torch.Tensor:
        ids = torch.from_numpy(sample.ids).long()
        logits = trainer.policy.logits(pack_samples([sample]).row, ids)[sample.targets - 1]
        temperature = float(np.float32(sample.temperature))
        return torch.log_softmax(logits / temperature, -1).gather(1, ids[sample.targets, None]).squeeze(1)

    reference = None
    if trainer.reference is not None:
        with trainer.reference.in_place(), torch.no_grad():
            reference = [logprobs(s) for s in samples]
    trainer.begin()
    now = [logprobs(s) for s in samples]
    mu = [torch.from_numpy(s.behaviour).double() for s in samples]
    total = torch.zeros((), dtype=torch.float64)
    for i, sample in enumerate(samples):
        same = [j for j, s in enumerate(samples) if s.rollout_id == sample.rollout_id]
        same = same if config.ratio == "rollout" else [i]
        mean = torch.cat([now[j] - mu[j] for j in same]).mean().detach()
        token = (now[i] - mu[i]).detach()
        level = token if config.correction_level == "token" else mean.expand_as(token)
        w = level.exp()
        constant = mean.exp().expand_as(token) if config.algorithm == "gspo" else token.exp()
        constant = torch.ones_like(token) if config.old == "trainer" else constant
        ratio = constant * (now[i] - now[i].detach()).exp()
        inner = torch.minimum(
            ratio * sample.advantage, ratio.clamp(1 - config.clip_low, 1 + config.clip_high) * sample.advantage
        )
        terms = -inner
        if config.correction == "truncate":
            terms = terms * w.clamp(max=config.correction_cap)
        if config.correction == "mask":
            terms = terms * ((w <= config.correction_cap) & (w >= config.correction_floor))
        if reference is not None:
            d = now[i] - reference[i]
            terms = terms + config.kl_coefficient * ((-d).exp() - 1 + d)
        total = total + terms.sum() * target_weight(config, sample.rollout_targets)
    parameters = dict(trainer.policy.model.named_parameters())
    gradients = torch.autograd.grad(total, list(parameters.values()))
    assert_equal(found, (total.item(), dict(zip(parameters, gradients, strict=True))), 1e-9)


def test_the_reference_is_the_first_weights_and_leaves_no_trace(tiny_policy: Path) -> None:
    objective = ObjectiveConfig(kl="k2", kl_coefficient=1.0, kl_reference="initial")
    trainer = Trainer(tiny_policy, TrainerConfig(logprob_chunk=16), objective)
    trainer.load(0, tiny_policy)
    batch = pack_samples(random_samples(1))
    assert trainer.micro_batch(batch, "m").kl_sum == 0
    weights = {n: t + 0.05 for n, t in trainer.export_hf().items()}
    trainer.load(3, weights)
    first = trainer.micro_batch(batch, "m")
    assert first.kl_sum > 0
    assert all(torch.equal(t, weights[n]) for n, t in trainer.export_hf().items())
    trainer.begin()
    assert trainer.micro_batch(batch, "m").kl_sum == first.kl_sum
    trainer.load(0, tiny_policy)
    assert trainer.micro_batch(batch, "m").kl_sum == 0


# ---- in a run -------------------------------------------------------------------------------------------------------


@pytest.fixture
def make_run(tiny_policy: Path, engine: Engine, tmp_path: Path) -> Callable[[dict[str, Any]], tuple[World, Replica]]:
    def make(options: dict[str, Any]) -> tuple[World, Replica]:
        config = run_config(tiny_policy).model_copy(update={"objective": ObjectiveConfig(**options)})
        world = World(config, engine)
        world.open_run()
        replica = Replica(ReplicaSettings(config, "alpha", True, tmp_path / "checkpoints", "alpha-1"), engine)
        replica.start()
        return world, replica

    return make


def train(world: World, replica: Replica, step_id: int) -> dict[str, Any]:
    replica.begin(step_id)
    while True:
        with transaction(world.engine) as s:
            found = queries.claim_micro_batch(s, step_id, "alpha", "alpha-1")
        if found is None:
            return dict(replica.optimizer_step(step_id)["metrics"])
        replica.micro_batch(found)


@pytest.mark.parametrize("algorithm", ["gspo", "dapo"])
def test_a_step_is_divided_by_the_algorithms_denominator(make_run: Any, algorithm: str) -> None:
    world, replica = make_run({"algorithm": algorithm, "clip_low": 0.2, "clip_high": 0.2})
    step_id = world.step(0)
    seen: list[float] = []
    taken = replica.trainer.optimizer_step
    replica.trainer.optimizer_step = lambda by: (seen.append(by), taken(by))[1]
    metrics = train(world, replica, step_id)
    by = divisor(world.config.objective, 6, metrics["n_targets"])
    assert seen == [by] == [6 if algorithm == "gspo" else metrics["n_targets"]]
    with transaction(world.engine) as s:
        parts = s.scalar(text("SELECT sum((metrics ->> 'loss')::float8) FROM micro_batches"))
        row = s.execute(text("SELECT * FROM step_summary")).one()
        clips = s.execute(text("SELECT sum(clipped) AS clipped, sum(targets) AS targets FROM clip_by_length")).one()
    assert metrics["loss"] == pytest.approx(parts / by)
    assert row.clip_fraction == pytest.approx(metrics["clipped_targets"] / metrics["n_targets"])
    assert row.mismatch_kl == pytest.approx(metrics["mismatch_k3_sum"] / metrics["n_targets"])
    assert row.mismatch_kl > 0
    assert (clips.clipped, clips.targets) == (metrics["clipped_targets"], metrics["n_targets"])


@pytest.mark.parametrize("level", ["token", "sequence"])
def test_rejected_tokens_are_accounted_for(make_run: Any, level: str) -> None:
    world, replica = make_run(
        {"correction": "mask", "correction_level": level, "correction_cap": 1.05, "correction_floor": 0.9}
    )
    metrics = train(world, replica, world.step(0))
    assert 0 < metrics["rejected_targets"] < metrics["n_targets"]
    with transaction(world.engine) as s:
        fates = dict(s.execute(text("SELECT fate, sum(tokens)::int FROM token_accounting GROUP BY fate")).all())
    assert fates == {
        "rejected": metrics["rejected_targets"],
        "trained": metrics["n_targets"] - metrics["rejected_targets"],
    }


def test_case_23_two_children_of_a_shared_prefix(tiny_policy: Path) -> None:
    """Two targets at the shared node's last token, one a child; the gradient equals that of the branches apart."""
    rng = np.random.default_rng(3)
    for lengths in ((4, 3, 2), (1, 1, 1), (3, 1, 5)):
        shared, first, second = (
            Node(1, None, False, 0, lengths[0]),
            Node(2, 1, True, lengths[0], lengths[1]),
            Node(3, 1, True, lengths[0], lengths[2]),
        )
        tree = Tree.of([shared, first, second])
        rollout = Rollout(
            name="run/s0/00/00",
            tree=tree,
            kept=select(tree, 5),
            tokens={n.id: rng.integers(0, VOCAB, n.length).astype(np.int32) for n in tree.nodes.values()},
            logprobs={n.id: np.full(n.length, -4.0, np.float32) for n in tree.nodes.values()},
            advantage=1.3,
            temperature=1.0,
        )
        batch: PackedBatch = pack_rows(micro_batch([rollout]))
        at = batch.positions[batch.predictors]
        assert np.count_nonzero(at == lengths[0] - 1) == 2
        assert batch.row.tokens == sum(lengths)
        trainer = trainer_of(tiny_policy, {"algorithm": "grpo", "clip_low": 0.99, "clip_high": 99.0})
        assert_equal(step(trainer, [batch]), step(trainer, [pack_samples([b]) for b in rollout.apart()]), 1e-10)


def test_rows_of_a_sample_say_what_it_owns() -> None:
    [row] = line(1).rows()
    assert isinstance(row, SampleRow)
    batch = pack_rows(micro_batch([line(1)]))
    assert sorted(set(batch.nodes.tolist())) == sorted(row.owned_nodes)

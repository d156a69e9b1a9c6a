"""A run in the database with one closed step, whose micro-batches the tiny policy can train."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from sqlalchemy import Engine
from sqlalchemy.orm import Session

from gyre.config import (
    CellConfig,
    ObjectiveConfig,
    OptimizerConfig,
    PolicyConfig,
    RunConfig,
    StackConfig,
    TasksConfig,
    TrainerConfig,
)
from gyre.store import queries
from gyre.store.db import transaction
from gyre.store.models import Call, Node
from gyre.store.tokens import pack_ids, pack_logprobs

VOCAB = 96


def run_config(policy: Path, **optimizer: float) -> RunConfig:
    """A run of two cells over the tiny policy, with plain sockets for transfer."""
    return RunConfig(
        name="tiny",
        steps=4,
        policy=PolicyConfig(path=policy),
        tasks=TasksConfig(train=policy),
        objective=ObjectiveConfig(clip_low=0.2, clip_high=0.2),
        trainer=TrainerConfig(
            micro_batch_tokens=64, logprob_chunk=16, optimizer=OptimizerConfig(**{"lr": 1e-2, **optimizer})
        ),
        cells=[CellConfig(name="alpha", central=True), CellConfig(name="beta")],
        stack=StackConfig(transfer="socket"),
    )


@dataclass
class World:
    """The run, and what its next step is made of."""

    config: RunConfig
    engine: Engine

    def open_run(self) -> None:
        """The run's row, which an agent makes before it starts a trainer."""
        run = self.config.run_id
        with transaction(self.engine) as session:
            queries.create_run(session, run, self.config.model_dump(mode="json"), run)

    def step(self, index: int, *, rollouts: int = 6, per_batch: int = 2, seed: int = 0) -> int:
        """A closed step of one group, one main branch and one sub-agent a rollout; returns its id."""
        rng = np.random.default_rng(seed + index)
        self.open_run()
        with transaction(self.engine) as session:
            step_id = queries.open_step(session, self.config.run_id, index, index)
            [group] = queries.create_groups(session, [queries.TaskRef("org/task", "/task", "fix")], step_id=step_id)
            names = queries.create_rollouts(session, group, rollouts, temperature=0.8, harness="command")
            advantages = {}
            samples = []
            for i, name in enumerate(names):
                advantages[name] = 1.0 if i % 2 else -1.0
                samples += self._samples(session, name, advantages[name], rng)
                queries.settle_rollout(session, name, "completed", float(i % 2))
            queries.settle_group(session, group, "trained", 0.5, 0.5, advantages)
            ids = queries.add_samples(session, step_id, samples)
            sizes = [s.n_tokens for s in samples]  # no branch shares a node with another
            parts = [slice(i, i + per_batch) for i in range(0, len(ids), per_batch)]
            cuts = [(ids[p], sum(sizes[p])) for p in parts]
            queries.cut_micro_batches(session, step_id, cuts)
            queries.close_step(session, step_id)
        return step_id

    def _samples(self, session: Session, rollout: str, advantage: float, rng: np.random.Generator):
        kinds = ("main", "sub-agent")
        leaves = [self._branch(session, rollout, seq, kind, rng) for seq, kind in enumerate(kinds)]
        targets = sum(leaf.length for leaf in leaves)
        return [
            queries.NewSample(
                rollout_id=rollout,
                leaf_id=leaf.id,
                kind=kind,
                rank=rank,
                n_tokens=leaf.start + leaf.length,
                n_targets=leaf.length,
                owned_nodes=[leaf.id],
                rollout_targets=targets,
                advantage=advantage,
            )
            for rank, (leaf, kind) in enumerate(zip(leaves, kinds, strict=True))
        ]

    def _branch(self, session: Session, rollout: str, seq: int, kind: str, rng: np.random.Generator) -> Node:
        call = Call(
            rollout_id=rollout,
            seq=seq,
            api="openai-chat",
            status="complete",
            kind=kind,
            request_hash=str(seq),
            request={},
        )
        session.add(call)
        session.flush()
        prompt, generated = (rng.integers(0, VOCAB, int(n)) for n in rng.integers(4, 20, 2))
        asked = Node(
            rollout_id=rollout, call_id=call.id, kind="prompt", start=0, length=len(prompt), token_ids=pack_ids(prompt)
        )
        session.add(asked)
        session.flush()
        answer = Node(
            rollout_id=rollout,
            parent_id=asked.id,
            call_id=call.id,
            kind="generated",
            start=len(prompt),
            length=len(generated),
            token_ids=pack_ids(generated),
            logprobs=pack_logprobs(-np.log(VOCAB) + rng.normal(0, 0.3, len(generated))),
            version_spans=[[0, 0, len(generated)]],
        )
        session.add(answer)
        session.flush()
        return answer

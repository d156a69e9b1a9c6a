"""Forward and backward of SmolLM2-135M on recorded trees: as packed trees, as every branch, as every call."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table

from benchmarks.trees import recorded, smollm2
from gyre.config import ObjectiveConfig, TrainerConfig
from gyre.store.queries import MicroBatchRows, NodeRow, SampleRow
from gyre.store.tokens import pack_ids, pack_logprobs
from gyre.training.batch import PackedBatch, TrainSample, pack_rows, pack_samples
from gyre.training.trainer import Trainer
from gyre.trajectory import Node, SamplePath, Tree, micro_batches, select, target_mask

BRANCH_CAP = 5
VOCABULARY = 49_152
RECOMPUTE_ABOVE = 3000
"""Longest row, in tokens, whose activations are kept: 1.2 MB a token in all layers."""
SHORT = (1, 3)
"""Layers of the models from which the whole model's seconds are reckoned."""


@dataclass(frozen=True)
class Content:
    """Token ids and log-probs of a tree's nodes: made up, since neither changes what a step costs."""

    tokens: dict[int, np.ndarray]
    logprobs: dict[int, np.ndarray]

    @staticmethod
    def of(tree: Tree, vocabulary: int) -> Content:
        rng = np.random.default_rng(0)
        nodes = tree.nodes.values()
        return Content(
            {n.id: rng.integers(0, vocabulary, n.length).astype(np.int32) for n in nodes},
            {n.id: np.full(n.length, -10.0, np.float32) for n in nodes},
        )

    def sequence(self, path: Sequence[Node], owned: Sequence[int]) -> TrainSample:
        targets = np.flatnonzero(target_mask(path, owned))
        known = np.concatenate([self.logprobs[n.id] for n in path])[targets]
        ids = np.concatenate([self.tokens[n.id] for n in path])
        return TrainSample("rollout", ids, targets, known, 1.0, len(targets))


def packed(tree: Tree, content: Content, budget: int) -> list[PackedBatch]:
    """As Gyre trains it: the hand-out's own selection and cut, the trainer's own packing."""
    kept = select(tree, BRANCH_CAP)
    total = sum(k.n_targets for k in kept)
    parts = micro_batches([SamplePath(0, tuple((n.id, n.length) for n in k.branch.nodes)) for k in kept], budget)
    batches = []
    for part in parts:
        mine = [kept[i] for i in part.samples]
        nodes = {n.id: n for k in mine for n in k.branch.nodes}
        batches.append(
            pack_rows(
                MicroBatchRows(
                    [
                        SampleRow(
                            i, "rollout", k.branch.leaf_id, k.owned_nodes, k.branch.n_tokens, k.n_targets, total, 1, 1
                        )
                        for i, k in enumerate(mine)
                    ],
                    [
                        NodeRow(
                            n.id,
                            "rollout",
                            n.parent_id,
                            n.generated,
                            n.start,
                            n.length,
                            pack_ids(content.tokens[n.id]),
                            pack_logprobs(content.logprobs[n.id]) if n.generated else None,
                        )
                        for n in sorted(nodes.values(), key=lambda n: n.id)
                    ],
                )
            )
        )
    return batches


def branches(tree: Tree, content: Content, budget: int) -> list[PackedBatch]:
    """Every branch a sequence, with all that was generated on it as its targets; as many in a row as fit."""
    every = tree.branches()
    apart = [SamplePath(i, ((0, b.n_tokens),)) for i, b in enumerate(every)]
    sequences = [content.sequence(b.nodes, [n.id for n in b.nodes if n.trainable]) for b in every]
    return [pack_samples([sequences[i] for i in part.samples]) for part in micro_batches(apart, budget)]


class Clock:
    """CPU seconds of forward and backward. With trainers of two depths, by depth: of the whole model, reckoned."""

    def __init__(self, trainers: Mapping[int, Trainer]) -> None:
        self.trainers = trainers
        self.rates: dict[int, float] = {}

    def seconds(self, batches: Sequence[PackedBatch]) -> float:
        taken: dict[int, float] = {}
        for depth, trainer in self.trainers.items():
            trainer.begin()
            began = time.process_time()
            for batch in batches:
                trainer.micro_batch(batch, "benchmark")
            taken[depth] = time.process_time() - began
        few, many = min(taken), max(taken)
        if few == many:
            return taken[few]
        return taken[few] + (smollm2.LAYERS - few) * (taken[many] - taken[few]) / (many - few)

    def measure(self, lengths: Sequence[int]) -> None:
        """The cost of a token in a sequence of each of these lengths, of which a tenth are targets."""
        for length in lengths:
            ids = np.random.default_rng(length).integers(0, 1000, length).astype(np.int32)
            targets = np.arange(length - max(1, length // 10), length)
            known = np.full(len(targets), -10.0, np.float32)
            sample = TrainSample("rollout", ids, targets, known, 1.0, len(targets))
            self.rates[length] = self.seconds([pack_samples([sample])]) / length

    def expected(self, lengths: Sequence[int]) -> float:
        """Seconds of sequences of these lengths, each token's cost taken from the measured lengths around its own."""
        known = sorted(self.rates)
        rates = np.interp(lengths, known, [self.rates[n] for n in known])
        return float((rates * np.asarray(lengths)).sum())


def trainer_of(layers: int, *, recompute: bool) -> Trainer:
    with tempfile.TemporaryDirectory() as folder:
        smollm2.write(Path(folder), layers)
        trainer = Trainer(Path(folder), TrainerConfig(recompute=recompute), ObjectiveConfig())
        trainer.load(0, Path(folder))
    return trainer


def main(context: int, tokens: int, budget: int, names: Sequence[str] = (), *, short: bool = False) -> None:
    trees = {n: recorded.scaled(t, context, tokens) for n, t in recorded.trees().items() if not names or n in names}
    contents = {name: Content.of(tree, VOCABULARY) for name, tree in trees.items()}
    ours = {name: packed(tree, contents[name], budget) for name, tree in trees.items()}
    longest = max(batch.row.tokens for batches in ours.values() for batch in batches)
    depths = SHORT if short else (smollm2.LAYERS,)
    recompute = longest * max(depths) > RECOMPUTE_ABOVE * smollm2.LAYERS
    clock = Clock({depth: trainer_of(depth, recompute=recompute) for depth in depths})
    deepest = max(b.n_tokens for tree in trees.values() for b in tree.branches())
    clock.measure([32])  # the first run of all is slower
    clock.measure([n for n in (64, 256, deepest // 8, deepest // 4, deepest // 2, deepest) if n >= 64])
    starred = "*" if short else ""
    table = Table(
        "tree", "tokens", f"all branches{starred}", "packed", "saved", "of the token ratio's saving", "every call*",
        "saved*",
        title=f"SmolLM2-135M, forward and backward, CPU seconds (longest branch {deepest} tokens, cap {BRANCH_CAP}"
        + (f", reckoned from {depths[0]} and {depths[1]} layers" if short else "")
        + (", activations recomputed)" if recompute else ")"),
    )  # fmt: skip
    for name, tree in trees.items():
        apart = [b.n_tokens for b in tree.branches()]
        calls = [n.start + n.length for n in tree.nodes.values() if n.trainable]
        computed = sum(batch.row.tokens for batch in ours[name])
        mine = clock.seconds(ours[name])
        theirs = clock.expected(apart) if short else clock.seconds(branches(tree, contents[name], budget))
        per_call = clock.expected(calls)
        saved, ideal = 1 - mine / theirs, 1 - computed / sum(apart)
        table.add_row(
            name,
            f"{computed} of {sum(apart)} ({len(ours[name])} micro-batches)",
            f"{theirs:.1f}",
            f"{mine:.1f}",
            f"{saved:.0%}",
            f"{saved / ideal:.0%} of {ideal:.0%}",
            f"{per_call:.0f} ({len(calls)} calls, {sum(calls)} tokens)",
            f"{1 - mine / per_call:.0%}",
        )
    console = Console(width=150)
    console.print(table)
    console.print("* each as its own sequence, from the measured cost of sequences of", sorted(clock.rates), "tokens")

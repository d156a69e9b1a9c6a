"""Random rollouts as a trainer reads them from the database, and the same branches apart."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from hypothesis import strategies as st

from gyre.store.queries import MicroBatchRows, NodeRow, SampleRow
from gyre.store.tokens import pack_ids, pack_logprobs
from gyre.training.batch import TrainSample
from gyre.trajectory import BranchSample, Node, SamplePath, Tree, select, target_mask

VOCAB = 96
KINDS = ("main", "main", "main", "main-summary", "sub-agent", "sub-agent-summary", "auxiliary")


@dataclass(frozen=True)
class Rollout:
    """A tree with its kept branches, tokens and log-probs by node."""

    name: str
    tree: Tree
    kept: list[BranchSample]
    tokens: dict[int, np.ndarray]
    logprobs: dict[int, np.ndarray]
    advantage: float
    temperature: float

    @property
    def n_targets(self) -> int:
        return sum(k.n_targets for k in self.kept)

    def apart(self) -> list[TrainSample]:
        """Each kept branch as a sequence of its own."""
        samples = []
        for k in self.kept:
            nodes = k.branch.nodes
            targets = np.flatnonzero(target_mask(nodes, k.owned_nodes))
            samples.append(
                TrainSample(
                    rollout_id=self.name,
                    ids=np.concatenate([self.tokens[n.id] for n in nodes]),
                    targets=targets,
                    behaviour=np.concatenate([self.logprobs[n.id] for n in nodes])[targets],
                    advantage=self.advantage,
                    rollout_targets=self.n_targets,
                    temperature=self.temperature,
                )
            )
        return samples

    def rows(self) -> list[SampleRow]:
        return [
            SampleRow(
                id=k.branch.leaf_id,
                rollout_id=self.name,
                leaf_id=k.branch.leaf_id,
                owned_nodes=k.owned_nodes,
                n_tokens=k.branch.n_tokens,
                n_targets=k.n_targets,
                rollout_targets=self.n_targets,
                advantage=self.advantage,
                temperature=self.temperature,
            )
            for k in self.kept
        ]

    def paths(self) -> list[SamplePath]:
        return [SamplePath(self.name, tuple((n.id, n.length) for n in k.branch.nodes)) for k in self.kept]


def micro_batch(rollouts: list[Rollout], samples: list[SampleRow] | None = None) -> MicroBatchRows:
    """What the database gives for these samples: their paths' nodes, each once. None: all samples."""
    if samples is None:
        samples = [s for r in rollouts for s in r.rows()]
    wanted = {s.leaf_id for s in samples}
    owned = {n for s in samples for n in s.owned_nodes}
    nodes = []
    for rollout in rollouts:
        used = {n.id for k in rollout.kept if k.branch.leaf_id in wanted for n in k.branch.nodes}
        for node in rollout.tree.nodes.values():
            if node.id in used:
                ids, known = pack_ids(rollout.tokens[node.id]), rollout.logprobs[node.id]
                logprobs = pack_logprobs(known) if node.id in owned else None
                row = (node.id, rollout.name, node.parent_id, node.generated, node.start, node.length, ids, logprobs)
                nodes.append(NodeRow(*row))
    return MicroBatchRows(samples, nodes)


@st.composite
def rollouts(draw: st.DrawFn, *, number: int = 0, cap: int = 25) -> Rollout:
    """A forest of depth up to 8 and fan-out up to 5 with at least one trained token; ids begin at 1000 * number."""
    count = draw(st.integers(2, 24))
    first = 1000 * number
    nodes: list[Node] = []
    depth, fan = [], []
    for i in range(count):
        open_ones = [j for j in range(i) if depth[j] < 7 and fan[j] < 5]
        root = not open_ones or (i > 1 and draw(st.integers(0, 9)) == 0)
        above = None if root else draw(st.sampled_from(open_ones[-6:] if draw(st.booleans()) else open_ones))
        parent = None if above is None else nodes[above]
        nodes.append(
            Node(
                id=first + i,
                parent_id=None if parent is None else parent.id,
                generated=parent is not None and (i == 1 or draw(st.booleans())),
                start=0 if parent is None else parent.start + parent.length,
                length=draw(st.sampled_from((1, 1, 2, 3, 7))),
                kind="main" if i == 1 else draw(st.sampled_from(KINDS)),
                complete=i == 1 or draw(st.integers(0, 9)) > 0,
            )
        )
        depth.append(0 if above is None else depth[above] + 1)
        fan.append(0)
        if above is not None:
            fan[above] += 1
    tree = Tree.of(nodes)
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    return Rollout(
        name=f"run/s0/00/{number:02d}",
        tree=tree,
        kept=select(tree, cap),
        tokens={n.id: rng.integers(0, VOCAB, n.length).astype(np.int32) for n in tree.nodes.values()},
        logprobs={
            n.id: (-np.log(VOCAB) + rng.normal(0, 0.3, n.length)).astype(np.float32) for n in tree.nodes.values()
        },
        advantage=float(rng.normal()),
        temperature=float(rng.choice([0.6, 1.0])),
    )

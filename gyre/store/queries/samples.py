"""Trees and samples as rows: for the trajectory processor and for the trainer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from sqlalchemy import select, text
from sqlalchemy.orm import Session

from gyre.store import models
from gyre.trajectory.tree import Node, Tree


@dataclass(frozen=True)
class NodeRow:
    """A span that a micro-batch's samples need. `token_ids` is int32[length]; `logprobs`, of owned spans only, is
    float32[length]."""

    id: int
    rollout_id: str
    parent_id: int | None
    generated: bool
    start: int
    length: int
    token_ids: bytes
    logprobs: bytes | None


@dataclass(frozen=True)
class SampleRow:
    """A sample: its path ends at `leaf_id`, and its targets are the tokens of `owned_nodes`."""

    id: int
    rollout_id: str
    leaf_id: int
    owned_nodes: tuple[int, ...]
    n_tokens: int
    n_targets: int
    rollout_targets: int
    advantage: float
    temperature: float


@dataclass(frozen=True)
class MicroBatchRows:
    """Samples by rollout and rank, and every distinct node of their paths once, by rollout and id."""

    samples: list[SampleRow]
    nodes: list[NodeRow]


_NODES = text("""
    WITH RECURSIVE up AS (
        SELECT n.id, n.parent_id FROM samples s JOIN nodes n ON n.id = s.leaf_id
         WHERE s.micro_batch_id = :micro_batch_id
        UNION
        SELECT n.id, n.parent_id FROM up JOIN nodes n ON n.id = up.parent_id)
    SELECT n.id, n.rollout_id, n.parent_id, n.kind = 'generated' AS generated, n.start, n.length, n.token_ids,
           CASE WHEN n.id IN (SELECT unnest(owned_nodes) FROM samples WHERE micro_batch_id = :micro_batch_id)
                THEN n.logprobs END AS logprobs
      FROM up JOIN nodes n ON n.id = up.id
     ORDER BY n.rollout_id, n.id
""")


def micro_batch_rows(session: Session, micro_batch_id: int) -> MicroBatchRows:
    """Everything a trainer needs of a micro-batch. A node that several samples share is read once."""
    sample, rollout = models.Sample, models.Rollout
    query = (
        select(
            sample.id,
            sample.rollout_id,
            sample.leaf_id,
            sample.owned_nodes,
            sample.n_tokens,
            sample.n_targets,
            sample.rollout_targets,
            sample.advantage,
            rollout.temperature,
        )
        .join(rollout, rollout.id == sample.rollout_id)
        .where(sample.micro_batch_id == micro_batch_id)
        .order_by(sample.rollout_id, sample.rank)
    )
    samples = [
        SampleRow(row.id, row.rollout_id, row.leaf_id, tuple(row.owned_nodes), *row[4:])
        for row in session.execute(query)
    ]
    nodes = session.execute(_NODES, {"micro_batch_id": micro_batch_id})
    return MicroBatchRows(samples, [NodeRow(*row) for row in nodes])


def trees(session: Session, rollout_ids: Sequence[str]) -> dict[str, Tree]:
    """The trees of rollouts, without their tokens. A rollout that has no node has an empty tree. Raises TreeError."""
    node, call = models.Node, models.Call
    query = (
        select(node.rollout_id, node.id, node.parent_id, node.kind, node.start, node.length, call.kind, call.status)
        .outerjoin(call, call.id == node.call_id)
        .where(node.rollout_id.in_(rollout_ids))
    )
    nodes: dict[str, list[Node]] = {rollout_id: [] for rollout_id in rollout_ids}
    for rollout_id, node_id, parent_id, kind, start, length, call_kind, status in session.execute(query):
        nodes[rollout_id].append(
            Node(node_id, parent_id, kind == "generated", start, length, call_kind or "", status == "complete")
        )
    return {rollout_id: Tree.of(found) for rollout_id, found in nodes.items()}

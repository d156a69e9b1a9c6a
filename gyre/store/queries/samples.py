"""Trees and samples as rows: for the trajectory processor and for the trainer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from sqlalchemy import select, text
from sqlalchemy.orm import Session

from gyre.store import models
from gyre.trajectory.tree import Node, Tree


@dataclass(frozen=True)
class PathNode:
    """A span of a sample's path, root first. `token_ids` is int32[length]; `logprobs` float32[length] or None."""

    id: int
    generated: bool
    owned: bool
    start: int
    length: int
    token_ids: bytes
    logprobs: bytes | None


@dataclass(frozen=True)
class SampleRows:
    """A sample with the spans of its branch; the targets are the tokens of the owned spans."""

    id: int
    rollout_id: str
    n_tokens: int
    n_targets: int
    rollout_targets: int
    advantage: float
    temperature: float
    nodes: list[PathNode]


_PATHS = text("""
    WITH RECURSIVE path AS (
        SELECT s.id AS sample_id, n.id, n.parent_id FROM samples s JOIN nodes n ON n.id = s.leaf_id
         WHERE s.micro_batch_id = :micro_batch_id
        UNION ALL
        SELECT path.sample_id, n.id, n.parent_id FROM path JOIN nodes n ON n.id = path.parent_id)
    SELECT s.id, s.rollout_id, s.n_tokens, s.n_targets, s.rollout_targets, s.advantage, r.temperature,
           n.id AS node_id, n.kind = 'generated' AS generated, n.id = ANY(s.owned_nodes) AS owned,
           n.start, n.length, n.token_ids, n.logprobs
      FROM path JOIN samples s ON s.id = path.sample_id JOIN rollouts r ON r.id = s.rollout_id
      JOIN nodes n ON n.id = path.id
     ORDER BY s.rollout_id, s.rank, n.start
""")


def micro_batch_samples(session: Session, micro_batch_id: int) -> list[SampleRows]:
    """Everything a trainer needs of a micro-batch, in one query: samples by rollout and rank, spans root first."""
    samples: dict[int, SampleRows] = {}
    for row in session.execute(_PATHS, {"micro_batch_id": micro_batch_id}):
        if row.id not in samples:
            samples[row.id] = SampleRows(
                id=row.id,
                rollout_id=row.rollout_id,
                n_tokens=row.n_tokens,
                n_targets=row.n_targets,
                rollout_targets=row.rollout_targets,
                advantage=row.advantage,
                temperature=row.temperature,
                nodes=[],
            )
        span = PathNode(row.node_id, row.generated, row.owned, row.start, row.length, row.token_ids, row.logprobs)
        samples[row.id].nodes.append(span)
    return list(samples.values())


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

"""A run in the database, built by the same functions that the system uses; calls are written as the gateway does."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from sqlalchemy import select
from sqlalchemy.orm import Session

from gyre.store import queries
from gyre.store.models import Call, Node
from gyre.store.tokens import pack_ids, pack_logprobs

RUN = "demo-s0"


@dataclass
class World:
    """A run with one step of groups of rollouts."""

    step_id: int
    group_ids: list[int]
    rollouts: list[list[str]] = field(default_factory=list)


def make_world(session: Session, groups: int = 1, size: int = 4, index: int = 0) -> World:
    queries.create_run(session, RUN, {"name": "demo"}, RUN)
    step_id = queries.open_step(session, RUN, index, min_version=index)
    tasks = [queries.TaskRef(f"org/task-{i}", f"/tasks/{i}", "fix") for i in range(groups)]
    world = World(step_id, queries.create_groups(session, tasks, step_id=step_id))
    world.rollouts = [
        queries.create_rollouts(session, g, size, temperature=1.0, harness="command") for g in world.group_ids
    ]
    return world


def add_call(
    session: Session,
    rollout_id: str,
    parent: Node | None = None,
    *,
    prompt: int = 5,
    generated: int = 3,
    kind: str = "main",
    status: str = "complete",
    versions: list[list[int]] | None = None,
) -> Node:
    """One call that extends `parent` (None: a new root) by a prompt and a generated node; returns the latter."""
    seq = len(session.scalars(select(Call.id).where(Call.rollout_id == rollout_id)).all())
    call = Call(
        rollout_id=rollout_id,
        seq=seq,
        api="openai-chat",
        status=status,
        kind=kind,
        fork_reason="root" if parent is None else None,
        request_hash=str(seq),
        request={},
        prompt_tokens=prompt,
        completion_tokens=generated,
    )
    session.add(call)
    session.flush()
    start = 0 if parent is None else parent.start + parent.length
    ids = np.arange(start, start + prompt + generated) + 1000 * seq
    asked = Node(
        rollout_id=rollout_id,
        parent_id=None if parent is None else parent.id,
        call_id=call.id,
        kind="prompt",
        start=start,
        length=prompt,
        token_ids=pack_ids(ids[:prompt]),
    )
    session.add(asked)
    session.flush()
    answer = Node(
        rollout_id=rollout_id,
        parent_id=asked.id,
        call_id=call.id,
        kind="generated",
        start=start + prompt,
        length=generated,
        token_ids=pack_ids(ids[prompt:]),
        logprobs=pack_logprobs(-np.arange(generated) / 8),
        version_spans=versions or [[0, 0, generated]],
    )
    session.add(answer)
    session.flush()
    call.leaf_id = answer.id
    session.flush()
    return answer


def record_answer(
    session: Session,
    rollout_id: str,
    prompt: list[int],
    said: list[int],
    logprobs: list[float],
    version_spans: list[list[int]],
) -> None:
    """The first call of a rollout, complete, with what an engine said, as a gateway records it."""
    call = Call(
        rollout_id=rollout_id, seq=0, api="openai-chat", status="complete", kind="main", fork_reason="root",
        request_hash="", request={}, prompt_tokens=len(prompt), completion_tokens=len(said),
    )  # fmt: skip
    session.add(call)
    session.flush()
    asked = Node(
        rollout_id=rollout_id, call_id=call.id, kind="prompt", start=0, length=len(prompt),
        token_ids=pack_ids(np.array(prompt)),
    )  # fmt: skip
    session.add(asked)
    session.flush()
    leaf = Node(
        rollout_id=rollout_id, parent_id=asked.id, call_id=call.id, kind="generated", start=len(prompt),
        length=len(said), token_ids=pack_ids(np.array(said)), logprobs=pack_logprobs(np.array(logprobs)),
        version_spans=version_spans,
    )  # fmt: skip
    session.add(leaf)
    session.flush()
    call.leaf_id = leaf.id


def settle(session: Session, rollout_id: str, reward: float | None) -> queries.Settled:
    """Settle with a reward, or excluded for a failed evaluator."""
    if reward is None:
        return queries.settle_rollout(session, rollout_id, "evaluator", None, "evaluator_failed")
    return queries.settle_rollout(session, rollout_id, "completed", reward)

"""Split-on-insert: prompts share prefixes, and no path ever changes."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from psycopg import DataError
from sqlalchemy import Engine, text
from sqlalchemy.orm import Session

from gyre.store.call_writer import CallWriter
from gyre.store.db import transaction
from gyre.store.gateway_queries import CallWrite, NodeSplit
from gyre.store.tokens import pack_ids, pack_logprobs
from tests.store.world import make_world


@pytest.fixture
def rollout(engine: Engine) -> str:
    with transaction(engine) as s:
        return make_world(s).rollouts[0][0]


@dataclass
class Gateway:
    """What a gateway holds of one rollout: the ids along each path. It makes its writes; somebody else sends them."""

    rollout: str
    first_id: int = 1
    path: dict[int, list[int]] = field(default_factory=dict)
    """Generated node -> all ids from the root to its end."""
    prompts: dict[int, tuple[int, int]] = field(default_factory=dict)
    """Prompt node -> (start, length)."""
    calls: int = 0

    def new_id(self) -> int:
        self.first_id += 1
        return self.first_id

    def call(self, parent: int | None, prompt: list[int], answer: list[int], splits: list[NodeSplit]) -> CallWrite:
        call, asked, leaf = self.new_id(), self.new_id(), self.new_id()
        base = [] if parent is None else self.path[parent]
        start = len(base)
        nodes = [
            {
                "id": asked, "rollout_id": self.rollout, "parent_id": parent, "call_id": call, "kind": "prompt",
                "start": start, "length": len(prompt), "token_ids": pack_ids(prompt), "logprobs": None,
                "version_spans": None,
            },
            {
                "id": leaf, "rollout_id": self.rollout, "parent_id": asked, "call_id": call, "kind": "generated",
                "start": start + len(prompt), "length": len(answer), "token_ids": pack_ids(answer),
                "logprobs": pack_logprobs(np.zeros(len(answer))), "version_spans": [[0, 0, len(answer)]],
            },
        ]  # fmt: skip
        begin = {
            "id": call, "rollout_id": self.rollout, "seq": self.calls, "api": "openai-chat", "status": "running",
            "kind": "main", "parent_call_id": None, "fork_reason": None, "request_hash": str(call), "request": {},
        }  # fmt: skip
        self.calls += 1
        self.path[leaf] = base + prompt + answer
        self.prompts[asked] = (start, len(prompt))
        return CallWrite(call, begin, nodes, {"status": "complete", "leaf_id": leaf, "cells": []}, splits)

    def split(self, node: int, at: int) -> NodeSplit:
        start, length = self.prompts[node]
        head = self.new_id()
        self.prompts[head], self.prompts[node] = (start, at), (start + at, length - at)
        return NodeSplit(node, head, at, start, length)


def send(database: str, *batches: list[CallWrite]) -> None:
    async def go() -> None:
        writer = CallWriter(database)
        for batch in batches:
            await writer.write(batch)
        await writer.close()

    asyncio.run(go())


def nodes(engine: Engine, rollout: str) -> list[tuple[int, int | None, str, int, int]]:
    query = text("SELECT id, parent_id, kind, start, length FROM nodes WHERE rollout_id = :r ORDER BY start, id")
    with engine.connect() as c:
        return [tuple(row) for row in c.execute(query, {"r": rollout})]


def test_a_split_keeps_the_old_node_below_the_new_one(database: str, engine: Engine, rollout: str) -> None:
    gateway = Gateway(rollout)
    first = gateway.call(None, [1, 2, 3, 4, 5], [6, 7], [])
    (old, leaf) = (n["id"] for n in first.nodes)
    split = gateway.split(old, 2)
    second = gateway.call(None, [8], [9], [split])
    second.nodes[0] |= {"parent_id": split.new_id, "start": 2}
    second.nodes[1] |= {"start": 3}
    send(database, [first], [second])
    assert nodes(engine, rollout) == [
        (split.new_id, None, "prompt", 0, 2),
        (old, split.new_id, "prompt", 2, 3),
        (second.nodes[0]["id"], split.new_id, "prompt", 2, 1),
        (second.nodes[1]["id"], second.nodes[0]["id"], "generated", 3, 1),
        (leaf, old, "generated", 5, 2),
    ]
    with engine.connect() as c:
        assert c.scalar(text(f"SELECT path_tokens({leaf})")) == [1, 2, 3, 4, 5, 6, 7]
        assert c.scalar(text(f"SELECT path_tokens({second.nodes[1]['id']})")) == [1, 2, 8, 9]
        assert c.scalars(text("SELECT call_id FROM nodes WHERE start = 0")).all() == [first.call_id]
    before = nodes(engine, rollout)
    send(database, [second], [first, second], [second, second])
    assert nodes(engine, rollout) == before


@pytest.mark.parametrize(("which", "at"), [("leaf", 1), ("prompt", 3), ("prompt", 0), ("prompt", -1), ("nobody", 1)])
def test_what_cannot_be_split_is_refused_whole(
    database: str, engine: Engine, rollout: str, which: str, at: int
) -> None:
    gateway = Gateway(rollout)
    first = gateway.call(None, [1, 2, 3], [4, 5], [])
    send(database, [first])
    node = {"prompt": first.nodes[0]["id"], "leaf": first.nodes[1]["id"], "nobody": 999}[which]
    before = nodes(engine, rollout)
    with pytest.raises(DataError, match=f"node {node} cannot be split at {at}"):
        send(database, [gateway.call(None, [1], [2], [NodeSplit(node, 1000, at, 0, 3)])])
    assert nodes(engine, rollout) == before


def test_a_node_that_was_cut_meanwhile_is_not_cut_again(database: str, engine: Engine, rollout: str) -> None:
    """A commit that comes late was made for the node as it was: its `at` would now be another place."""
    gateway = Gateway(rollout)
    first = gateway.call(None, [1, 2, 3, 4, 5, 6], [7], [])
    late = NodeSplit(first.nodes[0]["id"], 2000, 3, 0, 6)
    send(database, [first], [gateway.call(None, [8], [9], [gateway.split(first.nodes[0]["id"], 2)])])
    before = nodes(engine, rollout)
    with pytest.raises(DataError, match="of 6 tokens from 0 on"):
        send(database, [gateway.call(None, [1], [2], [late])])
    assert nodes(engine, rollout) == before


@settings(
    max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)
@given(data=st.data())
def test_no_path_is_changed_by_a_split(database: str, engine: Engine, data: st.DataObject) -> None:
    """Random conversations, random cuts of their prompts, in batches of which some are written again."""
    with transaction(engine) as s:
        index = s.execute(text("SELECT count(*) FROM steps")).scalar_one()
        rollout = make_world(s, index=index).rollouts[0][0]
        first = _highest_id(s)
    gateway = Gateway(rollout, first_id=first)
    ids = st.lists(st.integers(0, 2**31 - 1), min_size=1, max_size=6)
    batches: list[list[CallWrite]] = [[]]
    for _ in range(data.draw(st.integers(1, 8), label="calls")):
        splits = []
        for _ in range(data.draw(st.integers(0, 3), label="splits")):
            if longer := [n for n, (_, length) in gateway.prompts.items() if length > 1]:
                node = data.draw(st.sampled_from(longer), label="node")
                at = data.draw(st.integers(1, gateway.prompts[node][1] - 1), label="at")
                splits.append(gateway.split(node, at))
        parent = data.draw(st.sampled_from([None, *gateway.path]), label="parent")
        batches[-1].append(gateway.call(parent, data.draw(ids), data.draw(ids), splits))
        if data.draw(st.booleans(), label="commit"):
            if data.draw(st.booleans(), label="its answer is lost"):
                batches.append(batches[-1])
            batches.append([])
    send(database, *batches)
    with engine.connect() as c:
        for leaf, path in gateway.path.items():
            assert c.scalar(text(f"SELECT path_tokens({leaf})")) == path
    found = {n[0]: (n[3], n[4]) for n in nodes(engine, rollout) if n[2] == "prompt"}
    assert found == gateway.prompts


def _highest_id(session: Session) -> int:
    query = "SELECT GREATEST(0, (SELECT max(id) FROM nodes), (SELECT max(id) FROM calls))"
    return int(session.execute(text(query)).scalar_one())

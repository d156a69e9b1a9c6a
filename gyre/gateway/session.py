"""A live rollout: its tree, its calls in flight, and how both are had back from Postgres."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from sqlalchemy.ext.asyncio import AsyncEngine

from gyre.gateway.conversation import prompt_thinking
from gyre.gateway.messages import Message, ToolCall
from gyre.gateway.tree import Node, Tree, Turn
from gyre.gateway.wire import FORMATS
from gyre.store.gateway_queries import RolloutFacts, load_tree
from gyre.store.tokens import unpack_ids

if TYPE_CHECKING:
    from gyre.gateway.calls import LiveCall

OPEN_STATES = ("pending", "running")


@dataclass(slots=True)
class Session:
    """What the gateway holds of one rollout."""

    facts: RolloutFacts
    tree: Tree
    next_seq: int
    checked_at: float
    """Loop time at which `facts` was read."""
    live: dict[str, LiveCall] = field(default_factory=dict)
    """Calls that are not delivered yet, by the hash of their request."""
    undelivered: dict[str, Turn] = field(default_factory=dict)
    """After a restart: finished turns that no later call went on from; a retry gets them once."""
    closing: set[asyncio.Task[None]] = field(default_factory=set)


async def load_session(engine: AsyncEngine, facts: RolloutFacts, now: float) -> Session:
    """The rollout's session from what Postgres has of it."""
    calls, node_rows, top_seq = await load_tree(engine, facts.id)
    nodes: dict[int, Node] = {}
    for row in node_rows:
        parent = None if row.parent_id is None else nodes[row.parent_id]
        nodes[row.id] = Node(row.id, parent, row.start, unpack_ids(row.token_ids).copy())
    tree = Tree()
    for row in calls:
        if row.leaf_id is not None:
            tree.add(_turn(row, tree, nodes))
    waiting = {t.request_hash: t for t in tree.by_call.values() if not t.children}
    return Session(facts, tree, top_seq + 1, now, undelivered=waiting)


def _turn(row: Any, tree: Tree, nodes: dict[int, Node]) -> Turn:
    generated = nodes[row.leaf_id]
    assert generated.parent is not None
    parent = None if row.parent_call_id is None else tree.by_call[row.parent_call_id]
    wire = FORMATS[row.api]
    messages = tuple(wire.parse_message(m, f"calls.request of call {row.id}") for m in row.request["messages"])
    return Turn(
        call_id=row.id,
        seq=row.seq,
        parent=parent,
        messages=messages,
        reply=reply_from_json(row.response),
        tools_key=row.request["tools_key"] if parent is None else parent.tools_key,
        prompt=generated.parent,
        generated=generated,
        prompt_thinking=prompt_thinking(parent, messages, generated.parent),
        kind=row.kind,
        cell=row.cells[-1] if row.cells else None,
        request_hash=row.request_hash,
        finish_reason=row.finish_reason,
        new_tokens=row.new_tokens,
        cached_tokens=row.cached_tokens or 0,
        created=int(row.started_at.timestamp()),
    )


def reply_to_json(reply: Message) -> dict[str, Any]:
    """A reply as `calls.response` holds it."""
    return {
        "content": reply.content,
        "reasoning": reply.reasoning,
        "tool_calls": [{"id": c.id, "name": c.name, "arguments": c.arguments} for c in reply.tool_calls],
    }


def reply_from_json(data: dict[str, Any]) -> Message:
    """The reverse of `reply_to_json`."""
    calls = tuple(ToolCall(c["id"], c["name"], c["arguments"]) for c in data["tool_calls"])
    return Message("assistant", data["content"], data["reasoning"], calls)

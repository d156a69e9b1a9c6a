"""A live rollout: its tree, its calls in flight, and how both are had back from Postgres."""

from __future__ import annotations

import asyncio
from collections.abc import Collection
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from sqlalchemy.ext.asyncio import AsyncEngine

from gyre.gateway.conversation import prompt_thinking
from gyre.gateway.dialect import Dialect
from gyre.gateway.kinds import Kinds, Opening, system_of
from gyre.gateway.messages import Message, Request, ToolCall
from gyre.gateway.nodes import Node, of_rows
from gyre.gateway.prompt_text import PromptText
from gyre.gateway.reading import Reading
from gyre.gateway.tree import Tree, Turn
from gyre.gateway.wire import FORMATS
from gyre.store.gateway_queries import RolloutFacts, load_tree
from gyre.store.tokens import unpack_ids

if TYPE_CHECKING:
    from gyre.gateway.calls import LiveCall

OPEN_STATES = ("pending", "running")
# Seconds for which a rollout's state is believed; the sweep renews it more often.
STATE_FRESH_S = 3.0


@dataclass(slots=True)
class Session:
    """What the gateway holds of one rollout."""

    facts: RolloutFacts
    tree: Tree
    next_seq: int
    checked_at: float
    """Loop time at which `facts` was read."""
    kinds: Kinds = field(default_factory=Kinds)
    reading: Reading = field(default_factory=Reading)
    texts: PromptText = field(default_factory=PromptText)
    begun: dict[int, dict[str, Any]] = field(default_factory=dict)
    """Rows of the calls that run, by call id, as they are written when they begin."""
    recording: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Held from where a call's nodes are placed until they are committed: the tree never runs ahead of Postgres."""
    running: dict[int, str] = field(default_factory=dict)
    """Kinds that Postgres has of the calls that ran as this was read."""
    stale: bool = False
    """A commit failed, or its answer was lost: what Postgres has must be read anew."""
    live: dict[str, LiveCall] = field(default_factory=dict)
    """Calls that are not delivered yet, by the hash of their request."""
    undelivered: dict[str, Turn] = field(default_factory=dict)
    """After a restart, or a commit whose answer was lost: finished turns that no later call went on from. A retry gets
    them, once."""
    closing: set[asyncio.Task[None]] = field(default_factory=set)

    last_cell: str | None = None
    """Where its newest answer came from: a new conversation begins there, beside what it may share."""

    def fresh(self, now: float) -> bool:
        """Whether it can be used as it is at loop time `now`."""
        return not self.stale and now - self.checked_at < STATE_FRESH_S

    def change_kinds(self, changes: dict[int, str]) -> None:
        """Earlier calls, finished or not, turned out to be of another kind."""
        self.kinds.change(changes)
        for call_id, kind in changes.items():
            if (turn := self.tree.by_call.get(call_id)) is not None:
                turn.kind = kind
            if (begin := self.begun.get(call_id)) is not None:
                begin["kind"] = kind

    def renew(self, fresh: Session) -> None:
        """Take over what Postgres has. Calls in flight find their turns again by id; a retry gets what got lost."""
        lost = (turn for call_id, turn in fresh.tree.by_call.items() if call_id not in self.tree.by_call)
        self.undelivered |= {turn.request_hash: turn for turn in lost if not turn.children}
        fresh.kinds.begun(self.kinds, self.begun)
        self.tree, self.kinds = fresh.tree, fresh.kinds
        self.change_kinds(fresh.running)
        self.next_seq = max(self.next_seq, fresh.next_seq)
        self.stale = False


async def load_session(
    engine: AsyncEngine, facts: RolloutFacts, now: float, dialect: Dialect, begun: Collection[int] = ()
) -> Session:
    """The rollout's session from what Postgres has of it. `begun` are the ids of its calls that run in this process."""
    calls, node_rows, top_seq, running = await load_tree(engine, facts.id, begun)
    rows = ((n.id, n.parent_id, n.start, unpack_ids(n.token_ids).copy(), n.kind == "generated") for n in node_rows)
    nodes, by_id = of_rows(rows, [c.leaf_id for c in calls])
    tree, kinds = Tree(dialect.difference, nodes), Kinds()
    for row in calls:
        if row.leaf_id is not None:
            turn = _turn(row, tree, by_id, dialect)
            tree.add(turn)
            if turn.parent is None:
                system, tools = system_of(turn.messages), bool(turn.tools_key)
                kinds.add(Opening(turn.call_id, turn.kind, turn.agent, system, tools, turn.told))
    waiting = {t.request_hash: t for t in tree.by_call.values() if not t.children}
    return Session(facts, tree, top_seq + 1, now, kinds, undelivered=waiting, running=running)


def _turn(row: Any, tree: Tree, nodes: dict[int, Node], dialect: Dialect) -> Turn:
    generated = nodes[row.leaf_id]
    assert generated.parent is not None
    parent = None if row.parent_call_id is None else tree.by_call[row.parent_call_id]
    wire = FORMATS[row.api]
    parsed = tuple(wire.parse_message(m, f"calls.request of call {row.id}") for m in row.request["messages"])
    asked = dialect.normalise(Request(row.api, parsed, (), False, (), None, False, False, {}))
    messages = tuple(replace(m, raw=None) for m in asked.messages)
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
        agent=row.agent,
        told=bool(row.request.get("told")),
        stop_string=row.response.get("stop_string"),
    )


def reply_to_json(reply: Message, stop_string: str | None = None) -> dict[str, Any]:
    """A reply as `calls.response` holds it, with the harness's stop string where one ended it."""
    return {
        "content": reply.content,
        "reasoning": reply.reasoning,
        "tool_calls": [{"id": c.id, "name": c.name, "arguments": c.arguments} for c in reply.tool_calls],
        **({} if stop_string is None else {"stop_string": stop_string}),
    }


def reply_from_json(data: dict[str, Any]) -> Message:
    """The reverse of `reply_to_json`."""
    calls = tuple(ToolCall(c["id"], c["name"], c["arguments"]) for c in data["tool_calls"])
    return Message("assistant", data["content"], data["reasoning"], calls)

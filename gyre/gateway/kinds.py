"""Which kind of branch a call belongs to, where its dialect does not say: from the shape of the tree, now or later.

A call that goes on from a turn is of that turn's kind; after a summary, of the kind that was summarised. For a call
that begins a conversation:

- It quotes the answer of an earlier call that repeated a whole conversation and then asked for text: that one was a
  summary, and this one goes on where the summarised conversation left off.
- It is of an agent that its headers name: `sub-agent`.
- It offers no tools, and the main conversation does: `auxiliary`.
- It offers tools, and what was taken for the main conversation is one call without any (a title, a topic check or a
  probe that came first): that one was `auxiliary`, and this one is `main`.
- Its system text is the main conversation's: `main`; any other's: `sub-agent`.

So the kind of an earlier call may change when a later one arrives; never one that the dialect told.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from gyre.gateway.messages import Message, Request
from gyre.gateway.tree import Tree, Turn

SUMMARISED = {"main-summary": "main", "sub-agent-summary": "sub-agent"}
QUOTED = 0.3
"""Share of a summary's text that is found again, line by line, where the conversation starts anew. Harnesses leave
parts out: reasoning that the summary begins with, tags around it."""
MIN_SUMMARY = 24
"""Characters below which a text found again says nothing."""


@dataclass(slots=True)
class Opening:
    """A call that began a conversation, finished or not."""

    call_id: int
    kind: str
    agent: str
    system: str
    tools: bool
    told: bool


@dataclass(frozen=True, slots=True)
class Verdict:
    """The kind of a call that arrives, and what it makes of earlier ones: call id -> kind."""

    kind: str
    told: bool = False
    changes: dict[int, str] = field(default_factory=dict)


class Kinds:
    """The openings of one rollout, by call id, in order of arrival."""

    def __init__(self) -> None:
        self._openings: dict[int, Opening] = {}

    def extension(self, turn: Turn, agent: str) -> Verdict:
        """Of a call that goes on from `turn`."""
        if turn.agent != agent:
            return Verdict("sub-agent" if agent else "main")
        return Verdict(SUMMARISED.get(turn.kind, turn.kind))

    def opening(self, request: Request, agent: str, tree: Tree) -> Verdict:
        """Of a call that begins a conversation."""
        if (summary := _summary(request.messages, agent, tree)) is not None:
            base = self._summarised(summary)
            return Verdict(base, changes={summary.call_id: f"{base}-summary"})
        if agent:
            return Verdict("sub-agent")
        main = next((o for o in self._openings.values() if o.kind == "main"), None)
        if main is None:
            return Verdict("main")
        tools = bool(request.tools)
        if main.tools and not tools:
            return Verdict("auxiliary")
        if tools and not main.tools:
            early = [o for o in self._openings.values() if o.kind == "main" and not o.tools]
            if not any(o.told or _continued(o, tree) for o in early):
                return Verdict("main", changes={o.call_id: "auxiliary" for o in early})
        return Verdict("main" if main.system == system_of(request.messages) else "sub-agent")

    def add(self, opening: Opening) -> None:
        """A call that begins a conversation has begun."""
        self._openings[opening.call_id] = opening

    def drop(self, call_id: int) -> None:
        """It ended without an answer: nothing is concluded from it."""
        self._openings.pop(call_id, None)

    def change(self, changes: dict[int, str]) -> None:
        """Earlier calls turned out to be of another kind."""
        for call_id, kind in changes.items():
            if (opening := self._openings.get(call_id)) is not None:
                opening.kind = kind

    def _summarised(self, summary: Turn) -> str:
        """The kind of the conversation that a summary is of: its own branch's, or its system text's."""
        if summary.kind in ("main", "sub-agent"):
            return summary.kind
        root = _root(summary)
        same = (o.kind for o in self._openings.values() if o.system == system_of(root.messages))
        return next((kind for kind in same if kind in ("main", "sub-agent")), "sub-agent" if summary.agent else "main")


def system_of(messages: Sequence[Message]) -> str:
    """The system text that a conversation begins with."""
    return messages[0].content if messages and messages[0].role == "system" else ""


def _root(turn: Turn) -> Turn:
    while turn.parent is not None:
        turn = turn.parent
    return turn


def _continued(opening: Opening, tree: Tree) -> bool:
    turn = tree.by_call.get(opening.call_id)
    return turn is not None and bool(turn.children)


def _summary(messages: Sequence[Message], agent: str, tree: Tree) -> Turn | None:
    """The latest call whose answer, the summary of a conversation, `messages` begin anew from."""
    candidates = [t for t in tree.by_call.values() if _may_be_summary(t, agent)]
    if not candidates:
        return None
    said = "\n".join(m.content for m in messages if m.role != "assistant")
    lines = {line.strip() for line in said.splitlines()}
    for turn in sorted(candidates, key=lambda t: t.seq, reverse=True):
        text = [line for raw in turn.reply.content.splitlines() if (line := raw.strip())]
        found = sum(len(line) for line in text if line in lines)
        if turn.reply.content.strip() in said:  # in the middle of a line, too
            found = len(turn.reply.content.strip())
        if found >= MIN_SUMMARY and found >= QUOTED * sum(len(line) for line in text):
            return turn
    return None


def _may_be_summary(turn: Turn, agent: str) -> bool:
    """A text that nobody went on from, asked for at the end of a conversation that has answers."""
    return (
        not turn.children
        and not turn.told
        and turn.agent == agent
        and turn.kind not in SUMMARISED
        and not turn.reply.tool_calls
        and len(turn.reply.content) >= MIN_SUMMARY
        and bool(turn.messages)
        and turn.messages[-1].role == "user"
        and (turn.parent is not None or any(m.role == "assistant" for m in turn.messages))
    )

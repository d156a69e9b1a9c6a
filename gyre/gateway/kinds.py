"""Which kind of branch a call belongs to, where its dialect does not say: from the shape of the tree, now or later.

A call that goes on from a turn is of that turn's kind; after a summary, of the kind that was summarised. For a call
that begins a conversation:

- It quotes the answer of an earlier call that repeated a whole conversation and then asked for text, and has the system
  text and the tools of that conversation: that one was a summary, and this one goes on where it left off.
- It is of an agent that its headers name: `sub-agent`.
- It offers no tools and repeats answers of a conversation with its system text (a harness's last step, "answer now"):
  it is of that conversation's kind.
- It offers no tools, and a main conversation does: `auxiliary`, unless it begins as one without tools that went on.
- It offers tools, and what was taken for the main conversation is one call without any (a title, a topic check or a
  probe that came first): that one was `auxiliary`, and this one is `main`.
- Its system text is a main conversation's: `main`; any other's: `sub-agent`.

What was taken for `auxiliary` and goes on is a conversation after all, and `main`. So the kind of an earlier call may
change when a later one is complete; never one that the dialect told, and never for a call that came to nothing.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from gyre.gateway.messages import Message, Request, argument_value
from gyre.gateway.tree import Tree, Turn

SUMMARISED = {"main-summary": "main", "sub-agent-summary": "sub-agent"}
KEPT = ("main", "sub-agent")
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
    """The kind of a call that arrives, and of the summary that it goes on from: call id -> kind."""

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
        if _mistaken(turn):
            return Verdict("main")
        return Verdict(SUMMARISED.get(turn.kind, turn.kind))

    def opening(self, request: Request, agent: str, tree: Tree) -> Verdict:
        """Of a call that begins a conversation."""
        if (found := _summary(request, agent, tree)) is not None:
            summary, root = found
            base = summary.kind if summary.kind in KEPT else root.kind
            if base not in KEPT:
                base = "sub-agent" if agent else "main"
            return Verdict(base, changes={summary.call_id: f"{base}-summary"})
        if agent:
            return Verdict("sub-agent")
        mains = [o for o in self._openings.values() if o.kind == "main"]
        if not mains:
            return Verdict("main")
        system, offered = system_of(request.messages), any(o.tools for o in mains)
        if request.tools and not offered and not any(o.told or _continued(o, tree) for o in mains):
            return Verdict("main")
        if offered and not request.tools:
            for turn in _repeated(request.messages, tree):
                kind = SUMMARISED.get(turn.kind, turn.kind)
                if turn.agent == agent and kind in KEPT and system_of(_root(turn).messages) == system:
                    return Verdict(kind)
            if not any(o.system == system and not o.tools and _continued(o, tree) for o in mains):
                return Verdict("auxiliary")
        return Verdict("main" if any(o.system == system for o in mains) else "sub-agent")

    def concluded(self, call_id: int, kind: str, verdict: Verdict, parent: Turn | None, tree: Tree) -> dict[int, str]:
        """What a call of `kind` that is now complete makes of earlier ones: call id -> kind.

        `parent` is the turn that it went on from.
        """
        changes = {c: k for c, k in verdict.changes.items() if (t := tree.by_call.get(c)) is not None and not t.told}
        if parent is not None:
            root = _root(parent)
            if kind in ("main", "main-summary") and _mistaken(root):
                changes[root.call_id] = "main"
        elif (mine := self._openings.get(call_id)) is not None and mine.kind == "main" and mine.tools:
            before = [o for o in self._openings.values() if o.kind == "main" and o.call_id < call_id]
            if not any(o.told or _continued(o, tree) or (o.tools and o.call_id in tree.by_call) for o in before):
                changes = {o.call_id: "auxiliary" for o in before if not o.tools} | changes
        return changes

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

    def begun(self, others: Kinds, call_ids: Iterable[int]) -> None:
        """Take over from `others` what is known of calls that run."""
        known = {c: o for c in call_ids if (o := others._openings.get(c)) is not None}
        self._openings = dict(sorted((self._openings | known).items()))


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


def _mistaken(turn: Turn) -> bool:
    """Whether a call that began a conversation was taken for an auxiliary one, by its shape alone."""
    return turn.parent is None and turn.kind == "auxiliary" and not turn.told


def _said(message: Message) -> tuple[Any, ...]:
    """What is equal for two assistant messages that say the same: text, and calls by name and value."""
    return message.content.strip(), *((c.name, _value(c.arguments)) for c in message.tool_calls)


def _value(arguments: str) -> str:
    return json.dumps(argument_value(arguments), sort_keys=True)


def _repeated(messages: Sequence[Message], tree: Tree) -> Iterator[Turn]:
    """The turns whose answers are among `messages`, the latest first. About as costly as reading all of them."""
    said = {_said(m) for m in messages if m.role == "assistant"}
    if said:
        yield from (turn for turn in reversed(tree.by_call.values()) if _said(turn.reply) in said)


def _summary(request: Request, agent: str, tree: Tree) -> tuple[Turn, Turn] | None:
    """The latest call whose answer, the summary of a conversation, `request` begins anew from; and that one's root."""
    candidates = [t for t in tree.by_call.values() if _may_be_summary(t, agent)]
    if not candidates:
        return None
    system, tools_key = system_of(request.messages), request.tools_key
    said = "\n".join(m.content for m in request.messages if m.role != "assistant")
    lines = {line.strip() for line in said.splitlines()}
    for turn in sorted(candidates, key=lambda t: t.seq, reverse=True):
        text = [line for raw in turn.reply.content.splitlines() if (line := raw.strip())]
        found = sum(len(line) for line in text if line in lines)
        if turn.reply.content.strip() in said:  # in the middle of a line, too
            found = len(turn.reply.content.strip())
        if found >= MIN_SUMMARY and found >= QUOTED * sum(len(line) for line in text):
            for root in _summarised(turn, tree):
                if root.tools_key == tools_key and system_of(root.messages) == system:
                    return turn, root
    return None


def _summarised(summary: Turn, tree: Tree) -> Iterator[Turn]:
    """The roots of the conversations that a summary may be of: its own, and those whose answers it was shown."""
    yield _root(summary)
    if summary.parent is None:  # other tools or another system text than the conversation itself
        yield from (_root(turn) for turn in _repeated(summary.messages, tree) if turn.agent == summary.agent)


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

"""Which branch a request goes on from, and the exact ids of its prompt."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from gyre.gateway.dialect import Hint
from gyre.gateway.messages import Message, Request, common_prefix
from gyre.gateway.policy import Ids, Policy
from gyre.gateway.tree import Match, Node, Tree, Turn

NOTHING = Hint()


@dataclass(frozen=True, slots=True)
class Plan:
    """How a request joins its rollout's tree."""

    turn: Turn | None
    """The turn that it goes on from; None for a new root."""
    messages: tuple[Message, ...]
    """Its messages after that turn's reply."""
    parent: Node | None
    """The node that the new prompt ids hang under."""
    new_ids: Ids
    """The prompt ids to add; empty where `prompt` is reused."""
    prompt: Node | None
    """The prompt node of an earlier, equal request."""
    fork_reason: str | None
    kind: str
    base: int
    """Messages that the turn's conversation holds already."""

    @property
    def prompt_length(self) -> int:
        """Tokens of the whole prompt."""
        if self.prompt is not None:
            return self.prompt.end
        return (0 if self.parent is None else self.parent.end) + len(self.new_ids)

    def prompt_ids(self) -> Ids:
        """The whole prompt, int32[prompt_length]."""
        if self.prompt is not None:
            return self.prompt.tokens()
        return self.new_ids if self.parent is None else np.concatenate([self.parent.tokens(), self.new_ids])


def plan(tree: Tree, policy: Policy, request: Request, hint: Hint = NOTHING) -> Plan:
    """Match `request` against `tree` and tokenise what is new. Changes nothing."""
    tools_key = request.tools_key
    match = tree.match(request.messages, tools_key)
    reason = tree.fork_reason(match, request.messages, tools_key)
    rest = request.messages[match.position :]
    kind = hint.kind or _kind(tree, match, request, tools_key)
    if reason == "resample":
        twin = next(
            t
            for t in tree.children(match.turn)
            if t.tools_key == tools_key and common_prefix(t.messages, rest) == len(rest) == len(t.messages)
        )
        empty = np.empty(0, np.int32)
        return Plan(match.turn, rest, twin.prompt.parent, empty, twin.prompt, reason, kind, match.position)
    if match.turn is None:
        ids = np.asarray(policy.opening(rest, request.tools), np.int32)
        return Plan(None, rest, None, ids, None, reason, kind, 0)
    new = _extend(policy, match.turn, rest, request.tools)
    if new is not None:
        ids = np.asarray(new, np.int32)
        return Plan(match.turn, rest, match.turn.generated, ids, None, reason, kind, match.position)
    return _rerender(policy, match, rest, request, reason, kind)


def prompt_thinking(turn: Turn | None, messages: Sequence[Message], prompt: Node) -> bool:
    """Whether a prompt's branch holds reasoning, from its place in the tree: an extension has its turn's."""
    last_user = max((i for i, m in enumerate(messages) if m.role == "user"), default=-1)
    if turn is not None and prompt.parent is turn.generated:
        return turn.thinking or any(m.reasoning for m in messages)
    return any(m.reasoning for m in messages[last_user + 1 :])  # rendered whole: the template keeps only the newest


def _extend(policy: Policy, turn: Turn, rest: Sequence[Message], tools: Sequence[dict[str, Any]]) -> list[int] | None:
    """Ids after the turn's completion; None where the prompt must be rendered as a whole.

    Assistant turns in `rest` were not sampled here (an edited or copied history): they are rendered as plain prompt.
    """
    tail, completion = policy.tail(turn.prompt.ids), turn.generated.ids.tolist()
    thinking = turn.thinking
    ids: list[int] = []
    at = 0
    while True:
        end = next((i for i in range(at, len(rest)) if rest[i].role == "assistant"), len(rest))
        if end == at:
            return None  # two assistant turns in a row: no template has that
        new = policy.extension(tail, completion, rest[at:end], tools, thinking)
        if new is None:
            return None
        ids += new
        if end == len(rest):
            return ids
        completion = policy.foreign(rest[end], tools)
        ids += completion
        thinking = thinking or rest[end].reasoning is not None
        tail = policy.tail(np.asarray(new, np.int32))
        at = end + 1
        if at == len(rest):
            return None  # ends on an assistant turn: a prefill, rendered as a whole


def _rerender(
    policy: Policy, match: Match, rest: Sequence[Message], request: Request, reason: str | None, kind: str
) -> Plan:
    """A prompt rendered as a whole, hung under the deepest node of the matched branch that it repeats id for id."""
    assert match.turn is not None
    ids = np.asarray(policy.opening(request.messages, request.tools), np.int32)
    parent: Node | None = None
    for node in match.turn.generated.path():
        # Strictly shorter: a prompt node holds at least one token.
        if node.end >= len(ids) or not np.array_equal(ids[node.start : node.end], node.ids):
            break
        parent = node
    new = ids[parent.end :] if parent is not None else ids
    why = reason or ("thinking_dropped" if match.turn.thinking else "bridge_refused")
    return Plan(match.turn, tuple(rest), parent, new, None, why, kind, match.position)


def _kind(tree: Tree, match: Match, request: Request, tools_key: str) -> str:
    """Kind of the branch: that of the turn it goes on from; for a new root, by its likeness to the first root."""
    if match.turn is not None:
        return match.turn.kind
    if not tree.roots:
        return "main"
    first = tree.roots[0]
    if not request.tools and first.tools_key:
        return "auxiliary"
    return "main" if _system(first.messages) == _system(request.messages) else "sub-agent"


def _system(messages: Sequence[Message]) -> str:
    return messages[0].content if messages and messages[0].role == "system" else ""

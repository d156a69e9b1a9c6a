"""A rollout's live tree: nodes of token ids, and the turns of messages that made them. Pure data and matching."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from gyre.gateway.messages import Message, common_prefix, difference
from gyre.gateway.policy import Ids


@dataclass(slots=True, eq=False)
class Node:
    """A span of token ids under its parent. Its ids never change."""

    id: int
    parent: Node | None
    start: int
    ids: Ids

    def __post_init__(self) -> None:
        self.ids.flags.writeable = False

    @property
    def end(self) -> int:
        """Depth just after its last token."""
        return self.start + len(self.ids)

    def path(self) -> list[Node]:
        """The nodes from the root to this one."""
        out: list[Node] = []
        node: Node | None = self
        while node is not None:
            out.append(node)
            node = node.parent
        return out[::-1]

    def tokens(self) -> Ids:
        """The ids from the root to the end of this node, int32[end]."""
        return np.concatenate([n.ids for n in self.path()])


@dataclass(slots=True, eq=False)
class Turn:
    """A finished call: what was asked since `parent`, what was answered, and the nodes that hold both as ids."""

    call_id: int
    seq: int
    parent: Turn | None
    messages: tuple[Message, ...]
    reply: Message
    tools_key: str
    prompt: Node
    generated: Node
    prompt_thinking: bool
    kind: str
    cell: str | None
    request_hash: str
    finish_reason: str
    new_tokens: int
    cached_tokens: int
    created: int
    children: list[Turn] = field(default_factory=list)

    @property
    def thinking(self) -> bool:
        """Whether the branch holds reasoning at the end of this turn."""
        return self.prompt_thinking or self.reply.reasoning is not None


@dataclass(frozen=True, slots=True)
class Match:
    """The deepest turn whose conversation begins a request, and the number of messages that it covers."""

    turn: Turn | None
    position: int


class Tree:
    """The turns of one rollout."""

    def __init__(self) -> None:
        self.roots: list[Turn] = []
        self.by_call: dict[int, Turn] = {}

    def add(self, turn: Turn) -> None:
        """Insert a finished turn under its parent."""
        (self.roots if turn.parent is None else turn.parent.children).append(turn)
        self.by_call[turn.call_id] = turn

    def children(self, turn: Turn | None) -> list[Turn]:
        """The turns that go on from `turn`; the roots for None."""
        return self.roots if turn is None else turn.children

    def match(self, messages: Sequence[Message], tools_key: str) -> Match:
        """The deepest turn that `messages` go on from; of equals, the latest."""
        best = Match(None, 0)
        best_seq = -1
        stack = [(root, 0) for root in self.roots if root.tools_key == tools_key]
        while stack:
            turn, at = stack.pop()
            end = at + len(turn.messages)
            if end >= len(messages) or messages[end].role != "assistant":
                continue
            if common_prefix(turn.messages, messages[at:end]) < len(turn.messages):
                continue
            if difference(turn.reply, messages[end]) is not None:
                continue
            if (end + 1, turn.seq) > (best.position, best_seq):
                best, best_seq = Match(turn, end + 1), turn.seq
            stack.extend((child, end + 1) for child in turn.children)
        return best

    def fork_reason(self, match: Match, messages: Sequence[Message], tools_key: str) -> str | None:
        """Why a request that matches so far does not simply extend its turn; None where it does.

        `root`: the rollout's first call. `resample`: asked before, word for word. `turn_dropped`: a reply was left out.
        `tool_calls_edited`, `arguments_edited`, `content_edited`, `reasoning_edited`: a reply came back changed.
        `tools_changed`, `system_changed`, `new_root`: another beginning. `history_edited`, `sibling`: another
        continuation, with or without assistant turns that were not sampled here.
        """
        rest = messages[match.position :]
        siblings = self.children(match.turn)
        if match.turn is None:
            if not siblings:
                return "root"
            known = [s for s in siblings if s.tools_key == tools_key]
            if not known:
                return "tools_changed" if any(_begins(s, rest) for s in siblings) else "new_root"
            siblings = known
        elif not siblings:
            return "history_edited" if any(m.role == "assistant" for m in rest) else None
        for sibling in siblings:
            if _begins(sibling, rest):
                if len(rest) == len(sibling.messages):
                    return "resample"
                after = rest[len(sibling.messages)]
                if after.role != "assistant":
                    return "turn_dropped"
                return difference(sibling.reply, after) or "history_edited"
        if match.turn is None:
            changed = any(common_prefix(s.messages, rest) == 0 for s in siblings) and rest[0].role == "system"
            return "system_changed" if changed else "new_root"
        return "history_edited" if any(m.role == "assistant" for m in rest) else "sibling"


def _begins(turn: Turn, messages: Sequence[Message]) -> bool:
    n = len(turn.messages)
    return n <= len(messages) and common_prefix(turn.messages, messages[:n]) == n

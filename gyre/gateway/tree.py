"""A rollout's live tree: the turns of messages, which of them a request goes on from, and why it forks where it does.

Matching walks down from the roots and compares each message once, text against text, so that it costs about as much as
reading the request; from the last match on where the request's messages are the very objects of the one before. An
echo that is not equal byte for byte is judged by the dialect once; its hash is remembered.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from operator import is_

from gyre.gateway.messages import Message, difference
from gyre.gateway.nodes import Node, Nodes

WALKS = 8
"""Agents whose newest match is remembered."""

Difference = Callable[[Message, Message], str | None]


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
    agent: str = ""
    """The agent within the rollout that made the call; "" for the main one, or where nothing says."""
    told: bool = False
    """The dialect said its kind: structure does not change it."""
    stop_string: str | None = None
    """The harness's stop string that ended the answer."""
    children: list[Turn] = field(default_factory=list)
    echo: int | None = None
    """Hash of the last echo of `reply` that was found to mean the same without being the same."""

    @property
    def thinking(self) -> bool:
        """Whether the branch holds reasoning at the end of this turn."""
        return self.prompt_thinking or self.reply.reasoning is not None


@dataclass(frozen=True, slots=True)
class _Walk:
    """A match: the turns from the root to the deepest one, and how many of `messages` each covers.

    A later request that begins with the very same objects (`gyre.gateway.reading`) begins with these turns.
    """

    messages: Sequence[Message]
    tools_key: str
    turns: list[Turn]
    ends: list[int]

    @classmethod
    def to(cls, turn: Turn, messages: Sequence[Message], tools_key: str, before: _Walk | None) -> _Walk:
        """The walk that ends at `turn`; `before` spares the part that both have in common."""
        known = {} if before is None else {id(before.turns[-1]): before}
        new: list[Turn] = []
        at: Turn | None = turn
        while at is not None and id(at) not in known:
            new.append(at)
            at = at.parent
        turns, ends = ([], []) if at is None or before is None else (before.turns[:], before.ends[:])
        end = ends[-1] if ends else 0
        for step in reversed(new):
            end += len(step.messages) + 1
            turns.append(step)
            ends.append(end)
        return cls(messages, tools_key, turns, ends)

    def within(self, messages: Sequence[Message]) -> Match | None:
        """The deepest of its turns that `messages` begin with, object for object."""
        same = next((i for i, one in enumerate(map(is_, self.messages, messages)) if not one), None)
        if same is None:
            same = min(len(self.messages), len(messages))
        deepest = bisect_right(self.ends, same) - 1
        return None if deepest < 0 else Match(self.turns[deepest], self.ends[deepest])


@dataclass(frozen=True, slots=True)
class Match:
    """The deepest turn whose conversation begins a request, and the number of messages that it covers."""

    turn: Turn | None
    position: int


class Tree:
    """The turns of one rollout, and their nodes. `difference` is the dialect's."""

    def __init__(self, difference: Difference = difference, nodes: Nodes | None = None) -> None:
        self.nodes = Nodes() if nodes is None else nodes
        self.roots: list[Turn] = []
        self.by_call: dict[int, Turn] = {}
        self._difference = difference
        self._walks: dict[str, _Walk] = {}
        """The newest match of each agent, of the newest agents."""

    def add(self, turn: Turn) -> None:
        """Insert a finished turn under its parent."""
        (self.roots if turn.parent is None else turn.parent.children).append(turn)
        self.by_call[turn.call_id] = turn

    def children(self, turn: Turn | None, agent: str) -> list[Turn]:
        """The turns of an agent that go on from `turn`; its roots for None."""
        return [t for t in (self.roots if turn is None else turn.children) if t.agent == agent]

    def match(self, messages: Sequence[Message], tools_key: str, agent: str = "") -> Match:
        """The deepest turn that `messages` go on from.

        Of equals, one of the same agent; then the one with the most tool-call ids in common; then the latest.
        """
        before = self._walks.get(agent)
        known = None if before is None or before.tools_key != tools_key else before.within(messages)
        if known is None:
            best, rank = Match(None, 0), (0, False, 0, -1)
            stack = [(root, 0, 0) for root in self.roots if root.tools_key == tools_key]
        else:
            assert known.turn is not None
            best, rank = known, (known.position, known.turn.agent == agent, 0, -1)
            stack = [(child, known.position, 0) for child in known.turn.children]
        while stack:
            turn, at, ids = stack.pop()
            end = at + len(turn.messages)
            if end >= len(messages):
                continue
            echoed = messages[end]
            if echoed.role != "assistant" or not self._begins(turn, messages, at) or not self._echoes(turn, echoed):
                continue
            ids += _same_ids(turn.reply, echoed)
            mine = (end + 1, turn.agent == agent, ids, turn.seq)
            if mine > rank:
                best, rank = Match(turn, end + 1), mine
            stack += [(child, end + 1, ids) for child in turn.children]
        if best.turn is not None:
            walk = _Walk.to(best.turn, messages, tools_key, before)
            self._walks.pop(agent, None)
            self._walks[agent] = walk
            if len(self._walks) > WALKS:
                del self._walks[next(iter(self._walks))]
        return best

    def fork_reason(self, match: Match, messages: Sequence[Message], tools_key: str, agent: str = "") -> str | None:
        """Why a request that matches so far does not simply extend its turn; None where it does.

        `root`: the rollout's first call. `resample`: asked before, word for word. `turn_dropped`: a reply was left out.
        `tool_calls_edited`, `arguments_edited`, `content_edited`, `reasoning_edited`: a reply came back changed.
        `tools_changed`, `system_changed`, `new_root`: another beginning. `history_edited`, `sibling`: another
        continuation, with or without assistant turns that were not sampled here. `other_agent`: what another agent
        said so far is where this one begins.
        """
        at = match.position
        siblings = self.children(match.turn, agent)
        if match.turn is None:
            if not self.roots:
                return "root"
            known = [s for s in siblings if s.tools_key == tools_key]
            if not known:
                return "tools_changed" if any(self._begins(s, messages, 0) for s in siblings) else "new_root"
            siblings = known
        elif match.turn.agent != agent and not siblings:
            return "other_agent"
        elif not siblings:
            return "history_edited" if any(m.role == "assistant" for m in messages[at:]) else None
        for sibling in siblings:
            if self._begins(sibling, messages, at):
                end = at + len(sibling.messages)
                if len(messages) == end:
                    return "resample"
                if messages[end].role != "assistant":
                    return "turn_dropped"
                return self._difference(sibling.reply, messages[end]) or "history_edited"
        if match.turn is None:
            first = messages[0]
            changed = first.role == "system" and all(s.messages[0].content != first.content for s in siblings)
            return "system_changed" if changed else "new_root"
        return "history_edited" if any(m.role == "assistant" for m in messages[at:]) else "sibling"

    def twin(self, match: Match, messages: Sequence[Message], tools_key: str, agent: str) -> Turn | None:
        """The latest turn that was asked the same, word for word."""
        for turn in reversed(self.children(match.turn, agent)):
            whole = match.position + len(turn.messages) == len(messages)
            if whole and turn.tools_key == tools_key and self._begins(turn, messages, match.position):
                return turn
        return None

    def _begins(self, turn: Turn, messages: Sequence[Message], at: int) -> bool:
        """Whether `messages`, from `at` on, begin with what was asked in `turn`."""
        asked = turn.messages
        if at + len(asked) > len(messages):
            return False
        for i, mine in enumerate(asked, at):
            theirs = messages[i]
            if mine.role != theirs.role:
                return False
            if mine.role == "assistant":
                if self._difference(mine, theirs) is not None:
                    return False
            elif mine.content != theirs.content:
                return False
        return True

    def _echoes(self, turn: Turn, echoed: Message) -> bool:
        reply = turn.reply
        if (
            reply.content == echoed.content
            and reply.tool_calls == echoed.tool_calls
            and echoed.reasoning in (None, reply.reasoning)
        ):
            return True
        key = hash((echoed.content, echoed.reasoning, *((c.id, c.name, c.arguments) for c in echoed.tool_calls)))
        if turn.echo == key:
            return True
        if self._difference(reply, echoed) is not None:
            return False
        turn.echo = key
        return True


def _same_ids(reply: Message, echoed: Message) -> int:
    if not reply.tool_calls:
        return 0
    return sum(a.id == b.id for a, b in zip(reply.tool_calls, echoed.tool_calls, strict=False))

"""Which branch a request goes on from, and the exact ids of its prompt."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from gyre.gateway.dialect import Hint
from gyre.gateway.kinds import Kinds, Opening, Verdict, system_of
from gyre.gateway.messages import Message, Request
from gyre.gateway.nodes import Ids, Node
from gyre.gateway.policy import Policy
from gyre.gateway.tree import Match, Tree, Turn

NOTHING = Hint()
LONG_TEXT = 100_000
"""Characters of a conversation above which it is rendered in a thread: the event loop would stand still meanwhile."""


class LongOpening(Exception):
    """A plan needs `Policy.opening` of a long conversation."""


EMPTY: Ids = np.empty(0, np.int32)


@dataclass(frozen=True, slots=True)
class Plan:
    """How a request joins its rollout's tree."""

    turn: Turn | None
    """The turn that it goes on from; None for a new root."""
    messages: tuple[Message, ...]
    """Its messages after that turn's reply."""
    anchor: Turn | None
    """The turn whose ids the prompt keeps, the answer included; None where it shares none or only a part."""
    new_ids: Ids
    """The prompt's ids after the anchor's; empty where `twin` has the same prompt."""
    twin: Turn | None
    """An earlier, equal request."""
    fork_reason: str | None
    tokenised: int
    """Tokens that were made from text for this call."""
    base: int
    """Messages that the turn's conversation holds already."""
    agent: str = ""
    verdict: Verdict = field(default_factory=lambda: Verdict("main"))

    @property
    def kind(self) -> str:
        """Kind of the branch."""
        return self.verdict.kind

    @property
    def prompt_length(self) -> int:
        """Tokens of the whole prompt."""
        if self.twin is not None:
            return self.twin.prompt.end
        return (0 if self.anchor is None else self.anchor.generated.end) + len(self.new_ids)

    def prompt_ids(self) -> Ids:
        """The whole prompt, int32[prompt_length]."""
        if self.twin is not None:
            return self.twin.prompt.tokens()
        return self.new_ids if self.anchor is None else np.concatenate([self.anchor.generated.tokens(), self.new_ids])


async def plan_aside(
    tree: Callable[[], Tree], policy: Policy, request: Request, hint: Hint, kinds: Callable[[], Kinds]
) -> Plan:
    """`plan`, with a long conversation rendered in a thread. Nothing else runs between its end and the caller."""
    try:
        return plan(tree(), policy, request, hint, kinds(), long_text=LONG_TEXT)
    except LongOpening:
        opening = await asyncio.to_thread(policy.opening, request.messages, request.tools)
    return plan(tree(), policy, request, hint, kinds(), opening=opening)


def plan(
    tree: Tree, policy: Policy, request: Request, hint: Hint = NOTHING, kinds: Kinds | None = None, *,
    opening: Sequence[int] | None = None, long_text: int | None = None,
) -> Plan:  # fmt: skip
    """Match `request` against `tree` and tokenise what is new. Changes nothing.

    `opening` is the whole prompt, where the caller has it. Raises GatewayError where the policy's template refuses the
    messages, LongOpening where the whole prompt is needed and its text has more than `long_text` characters.
    """
    tools_key = request.tools_key
    match = tree.match(request.messages, tools_key, hint.agent)
    reason = tree.fork_reason(match, request.messages, tools_key, hint.agent)
    rest = request.messages[match.position :]
    verdict = _verdict(tree, match, request, hint, kinds or Kinds())

    def made(anchor: Turn | None, ids: Ids, why: str | None, tokenised: int, twin: Turn | None = None) -> Plan:
        return Plan(match.turn, rest, anchor, ids, twin, why, tokenised, match.position, hint.agent, verdict)

    if reason == "resample":
        twin = tree.twin(match, request.messages, tools_key, hint.agent)
        if twin is not None:
            return made(None, EMPTY, reason, 0, twin)

    def whole() -> Ids:
        if opening is not None:
            return _array(opening)
        if long_text is not None and sum(len(m.content) for m in request.messages) > long_text:
            raise LongOpening
        return _array(policy.opening(request.messages, request.tools))

    if match.turn is None:
        ids = whole()
        return made(None, ids, reason, len(ids))
    new = _extend(policy, match.turn, rest, request.tools)
    if new is not None:
        return made(match.turn, _array(new), reason, len(new))
    ids = whole()
    anchor = _repeated(match.turn, ids)
    after = ids if anchor is None else ids[anchor.generated.end :].copy()
    why = reason or ("thinking_dropped" if match.turn.thinking else "bridge_refused")
    return made(anchor, after, why, len(ids))


def prompt_thinking(turn: Turn | None, messages: Sequence[Message], prompt: Node) -> bool:
    """Whether a prompt's branch holds reasoning, from its place in the tree: an extension has its turn's."""
    if turn is not None and prompt.follows() is turn.generated:
        return turn.thinking or any(m.reasoning for m in messages)
    last_user = max((i for i, m in enumerate(messages) if m.role == "user"), default=-1)
    return any(m.reasoning for m in messages[last_user + 1 :])  # rendered whole: the template keeps only the newest


def opening_of(call_id: int, planned: Plan, request: Request) -> Opening:
    """What is remembered of a call that begins a conversation."""
    system, tools = system_of(request.messages), bool(request.tools)
    return Opening(call_id, planned.kind, planned.agent, system, tools, planned.verdict.told)


def _extend(policy: Policy, turn: Turn, rest: Sequence[Message], tools: Sequence[dict[str, Any]]) -> list[int] | None:
    """Ids after the turn's completion; None where the prompt must be rendered as a whole.

    Assistant turns in `rest` were not sampled here (an edited or copied history): they are rendered as plain prompt.
    """
    tail, completion = policy.tail_of(turn.prompt), turn.generated.ids.tolist()
    thinking = turn.thinking
    ids: list[int] = []
    at = 0
    while True:
        end = next((i for i in range(at, len(rest)) if rest[i].role == "assistant"), len(rest))
        # An assistant turn right after another one, or at the end of the request: the policy speaks again.
        new = (
            policy.extension(tail, completion, rest[at:end], tools, thinking) if at < end else policy.again(completion)
        )
        if new is None:
            return None
        ids += new
        if end == len(rest):
            return ids
        completion = policy.foreign(rest[end], tools)
        ids += completion
        thinking = thinking or rest[end].reasoning is not None
        tail = policy.tail(new)
        at = end + 1


def _repeated(turn: Turn, ids: Ids) -> Turn | None:
    """The deepest turn of a branch that a prompt rendered as a whole repeats id for id, its answer included."""
    line: dict[Node, Turn] = {}
    at: Turn | None = turn
    while at is not None:
        line[at.generated] = at
        at = at.parent
    deepest: Turn | None = None
    for node in turn.generated.path():
        # Strictly shorter: a prompt holds at least one token.
        if node.end >= len(ids) or not np.array_equal(ids[node.start : node.end], node.ids):
            break
        deepest = line.get(node, deepest)
    return deepest


def _verdict(tree: Tree, match: Match, request: Request, hint: Hint, kinds: Kinds) -> Verdict:
    found = kinds.opening(request, hint.agent, tree) if match.turn is None else kinds.extension(match.turn, hint.agent)
    if hint.kind is None:
        return found
    return Verdict(hint.kind, told=True, changes=found.changes if found.kind == hint.kind else {})


def _array(ids: Sequence[int]) -> Ids:
    return np.asarray(ids, np.int32)

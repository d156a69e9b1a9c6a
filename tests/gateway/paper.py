"""A rollout on paper: planned, placed and added to its tree as the gateway does, with given answers and no engine."""

from __future__ import annotations

from gyre.gateway.conversation import NOTHING, Plan, opening_of, plan, prompt_thinking
from gyre.gateway.dialect import PLAIN, Dialect, Hint
from gyre.gateway.kinds import Kinds
from gyre.gateway.messages import Message, Request
from gyre.gateway.placing import Sampled, place
from gyre.gateway.policy import Policy
from gyre.gateway.tree import Tree, Turn
from tests.gateway.conftest import BASH
from tests.gateway.markov import tokenizer

MADE = tokenizer()
CALL = '<tool_call>\n{"name": "bash", "arguments": {"command": "ls "}}\n</tool_call>'


class Paper:
    """One rollout."""

    def __init__(self, policy: Policy, dialect: Dialect = PLAIN) -> None:
        self.policy, self.tree, self.kinds, self.count = policy, Tree(dialect.difference), Kinds(), 0
        self.changed: dict[int, str] = {}

    def plan(self, messages: list[Message], tools: bool = True, hint: Hint = NOTHING) -> Plan:
        return plan(self.tree, self.policy, request(messages, tools), hint, self.kinds)

    def call(
        self, messages: list[Message], answer: str | list[int] = "done<|im_end|>", tools: bool = True,
        hint: Hint = NOTHING,
    ) -> Turn:  # fmt: skip
        call_id, planned = self.begin(messages, tools, hint)
        return self.end(call_id, planned, request(messages, tools), answer)

    def begin(self, messages: list[Message], tools: bool = True, hint: Hint = NOTHING) -> tuple[int, Plan]:
        """A call arrives, and runs."""
        asked = request(messages, tools)
        planned, call_id = self.plan(messages, tools, hint), self._next()
        if planned.turn is None:
            self.kinds.add(opening_of(call_id, planned, asked))
        return call_id, planned

    def end(self, call_id: int, planned: Plan, asked: Request, answer: str | list[int]) -> Turn:
        """It is answered."""
        ids = MADE.encode(answer, add_special_tokens=False).ids if isinstance(answer, str) else answer
        sampled = Sampled(ids, [0.0] * len(ids), [[0, 0, len(ids)]])
        placing = place(self.tree, planned, sampled, [self._next(), self._next(), self._next()], {})
        prompt, generated = placing.apply(complete=True)
        assert generated is not None
        assert prompt.tokens().tolist() == planned.prompt_ids().tolist()
        kind = self.changed.get(call_id, planned.kind)
        changes = self.kinds.concluded(call_id, kind, planned.verdict, planned.turn, self.tree)
        self.kinds.change(changes)
        self.changed |= changes
        for changed, other in changes.items():
            if changed in self.tree.by_call:
                self.tree.by_call[changed].kind = other
        turn = Turn(
            call_id=call_id, seq=call_id, parent=planned.turn, messages=planned.messages,
            reply=self.policy.reply(planned.prompt_ids(), ids, asked.tools, True), tools_key=asked.tools_key,
            prompt=prompt, generated=generated,
            prompt_thinking=prompt_thinking(planned.turn, planned.messages, prompt),
            kind=kind, cell=None,
            request_hash="", finish_reason="stop", new_tokens=planned.tokenised, cached_tokens=0, created=0,
            agent=planned.agent, told=planned.verdict.told,
        )  # fmt: skip
        self.tree.add(turn)
        return turn

    def kind_of(self, call_id: int) -> str:
        """The kind of a finished call, as it is now."""
        return self.tree.by_call[call_id].kind

    def _next(self) -> int:
        self.count += 1
        return self.count


def request(messages: list[Message], tools: bool) -> Request:
    return Request("openai-chat", tuple(messages), (BASH,) if tools else (), True, (), None, False, False, {})


def user(text: str) -> Message:
    return Message("user", text)


def result(text: str) -> Message:
    return Message("tool", text, tool_call_id="x")


def ids(text: str) -> list[int]:
    return list(MADE.encode(text, add_special_tokens=False).ids)


SYSTEM = Message("system", "sys")

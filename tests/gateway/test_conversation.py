"""Matching, exact ids and fork reasons, without an engine: random conversations, random edits of them."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gyre.config import PolicyConfig
from gyre.gateway.conversation import Plan, plan, prompt_thinking
from gyre.gateway.messages import Message, Request, ToolCall
from gyre.gateway.policy import Policy
from gyre.gateway.tree import Node, Tree, Turn
from tests.gateway.conftest import BASH
from tests.gateway.markov import tokenizer, write_policy

MADE = tokenizer()
CALL = '<tool_call>\n{"name": "bash", "arguments": {"command": "ls "}}\n</tool_call>'


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Policy:
    return Policy(PolicyConfig(path=write_policy(tmp_path_factory.mktemp("policy")), context=100_000))


class Rollout:
    """A tree, and calls that are answered with given ids."""

    def __init__(self, policy: Policy) -> None:
        self.policy, self.tree, self.count = policy, Tree(), 0

    def plan(self, messages: list[Message], tools: bool = True) -> Plan:
        return plan(self.tree, self.policy, request(messages, tools))

    def call(self, messages: list[Message], answer: str | list[int] = "done<|im_end|>", tools: bool = True) -> Turn:
        asked = request(messages, tools)
        planned = plan(self.tree, self.policy, asked)
        ids = MADE.encode(answer, add_special_tokens=False).ids if isinstance(answer, str) else answer
        prompt = planned.prompt
        if prompt is None:
            start = 0 if planned.parent is None else planned.parent.end
            prompt = Node(self._next(), planned.parent, start, planned.new_ids)
        generated = Node(self._next(), prompt, prompt.end, np.asarray(ids, np.int32))
        turn = Turn(
            call_id=self._next(), seq=self.count, parent=planned.turn, messages=planned.messages,
            reply=self.policy.reply(planned.prompt_ids(), ids, asked.tools, True), tools_key=asked.tools_key,
            prompt=prompt, generated=generated,
            prompt_thinking=prompt_thinking(planned.turn, planned.messages, prompt), kind=planned.kind, cell=None,
            request_hash="", finish_reason="stop", new_tokens=len(planned.new_ids), cached_tokens=0, created=0,
        )  # fmt: skip
        self.tree.add(turn)
        return turn

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


def test_an_extension_keeps_every_id_and_equals_the_template(policy: Policy) -> None:
    rollout = Rollout(policy)
    history = [SYSTEM, user("a")]
    for step in range(4):
        turn = rollout.call(history, CALL + "<|im_end|>")
        history += [turn.reply, result(f"r{step}"), result("second")]
        planned = rollout.plan(history)
        assert planned.fork_reason is None
        assert planned.parent is turn.generated
        assert planned.prompt_ids().tolist() == policy.opening(history, [BASH])


def test_ids_that_text_would_not_give_again_are_kept(policy: Policy) -> None:
    """Case 1: two tokens whose text encodes to one other token stay two tokens."""
    rollout = Rollout(policy)
    odd = [*ids("d"), *ids("one"), *ids("<|im_end|>")]
    assert ids(MADE.decode(odd[:-1])) != odd[:-1]
    turn = rollout.call([user("a")], odd)
    planned = rollout.plan([user("a"), turn.reply, user("b")])
    assert planned.fork_reason is None
    assert planned.prompt_ids().tolist()[: turn.generated.end] == turn.generated.tokens().tolist()


@pytest.mark.parametrize("answer", ["done", CALL[:-20], "", "<tool_call>", "<|im_end|>"])
def test_a_truncated_answer_gets_a_close_that_is_prompt(policy: Policy, answer: str) -> None:
    rollout = Rollout(policy)
    turn = rollout.call([user("a")], answer or "x")
    planned = rollout.plan([user("a"), turn.reply, user("b")])
    assert planned.fork_reason is None
    text = MADE.decode(planned.new_ids.tolist(), skip_special_tokens=False)
    close = "" if answer.endswith("<|im_end|>") else "<|im_end|>"
    assert text == close + "\n<|im_start|>user\nb<|im_end|>\n<|im_start|>assistant\n"


def test_old_thinking_is_dropped_by_the_template_in_one_counted_fork(policy: Policy) -> None:
    """Case 2: within a tool cycle thinking stays, at the next user turn the stock template drops it."""
    rollout = Rollout(policy)
    first = rollout.call([user("a")], "<think>\nhm\n</think>\n\n" + CALL + "<|im_end|>")
    assert first.reply.reasoning == "hm"
    history = [user("a"), first.reply, result("r")]
    second = rollout.call(history, "<think>\nso\n</think>\n\ndone<|im_end|>")
    assert second.parent is first
    assert second.prompt.parent is first.generated
    history += [second.reply, user("b")]
    planned = rollout.plan(history)
    assert planned.fork_reason == "thinking_dropped"
    assert planned.turn is second
    assert planned.prompt_ids().tolist() == policy.opening(history, [BASH])
    assert planned.parent is first.prompt, "what the template keeps is shared"
    third = rollout.call(history, "done<|im_end|>")
    assert rollout.plan([*history, third.reply, user("c")]).fork_reason is None
    assert first.generated.tokens().tolist()[-1] == ids("<|im_end|>")[0]


def test_thinking_that_never_closes(policy: Policy) -> None:
    rollout = Rollout(policy)
    turn = rollout.call([user("a")], "<think>\nhm hm")
    assert turn.reply.reasoning == "hm hm" or turn.reply.content == ""
    planned = rollout.plan([user("a"), turn.reply, user("b")])
    assert planned.fork_reason == "thinking_dropped"


def test_reasons_of_forks(policy: Policy) -> None:
    rollout = Rollout(policy)
    assert rollout.plan([SYSTEM, user("a")]).fork_reason == "root"
    one = rollout.call([SYSTEM, user("a")], CALL + "<|im_end|>")
    base = [SYSTEM, user("a")]
    assert rollout.plan(base).fork_reason == "resample"
    assert rollout.plan(base).prompt is one.prompt
    assert rollout.plan(base, tools=False).fork_reason == "tools_changed"
    assert rollout.plan(base, tools=False).kind == "auxiliary"
    assert rollout.plan([replace(SYSTEM, content="other"), user("a")]).fork_reason == "system_changed"
    assert rollout.plan([replace(SYSTEM, content="other"), user("a")]).kind == "sub-agent"
    assert rollout.plan([SYSTEM, user("z")]).fork_reason == "new_root"
    assert rollout.plan([SYSTEM, user("z")]).kind == "main"
    assert rollout.plan([*base, user("bad format")]).fork_reason == "turn_dropped"
    edited = replace(one.reply, content="I say")
    assert rollout.plan([*base, edited, result("r")]).fork_reason == "content_edited"
    renamed = replace(one.reply, tool_calls=(ToolCall("x", "bash", '{"command": "rm"}'),))
    assert rollout.plan([*base, renamed, result("r")]).fork_reason == "arguments_edited"
    assert rollout.plan([*base, replace(one.reply, tool_calls=()), user("r")]).fork_reason == "tool_calls_edited"
    two = rollout.call([*base, one.reply, result("r")], "done<|im_end|>")
    assert two.parent is one
    sibling = rollout.plan([*base, one.reply, result("other")])
    assert (sibling.fork_reason, sibling.parent) == ("sibling", one.generated)
    rewritten = [*base, one.reply, result("other"), Message("assistant", "made up"), user("c")]
    forked = rollout.plan(rewritten)
    assert (forked.fork_reason, forked.parent) == ("history_edited", one.generated)
    assert forked.prompt_ids().tolist() == policy.opening(rewritten, [BASH])


def test_two_lineages_that_interleave(policy: Policy) -> None:
    """Case 6: sub-agents under one key stay apart."""
    rollout = Rollout(policy)
    histories = [[replace(SYSTEM, content=f"agent {i}"), user("go")] for i in range(2)]
    for step in range(3):
        for i, history in enumerate(histories):
            turn = rollout.call(history, f"done{'done' * i}<|im_end|>")
            histories[i] = [*history, turn.reply, user(f"more {step}")]
    assert len(rollout.tree.roots) == 2
    for root in rollout.tree.roots:
        turn, depth = root, 1
        while turn.children:
            [turn] = turn.children
            depth += 1
        assert depth == 3


def test_prefix_cache_is_one_root_whatever_the_billing_header(policy: Policy) -> None:
    """Case 4, at the level of ids: see test_messages for the text."""
    rollout = Rollout(policy)
    rollout.call([SYSTEM, user("a")])
    assert rollout.plan([SYSTEM, user("a")]).fork_reason == "resample"


# An engine stops at a stop token, so that one is the last or there is none.
STOPS = ids("<|endoftext|><|im_end|>")
TOKENS = st.builds(
    lambda body, stop: [*[t for t in body if t not in STOPS], *stop] or [STOPS[1]],
    st.lists(st.integers(0, MADE.get_vocab_size() - 1), max_size=40),
    st.sampled_from([[], STOPS[:1], STOPS[1:]]),
)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.tuples(TOKENS, st.integers(0, 6), st.integers(0, 2**32)), min_size=1, max_size=8))
def test_random_answers_and_edits_never_change_an_id(policy: Policy, steps: list[tuple[list[int], int, int]]) -> None:
    """Any sampled ids, any edit of the history: no crash, no stored id changes, and each prompt's path is whole."""
    rollout = Rollout(policy)
    history: list[Message] = [SYSTEM, user("a")]
    stored: dict[int, list[int]] = {}
    for sampled, edit, seed in steps:
        turn = rollout.call(history, sampled)
        path = turn.generated.path()
        assert [n.start for n in path] == [sum(len(m.ids) for m in path[:i]) for i in range(len(path))]
        assert turn.generated.ids.tolist() == sampled
        for node in path:
            assert stored.setdefault(node.id, node.ids.tolist()) == node.ids.tolist()
        assert MADE.decode(turn.prompt.tokens().tolist(), skip_special_tokens=False).endswith("assistant\n")
        history = [*history, turn.reply, user(f"next {seed}") if seed % 2 else result(f"out {seed}")]
        rng = random.Random(seed)
        at = rng.randrange(len(history) - 1)
        if edit == 1:
            history[at] = replace(history[at], content=history[at].content + "!")
        elif edit == 2 and len(history) > 3:
            del history[at]
        elif edit == 3:
            history = [SYSTEM, user("summary"), *history[-1:]]
        elif edit == 4:
            history.insert(at + 1, user("inserted"))
        elif edit == 5:
            history.insert(at + 1, Message("assistant", "copied", None, (ToolCall("1", "bash", "{broken"),)))
        elif edit == 6:
            history[at] = replace(history[at], reasoning=None, tool_calls=())
        if edit == 0 and "</think>" not in turn.reply.content:
            planned = rollout.plan(history)
            if not turn.thinking:
                assert planned.fork_reason is None
                assert planned.parent is turn.generated


@pytest.mark.parametrize(
    "text",
    [
        '<tool_call>\n{"name": "bash", "arguments": {"command": "ls',
        "<tool_call>\n{not json}\n</tool_call>",
        '<tool_call>{"name": 5, "arguments": {}}</tool_call>',
        '<tool_call>{"arguments": {}}</tool_call>',
        '<tool_call>{"name": "bash", "arguments": NaN}</tool_call>',
        '<tool_call>{"name": "bash", "arguments": {"command": "\\ud800"}}</tool_call>',
        "<tool_call>[]</tool_call>",
        "<tool_call>" + "[" * 5000 + "</tool_call>",
        "<tool_call>" + "9" * 5000 + "</tool_call>",
        "<tool_call></tool_call>",
        "</tool_call>",
        "<tool_call><tool_call></tool_call></tool_call>",
        "<tool_call>\n<function=bash>\n<parameter=command>ls",
    ],
)
def test_ill_formed_calls_go_out_as_text(policy: Policy, text: str) -> None:
    """Case 3: no crash, the raw text is in the content, and it extends."""
    rollout = Rollout(policy)
    turn = rollout.call([user("a")], text + "<|im_end|>")
    assert not turn.reply.tool_calls
    assert turn.reply.content.replace("\n", "") == text.replace("\n", "")
    turn.reply.content.encode()
    assert rollout.plan([user("a"), turn.reply, user("b")]).fork_reason is None


def test_good_calls_beside_a_bad_one(policy: Policy) -> None:
    reply = policy.reply(
        np.asarray(ids("<|im_start|>assistant\n"), np.int32), ids(f"done{CALL}<tool_call>oops"), [BASH], True
    )
    assert [c.arguments for c in reply.tool_calls] == ['{"command": "ls "}']
    assert reply.content == "done\n<tool_call>oops"


def test_calls_are_text_where_no_tools_were_offered(policy: Policy) -> None:
    reply = policy.reply(np.asarray(ids("<|im_start|>assistant\n"), np.int32), ids(CALL + "<|im_end|>"), [], False)
    assert reply.content == CALL
    assert not reply.tool_calls


def test_stop_strings_keep_the_tokens_that_spell_them(policy: Policy) -> None:
    keep = policy.stopped(["END", "one"])
    assert keep is not None
    assert keep(ids("hello wor")) is None
    assert keep(ids("hello END and one")) == len("hello END")
    assert policy.reply(np.empty(0, np.int32), ids("hello END"), [], False, ["END"]).content == "hello"


def test_a_policy_without_tokenizer(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"policy\.path: no tokenizer\.json"):
        Policy(PolicyConfig(path=tmp_path))

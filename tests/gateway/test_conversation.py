"""Matching, exact ids and fork reasons, without an engine: random conversations, random edits of them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from gyre.config import PolicyConfig
from gyre.gateway.messages import Message, ToolCall
from gyre.gateway.policy import Policy
from tests.gateway.conftest import BASH
from tests.gateway.paper import CALL, MADE, SYSTEM, Paper, ids, result, user


def test_an_extension_keeps_every_id_and_equals_the_template(policy: Policy) -> None:
    rollout = Paper(policy)
    history = [SYSTEM, user("a")]
    for step in range(4):
        turn = rollout.call(history, CALL + "<|im_end|>")
        history += [turn.reply, result(f"r{step}"), result("second")]
        planned = rollout.plan(history)
        assert planned.fork_reason is None
        assert planned.anchor is turn
        assert planned.prompt_ids().tolist() == policy.opening(history, [BASH])


def test_ids_that_text_would_not_give_again_are_kept(policy: Policy) -> None:
    """Case 1: two tokens whose text encodes to one other token stay two tokens."""
    rollout = Paper(policy)
    odd = [*ids("d"), *ids("one"), *ids("<|im_end|>")]
    assert ids(MADE.decode(odd[:-1])) != odd[:-1]
    turn = rollout.call([user("a")], odd)
    planned = rollout.plan([user("a"), turn.reply, user("b")])
    assert planned.fork_reason is None
    assert planned.prompt_ids().tolist()[: turn.generated.end] == turn.generated.tokens().tolist()


@pytest.mark.parametrize("answer", ["done", CALL[:-20], "", "<tool_call>", "<|im_end|>"])
def test_a_truncated_answer_gets_a_close_that_is_prompt(policy: Policy, answer: str) -> None:
    rollout = Paper(policy)
    turn = rollout.call([user("a")], answer or "x")
    planned = rollout.plan([user("a"), turn.reply, user("b")])
    assert planned.fork_reason is None
    text = MADE.decode(planned.new_ids.tolist(), skip_special_tokens=False)
    close = "" if answer.endswith("<|im_end|>") else "<|im_end|>"
    assert text == close + "\n<|im_start|>user\nb<|im_end|>\n<|im_start|>assistant\n"


def test_old_thinking_is_dropped_by_the_template_in_one_counted_fork(policy: Policy) -> None:
    """Case 2: within a tool cycle thinking stays, at the next user turn the stock template drops it."""
    rollout = Paper(policy)
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
    before = first.prompt.tokens().tolist()
    third = rollout.call(history, "done<|im_end|>")
    head = third.prompt.path()[0]
    assert head is first.prompt.path()[0], "what the template keeps is shared"
    assert head.tokens().tolist() == before[: head.end]
    assert rollout.plan([*history, third.reply, user("c")]).fork_reason is None
    assert first.generated.tokens().tolist()[-1] == ids("<|im_end|>")[0]


def test_thinking_that_never_closes(policy: Policy) -> None:
    rollout = Paper(policy)
    turn = rollout.call([user("a")], "<think>\nhm hm")
    assert turn.reply.reasoning == "hm hm" or turn.reply.content == ""
    planned = rollout.plan([user("a"), turn.reply, user("b")])
    assert planned.fork_reason == "thinking_dropped"


def test_reasons_of_forks(policy: Policy) -> None:
    rollout = Paper(policy)
    assert rollout.plan([SYSTEM, user("a")]).fork_reason == "root"
    one = rollout.call([SYSTEM, user("a")], CALL + "<|im_end|>")
    base = [SYSTEM, user("a")]
    assert rollout.plan(base).fork_reason == "resample"
    assert rollout.plan(base).twin is one
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
    assert (sibling.fork_reason, sibling.anchor) == ("sibling", one)
    rewritten = [*base, one.reply, result("other"), Message("assistant", "made up"), user("c")]
    forked = rollout.plan(rewritten)
    assert (forked.fork_reason, forked.anchor) == ("history_edited", one)
    assert forked.prompt_ids().tolist() == policy.opening(rewritten, [BASH])


def test_two_lineages_that_interleave(policy: Policy) -> None:
    """Case 6: sub-agents under one key stay apart."""
    rollout = Paper(policy)
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
    rollout = Paper(policy)
    rollout.call([SYSTEM, user("a")])
    assert rollout.plan([SYSTEM, user("a")]).fork_reason == "resample"


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
    rollout = Paper(policy)
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


@pytest.mark.parametrize("step", [1, 7, 100])
def test_a_stop_string_is_found_wherever_a_chunk_ends(policy: Policy, step: int) -> None:
    whole = ids("é" * 300 + "the END of it")
    keep = policy.stopped(["END", "nowhere"])
    assert keep is not None
    found = next(n for end in range(step, len(whole) + step, step) if (n := keep(whole[:end])) is not None)
    assert policy.text(whole[:found]).endswith("END")


def test_a_policy_without_tokenizer(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"policy\.path: no tokenizer\.json"):
        Policy(PolicyConfig(path=tmp_path))

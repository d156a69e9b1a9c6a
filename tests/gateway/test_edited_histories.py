"""Any answers, any edits of the history: nothing crashes, no stored id changes, each prompt says what was asked."""

from __future__ import annotations

import contextlib
import json
import random
from collections.abc import Callable
from dataclasses import replace

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gyre.gateway.conversation import Plan
from gyre.gateway.dialect import Hint
from gyre.gateway.messages import Message, ToolCall
from gyre.gateway.nodes import Node
from gyre.gateway.policy import Policy
from tests.gateway.conftest import BASH
from tests.gateway.paper import CALL, MADE, SYSTEM, Paper, ids, result, user

# An engine stops at a stop token, so that one is the last or there is none.
STOPS = ids("<|endoftext|><|im_end|>")
ANSWERS = st.one_of(
    st.builds(
        lambda body, stop: [*[t for t in body if t not in STOPS], *stop] or [STOPS[1]],
        st.lists(st.integers(0, MADE.get_vocab_size() - 1), max_size=40),
        st.sampled_from([[], STOPS[:1], STOPS[1:]]),
    ),
    st.sampled_from(
        [CALL, CALL + CALL, "done", "<think>\nhm\n</think>\n\n" + CALL, "<think>\nso\n</think>\n\ndone"]
    ).map(lambda text: ids(text + "<|im_end|>")),
)

Edit = Callable[[list[Message], int, random.Random], list[Message]]


def arguments(message: Message, change: Callable[[str], str]) -> Message:
    calls = tuple(replace(c, arguments=change(c.arguments)) for c in message.tool_calls)
    return replace(message, tool_calls=calls)


def reordered(text: str) -> str:
    try:
        value = json.loads(text)
    except ValueError:
        return text
    return json.dumps(dict(reversed(value.items())) if isinstance(value, dict) else value, indent=2)


EDITS: dict[str, Edit] = {
    "nothing": lambda h, at, rng: h,
    "drop": lambda h, at, rng: h[:at] + h[at + 1 :] if len(h) > 2 else h,
    "swap": lambda h, at, rng: [*h[:at], *reversed(h[at : at + 2]), *h[at + 2 :]],
    "edit": lambda h, at, rng: [*h[:at], replace(h[at], content=h[at].content + "!"), *h[at + 1 :]],
    "trim": lambda h, at, rng: [*h[:at], replace(h[at], content=h[at].content.strip()), *h[at + 1 :]],
    "pad": lambda h, at, rng: [*h[:at], replace(h[at], content=f" {h[at].content}\n"), *h[at + 1 :]],
    "insert": lambda h, at, rng: [*h[: at + 1], user("inserted"), *h[at + 1 :]],
    "late system": lambda h, at, rng: [*h[: at + 1], Message("system", "a reminder"), *h[at + 1 :]],
    "copied answer": lambda h, at, rng: [
        *h[: at + 1], Message("assistant", "copied", None, (ToolCall("1", "bash", "{broken"),)), *h[at + 1 :]
    ],
    "duplicate": lambda h, at, rng: [*h[: at + 1], *h[at:]],
    "reordered keys": lambda h, at, rng: [arguments(m, reordered) for m in h],
    "other arguments": lambda h, at, rng: [*h[:at], arguments(h[at], lambda _: '{"command": "x"}'), *h[at + 1 :]],
    "other ids": lambda h, at, rng: [
        replace(m, tool_calls=tuple(replace(c, id=f"new{rng.random()}") for c in m.tool_calls)) for m in h
    ],
    "thinking left out": lambda h, at, rng: [replace(m, reasoning=None) for m in h],
    "calls left out": lambda h, at, rng: [*h[:at], replace(h[at], tool_calls=()), *h[at + 1 :]],
    "cut short": lambda h, at, rng: h[: at + 1],
    "compacted": lambda h, at, rng: [SYSTEM, user("So far: much."), *h[-2:]],
    "ends on an answer": lambda h, at, rng: [*h, Message("assistant", "I begin")],
}  # fmt: skip

STEPS = st.lists(
    st.tuples(ANSWERS, st.sampled_from(sorted(EDITS)), st.integers(0, 2**32), st.sampled_from(["", "", "a", "b"])),
    min_size=1, max_size=8,
)  # fmt: skip


@settings(
    max_examples=120, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)
@given(STEPS)
def test_random_edits(policy: Policy, steps: list[tuple[list[int], str, int, str]]) -> None:
    paper = Paper(policy)
    history: list[Message] = [SYSTEM, user("a")]
    paths: dict[int, list[int]] = {}
    for sampled, edit, seed, agent in steps:
        tools = seed % 5 > 0
        planned = paper.plan(history, tools, Hint(agent=agent))
        check_text(policy, planned, history, tools)
        turn = paper.call(history, sampled, tools, Hint(agent=agent))
        assert turn.generated.ids.tolist() == sampled
        paths[turn.call_id] = [*planned.prompt_ids().tolist(), *sampled]
        for known in paper.tree.by_call.values():
            assert known.generated.tokens().tolist() == paths[known.call_id], "a path never changes"
        check_nodes(paper)
        said = turn.reply
        results = [replace(result(f"out {seed}"), tool_call_id=c.id) for c in said.tool_calls]
        extended = [*history, said, *(results or [user(f"next {seed}")])]
        if not turn.thinking and "think>" not in said.content:
            after = paper.plan(extended, tools, Hint(agent=agent))
            assert (after.fork_reason, after.anchor) == (None, turn), "what only goes on never forks"
        rng = random.Random(seed)
        history = EDITS[edit](extended, rng.randrange(len(extended)), rng)


def check_nodes(paper: Paper) -> None:
    """Spans fit together, answers are whole, and no two prompts begin alike for longer than a row is worth."""
    answers = {t.generated for t in paper.tree.by_call.values()}
    stack: list[Node] = list(paper.tree.nodes.roots)
    while stack:
        node = stack.pop()
        assert node.start == (0 if node.parent is None else node.parent.end)
        assert len(node.ids) > 0
        assert not node.generated or node in answers
        answers.discard(node)
        assert all(child.parent is node for child in node.children)
        prompts = [c.ids[:16].tolist() for c in node.children if not c.generated and len(c.ids) >= 16]
        assert len({tuple(p) for p in prompts}) == len(prompts)
        stack += node.children
    assert not answers


def check_text(policy: Policy, planned: Plan, messages: list[Message], tools: bool) -> None:
    """The prompt is the template's, or exactly the ids before with the new messages after them."""
    said = policy.text(planned.prompt_ids().tolist())
    if planned.twin is not None:
        assert planned.prompt_ids().tolist() == planned.twin.prompt.tokens().tolist()
        return
    if planned.anchor is None or planned.tokenised != len(planned.new_ids):
        assert said == policy.text(policy.opening(messages, [BASH] if tools else []))
        return
    before = planned.anchor.generated.tokens().tolist()
    assert planned.prompt_ids().tolist()[: len(before)] == before
    rest = planned.messages
    if any(m.role == "assistant" and (m.reasoning or "think>" in m.content) for m in rest):
        return  # where old thinking stays is the template's affair
    closed = before[-1] in STOPS
    new = policy.text(planned.new_ids.tolist())
    opened = "</think>" if not closed and new.startswith("</think>") else ""
    assert new == opened + ("" if closed else "<|im_end|>") + "\n" + chatml(list(rest)) + "<|im_start|>assistant\n"


def chatml(messages: list[Message]) -> str:
    """Qwen3's template for what follows a turn."""
    out = ""
    for i, message in enumerate(messages):
        if message.role == "tool":
            first = i == 0 or messages[i - 1].role != "tool"
            last = i + 1 == len(messages) or messages[i + 1].role != "tool"
            out += "<|im_start|>user" if first else ""
            out += f"\n<tool_response>\n{message.content}\n</tool_response>"
            out += "<|im_end|>\n" if last else ""
            continue
        text = message.content
        for call in message.tool_calls:
            value = call.arguments
            with contextlib.suppress(ValueError):
                value = json.dumps(json.loads(value), ensure_ascii=False)
            said = f'<tool_call>\n{{"name": "{call.name}", "arguments": {value}}}\n</tool_call>'
            text += ("\n" if text else "") + said
        out += f"<|im_start|>{message.role}\n{text}<|im_end|>\n"
    return out

"""A harness's conversation over the real engine: exact ids, exact log-probs, streaming and not, across a restart."""

from __future__ import annotations

import asyncio
import itertools
import json
from typing import Any

import numpy as np
import pytest

from gyre.config import RunConfig
from gyre.gateway import app as app_module
from gyre.store.tokens import unpack_ids, unpack_logprobs
from tests.gateway.conftest import BASH, Served, World
from tests.gateway.markov import TABLE, ids_of, logits_after, tokenizer

START = [{"role": "system", "content": "You are an agent."}, {"role": "user", "content": "List the files. ünï"}]


async def ask(world: World, messages: list[Any], *, stream: bool = False, member: int = 0, **more: Any) -> Any:
    """One call through the official client; the assistant message as a harness would echo it."""
    client = world.client(member)
    options = {"model": "policy", "messages": messages, "tools": [BASH], **more}
    if not stream:
        answer = await client.chat.completions.create(**options)
        return answer.choices[0].message.model_dump(exclude_none=True), answer.choices[0].finish_reason, answer.usage
    content, calls, finish, usage = "", {}, None, None
    events = await client.chat.completions.create(stream=True, stream_options={"include_usage": True}, **options)
    async for event in events:
        usage = event.usage or usage
        for choice in event.choices:
            content += choice.delta.content or ""
            for call in choice.delta.tool_calls or []:
                calls[call.index] = call.model_dump(exclude_none=True, exclude={"index"})
            finish = choice.finish_reason or finish
    message: dict[str, Any] = {"role": "assistant", "content": content or None}
    if calls:
        message["tool_calls"] = [calls[i] for i in sorted(calls)]
    return message, finish, usage


def results(message: dict[str, Any]) -> list[dict[str, Any]]:
    """What a harness says to an answer."""
    calls = message.get("tool_calls") or []
    if not calls:
        return [{"role": "user", "content": "Please call a tool."}]
    return [{"role": "tool", "tool_call_id": c["id"], "content": f"out of {c['function']['arguments']}"} for c in calls]


@pytest.mark.parametrize("stream", [False, True])
async def test_each_prompt_begins_with_the_ids_before(live: World, stream: bool) -> None:
    messages: list[Any] = list(START)
    for turn in range(5):
        if turn == 3:
            await live.restart()
        message, finish, usage = await ask(live, messages, stream=stream)
        assert finish == ("tool_calls" if message.get("tool_calls") else "stop")
        assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens
        messages += [message, *results(message)]
    calls = live.calls()
    assert [c.status for c in calls] == ["complete"] * 5
    assert [c.fork_reason for c in calls] == ["root", None, None, None, None]
    paths = [live.path(c.leaf_id) for c in calls]
    for before, after in itertools.pairwise(paths):
        assert after[: len(before)] == before
    assert live.calls()[1].cached_tokens > 0
    text = tokenizer().decode(paths[-1], skip_special_tokens=False)
    assert text.count("<|im_start|>assistant\n") == 5
    assert "ünï" in text
    for call in calls:
        leaf = live.node(call.leaf_id)
        ids = unpack_ids(leaf.token_ids).tolist()
        assert leaf.version_spans == [[3, 0, leaf.length]]
        assert ids[-1] == ids_of("<|im_end|>", tokenizer()), "the sampled stop token belongs to the generated span"
        assert call.prompt_tokens == leaf.start
        assert call.completion_tokens == leaf.length
        assert call.cells == ["c0"]
        assert call.started_at <= call.routed_at <= call.first_token_at <= call.ended_at


async def test_arguments_come_back_as_values_and_extend(live: World) -> None:
    message, _, _ = await ask(live, START)
    while not message.get("tool_calls"):
        message, _, _ = await ask(live, START)
    for call in message["tool_calls"]:
        call["function"]["arguments"] = json.dumps(json.loads(call["function"]["arguments"]), indent=4)
        call["id"] = "renamed"
    message["content"] = "  "
    await ask(live, [*START, message, *results(message)])
    assert live.calls()[-1].fork_reason is None
    assert live.calls()[-1].parent_call_id == live.calls()[-2].id


@pytest.mark.parametrize("temperature", [1.0, 2.0])
async def test_logprobs_are_of_the_distribution_sampled_from(live: World, temperature: float) -> None:
    """The rollout's temperature is used, whatever the harness asks; log-probs are of softmax(logits / temperature)."""
    live.rollout(temperature=temperature)
    await ask(live, START, temperature=0.1, max_tokens=40)
    leaf = live.node(live.calls()[-1].leaf_id)
    ids, got = unpack_ids(leaf.token_ids).tolist(), unpack_logprobs(leaf.logprobs or b"")
    made = tokenizer()
    table = {ids_of(t, made) for t in TABLE}
    last, checked = ids_of("\n", made), 0
    for token, logprob in zip(ids, got, strict=True):
        if last in table:
            scaled = logits_after(last) / temperature
            expected = scaled[token] - np.log(np.exp(scaled).sum())
            assert logprob == pytest.approx(expected, abs=1e-4)
            checked += 1
        last = token
    assert checked >= 1


async def test_a_truncated_call_is_text_and_the_conversation_goes_on(live: World) -> None:
    live.rollout(temperature=0.05)
    message, finish, usage = await ask(live, START, max_tokens=20)
    assert (finish, usage.completion_tokens) == ("length", 20)
    assert message["content"].startswith('<tool_call>\n{"name": "bash"')
    assert "tool_calls" not in message
    await ask(live, [*START, message, *results(message)], max_tokens=20)
    first, second = live.calls()
    assert second.fork_reason is None
    before, after = live.path(first.leaf_id), live.path(second.leaf_id)
    assert after[: len(before) + 1] == [*before, ids_of("<|im_end|>", tokenizer())]


async def test_stop_strings_end_the_answer(live: World) -> None:
    live.rollout(temperature=0.05)
    message, finish, usage = await ask(live, START, stop=["ls ls ls "])
    assert finish == "stop"
    assert message["content"].endswith('"command": "')
    assert usage.completion_tokens == 2 + 3
    leaf = live.node(live.calls()[0].leaf_id)
    assert leaf.length == 5
    assert leaf.version_spans == [[3, 0, 5]]


async def test_the_end_of_the_context_ends_the_answer(live: World) -> None:
    live.rollout(temperature=0.05)
    filler = [{"role": "user", "content": "x" * 1200}]
    _, finish, usage = await ask(live, [*START, *filler])
    assert finish == "length"
    assert usage.total_tokens == 2048


async def test_rollouts_cannot_reach_each_other(live: World) -> None:
    message, _, _ = await ask(live, START)
    history = [*START, message, *results(message)]
    await ask(live, history, member=1)
    [theirs] = live.calls(1)
    assert theirs.fork_reason == "root"
    assert theirs.parent_call_id is None
    assert live.path(theirs.leaf_id)[: theirs.prompt_tokens] != live.path(live.calls()[0].leaf_id)


async def test_an_edited_history_forks_once_and_keeps_what_was_sampled(live: World) -> None:
    message, _, _ = await ask(live, START)
    history = [*START, message, *results(message)]
    await ask(live, history)
    made_up = {"role": "assistant", "content": "something else"}
    await live.restart()
    await ask(live, [*history, made_up, {"role": "user", "content": "well?"}])
    first, second, third = live.calls()
    assert (second.fork_reason, third.parent_call_id) == (None, first.id)
    assert third.fork_reason in ("content_edited", "tool_calls_edited")
    sampled = live.path(first.leaf_id)
    assert live.path(third.leaf_id)[: len(sampled)] == sampled


async def test_truncated_sampling_has_the_logprobs_of_what_is_left(run: RunConfig, live: World) -> None:
    """top_p below 1: behaviour log-probs are those of the nucleus, renormalised."""
    sampling = run.sampling.model_copy(update={"top_p": 0.5})
    objective = run.objective.model_copy(update={"old": "trainer"})  # what a run file with a nucleus must say
    await live.served.stop()
    live.served = Served(run.model_copy(update={"sampling": sampling, "objective": objective}), live.database)
    await live.served.start()
    for member in range(3):
        await ask(live, START, member=member)
        leaf = live.node(live.calls(member)[0].leaf_id)
        ids, logprobs = unpack_ids(leaf.token_ids).tolist(), unpack_logprobs(leaf.logprobs or b"")
        made = tokenizer()
        # After "\n" one token holds 80 %, after "ls " one holds 73 %: alone in the nucleus, they are certain.
        assert ids[0] == ids_of("<tool_call>", made)
        assert logprobs[0] == pytest.approx(0.0, abs=1e-6)
        last = ids_of("\n", made)
        for token, logprob in zip(ids, logprobs, strict=True):
            if last == ids_of("cat ", made):  # two tokens of 50 % each
                assert logprob == pytest.approx(np.log(0.5), abs=1e-3) or logprob == pytest.approx(0, abs=1e-3)
            last = token


async def test_a_long_answer_streams_after_signs_of_life(live: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(app_module, "PING_S", 0.05)
    live.rollout(temperature=0.05)
    message, finish, usage = await ask(live, START, stream=True)
    assert (finish, usage.completion_tokens) == ("length", 400)
    assert message["content"].count("ls ") == 398


async def test_many_rollouts_at_once(live: World) -> None:
    """More calls than the cell admits: all are answered, none is recorded twice."""

    async def rollout(member: int) -> None:
        messages: list[Any] = list(START)
        for _ in range(3):
            message, _, _ = await ask(live, messages, member=member)
            messages += [message, *results(message)]

    live.cell("c0", known=True, max_running=2)
    await asyncio.gather(*(rollout(m) for m in range(4)))
    for member in range(4):
        assert [c.fork_reason for c in live.calls(member)] == ["root", None, None]
        assert {c.status for c in live.calls(member)} == {"complete"}

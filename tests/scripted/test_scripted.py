"""The scripted engine itself: exact under caching, chunked prefill, batches and resumed prompts."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer

from tests.clients import http_client
from tests.gateway.conftest import BASH
from tests.scripted.engine import ScriptedEngine
from tests.scripted.fixtures import MakeWorld
from tests.scripted.proof import prove
from tests.scripted.script import History, Policy, Vocabulary


@pytest.fixture(scope="module")
def tokenizer(scripted_policy: Any) -> Tokenizer:
    return Tokenizer.from_file(str(scripted_policy / "tokenizer.json"))


async def generate(engine: ScriptedEngine, ids: list[int], **sampling: Any) -> list[int]:
    parameters = {"max_new_tokens": 300, "stop_token_ids": [2], "no_stop_trim": True, "skip_special_tokens": False}
    body = {"input_ids": ids, "sampling_params": {**parameters, **sampling}}
    async with http_client() as http:
        answer = await http.post(f"{engine.url}/generate", json=body)
    out: list[int] = answer.json()["output_ids"]
    return out


def prompt(tokenizer: Tokenizer, *messages: tuple[str, str]) -> list[int]:
    text = "".join(f"<|im_start|>{role}\n{content}<|im_end|>\n" for role, content in messages)
    ids: list[int] = tokenizer.encode(text + "<|im_start|>assistant\n", add_special_tokens=False).ids
    return ids


async def test_long_prompts_in_a_batch(scripted_engine: ScriptedEngine, tokenizer: Tokenizer) -> None:
    """Prompts with a common beginning, longer than a chunk of prefill, at once: each follows its own script."""
    long = "A line of a file, and another one: x = [i for i in range(10)]\n" * 700
    markers = [scripted_engine.script([{"text": f"answer {i} " + "word " * i}]) for i in range(6)]
    prompts = [prompt(tokenizer, ("system", long), ("user", f"{m} {long}")) for m in markers]
    assert len(prompts[0]) > 20_000
    answers = await asyncio.gather(*(generate(scripted_engine, p) for p in prompts))
    said = [tokenizer.decode(a, skip_special_tokens=False) for a in answers]
    assert said == [f"(step 0) answer {i} {'word ' * i}".rstrip() + "<|im_end|>" for i in range(6)]
    again = await asyncio.gather(*(generate(scripted_engine, p) for p in prompts))
    assert again == answers


async def test_a_prompt_that_is_resumed(scripted_engine: ScriptedEngine, tokenizer: Tokenizer) -> None:
    marker = scripted_engine.script([{"think": "some thought", "text": "a text of several words"}])
    ids = prompt(tokenizer, ("user", marker))
    whole = await generate(scripted_engine, ids)
    for at in range(0, len(whole), 5):
        rest = await generate(scripted_engine, ids + whole[:at])
        planned = whole[at:]
        assert len(rest) == len(planned)
        told = tokenizer.decode(rest, skip_special_tokens=False).partition("</think>")[2]
        assert told == tokenizer.decode(planned, skip_special_tokens=False).partition("</think>")[2]


def test_answers_that_no_tokenizer_would_give(tokenizer: Tokenizer) -> None:
    vocabulary = Vocabulary(tokenizer)
    call = {"name": "bash", "arguments": {"command": "ls -la /some/folder"}}
    text = f"<think>\nHm ✓ é.\n</think>\n\nsome text\n<tool_call>\n{json.dumps(call)}\n</tool_call>"
    ids = vocabulary.scattered(text)
    assert ids != vocabulary.encode(text)
    assert tokenizer.decode(ids, skip_special_tokens=False) == text


@pytest.mark.parametrize(
    ("messages", "finished"),
    [
        ([("user", "SCRIPT@a go")], -1),
        ([("user", "SCRIPT@a go"), ("assistant", "x"), ("user", "y")], 0),
        ([("user", "SCRIPT@a go"), ("assistant", "(step 4) x"), ("user", "y"), ("assistant", "z"), ("user", "y")], 5),
        ([("user", "SCRIPT@a go"), ("user", "Work on SCRIPT@a (step 7) goes on.")], 7),
        ([("user", "Work on SCRIPT@a (step 7)."), ("assistant", "(step 7) copied"), ("user", "y")], 7),
        ([("user", "SCRIPT@a"), ("assistant", "(step 2)"), ("user", "<tool_response>\n(step 9)\n</tool_response>")], 2),
    ],
)
def test_the_step_is_found_from_the_history(
    tokenizer: Tokenizer, messages: list[tuple[str, str]], finished: int
) -> None:
    history = History.parse(np.asarray(prompt(tokenizer, *messages)), Vocabulary(tokenizer))
    assert history is not None and history.script == "a"
    assert history.finished("a") == finished


def test_values_are_found_in_what_tools_said(tokenizer: Tokenizer, tmp_path: Any) -> None:
    call = {"name": "wait", "input": {"ids": {"$findall": r'"agent": "(\w+)"'}, "last": {"$find": r'"agent": "(\w+)"'}}}
    (tmp_path / "a.json").write_text(json.dumps({"steps": [{"tools": [call]}]}))
    tools = '# Tools\n\n<tools>\n{"type": "function", "function": {"name": "wait"}}\n</tools>\n'
    said = '<tool_response>\n{"agent": "one"} {"agent": "two"}\n</tool_response>'
    vocabulary = Vocabulary(tokenizer)
    ids = np.asarray(prompt(tokenizer, ("system", tools), ("user", "SCRIPT@a"), ("user", said)))
    history = History.parse(ids, vocabulary)
    assert history is not None and history.tools == ["wait"]
    plan = Policy(tmp_path, vocabulary).plan(history)
    said = tokenizer.decode([plan.at(i)[0] for i in range(len(plan.tokens))], skip_special_tokens=False)
    assert '{"ids": ["one", "two"], "last": "two"}' in said


async def test_a_rollout_through_the_gateway(scripted_world: MakeWorld, scripted_engine: ScriptedEngine) -> None:
    """An agent with tools, a resample, and an answer without end: the store has what the engine got and gave."""
    world = await scripted_world(max_tokens=200)
    marker = scripted_engine.script(
        [
            {"think": "First.", "text": "Look.", "tools": [{"name": "bash", "input": {"command": "ls"}}] * 2},
            {"tries": [{"think": "Nothing to say.", "mark": False}, {"text": "Now."}]},
            {"text": "On and on", "stop": False},
        ]
    )
    messages: list[Any] = [{"role": "user", "content": f"{marker} Do it."}]
    async with world.client() as client:

        async def ask() -> Any:
            answer = await client.chat.completions.create(model="policy", messages=messages, tools=[BASH])  # type: ignore[list-item]
            return answer.choices[0]

        first = await ask()
        calls = first.message.tool_calls
        assert [c.function.arguments for c in calls] == ['{"command": "ls"}'] * 2
        assert first.message.content == "(step 0) Look."
        messages.append(first.message.model_dump(exclude_none=True))
        messages += [{"role": "tool", "tool_call_id": c.id, "content": f"file{i}"} for i, c in enumerate(calls)]
        second = await ask()
        assert not second.message.content and second.message.reasoning_content.startswith("Nothing to say.")
        second = await ask()
        assert second.message.content == "(step 1) Now."
        messages += [second.message.model_dump(exclude_none=True), {"role": "user", "content": "Go on."}]
        third = await ask()
        assert third.finish_reason == "length" and third.message.content.startswith("(step 2) On and on")
    assert prove(world, [scripted_engine]) == 4
    logprobs = [world.node(c.leaf_id).logprobs for c in world.calls()]
    assert any(any(v < -1 for v in np.frombuffer(p, np.float32)) for p in logprobs), "sampled words have log-probs"

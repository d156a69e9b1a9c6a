"""Anthropic's official client over the gateway and a real engine: tools, thinking, streams, counts, errors."""

from __future__ import annotations

import asyncio
import itertools
from typing import Any

import anthropic
import pytest

from gyre.gateway import app as app_module
from tests.clients import anthropic_client, http_client
from tests.gateway.conftest import World
from tests.scripted.engine import ScriptedEngine
from tests.scripted.fixtures import MakeWorld
from tests.scripted.proof import prove

BASH: Any = {
    "name": "Bash",
    "description": "Execute a command",
    "input_schema": {"type": "object", "properties": {"command": {"type": "string"}}, "required": ["command"]},
}


def client(world: World, member: int = 0, **options: Any) -> anthropic.AsyncAnthropic:
    url = f"{world.served.url}/r/{world.tokens[member]}"
    return anthropic_client(**{"base_url": url, "api_key": "none", **options})


async def ask(world: World, messages: Any, *, stream: bool = False, **more: Any) -> anthropic.types.Message:
    options: dict[str, Any] = {"model": "policy", "max_tokens": 400, "messages": messages, "tools": [BASH], **more}
    async with client(world) as made:
        if not stream:
            return await made.messages.create(**options)
        async with made.messages.stream(**options) as events:
            return await events.get_final_message()


def results(message: anthropic.types.Message) -> list[dict[str, Any]]:
    """The answer and what a harness says to it."""
    used = [b for b in message.content if b.type == "tool_use"]
    said: list[dict[str, Any]] = []
    for block in used:
        out = [{"type": "text", "text": f"out of {block.input}"}]
        said.append({"type": "tool_result", "tool_use_id": block.id, "content": out})
    content = [b.model_dump(exclude_none=True) for b in message.content]
    return [{"role": "assistant", "content": content}, {"role": "user", "content": said or "Go on."}]


LS = {"name": "Bash", "input": {"command": "ls", "n": 2.5}}
STEPS: list[dict[str, Any]] = [
    {"think": "First a look.", "text": "Looking.", "tools": [LS, LS]},
    {"tools": [{"name": "Bash", "input": {"command": "cat 'é'"}}]},
    {"think": "Only a thought.", "text": "", "tools": [{"name": "Bash", "input": {}}]},
    {"text": "Done."},
]


@pytest.mark.parametrize("stream", [False, True])
async def test_a_conversation_with_tools(
    scripted_world: MakeWorld, scripted_engine: ScriptedEngine, stream: bool
) -> None:
    """Each prompt begins with the ids before it, the counts are true, and a gateway that is restarted knows it all."""
    world = await scripted_world()
    messages: list[Any] = [{"role": "user", "content": f"{scripted_engine.script(STEPS)} Do it."}]
    system: Any = [{"type": "text", "text": "You help.", "cache_control": {"type": "ephemeral"}}]
    stops: list[Any] = []
    for turn in range(4):
        async with client(world) as made:
            counted = await made.messages.count_tokens(model="policy", messages=messages, system=system, tools=[BASH])
        message = await ask(world, messages, system=system, stream=stream)
        usage = message.usage
        assert usage.input_tokens + (usage.cache_read_input_tokens or 0) == counted.input_tokens
        stops.append(message.stop_reason)
        messages += results(message)
        if turn == 1:
            await world.restart()
        if turn == 2:
            messages.append({"role": "system", "content": "A note in the middle."})
    assert stops == ["tool_use", "tool_use", "tool_use", "end_turn"]
    first = messages[1]["content"]
    assert [b["type"] for b in first] == ["thinking", "text", "tool_use", "tool_use"]
    assert first[0]["thinking"].startswith("First a look.") and first[0]["signature"]
    assert first[2]["input"] == {"command": "ls", "n": 2.5}
    assert first[2]["id"] != first[3]["id"]
    calls = world.calls()
    assert [c.fork_reason for c in calls] == ["root", None, None, None]
    assert {c.api for c in calls} == {"anthropic-messages"}
    paths = [world.path(c.leaf_id) for c in calls]
    for before, after in itertools.pairwise(paths):
        assert after[: len(before)] == before
    assert len(calls) == prove(world, [scripted_engine]) == 4
    assert (calls[1].cached_tokens or 0) > 0


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("step", "more", "stop", "said"),
    [
        ({"text": "a b END c"}, {"stop_sequences": ["c", "END"]}, ("stop_sequence", "END"), "(step 0) a b"),
        ({"text": "words", "stop": False}, {"max_tokens": 30}, ("max_tokens", None), None),
        (
            {"raw": 'Text.\n<tool_call>\n{"name": "Bash", "argum'},
            {},
            ("end_turn", None),
            'Text.\n<tool_call>\n{"name": "Bash", "argum',
        ),
        ({"raw": ""}, {}, ("end_turn", None), ""),
        ({"tools": [{"name": "Bash", "input": {}}]}, {"tool_choice": {"type": "none"}}, ("end_turn", None), None),
    ],
)
async def test_how_an_answer_ends(
    scripted_world: MakeWorld, scripted_engine: ScriptedEngine, stream: bool, step: dict[str, Any],
    more: dict[str, Any], stop: tuple[str, str | None], said: str | None,
) -> None:  # fmt: skip
    """Case 3 among them: what is no whole call is text, and the conversation goes on from the very ids."""
    world = await scripted_world()
    messages: list[Any] = [{"role": "user", "content": f"{scripted_engine.script([step])} Do it."}]
    message = await ask(world, messages, stream=stream, **more)
    assert (message.stop_reason, message.stop_sequence) == stop
    text = "".join(b.text for b in message.content if b.type == "text")
    assert all(b.type == "text" for b in message.content)
    if said is not None:
        assert text == said
    await ask(world, [*messages, *results(message)], **more)
    first, second = world.calls()
    assert second.fork_reason is None
    before = world.path(first.leaf_id)
    assert world.path(second.leaf_id)[: len(before)] == before


async def test_a_stop_string_is_known_after_a_restart(
    scripted_world: MakeWorld, scripted_engine: ScriptedEngine
) -> None:
    """An answer that was not delivered when the gateway died goes to the retry, with how it ended."""
    world = await scripted_world()
    marker = scripted_engine.script([{"text": "a END b"}, {"text": "never asked for"}])
    messages: list[Any] = [{"role": "user", "content": f"{marker} Do it."}]
    first = await ask(world, messages, stop_sequences=["END"])
    await world.restart()
    again = await ask(world, messages, stop_sequences=["END"])
    assert (again.id, again.stop_reason, again.stop_sequence) == (first.id, "stop_sequence", "END")
    assert again.content == first.content


async def test_counting_changes_nothing(scripted_world: MakeWorld) -> None:
    world = await scripted_world()
    async with client(world) as made:
        messages: Any = [{"role": "user", "content": "Count me, é."}]
        one = await made.messages.count_tokens(model="policy", messages=messages)
        assert one.input_tokens == (await made.messages.count_tokens(model="policy", messages=messages)).input_tokens
        more = await made.messages.count_tokens(model="policy", messages=messages, tools=[BASH])
        assert more.input_tokens > one.input_tokens
        with pytest.raises(anthropic.BadRequestError, match=r"messages: at least one message"):
            await made.messages.count_tokens(model="policy", messages=[])
    assert world.calls() == []


@pytest.mark.parametrize("stream", [False, True])
async def test_context_overflow(scripted_world: MakeWorld, stream: bool) -> None:
    """Case 9: the words on which Claude Code compacts, and the number that count_tokens gives."""
    world = await scripted_world(context=1000)
    messages: Any = [{"role": "user", "content": "x " * 2000}]
    with pytest.raises(anthropic.BadRequestError) as caught:
        await ask(world, messages, stream=stream)
    async with client(world) as made:
        counted = await made.messages.count_tokens(model="policy", messages=messages, tools=[BASH])
    assert caught.value.body == {
        "type": "error",
        "error": {
            "type": "invalid_request_error",
            "message": f"prompt is too long: {counted.input_tokens} tokens > 1000 maximum",
        },
    }


async def test_errors(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    messages: Any = [{"role": "user", "content": "hi"}]
    with pytest.raises(anthropic.NotFoundError) as unknown:
        await ask(world, messages, model="claude-opus-5")
    assert unknown.value.body["error"]["type"] == "not_found_error"  # type: ignore[index]
    with pytest.raises(anthropic.BadRequestError, match=r"tools\.1: web_search: only custom tools"):
        await ask(world, messages, tools=[BASH, {"type": "web_search_20250305", "name": "web_search"}])
    async with client(world, base_url=f"{world.served.url}/r/guess") as guess:
        with pytest.raises(anthropic.AuthenticationError) as wrong:
            await guess.messages.create(model="policy", max_tokens=1, messages=messages)
    assert wrong.value.body["error"]["type"] == "authentication_error"  # type: ignore[index]
    monkeypatch.setattr(app_module, "MAX_BODY", 1000)
    with pytest.raises(anthropic.RequestTooLargeError):
        await ask(world, [{"role": "user", "content": "x" * 1000}])
    monkeypatch.undo()
    world.rollout(state="scoring")
    await world.until(lambda: not world.served.gateway.calls.sessions)
    with pytest.raises(anthropic.PermissionDeniedError, match=r"is over \(scoring\)"):
        await ask(world, messages)
    async with http_client(world.served.url) as http:
        answer = await http.post("/nowhere", headers={"anthropic-version": "2023-06-01"})
        assert (answer.status_code, answer.json()["error"]["type"]) == (404, "not_found_error")
        body = b'{"model": "policy", '
        answer = await http.post(f"/r/{world.tokens[1]}/v1/messages?beta=true", content=body)
        assert (answer.status_code, answer.json()["error"]["type"]) == (400, "invalid_request_error")


@pytest.mark.parametrize("key", ["api_key", "auth_token"])
async def test_the_token_as_key(world: World, monkeypatch: pytest.MonkeyPatch, key: str) -> None:
    for variable in ("ANTHROPIC_API_KEY", "ANTHROPIC_AUTH_TOKEN"):
        monkeypatch.delenv(variable, raising=False)
    made = anthropic_client(world.served.url, **{key: world.tokens[0]})
    async with made:
        [model] = (await made.models.list()).data
        assert (model.id, model.type) == ("policy", "model")
        assert (await made.models.retrieve("policy")).id == "policy"
        with pytest.raises(anthropic.NotFoundError):
            await made.models.retrieve("claude-opus-5")
    async with http_client(f"{world.served.url}/r/{world.tokens[0]}") as http:
        assert (await http.head("/api/hello")).status_code == 200
        assert (await http.get("/api/hello")).status_code == 200


async def test_a_stream_shows_signs_of_life_before_its_answer(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(app_module, "PING_S", 0.1)
    asked = asyncio.create_task(ask(world, [{"role": "user", "content": "hi"}], stream=True))
    await world.until(lambda: len(world.calls()) == 1)
    await asyncio.sleep(0.5)
    assert not asked.done()
    world.rollout(state="scoring")
    await world.served.gateway.calls.sweep()
    with pytest.raises(anthropic.APIStatusError, match="aborted") as ended:  # on a stream that has begun
        await asked
    assert ended.value.body["error"]["type"] == "overloaded_error"  # type: ignore[index]

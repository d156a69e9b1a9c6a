"""The official OpenAI client against the gateway and the scripted engine: Chat and Responses, whole conversations."""

from __future__ import annotations

from typing import Any

import httpx
import openai
import pytest

from gyre.gateway.openai_responses import SUMMARY_PREFIX
from tests.clients import http_client, openai_client
from tests.gateway.conftest import BASH, World
from tests.scripted.engine import ScriptedEngine
from tests.scripted.fixtures import MakeWorld
from tests.scripted.proof import prove

EXEC = {"type": "function", "name": "exec", "description": "Run", "parameters": BASH["function"]["parameters"]}
CUSTOM = {"type": "custom", "name": "apply_patch", "description": "Patch"}
SPAWN = {"type": "namespace", "name": "agents", "description": "", "tools": [{**EXEC, "name": "spawn"}]}
STRICT: Any = {**BASH, "function": {**BASH["function"], "strict": True}}  # the client's helper takes no other
TOOLS: Any = [EXEC, CUSTOM, SPAWN, {"type": "web_search"}]
ENCRYPTED: Any = ["reasoning.encrypted_content"]


async def test_chat(scripted_world: MakeWorld, scripted_engine: ScriptedEngine) -> None:
    """Parallel calls, thinking, forced tools, usage on a stream, a stop string, several system messages, a prefill."""
    world = await scripted_world()
    call = {"name": "bash", "input": {"command": "ls"}}
    marker = scripted_engine.script(
        [
            {"think": "First.", "text": "Look.", "tools": [call, {**call, "input": {"command": "pwd"}}]},
            {"tools": [call]},
            {"text": "Never: what the harness said itself counts as a step."},
            {"text": "Begun and done."},
            {"text": "The end."},
        ]
    )
    messages: list[Any] = [
        {"role": "system", "content": "Be brief."},
        {"role": "developer", "content": "Be kind."},
        {"role": "user", "content": [{"type": "text", "text": f"{marker} Do it."}]},
    ]
    client = world.client()

    async def turn(**options: Any) -> Any:
        async with client.chat.completions.stream(
            model="policy", messages=messages, tools=[STRICT], stream_options={"include_usage": True}, **options
        ) as stream:
            final = await stream.get_final_completion()
        assert final.usage is not None
        choice = final.choices[0]
        messages.append(choice.message.to_dict())
        for made in choice.message.tool_calls or []:
            messages.append({"role": "tool", "tool_call_id": made.id, "content": "out"})
        return final

    first = await turn(tool_choice="required", parallel_tool_calls=True, user="someone")
    said = first.choices[0].message
    assert [c.function.arguments for c in said.tool_calls] == ['{"command": "ls"}', '{"command": "pwd"}']
    assert len({c.id for c in said.tool_calls}) == 2 and said.reasoning_content.startswith("First.")
    second = await turn(tool_choice={"type": "function", "function": {"name": "bash"}})
    assert second.usage.prompt_tokens > first.usage.total_tokens and second.choices[0].finish_reason == "tool_calls"
    messages.append({"role": "assistant", "content": "Begun"})
    await turn(response_format={"type": "json_object"})
    assert prove(world, [scripted_engine]) == 3
    messages.append({"role": "user", "content": "Go on."})
    last = await turn(stop=["end"])  # the engine may be some tokens ahead
    assert last.choices[0].message.content == "(step 4) The" and last.choices[0].finish_reason == "stop"
    calls = world.calls()
    assert [c.fork_reason for c in calls[:2]] == ["root", None]
    assert calls[0].request["options"]["tool_choice"] == "required" and {c.kind for c in calls} == {"main"}


async def test_responses(scripted_world: MakeWorld, scripted_engine: ScriptedEngine) -> None:
    """Function, custom and namespaced tools, reasoning back and forth, streamed or not, and a restart in between."""
    world = await scripted_world()
    marker = scripted_engine.script(
        [
            {"think": "First.", "text": "Look.", "tools": [{"name": "exec", "input": {"command": "ls"}}]},
            {"tools": [{"name": "apply_patch", "input": {"input": "*** Begin"}}]},
            {"tools": [{"name": "apply_patch", "input": {"patch": "*** Begin", "input": 5}}]},
            {"think": "Spawn.", "tools": [{"name": "agents.spawn", "input": {"command": "x"}}] * 2},
            {"text": "The end."},
        ]
    )
    items: list[Any] = [{"role": "user", "content": f"{marker} Do it."}]

    async def turn(*, stream: bool) -> Any:
        options: Any = {"model": "policy", "instructions": "Be brief.", "input": items, "tools": TOOLS}
        options |= {"include": ENCRYPTED, "store": False}
        async with world.client() as client:
            if stream:
                async with client.responses.stream(**options) as events:
                    answer = await events.get_final_response()
            else:
                answer = await client.responses.create(**options)
        for item in answer.output:
            said = item.to_dict()
            items.append({k: v for k, v in said.items() if k not in ("parsed_arguments",)})
            if said["type"].endswith("_call"):
                items.append({"type": said["type"] + "_output", "call_id": said["call_id"], "output": "out"})
        assert answer.status == "completed"
        return [item.to_dict() for item in answer.output]

    [thought, text, call] = await turn(stream=True)
    assert thought["summary"][0]["text"].startswith("First.") and thought["encrypted_content"]
    assert text["content"][0]["text"] == "(step 0) Look." and call["arguments"] == '{"command": "ls"}'
    [_, patch] = await turn(stream=False)
    assert (patch["type"], patch["name"], patch["input"]) == ("custom_tool_call", "apply_patch", "*** Begin")
    [_, odd] = await turn(stream=True)
    assert odd["type"] == "custom_tool_call" and odd["input"] == '{"patch": "*** Begin", "input": 5}'
    await world.restart()
    [*_, one, two] = await turn(stream=True)
    assert (one["namespace"], one["name"]) == ("agents", "spawn") and one["call_id"] != two["call_id"]
    [last] = await turn(stream=False)
    assert last["content"][0]["text"] == "(step 4) The end."
    assert prove(world, [scripted_engine]) == 5
    assert [c.fork_reason for c in world.calls()] == ["root", None, None, None, None]


@pytest.mark.parametrize("how", ["endpoint", "item"])
async def test_compaction(scripted_world: MakeWorld, scripted_engine: ScriptedEngine, how: str) -> None:
    world = await scripted_world()
    marker = scripted_engine.script([{"text": f"Answer {i}."} for i in range(3)])
    items: list[Any] = [{"type": "message", "role": "user", "content": f"{marker} Do it."}]
    async with world.client() as client:
        answer = await client.responses.create(model="policy", input=items)
        items += [item.to_dict() for item in answer.output]
        items.append({"type": "message", "role": "user", "content": "Go on."})
        if how == "endpoint":
            compact = await client.post(
                "/responses/compact", body={"model": "policy", "input": items}, cast_to=httpx.Response
            )
            body = compact.json()
            assert body["object"] == "response.compaction"
            items = body["output"]
            assert items[:-1] == [
                {"type": "message", "role": "user", "content": t} for t in (f"{marker} Do it.", "Go on.")
            ]
        else:
            trigger: Any = [*items, {"type": "compaction_trigger"}]
            events = [e async for e in await client.responses.create(model="policy", input=trigger, stream=True)]
            [done] = [e.item.to_dict() for e in events if e.type == "response.output_item.done"]
            items = [items[0], done]
        assert items[-1]["type"] == "compaction"
        after = await client.responses.create(model="policy", input=items)
    assert after.output_text == "(step 1) Answer 1."
    assert prove(world, [scripted_engine]) == 3
    calls = world.calls()
    assert [c.kind for c in calls] == ["main", "main-summary", "main"]
    assert calls[1].fork_reason is None, "the summary goes on from the conversation"
    prompt = world.path(calls[2].leaf_id)[: calls[2].prompt_tokens]
    assert SUMMARY_PREFIX + "Work on" in world.served.gateway.calls.policy.text(prompt)


async def test_errors_of_responses(world: World) -> None:
    url = f"{world.served.url}/r"
    stranger = openai_client(f"{url}/guess/v1")
    with pytest.raises(openai.AuthenticationError, match="No rollout has this token"):
        await stranger.responses.create(model="policy", input="hi")
    client = world.client()
    with pytest.raises(openai.NotFoundError) as unknown:
        await client.responses.create(model="gpt-5", input="hi")
    assert unknown.value.code == "model_not_found"
    for stream in (False, True):
        with pytest.raises(openai.BadRequestError, match="exceeds the context window") as long:
            await client.responses.create(model="policy", input="x" * 4000, stream=stream)
        assert (long.value.code, long.value.param) == ("context_length_exceeded", "input")
    with pytest.raises(openai.BadRequestError, match="whole history"):
        await client.responses.create(model="policy", input="hi", previous_response_id="resp_1")
    with pytest.raises(openai.NotFoundError):
        await client.responses.retrieve("resp_1")
    async with http_client() as http:
        answer = await http.post(f"{url}/{world.tokens[0]}/v1/responses", content=b"{nope")
        assert (answer.status_code, answer.json()["error"]["type"]) == (400, "invalid_request_error")
    world.rollout(state="scoring")
    await world.served.gateway.calls.sweep()
    with pytest.raises(openai.PermissionDeniedError) as over:
        await client.responses.create(model="policy", input="hi")
    assert over.value.code == "rollout_over"

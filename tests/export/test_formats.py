"""What each provider's API sent becomes steps of ATIF: as its format reads it, from what the gateway records."""

from __future__ import annotations

import json
from typing import Any

import pytest
from atif import Trajectory

from gyre.export.trajectories import trajectory
from gyre.gateway.wire import FORMATS
from gyre.store.tokens import pack_ids, pack_logprobs

TOOL = {"name": "Bash", "description": "", "parameters": {"type": "object", "properties": {}}}
ANTHROPIC = {
    "model": "m", "max_tokens": 9, "system": [{"type": "text", "text": "be brief"}],
    "tools": [{"name": "Bash", "description": "", "input_schema": {"type": "object", "properties": {}}}],
    "messages": [
        {"role": "user", "content": "go"},
        {"role": "assistant", "content": [
            {"type": "text", "text": "on it"},
            {"type": "tool_use", "id": "t1", "name": "Bash", "input": {"command": "ls"}},
        ]},
        {"role": "user", "content": [
            {"type": "tool_result", "tool_use_id": "t1", "content": [{"type": "text", "text": "a.py"}]},
            {"type": "text", "text": "and now?"},
        ]},
    ],
}  # fmt: skip
RESPONSES = {
    "model": "m", "instructions": "be brief", "tools": [{"type": "function", **TOOL}],
    "input": [
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "go"}]},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "on it"}]},
        {"type": "function_call", "call_id": "t1", "name": "Bash", "arguments": '{"command": "ls"}'},
        {"type": "function_call_output", "call_id": "t1", "output": "a.py"},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "and now?"}]},
    ],
}  # fmt: skip
CHAT = {
    "model": "m", "tools": [{"type": "function", "function": TOOL}],
    "messages": [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": "go"},
        {"role": "assistant", "content": "on it", "tool_calls": [
            {"id": "t1", "type": "function", "function": {"name": "Bash", "arguments": '{"command": "ls"}'}},
        ]},
        {"role": "tool", "tool_call_id": "t1", "content": "a.py"},
        {"role": "user", "content": "and now?"},
    ],
}  # fmt: skip
BODIES = {"anthropic-messages": ANTHROPIC, "openai-responses": RESPONSES, "openai-chat": CHAT}


def rows(api: str, body: dict[str, Any]) -> dict[str, list[dict[str, Any]]]:
    """A rollout with one call, recorded as the gateway does."""
    request = FORMATS[api].parse_request(json.dumps(body).encode(), "m")
    call = {
        "id": 1, "seq": 0, "api": api, "status": "complete", "kind": "main", "leaf_id": 2, "parent_call_id": None,
        "request": {"base": 0, "messages": [m.raw for m in request.messages], "tools": list(request.tools)},
        "response": {"content": "done", "reasoning": None, "tool_calls": []}, "ended_at": None, "prompt_tokens": 2,
        "completion_tokens": 1, "cached_tokens": 0,
    }  # fmt: skip
    prompt = {"id": 1, "parent_id": None, "kind": "prompt", "token_ids": pack_ids([5, 6])}
    leaf = {
        "id": 2, "parent_id": 1, "kind": "generated", "token_ids": pack_ids([7]), "logprobs": pack_logprobs([-0.5]),
        "version_spans": [[0, 0, 1]],
    }  # fmt: skip
    rollout = {"id": "demo/s0/00/00", "harness": "some-harness", "reward": 1.0, "outcome": "completed"}
    run = {"config": {"policy": {"name": "m"}}}
    return {"runs": [run], "rollouts": [rollout], "calls": [call], "nodes": [prompt, leaf]}


@pytest.mark.parametrize("api", FORMATS)
def test_a_conversation_of_every_format(api: str) -> None:
    made = Trajectory.model_validate(trajectory(rows(api, BODIES[api]), "x.json", prompt_ids=True))
    steps = [(s.source, s.message, bool(s.is_copied_context)) for s in made.steps]
    assert steps == [
        ("system", "be brief", False), ("user", "go", False), ("agent", "on it", True), ("user", "and now?", False),
        ("agent", "done", False),
    ]  # fmt: skip
    foreign, answer = made.steps[2], made.steps[4]
    assert foreign.metrics is None and foreign.tool_calls is not None and foreign.observation is not None
    assert [(t.tool_call_id, t.function_name, t.arguments) for t in foreign.tool_calls] == [
        ("t1", "Bash", {"command": "ls"})
    ]
    assert [(o.source_call_id, o.content) for o in foreign.observation.results] == [("t1", "a.py")]
    assert answer.metrics is not None
    assert (answer.metrics.prompt_token_ids, answer.metrics.completion_token_ids) == ([5, 6], [7])
    assert made.agent.tool_definitions is not None and made.agent.model_name == "m"


def test_a_format_that_nobody_speaks_is_shown_as_it_was_sent() -> None:
    given = rows("openai-chat", CHAT)
    given["calls"][0] |= {"api": "tomorrows-api", "request": {"messages": [{"say": "hi"}, "plain"]}}
    made = Trajectory.model_validate(trajectory(given, "x.json", prompt_ids=False))
    assert [s.message for s in made.steps] == ['{"say": "hi"}', "plain", "done"]

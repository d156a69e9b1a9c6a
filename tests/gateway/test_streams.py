"""A stream whose cell leaves in the middle of the answer: signs of life, then one whole answer, in each API."""

from __future__ import annotations

import asyncio
from typing import Any

import orjson
import pytest

from gyre.gateway import anthropic_messages, openai_chat, openai_responses
from gyre.gateway import app as app_module
from gyre.gateway.wire import WireFormat
from gyre.store.tokens import unpack_ids
from tests.clients import http_client
from tests.gateway.conftest import World
from tests.gateway.stand_in import StandIn
from tests.gateway.test_silence import ALPHABET, ASK, WHOLE

HALF = len(WHOLE) // 2
APIS: dict[str, tuple[WireFormat, dict[str, Any], list[str]]] = {
    "messages": (
        anthropic_messages,
        {"messages": ASK, "max_tokens": 400},
        ["message_start", "content_block_start", "content_block_stop", "message_delta", "message_stop"],
    ),
    "chat/completions": (openai_chat, {"messages": ASK}, []),
    "responses": (
        openai_responses,
        {"input": ASK},
        ["response.created", "response.output_item.added", "response.output_item.done", "response.completed"],
    ),
}


@pytest.mark.parametrize("api", list(APIS))
async def test_a_cell_leaves_in_the_middle_of_a_stream(world: World, monkeypatch: pytest.MonkeyPatch, api: str) -> None:
    """Half of the answer is there when its only cell goes, nobody serves for a while, and another one, with newer
    weights, gives the rest."""
    monkeypatch.setattr(app_module, "PING_S", 0.05)
    wire, asked, once = APIS[api]
    got = bytearray()

    async def stream() -> int:
        url = f"{world.served.url}/r/{world.tokens[0]}/v1/{api}"
        body = {"model": "policy", "stream": True, **asked}
        async with http_client() as http, http.stream("POST", url, json=body) as answer:
            async for piece in answer.aiter_bytes():
                got.extend(piece)
            return answer.status_code

    async def more_signs_of_life() -> None:
        before = len(got)
        await world.until(lambda: len(got) > before + len(wire.PING))
        assert bytes(got) == wire.PING * (len(got) // len(wire.PING)), "nothing of an answer that is not recorded"

    async with StandIn() as leaves, StandIn() as comes:
        leaves.text = comes.text = ALPHABET
        leaves.hold_after, comes.version = HALF, 4
        world.cell("c0", engine_url=leaves.url, engine_incarnation="a")
        call = asyncio.create_task(stream())
        await world.until(lambda: bool(leaves.running))
        await more_signs_of_life()
        world.cell("c0", known=True, routable=False)
        await world.until(lambda: world.served.gateway.router.waiting == 1)
        await more_signs_of_life()
        world.cell("c1", engine_url=comes.url, engine_incarnation="b", serving_version=4)
        assert await call == 200
        assert comes.prompts == [leaves.prompts[0] + WHOLE[:HALF]]

    events = [orjson.loads(line[6:]) for line in bytes(got).splitlines() if line.startswith(b"data: {")]
    assert "".join(map(_text, events)) == ALPHABET
    kinds = [e.get("type") for e in events]
    assert [kinds.count(kind) for kind in once] == [1] * len(once)
    if api == "chat/completions":
        assert bytes(got).endswith(b"data: [DONE]\n\n")
        ends = [c["finish_reason"] for e in events for c in e["choices"]]
        assert [end for end in ends if end] == ["stop"]
    assert "error" not in kinds and not any(e.get("error") for e in events)

    [row] = world.calls()
    assert (row.status, row.cells) == ("complete", ["c0", "c1"])
    leaf = world.node(row.leaf_id)
    assert unpack_ids(leaf.token_ids).tolist() == WHOLE
    assert leaf.version_spans == [[3, 0, HALF], [4, HALF, len(WHOLE)]]


def _text(event: dict[str, Any]) -> str:
    """What an event adds to the answer's text."""
    if event.get("type") == "content_block_delta":
        return str(event["delta"]["text"])
    if event.get("type") == "response.output_text.delta":
        return str(event["delta"])
    return "".join(c["delta"].get("content") or "" for c in event.get("choices", []))

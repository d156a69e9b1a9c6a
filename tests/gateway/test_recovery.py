"""Killed, or cut off from Postgres, at any moment: what was recorded comes back, with its agents, kinds and cuts.

The engine is a stand-in that answers at once: what is looked at is the tree in Postgres and the tree in memory.
"""

from __future__ import annotations

import asyncio
import random
from typing import Any

import openai
import pytest

from gyre.gateway import conversation as conversation_module
from gyre.gateway.errors import GatewayError
from gyre.gateway.nodes import Node
from gyre.gateway.session import Session
from gyre.store.gateway_queries import CallWrite
from tests.clients import http_client
from tests.gateway.conftest import BASH, World
from tests.gateway.stand_in import MADE, StandIn

LONG = "the very same system text " * 20
SYSTEM = {"role": "system", "content": LONG}


async def ask(world: World, messages: list[Any], *, agent: str = "", tools: bool = True, member: int = 0) -> Any:
    headers = {"x-claude-code-agent-id": agent} if agent else {}
    async with world.client(member, default_headers=headers) as client:
        options: dict[str, Any] = {"tools": [BASH]} if tools else {}
        answer = await client.chat.completions.create(model="policy", messages=messages, **options)
    return answer.choices[0].message.model_dump(exclude_none=True)


def session_of(world: World, member: int = 0) -> Session:
    return world.served.gateway.calls.sessions[world.tokens[member]]


def picture(session: Session) -> dict[int, tuple[Any, ...]]:
    """All that a later call can depend on."""
    return {
        t.call_id: (
            None if t.parent is None else t.parent.call_id, [m.content for m in t.messages], t.reply, t.tools_key,
            t.generated.tokens().tolist(), t.prompt.end, t.prompt_thinking, t.kind, t.agent, t.told, t.cell,
            t.request_hash, t.finish_reason, t.cached_tokens,
        )
        for t in session.tree.by_call.values()
    }  # fmt: skip


def spans(session: Session) -> set[tuple[int, int | None, int, tuple[int, ...]]]:
    out, stack = set(), list(session.tree.nodes.roots)
    while stack:
        node: Node = stack.pop()
        out.add((node.id, None if node.parent is None else node.parent.id, node.start, tuple(node.ids.tolist())))
        stack += node.children
    return out


async def conversation(world: World) -> None:
    """Forks in the middle of prompts, a title before the work, a summary, a second root: something of everything."""
    await ask(world, [{"role": "system", "content": "Write a title."}, {"role": "user", "content": "x"}], tools=False)
    base = [SYSTEM, {"role": "user", "content": "u" * 40}]
    first = await ask(world, base)
    history = [*base, first, {"role": "user", "content": "v" * 40 + "1"}]
    await ask(world, [*base, first, {"role": "user", "content": "v" * 40 + "2"}])
    second = await ask(world, history)
    asked = [*history, second, {"role": "user", "content": "Summarise all this."}]
    summary = await ask(world, asked)
    await ask(world, [SYSTEM, {"role": "user", "content": f"So far:\n{summary['content']}"}])


@pytest.mark.parametrize("in_a_thread", [False, True])
async def test_a_tree_comes_back_as_it_was(
    world: World, stand_in: StandIn, in_a_thread: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if in_a_thread:
        monkeypatch.setattr(conversation_module, "LONG_TEXT", 0)
    stand_in.text = "everything that was done, in one line of some length"
    await conversation(world)
    calls = world.calls()
    assert [c.kind for c in calls] == ["auxiliary", "main", "main", "main", "main-summary", "main"]
    assert [c.status for c in calls] == ["complete"] * 6
    before, nodes = picture(session_of(world)), spans(session_of(world))
    for call in calls:
        assert world.path(call.leaf_id) == session_of(world).tree.by_call[call.id].generated.tokens().tolist()
    sent, stored = sum(len(world.path(c.leaf_id)) for c in calls), sum(len(s[3]) for s in nodes)
    assert stored < 0.5 * sent, "what prompts share is stored once"
    for ids in stand_in.prompts:
        assert any(world.path(c.leaf_id)[: c.prompt_tokens] == ids for c in calls), "what the engine got is on record"
    await world.restart()
    async with world.client() as client:
        await client.models.list()
    assert picture(session_of(world)) == before
    assert spans(session_of(world)) == nodes
    # And it goes on: an extension, and a fork that cuts once more.
    base = [SYSTEM, {"role": "user", "content": "u" * 40}]
    first = {"role": "assistant", "content": stand_in.text}
    await ask(world, [*base, first, {"role": "user", "content": "v" * 20 + "3"}])
    assert world.calls()[-1].fork_reason == "sibling"
    assert world.calls()[-1].parent_call_id == calls[1].id


async def test_a_write_that_fails_leaves_memory_as_postgres_is(
    world: World,
    stand_in: StandIn,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Both ways a commit can be lost: it never happened, or its answer never came. Later calls fit what is there."""
    base = [SYSTEM, {"role": "user", "content": "u" * 40}]
    await ask(world, base)
    recorder = world.served.gateway.recorder
    written = recorder.write
    for happened in (False, True):

        async def write(write: CallWrite, happened: bool = happened) -> None:
            if happened:
                await written(write)
            raise GatewayError("unavailable", "lost")

        monkeypatch.setattr(recorder, "write", write)
        other = [SYSTEM, {"role": "user", "content": f"w{happened}" * 20}]
        with pytest.raises(openai.InternalServerError, match="lost"):
            await ask(world, other)
        monkeypatch.setattr(recorder, "write", written)
        complete = [c.status for c in world.calls()].count("complete")
        await ask(world, other)
        now = [c.status for c in world.calls()].count("complete")
        assert now == complete + (not happened), "what was committed is what a retry gets"
        await ask(world, [SYSTEM, {"role": "user", "content": f"z{happened}" * 20}])
        for call in world.calls():
            if call.status == "complete":
                path = world.path(call.leaf_id)
                assert path == session_of(world).tree.by_call[call.id].generated.tokens().tolist()
                assert path[: call.prompt_tokens] in stand_in.prompts


async def test_calls_that_run_while_the_tree_is_read_anew_go_on(world: World, stand_in: StandIn) -> None:
    """Another call's commit is lost meanwhile: they stay `running`, and what is known of their beginning is kept."""
    title = [{"role": "system", "content": "Write a title."}, {"role": "user", "content": "x"}]
    stand_in.delay = 600.0
    running = asyncio.create_task(ask(world, title, tools=False))
    await world.until(lambda: len(stand_in.running) == 1)
    await world.until(lambda: len(world.calls()) == 1)
    stand_in.delay = 0.0
    session_of(world).stale = True
    await ask(world, [SYSTEM, {"role": "user", "content": "u" * 40}])
    assert not session_of(world).stale
    assert [(c.status, c.kind) for c in world.calls()] == [("running", "auxiliary"), ("complete", "main")]
    for stop in stand_in.running.values():
        stop.set()  # the engine lets it go, and it goes on elsewhere: here, at once
    await running
    assert [(c.status, c.kind) for c in world.calls()] == [("complete", "auxiliary"), ("complete", "main")]
    assert [t.kind for t in session_of(world).tree.roots] == ["main", "auxiliary"]


async def test_parallel_calls_that_share_a_prompt_all_fit(world: World, stand_in: StandIn) -> None:
    """Each is planned before any of them is recorded, and each cuts what the one before has stored."""
    stand_in.gate.clear()
    asked = [[SYSTEM, {"role": "user", "content": f"{i}" * (30 + i)}] for i in range(8)]
    asked += [[SYSTEM, {"role": "user", "content": "7" * (30 + i)}] for i in range(4)]
    asking = [asyncio.create_task(ask(world, messages)) for messages in asked]
    await world.until(lambda: len(stand_in.running) == 8 and world.served.gateway.router.waiting == 4)
    stand_in.gate.set()
    await asyncio.gather(*asking)
    calls = world.calls()
    assert len({tuple(world.path(c.leaf_id)) for c in calls}) == len(calls)
    assert sorted(world.path(c.leaf_id)[: c.prompt_tokens] for c in calls) == sorted(stand_in.prompts)
    assert sum(len(s[3]) for s in spans(session_of(world))) < 0.3 * sum(len(world.path(c.leaf_id)) for c in calls)


async def test_a_call_that_broke_off_lends_its_prompt(world: World, stand_in: StandIn) -> None:
    stand_in.delay = 30.0
    base = [SYSTEM, {"role": "user", "content": "u" * 40}]
    call = asyncio.create_task(ask(world, base))
    await world.until(lambda: len(stand_in.prompts) == 1)
    call.cancel()
    await world.until(lambda: [c.status for c in world.calls()] == ["incomplete"])
    stand_in.delay = 0.0
    await ask(world, base)
    again = world.calls()[-1]
    assert (again.fork_reason, again.parent_call_id) == ("root", None)
    assert len(spans(session_of(world))) == 2, "one prompt, one answer"


async def test_rollouts_share_nothing(world: World, stand_in: StandIn) -> None:
    """The same words in another rollout: its own root, its own nodes; and nobody reads what is not theirs."""
    base = [SYSTEM, {"role": "user", "content": "u" * 40}]
    first = await ask(world, base)
    await ask(world, [*base, first, {"role": "user", "content": "more"}], member=1)
    [theirs] = world.calls(1)
    assert (theirs.fork_reason, theirs.parent_call_id) == ("root", None)
    assert {s[0] for s in spans(session_of(world))} & {s[0] for s in spans(session_of(world, 1))} == set()
    async with http_client(world.served.url) as http:
        for path in (
            "",
            "/v1",
            f"/{world.ids[0]}",
            f"/r/{world.ids[0]}/v1/models",
            f"/r/{world.tokens[0][:-1]}/v1/models",
        ):
            assert (await http.get(path)).status_code in (401, 404)


async def test_a_run_without_a_cell_costs_time_only(world: World) -> None:
    """No cell serves: the call waits, and is answered when one does."""
    call = asyncio.create_task(ask(world, [SYSTEM, {"role": "user", "content": "u"}]))
    await world.until(lambda: world.served.gateway.router.waiting == 1)
    made = StandIn()
    async with made:
        world.cell(engine_url=made.url, engine_incarnation="late")
        assert (await call)["content"] == made.text


@pytest.mark.parametrize("seed", range(2))
async def test_random_conversations_over_http(world: World, stand_in: StandIn, seed: int) -> None:
    """Agents that interleave, edit, drop, copy, compact and retry, with the gateway killed now and then.

    Whatever happens, each recorded call is what the engine got and gave, and memory is what Postgres has.
    """
    rng = random.Random(seed)
    tool = '<tool_call>\n{"name": "bash", "arguments": {"command": "ls "}}\n</tool_call>'
    histories: list[list[dict[str, Any]]] = [
        [{"role": "system", "content": LONG + name}, {"role": "user", "content": "go"}] for name in ("", "sub", "")
    ]
    given: list[tuple[list[int], list[int]]] = []
    for step in range(45):
        stand_in.text = rng.choice([tool, "done", f"<think>\nhm {step}\n</think>\n\n{tool}", f"I say {step}", "é" * 9])
        which = rng.randrange(len(histories))
        history = histories[which]
        asked = len(stand_in.prompts)
        said = await ask(world, history, tools=rng.random() < 0.9, member=which % 2)
        if len(stand_in.prompts) > asked:
            given.append(
                (stand_in.prompts[-1], MADE.encode(f"{stand_in.text}<|im_end|>", add_special_tokens=False).ids)
            )
        said.pop("refusal", None)
        results = [{"role": "tool", "tool_call_id": c["id"], "content": f"r{step}"} for c in said.get("tool_calls", [])]
        grown = [*history, said, *(results or [{"role": "user", "content": f"on {step}"}])]
        at = rng.randrange(1, len(grown))
        histories[which] = rng.choices(
            [
                grown,
                history,
                [*grown[:at], {"role": "user", "content": f"edited {step}"}, *grown[at + 1 :]],
                [*grown[:at], *grown[at + 1 :]] if len(grown) > 3 else grown,
                [*grown[:2], {"role": "user", "content": f"So far: {said.get('content')}"}],
                [*grown, {"role": "system", "content": "a reminder"}],
                [*grown[:at], {"role": "assistant", "content": "copied"}, *grown[at:]],
            ],
            [8, 1, 1, 1, 1, 1, 1],
        )[0]
        if rng.random() < 0.08:
            await world.restart()
    recorded = []
    for member in range(2):
        calls = world.calls(member)
        assert {c.status for c in calls} == {"complete"}
        for call in calls:
            path = world.path(call.leaf_id)
            assert call.prompt_tokens is not None
            recorded.append((path[: call.prompt_tokens], path[call.prompt_tokens :]))
    assert sorted(recorded) == sorted(given)
    for member in range(2):
        async with world.client(member) as client:
            await client.models.list()
    before = [(picture(session_of(world, m)), spans(session_of(world, m))) for m in range(2)]
    await world.restart()
    for member in range(2):
        async with world.client(member) as client:
            await client.models.list()
    assert [(picture(session_of(world, m)), spans(session_of(world, m))) for m in range(2)] == before

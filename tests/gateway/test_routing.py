"""Who gets which cell, and when."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from gyre.gateway import routing
from gyre.gateway.routing import PATIENCE, Lease, Router
from gyre.store.gateway_queries import CellRow


def row(name: str, *, version: int = 0, running: int = 2, routable: bool = True, incarnation: str = "i") -> CellRow:
    return CellRow(name, f"http://{name}", routable, version, running, incarnation)


async def settle() -> None:
    for _ in range(3):
        await asyncio.sleep(0)


async def test_the_least_loaded_cell_and_the_prefix() -> None:
    router = Router()
    router.apply([row("a", running=8), row("b", running=8)])
    leases = [await router.acquire("r", 0, None) for _ in range(4)]
    assert sorted(lease.cell for lease in leases) == ["a", "a", "b", "b"]
    assert [(await router.acquire("r", 0, "b")).cell for _ in range(4)] == ["b"] * 4
    assert [(await router.acquire("r", 0, "b")).cell for _ in range(4)].count("a") > 0


async def test_waiting_is_fair_among_rollouts() -> None:
    router = Router()
    order: list[str] = []

    async def call(rollout: str) -> None:
        lease = await router.acquire(rollout, 0, None)
        order.append(rollout)
        await settle()
        router.release(lease)

    tasks = [asyncio.create_task(call("greedy")) for _ in range(6)]
    await settle()
    tasks += [asyncio.create_task(call("modest")) for _ in range(2)]
    await settle()
    assert router.waiting == 8
    router.apply([row("a", running=1)])
    await asyncio.gather(*tasks)
    assert order[:4] == ["greedy", "modest", "greedy", "modest"]
    assert router.waiting == 0


async def test_a_version_that_no_cell_serves_yet() -> None:
    router = Router()
    router.apply([row("a", version=1)])
    call = asyncio.create_task(router.acquire("r", 2, None))
    other = await router.acquire("s", 1, None)
    await settle()
    assert not call.done()
    router.apply([row("a", version=2)])
    assert (await call).version == 2
    assert not other.revoked.is_set(), "newer weights do not end what runs"


@pytest.mark.parametrize("change", [row("a", routable=False), row("a", incarnation="j"), None])
async def test_a_cell_that_leaves_revokes_its_leases(change: CellRow | None) -> None:
    router = Router()
    router.apply([row("a"), row("b", running=1)])
    leases: list[Lease] = [await router.acquire("r", 0, None) for _ in range(3)]
    router.apply([row("b", running=1)] + ([change] if change else []))
    assert {lease.cell for lease in leases if lease.revoked.is_set()} == {"a"}
    for lease in leases:
        router.release(lease)


async def test_a_cell_that_admits_nothing_keeps_its_calls() -> None:
    """serving.on_update = "finish": its running calls end there, new ones go elsewhere or wait."""
    router = Router()
    router.apply([row("a")])
    running = await router.acquire("r", 0, None)
    router.apply([replace(row("a"), admits=False)])
    assert not running.revoked.is_set()
    waits = asyncio.create_task(router.acquire("s", 0, "a"))
    await asyncio.sleep(0)
    assert router.waiting == 1
    router.apply([replace(row("a"), admits=False), row("b")])
    assert (await waits).cell == "b"
    router.release(running)
    router.apply([row("a", version=1)])
    assert (await router.acquire("r", 1, None)).cell == "a"


async def test_a_cell_that_fails_is_left_alone_for_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(routing, "BACKOFF_S", (3.0, 48.0))  # longer than any stall between two lines
    router = Router()
    router.apply([row("a")])
    lease = await router.acquire("r", 0, None)
    router.release(lease)
    assert router.failed(lease) == pytest.approx(3.0)
    assert router.failed(lease) <= 3.0, "calls that fail together count as one failure"
    call = asyncio.create_task(router.acquire("r", 0, None))
    await settle()
    assert not call.done()
    lease = await asyncio.wait_for(call, 30)
    assert router.failed(lease) == pytest.approx(6.0)
    router.apply([row("a", incarnation="new")])
    await asyncio.wait_for(router.acquire("r", 0, None), 30)


async def test_a_cell_that_failed_is_tried_by_one_call_until_it_gives_a_token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(routing, "BACKOFF_S", (0.0, 0.0))
    router = Router()
    router.apply([row("a")])
    lease = await router.acquire("r", 0, None)
    router.failed(lease)
    router.release(lease)
    trial = await asyncio.wait_for(router.acquire("r", 0, None), 30)
    waits = [asyncio.create_task(router.acquire(f"s{n}", 0, None)) for n in range(2)]
    await settle()
    assert router.waiting == 2
    router.succeeded(lease)  # a word of before says nothing
    router.failed(trial)
    router.release(trial)
    await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED, timeout=30)
    await settle()
    assert router.waiting == 1, "its failure makes room for another trial, not for all"
    [second] = [call.result() for call in waits if call.done()]
    router.succeeded(second)
    await asyncio.wait_for(asyncio.gather(*waits), 30)


async def test_a_waiter_that_gives_up_leaves_no_trace() -> None:
    router = Router()
    router.apply([row("a", running=1)])
    held = await router.acquire("r", 0, None)
    call = asyncio.create_task(router.acquire("s", 0, None))
    await settle()
    call.cancel()
    await settle()
    assert router.waiting == 0
    again = asyncio.create_task(router.acquire("s", 0, None))
    await settle()
    router.release(held)  # granted and cancelled in the same breath: the place is not lost
    again.cancel()
    await settle()
    await asyncio.wait_for(router.acquire("t", 0, None), 30)


async def test_a_waiter_that_is_cancelled_in_the_moment_of_a_grant() -> None:
    """Its task has not run yet when a place becomes free: the place goes to the next, and nobody else's call fails."""
    router = Router()
    router.apply([row("a", running=1)])
    lease = await router.acquire("first", 0, None)
    leaver = asyncio.create_task(router.acquire("leaver", 0, None))
    stayer = asyncio.create_task(router.acquire("stayer", 0, None))
    await settle()
    leaver.cancel()
    router.release(lease)  # before the cancelled task has its turn
    with pytest.raises(asyncio.CancelledError):
        await leaver
    router.release(await asyncio.wait_for(stayer, 30))
    assert router.view()[0]["running"] == 0
    assert router.waiting == 0


def roomy(name: str, kv_tokens: int, running: int = 8) -> CellRow:
    return CellRow(name, f"http://{name}", True, 0, running, "i", kv_tokens)


async def test_a_cell_takes_no_more_than_its_cache_holds() -> None:
    router = Router()
    router.apply([roomy("a", 1000)])
    held = [await router.acquire(f"r{i}", 0, None, tokens=400) for i in range(2)]
    third = asyncio.create_task(router.acquire("r2", 0, None, tokens=400))
    small = await asyncio.wait_for(router.acquire("r3", 0, None, tokens=200), 30)
    await settle()
    assert not third.done()
    assert router.view()[0]["tokens"] == 1000
    router.release(held[0])
    await asyncio.wait_for(third, 30)
    for lease in (held[1], small, third.result()):
        router.release(lease)
    assert router.view()[0]["tokens"] == 0
    huge = await asyncio.wait_for(router.acquire("r", 0, None, tokens=5000), 30)
    assert huge.tokens == 5000, "what fits nowhere is taken by an empty cell"


async def test_a_long_prompt_is_not_starved_by_short_ones() -> None:
    """Short calls keep coming and always fit; the long one gets in all the same, after a bounded number of them."""
    router = Router()
    router.apply([roomy("a", 1000), roomy("b", 1000)])
    running = [await router.acquire(f"s{i}", 0, None, tokens=300) for i in range(6)]
    long = asyncio.create_task(router.acquire("long", 0, None, tokens=900))
    await settle()
    let_in = 0
    for i in range(200):
        waiting = asyncio.create_task(router.acquire(f"t{i}", 0, None, tokens=300))
        await settle()
        router.release(running.pop(0))
        await settle()
        if waiting.done():
            let_in += 1
            running.append(waiting.result())
        if long.done():
            break
        if not running:
            break
    assert long.done()
    assert let_in <= PATIENCE + 1


async def test_a_rollout_with_many_calls_running_comes_after_those_with_fewer() -> None:
    router = Router()
    router.apply([row("a", running=4)])
    held = [await router.acquire("greedy", 0, None) for _ in range(4)]
    more = [asyncio.create_task(router.acquire("greedy", 0, None)) for _ in range(3)]
    await settle()
    modest = asyncio.create_task(router.acquire("modest", 0, None))
    await settle()
    router.release(held.pop())
    await settle()
    assert modest.done()
    assert not any(m.done() for m in more)
    for task in more:
        task.cancel()


async def test_a_long_prefix_is_worth_a_fuller_cell_and_a_short_one_is_not() -> None:
    router = Router()
    router.apply([roomy("a", 100_000, running=64), roomy("b", 100_000, running=64)])
    for i in range(20):
        await router.acquire(f"r{i}", 0, "a", tokens=100)
    on_a = next(c for c in router.view() if c["name"] == "a")["running"]
    assert isinstance(on_a, int)
    assert 10 < on_a < 14, "a few places, not a queue"
    assert (await router.acquire("x", 0, "a", tokens=50_000)).cell == "a"


async def test_cells_that_join_take_what_waits() -> None:
    router = Router()
    calls = [asyncio.create_task(router.acquire(f"r{i}", 0, None, tokens=10)) for i in range(3)]
    await settle()
    assert router.waiting == 3
    router.apply([roomy("new", 1000)])
    leases = await asyncio.wait_for(asyncio.gather(*calls), 30)
    assert {lease.cell for lease in leases} == {"new"}
    router.apply([])
    assert all(lease.revoked.is_set() for lease in leases)
    for lease in leases:
        router.release(lease)
    assert router.waiting == 0


async def test_several_processes_share_a_cell() -> None:
    """Three of them let in about what one would, and an empty cell takes any call."""
    routers = [Router(shards=3) for _ in range(3)]
    for router in routers:
        router.apply([CellRow("a", "http://a", True, 0, 8, "i", 900)])
    calls = [asyncio.create_task(router.acquire(f"r{i}", 0, None, tokens=100)) for router in routers for i in range(8)]
    await settle()
    assert [router.view()[0]["running"] for router in routers] == [3, 3, 3]
    for router in routers:
        router.apply([CellRow("b", "http://b", True, 0, 8, "i", 900)])
    await settle()
    assert [router.view()[0]["running"] for router in routers] == [3, 3, 3]
    for call in calls:
        call.cancel()
    [alone] = [Router(shards=3)]
    alone.apply([CellRow("a", "http://a", True, 0, 8, "i", 900)])
    await alone.acquire("long", 0, None, tokens=800)
    late = asyncio.create_task(alone.acquire("short", 0, None, tokens=10))
    await settle()
    assert not late.done()
    late.cancel()

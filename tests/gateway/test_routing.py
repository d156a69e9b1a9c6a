"""Who gets which cell, and when."""

from __future__ import annotations

import asyncio

import pytest

from gyre.gateway.routing import Lease, Router
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


async def test_a_cell_that_fails_is_left_alone_for_a_while() -> None:
    router = Router()
    router.apply([row("a")])
    lease = await router.acquire("r", 0, None)
    router.release(lease)
    assert router.failed(lease) == pytest.approx(0.25)
    assert router.failed(lease) <= 0.25, "calls that fail together count as one failure"
    call = asyncio.create_task(router.acquire("r", 0, None))
    await settle()
    assert not call.done()
    lease = await asyncio.wait_for(call, 1.0)
    assert router.failed(lease) == pytest.approx(0.5)
    router.apply([row("a", incarnation="new")])
    await asyncio.wait_for(router.acquire("r", 0, None), 0.05)


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
    await asyncio.wait_for(router.acquire("t", 0, None), 0.1)


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
    router.release(await asyncio.wait_for(stayer, 1))
    assert router.view()[0]["running"] == 0
    assert router.waiting == 0

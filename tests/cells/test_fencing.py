"""A cell has one agent: one that was replaced while it was stopped or cut off may wake up, and changes nothing."""

from __future__ import annotations

import asyncio
import os
import signal
from contextlib import AsyncExitStack
from functools import partial

import pytest

import activities.cell_site
from activities.cell_store import OpenStep
from activities.cell_work import Work, prepare
from gyre.store import queries as q
from gyre.store.db import transaction
from gyre.store.models import Cell, Step
from gyre.store.queries import FencedError
from gyre.training.protocol import TrainerError
from tests.cells import deadly
from tests.cells.agent import CENTRAL, SATELLITE, Agent
from tests.cells.pair import Pair

EVERY = bool(os.environ.get("GYRE_EVERY_FAULT"))  # make faults
pytestmark = pytest.mark.asyncio(loop_scope="module")


def row(pair: Pair, cell: str) -> Cell:
    with transaction(pair.db) as session:
        return next(c for c in q.cells(session, pair.run.run_id) if c.name == cell)


async def claim(agent: Agent, step: Step) -> int:
    incarnation = agent.site.trainer.incarnation
    assert incarnation is not None
    take = partial(q.claim_micro_batch, step_id=step.id, cell=agent.site.name, incarnation=incarnation)
    found = await agent.site.store.do(take)
    assert found is not None
    return found


async def ready_to_train(agent: Agent, step: Step) -> None:
    found = await agent.site.store.open_step()
    assert isinstance(found, OpenStep) and found.id == step.id
    assert await prepare(agent.site, found)


async def ends(agent: Agent) -> None:
    """Its trainer ends, and so does what keeps it: it is not started again."""
    keeping = agent._tasks[0]
    async with asyncio.timeout(60):
        await asyncio.wait({keeping})
    assert isinstance(keeping.exception(), FencedError)
    assert agent.site.trainer.pid is None
    with pytest.raises(FencedError):
        await asyncio.wait_for(agent.site.store.until_fenced(), 60)


async def test_a_replaced_satellite_can_no_longer_claim_commit_push_or_report(pair: Pair) -> None:
    step = pair.next_step()
    old = pair.agents[SATELLITE]
    await ready_to_train(old, step)
    for _ in range(2):
        await old.site.trainer.client.micro_batch(await claim(old, step))
    ticket = await old.site.trainer.client.push(step.id)
    incarnation = old.site.trainer.incarnation
    assert ticket is not None and incarnation is not None

    assert await pair.replace(SATELLITE) is old
    new = pair.agents[SATELLITE]
    with pytest.raises(FencedError, match="'beta' of run 'tiny-s0' was taken by another agent"):
        await claim(old, step)
    with pytest.raises(FencedError):  # nor does it say that its engine serves
        await old.site.store.report(routable=True, engine_url="http://127.0.0.1:1")
    with pytest.raises(TrainerError, match=r"LedgerError: the push of cell 'beta' is void: .* taken by another agent"):
        await (await old.site.central_trainer()).absorb(step.id, ticket, incarnation)
    found = row(pair, SATELLITE)
    assert (found.routable, found.engine_url) == (False, None)
    assert found.trainer_incarnation == new.site.trainer.incarnation != incarnation
    assert pair.agents[CENTRAL].site.trainer.ready.is_set()  # its trainer is not fenced by what another one is told

    async with new.working():
        await pair.finish(step)
    pair.check(step)
    await old.stop()


async def test_a_commit_of_a_replaced_trainer_is_refused_and_ends_it(pair: Pair) -> None:
    """It was stopped while it computed; its claim is its own no more, and neither is the cell."""
    step = pair.next_step()
    old = pair.agents[SATELLITE]
    await ready_to_train(old, step)
    claimed = await claim(old, step)
    pid = old.site.trainer.pid
    assert pid is not None
    os.kill(pid, signal.SIGSTOP)
    asked = asyncio.create_task(old.site.trainer.client.micro_batch(claimed))
    await asyncio.sleep(0.2)  # the connection is made; later ones find no socket
    await pair.replace(SATELLITE)
    os.kill(pid, signal.SIGCONT)
    with pytest.raises(TrainerError, match="FencedError: cell 'beta' of run 'tiny-s0' was taken by another agent"):
        await asked
    await ends(old)
    async with pair.agents[SATELLITE].working():
        await pair.finish(step)
    pair.check(step)
    await old.stop()


@pytest.mark.parametrize(
    "point", ["gradient computed", *(["gradient written, not committed", "push published"] if EVERY else [])]
)
async def test_a_satellite_that_sleeps_while_it_is_replaced(pair: Pair, point: str) -> None:
    """Stopped at a point of its way, and woken when the batch is over."""
    await sleeps_and_wakes(pair, pair.next_step(), SATELLITE, point)


@pytest.mark.parametrize(
    "point",
    [
        "checkpoint half written",
        *(["version written, not committed", "absorb written, not committed", "step to be taken"] if EVERY else []),
    ],
)
async def test_a_central_that_sleeps_while_it_is_replaced(pair: Pair, point: str) -> None:
    """It makes no version, publishes none, and touches no file of the version that its successor made."""
    await sleeps_and_wakes(pair, pair.next_step(), CENTRAL, point)


async def sleeps_and_wakes(pair: Pair, step: Step, cell: str, point: str) -> None:
    old = pair.agents[cell]
    pid, given = old.site.trainer.pid, deadly.order(pair.sockets, cell, point, number=signal.SIGSTOP)
    assert pid is not None
    async with AsyncExitStack() as work:
        if cell == CENTRAL:
            await work.enter_async_context(pair.agents[SATELLITE].working())
            doing = asyncio.create_task(pair.finish(step))
        else:
            doing = asyncio.create_task(Work(old.site).run())
        await pair.until(lambda: not given.exists(), f"{cell} reaches {point!r}")
        old.sleep()
        await pair.replace(cell)
        if cell == SATELLITE:
            await work.enter_async_context(pair.agents[SATELLITE].working())
        await pair.finish(step)
    pair.check(step)
    made = what_was_made(pair, step)
    os.kill(pid, signal.SIGCONT)
    await asyncio.wait({doing}, timeout=20)  # what it was about; where Postgres ended its transaction it asks on
    with pytest.raises(FencedError):
        await old.site.report()
    doing.cancel()
    with pytest.raises((FencedError, TrainerError, asyncio.CancelledError)):
        await doing
    await old.stop()
    assert old.site.trainer.pid is None
    assert what_was_made(pair, step) == made
    pair.check(step)


def what_was_made(pair: Pair, step: Step) -> object:
    """The version's ticket and files, and the cells' rows."""
    files = {p.name: p.stat().st_mtime_ns for p in pair.folder(step.index + 1).iterdir()}
    epochs = {cell: (row(pair, cell).epoch, row(pair, cell).trainer_incarnation) for cell in (CENTRAL, SATELLITE)}
    ticket = pair.published(step.index + 1)
    assert ticket is not None
    return ticket, files, epochs


async def test_an_agent_that_was_replaced_ends_by_itself_and_leaves_the_row_alone(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(activities.cell_site, "BEAT_S", 0.2)
    old = Agent(pair.settings, SATELLITE)
    monkeypatch.setattr(old.site.engine, "keep", lambda _: asyncio.sleep(3600))  # no server is needed
    keeping = asyncio.create_task(old.site.keep())
    await asyncio.wait_for(old.site.trainer.ready.wait(), 60)
    await pair.agents[SATELLITE].stop()
    await pair.replace(SATELLITE)
    with pytest.raises(ExceptionGroup) as ended:
        await asyncio.wait_for(keeping, 60)
    assert ended.group_contains(FencedError)
    assert old.site.trainer.pid is None and old.site.role == "down"
    found = row(pair, SATELLITE)
    assert found.role == "train" and found.trainer_incarnation == pair.agents[SATELLITE].site.trainer.incarnation

"""Attempts of the activity that trains: the work is the cell's, and outlives one that Temporal has lost sight of."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any, cast

import pytest
from temporalio.activity import ActivityCancellationDetails
from temporalio.testing import ActivityEnvironment

import activities.cell
from activities.cell import CellActivities
from activities.cell_site import CellSite
from workflows import messages as m

TRAIN = m.CellTrain("run", "beta")


class Work:
    """Stands for training; ends when it is told to."""

    begun: list[Work]

    def __init__(self, site: Any, micro_batches: int, tokens: int) -> None:
        self.micro_batches, self.tokens = micro_batches, tokens
        self.stop = asyncio.Event()
        self.given_back = False
        self.begun.append(self)

    async def run(self) -> None:
        await self.stop.wait()

    async def give_back(self) -> None:
        self.given_back = True


@pytest.fixture
def on_cell(monkeypatch: pytest.MonkeyPatch) -> CellActivities:
    async def do(_: object) -> None:
        return None

    monkeypatch.setattr(Work, "begun", [], raising=False)
    monkeypatch.setattr(activities.cell, "Work", Work)
    site = SimpleNamespace(role="train", name="beta", run=SimpleNamespace(run_id="run"), store=SimpleNamespace(do=do))
    return CellActivities(cast(CellSite, site))


async def attempt(on_cell: CellActivities) -> tuple[ActivityEnvironment, asyncio.Task[m.CellTrained]]:
    """An attempt that has come as far as it waits for the work."""
    environment = ActivityEnvironment()
    task = asyncio.create_task(environment.run(on_cell.cell_train, TRAIN))
    for _ in range(20):
        await asyncio.sleep(0)
    return environment, task


async def test_one_that_timed_out_leaves_the_work_to_the_next(on_cell: CellActivities) -> None:
    environment, first = await attempt(on_cell)
    [work] = Work.begun
    environment.cancel(ActivityCancellationDetails(timed_out=True))
    with pytest.raises(asyncio.CancelledError):
        await first
    assert not work.stop.is_set()

    environment, second = await attempt(on_cell)
    assert Work.begun == [work], "it trains what is trained already"
    work.micro_batches, work.tokens = 5, 400
    environment.cancel(ActivityCancellationDetails(cancel_requested=True))
    assert await second == m.CellTrained(5, 400)
    assert work.stop.is_set()


async def test_two_at_once_are_one_training(on_cell: CellActivities) -> None:
    """Temporal's next attempt may come before the one that it gave up has heard of it."""
    one, first = await attempt(on_cell)
    _, second = await attempt(on_cell)
    assert len(Work.begun) == 1
    one.cancel(ActivityCancellationDetails(timed_out=True))
    with pytest.raises(asyncio.CancelledError):
        await first
    assert not second.done() and not Work.begun[0].stop.is_set()
    Work.begun[0].stop.set()
    await second


async def test_one_after_the_work_has_ended_begins_anew(on_cell: CellActivities) -> None:
    environment, first = await attempt(on_cell)
    environment.cancel(ActivityCancellationDetails(cancel_requested=True))
    await first
    environment, second = await attempt(on_cell)
    assert len(Work.begun) == 2
    environment.cancel(ActivityCancellationDetails(cancel_requested=True))
    await second

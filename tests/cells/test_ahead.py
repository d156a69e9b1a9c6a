"""The next micro-batch is claimed and made ready while one computes, and goes back when the cell leaves."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, cast

from activities.cell_site import CellSite
from activities.cell_store import OpenStep
from activities.cell_work import Work
from gyre.store import queries as q
from gyre.store.queries import StepProgress
from gyre.training.protocol import TrainerError, TrainerStatus, TrainerUnavailable


@dataclass
class Script:
    """A central cell's site and its trainer, which computes a micro-batch only when it is let."""

    queue: list[int]
    sent: list[str] = field(default_factory=list)
    changed: asyncio.Condition = field(default_factory=asyncio.Condition)
    let: int = 0
    claimed: list[int] = field(default_factory=list)
    prefetch_says: Exception | None = None
    dies: bool = False
    central: bool = True
    name: str = "c0"
    incarnation: str = "me"

    @property
    def store(self) -> Script:
        return self

    trainer = client = store

    async def status(self) -> TrainerStatus:
        return TrainerStatus(self.incarnation, 0, 7, 0, False, False, None, 0)

    async def open_step(self) -> OpenStep:
        return OpenStep(7, 0, StepProgress("open", len(self.queue), len(self.claimed), {}, 0, 1, 1))

    async def do(self, work: Callable[..., Any]) -> int | None:
        assert isinstance(work, partial)
        if work.func is q.unclaim:
            back = [i for i in self.claimed if i != work.keywords["besides"]]
            self.claimed = [i for i in self.claimed if i not in back]
            self.queue[:0] = back
            for number in back:
                await self.say(f"back {number}")
            return len(back)
        if work.func is q.claim_micro_batch and self.claimed:
            return self.claimed[0]
        if not self.queue:
            return None
        self.claimed.append(self.queue.pop(0))
        await self.say(f"{'ahead' if work.func is q.claim_ahead else 'claim'} {self.claimed[-1]}")
        return self.claimed[-1]

    async def requeue_lost(self, step_id: int, mine: str) -> None:
        return None

    async def prefetch(self, number: int) -> None:
        await self.say(f"prefetch {number}")
        if self.prefetch_says is not None:
            raise self.prefetch_says

    async def micro_batch(self, number: int) -> dict[str, Any]:
        await self.say(f"begin {number}")
        async with self.changed:
            await self.changed.wait_for(lambda: self.let > 0 or self.dies)
        if self.dies:
            self.dies, self.incarnation = False, "another"
            self.queue[:0], self.claimed = self.claimed, []  # as dead trainers' claims are queued again
            raise TrainerUnavailable("it went away")
        self.let -= 1
        self.claimed.remove(number)
        await self.say(f"end {number}")
        return {"tokens": 5}

    async def say(self, what: str) -> None:
        async with self.changed:
            self.sent.append(what)
            self.changed.notify_all()

    async def until(self, what: str) -> None:
        async with asyncio.timeout(60), self.changed:
            await self.changed.wait_for(lambda: what in self.sent)

    async def lets(self, n: int = 1) -> None:
        async with self.changed:
            self.let += n
            self.changed.notify_all()

    def work(self) -> tuple[Work, asyncio.Task[None]]:
        work = Work(cast(CellSite, self))
        return work, asyncio.create_task(work.run())


async def test_the_next_one_is_ready_when_the_one_in_hand_ends() -> None:
    script = Script([1, 2, 3])
    work, running = script.work()
    await script.until("prefetch 2")
    assert "end 1" not in script.sent
    await script.lets()
    await script.until("prefetch 3")
    await script.until("begin 2")
    asked = [x for x in script.sent if not x.startswith("prefetch")]
    assert [asked[0], *sorted(asked[1:3]), asked[3]] == ["claim 1", "ahead 2", "begin 1", "end 1"]
    assert sorted(asked[4:]) == ["ahead 3", "begin 2"]
    await script.lets(2)
    await script.until("end 3")
    work.stop.set()
    await running
    assert (work.micro_batches, work.tokens) == (3, 15) and not script.claimed


async def test_work_that_comes_during_a_computation_is_made_ready_too() -> None:
    script = Script([1])
    work, running = script.work()
    await script.until("begin 1")
    script.queue.append(2)
    await script.until("prefetch 2")
    await script.lets(2)
    await script.until("end 2")
    work.stop.set()
    await running


async def test_what_was_claimed_ahead_goes_back_before_the_one_in_hand_ends() -> None:
    script = Script([1, 2])
    work, running = script.work()
    await script.until("prefetch 2")
    work.stop.set()
    await script.until("back 2")
    assert not running.done() and script.claimed == [1] and script.queue == [2]
    await script.lets()
    await running
    assert script.sent[-1] == "end 1" and not script.claimed  # and the one in hand was finished, not preempted


async def test_a_trainer_that_dies_takes_its_claims_along() -> None:
    script = Script([1, 2])
    work, running = script.work()
    await script.until("prefetch 2")
    async with script.changed:
        script.dies = True
        script.changed.notify_all()
    await script.until("claim 1")
    await script.lets(2)
    await script.until("end 2")
    work.stop.set()
    await running
    assert script.sent.count("end 1") == script.sent.count("end 2") == 1
    assert work.micro_batches == 2


async def test_a_micro_batch_that_cannot_be_made_ready_is_computed_all_the_same() -> None:
    script = Script([1, 2], prefetch_says=TrainerError("BatchError", "sample 3 has no node"))
    work, running = script.work()
    await script.until("prefetch 2")
    await script.lets(2)
    await script.until("end 2")
    work.stop.set()
    await running


async def test_a_claim_that_nobody_computes_goes_back_at_the_end() -> None:
    """Its prefetch went unanswered, so the loop does not know of it."""
    script = Script([1, 2], prefetch_says=TrainerUnavailable("no answer"))
    work, running = script.work()
    await script.until("prefetch 2")
    work.stop.set()
    await running
    assert not script.claimed and sorted(script.queue) == [1, 2]

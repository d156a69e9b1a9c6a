"""What a cell does while it trains: micro-batches of the oldest open step, and handing its gradient to central."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from activities.cell_site import CellSite
from activities.cell_store import OpenStep
from gyre.store import queries as q
from gyre.training.protocol import DATABASE_LOST, FENCED, REFUSALS, TrainerError, TrainerStatus, TrainerUnavailable

log = logging.getLogger("gyre.cell")

POLL_S = 0.1
"""Pause between two looks at what another process does."""
IDLE_POLL_S = 0.4
"""Longest pause between two looks at an empty queue: they grow to it, since each costs agent and database a little."""
REQUEUE_S = 2.0
"""Pause between two looks for dead holders."""
CENTRAL_LOOK_S = 2.0
"""Pause between two looks whether central, which does not answer a push yet, is still the same."""
MAX_REFUSALS = 20
"""Refusals of the trainer in a row before training counts as failed."""


@dataclass(frozen=True)
class Claim:
    """A micro-batch that this trainer will compute next, and is made ready while it computes another."""

    micro_batch: int
    step_id: int
    incarnation: str


@dataclass
class Work:
    """One stretch of training; `stop` ends it between two micro-batches."""

    site: CellSite
    micro_batches: int = 0
    tokens: int = 0
    looks_ahead: bool = True
    """Whether the next micro-batch is claimed, read and packed while one computes."""
    _ahead: Claim | None = None
    _newest: Claim | None = None
    stop: asyncio.Event = field(default_factory=asyncio.Event)
    _requeued_at: float = 0.0
    _refusals: int = 0
    _waits_for: str = ""
    """What was last logged to be missing, as long as it is."""
    _idle_s: float = 0.0

    async def run(self) -> None:
        """Work until `stop` is set. A trainer that dies is waited for; what it held is queued again.

        Raises FencedError when another agent has taken the cell.
        """
        while not self.stop.is_set():
            try:
                busy = await self._once()
                self._refusals, self._waits_for = 0, ""
            except TrainerUnavailable as error:
                if str(error) != self._waits_for:  # it is asked several times a second
                    log.warning("training waits for the trainer: %s", error)
                self._waits_for = str(error)
                busy = False
            except TrainerError as error:
                self._refusals += 1
                await judge(self.site, error, self._refusals)
                busy = False
            self._idle_s = 0.0 if busy else min(IDLE_POLL_S, self._idle_s * 1.5 or POLL_S / 2)
            await self._pause(self._idle_s)
        await self.give_back()

    async def _pause(self, seconds: float) -> None:
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self.stop.wait(), seconds)

    async def _once(self) -> bool:
        """One micro-batch, or one push. False: there was nothing to do."""
        site = self.site
        ahead, self._ahead = self._ahead, None  # where it fails, the claim is found again, as any claim that was made
        if ahead is not None and ahead.incarnation == site.trainer.incarnation:
            await self._compute(ahead)
            return True
        step = await site.store.open_step()
        if step is None:
            return False
        incarnation = site.trainer.incarnation
        if incarnation is None or not await prepare(site, step):
            return False
        if (await site.trainer.status()).pushed:
            # A push that central did not answer, and perhaps its death has filled the queue again: first things first,
            # for with its push out the trainer refuses micro-batches.
            return await push_held(site)
        claim = partial(q.claim_micro_batch, step_id=step.id, cell=site.name, incarnation=incarnation)
        # The fence is in the claim: an agent that was replaced takes nothing from its successor.
        taken = await site.store.do(claim) if step.progress.queued or step.progress.claimed else None
        if taken is not None:
            await self._compute(Claim(taken, step.id, incarnation))
            return True
        if time.monotonic() - self._requeued_at > REQUEUE_S:
            self._requeued_at = time.monotonic()
            await site.store.requeue_lost(step.id, incarnation)
        if step.progress.groups_open == 0 and step.progress.held_by.get(incarnation):
            return await push_held(site)
        return False

    async def _compute(self, claim: Claim) -> None:
        """Have the trainer compute a micro-batch, and make another one ready meanwhile; that one goes back at `stop`,
        at once, so that others need not wait for the one in hand."""
        client, self._newest = self.site.trainer.client, claim
        computing = asyncio.create_task(client.micro_batch(claim.micro_batch))
        leaving = asyncio.create_task(self.stop.wait())
        try:
            while not computing.done() and not leaving.done():
                if self._ahead is None and self.looks_ahead:
                    self._ahead = await self._look_ahead(claim)
                pause = IDLE_POLL_S if self._ahead is None and self.looks_ahead else None
                await asyncio.wait({computing, leaving}, timeout=pause, return_when=asyncio.FIRST_COMPLETED)
            if leaving.done():
                await self.give_back(besides=claim.micro_batch)
            metrics = await computing
        finally:
            computing.cancel()
            leaving.cancel()
        self.micro_batches += 1
        self.tokens += int(metrics["tokens"])

    async def _look_ahead(self, now: Claim) -> Claim | None:
        """Claim the micro-batch after `now`, and have the trainer read and pack it."""
        claim = partial(q.claim_ahead, step_id=now.step_id, cell=self.site.name, incarnation=now.incarnation)
        if (found := await self.site.store.do(claim)) is None:
            return None
        try:
            await self.site.trainer.client.prefetch(found)
        except TrainerError as error:  # what is wrong with it is for its computation to say
            log.warning("micro-batch %d cannot be made ready: %s", found, error)
        return replace(now, micro_batch=found)

    async def give_back(self, besides: int | None = None) -> None:
        """Queue again what this trainer has claimed and does not compute."""
        self._ahead, newest = None, self._newest
        if newest is not None:
            mine = partial(q.unclaim, step_id=newest.step_id, incarnation=newest.incarnation, besides=besides)
            await self.site.store.do(mine)


async def judge(site: CellSite, error: TrainerError, refusals: int) -> None:
    """Return if what a trainer refused, `refusals` times in a row by now, is to be tried again.

    LedgerError: what the trainer held beyond the ledger is void, and queued again. CommandError: the step ended between
    our look and the command, or a transfer failed. Either is over at the next look, or is an error. Raises `error`, or
    FencedError where another agent has taken the cell.
    """
    if error.kind == FENCED or error.kind in DATABASE_LOST:  # it may be central's that was replaced, or has no database
        await site.store.do(lambda _: None)
    elif error.kind not in REFUSALS or refusals > MAX_REFUSALS:
        raise error
    log.warning("a trainer refused: %s", error)


async def prepare(site: CellSite, step: OpenStep) -> bool:
    """Have the trainer accumulate for `step` under the version that it trains. False: that version is not there yet."""
    status = await site.trainer.status()
    if status.asleep:
        await site.trainer.client.wake()
    if site.central and status.version is not None and status.version > step.index:
        return False  # the optimizer step came after our look at the run
    if status.version != step.index:
        if await site.store.look(lambda s: q.weight_version(s, site.run.run_id, step.index)) is None:
            return False
        if status.held and not site.central:
            await push_held(site)
        await site.trainer.client.load(step.index)
    if status.step_id != step.id:
        await site.trainer.client.begin(step.id)
    return True


async def _absorbed(site: CellSite, status: TrainerStatus, ticket: dict[str, Any]) -> None:
    """Central's trainer has absorbed the push. Raises TrainerUnavailable, too, when central's agent is replaced while
    its trainer, which may be stopped for good, does not answer."""
    assert status.step_id is not None
    central = await site.central_trainer()
    asking = asyncio.create_task(central.absorb(status.step_id, ticket, status.incarnation))
    try:
        while not (await asyncio.wait({asking}, timeout=CENTRAL_LOOK_S))[0]:
            if (await site.central_trainer()).at != central.at:
                raise TrainerUnavailable(f"{central.at}: central's agent was replaced during absorb")
        asking.result()
    finally:
        asking.cancel()


async def push_held(site: CellSite) -> bool:
    """Satellite: hand the accumulated gradient to central, exactly once. False: there is nothing to hand over.

    Central commits the move in the ledger; only then does this trainer forget. If central dies in between, either the
    ledger moved (and central's death queues the micro-batches again) or it did not (and the next push repeats it).
    """
    if site.central:
        return False
    status = await site.trainer.status()
    if not status.held or status.step_id is None:
        return False
    client = site.trainer.client
    ticket = await client.push(status.step_id)
    if ticket is None:
        return False
    refused = ""
    try:
        await _absorbed(site, status, ticket)
    except TrainerError as error:
        # CommandError: central is done with the step, which it cannot be before it has this gradient, from this push
        # or from another trainer. Whether this one may be forgotten is for the ledger to say: `reset` asks it.
        if error.kind not in REFUSALS:
            raise
        log.warning("central refused a gradient: %s", error.message)
        refused = f"; central had refused it: {error.message}"
    try:
        await client.reset(status.step_id)
    except TrainerError as error:
        raise TrainerError(error.kind, error.message + refused) from error
    return True

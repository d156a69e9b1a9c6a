"""The activities of one cell, run by its agent: change of role, training, weights, the optimizer step.

Each may be retried at any point: it looks where things stand and does what is left.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Any

from temporalio import activity
from temporalio.exceptions import ApplicationError

from activities.beat import beating, is_cancelled_for_good
from activities.cell_site import CellSite, Phases
from activities.cell_work import POLL_S, REQUEUE_S, Work, judge, prepare, push_held
from gyre.serving.client import EngineError
from gyre.store import queries as q
from gyre.store.queries.cells import Role
from gyre.training.protocol import TrainerError, TrainerUnavailable
from workflows import messages as m

log = logging.getLogger("gyre.cell")

BEAT_S = 1.0


class CellActivities:
    """The activities over one site."""

    def __init__(self, site: CellSite) -> None:
        self._site = site
        self._training: tuple[Work, asyncio.Task[None]] | None = None
        """What trains now. It is the cell's, not an attempt's: Temporal may take an attempt for lost that is only out
        of touch, and the next one then joins the work that goes on."""

    def all(self) -> Sequence[Callable[..., Any]]:
        """What the agent's worker registers."""
        return [self.cell_to_train, self.cell_train, self.cell_to_rollout, self.cell_load_weights, self.finish_step]

    # ---- change of role -------------------------------------------------------------------------------------------

    @activity.defn
    async def cell_to_train(self, x: m.CellSwitch) -> m.CellSwitched:
        """Serving ends: calls move away, the server gives its memory back, the trainer wakes with current weights."""
        async with _beating():
            await self._check(x.run_id, x.cell)
            return await self._to_train(x.reason)

    async def _to_train(self, reason: str) -> m.CellSwitched:
        site = self._site
        async with site.switching:
            if site.role == "train":
                return m.CellSwitched("train", (await site.trainer.status()).version or 0)
            change = await self._open_change("train", reason)
            phases = site.phases()
            with phases("unroute"):
                await site.set_role("to_train")
            await self._quiet(phases)
            with phases("wake"):
                await site.trainer.ready.wait()
                await site.trainer.client.wake()
            with phases("load"):
                version = await self._training_version()
            await self._close_change("train", change, phases)
        return m.CellSwitched("train", version, phases.seconds)

    async def _quiet(self, phases: Phases) -> None:
        """Drain the server, get its KV out, take its memory. A restarting one runs nothing, gives way when it comes."""
        engine = self._site.engine
        if not engine.ready.is_set():
            return
        try:
            with phases("drain"):
                await engine.drain()
            if engine.moves_kv:
                with phases("kv"):
                    await engine.hand_over()
            with phases("release"):
                await engine.release()
        except EngineError:
            if engine.process.alive:
                raise
            log.warning("the engine died while it was drained")

    async def _training_version(self) -> int:
        """Load what is to be trained now: the version of the oldest open step, or the newest."""
        site = self._site
        step = await site.store.open_step()
        if step is None or not await prepare(site, step):
            version, _, row = await site.store.newest_version()
            if row is not None:
                await push_held(site)
                await site.trainer.client.load(version)
        return (await site.trainer.status()).version or 0

    @activity.defn
    async def cell_to_rollout(self, x: m.CellSwitch) -> m.CellSwitched:
        """Training ends: the gradient goes to central, the trainer sleeps, the server takes the newest weights."""
        site = self._site
        async with _beating(), site.switching:
            await self._check(x.run_id, x.cell)
            if site.role == "rollout" and site.engine.ready.is_set() and not site.engine.released:
                return m.CellSwitched("rollout", await self._serve_newest(0))
            change = await self._open_change("rollout", x.reason)
            phases = site.phases()
            await site.set_role("to_rollout")
            await self._stop_training()  # an attempt that Temporal gave up may have left it running
            with phases("push"):
                await site.trainer.ready.wait()
                await self._push()
            with phases("sleep"):
                await site.trainer.client.sleep()
            with phases("resume"):
                await site.engine.ready.wait()
                version = await site.engine.resume()
            await self._close_change("rollout", change, phases)
        return m.CellSwitched("rollout", version, phases.seconds)

    async def _push(self) -> None:
        """Hand everything to central; wait for a central that is being restarted, and try a failed transfer again."""
        refusals, waits_for = 0, ""
        while True:
            try:
                await push_held(self._site)
                return
            except TrainerUnavailable as error:
                if str(error) != waits_for:
                    log.warning("the push waits for a trainer: %s", error)
                waits_for = str(error)
            except TrainerError as error:
                refusals += 1
                await judge(self._site, error, refusals)
            await asyncio.sleep(0.5)

    async def _open_change(self, to_role: str, reason: str) -> int:
        site, from_role = self._site, {"train": "rollout", "rollout": "train"}[to_role]
        return await site.store.do(
            lambda s: q.start_role_change(s, site.run.run_id, site.name, from_role, to_role, reason)
        )

    async def _close_change(self, role: Role, change: int, phases: Phases) -> None:
        with phases("report"):
            await self._site.set_role(role)
        await self._site.store.do(lambda s: q.end_role_change(s, change, phases.seconds, phases.rss_mb))

    # ---- while serving --------------------------------------------------------------------------------------------

    @activity.defn
    async def cell_load_weights(self, x: m.CellWeights) -> m.CellServing:
        """Serve `version` or a newer one; live calls go on. A cell that trains takes them when it serves again."""
        site = self._site
        async with _beating(), site.switching:
            await self._check(x.run_id, x.cell)
            if site.role != "rollout":
                return m.CellServing(site.engine.version or 0)
            await site.engine.ready.wait()
            return m.CellServing(await self._serve_newest(x.version))

    async def _serve_newest(self, at_least: int) -> int:
        version = await self._site.engine.load(at_least)
        await self._site.report()  # also where nothing is new: the row must be this agent's for the answer to be true
        return version

    # ---- while training -------------------------------------------------------------------------------------------

    @activity.defn
    async def cell_train(self, x: m.CellTrain) -> m.CellTrained:
        """Compute micro-batches until cancelled; the one in hand is finished first, and its result is returned.

        An attempt that Temporal has given up (the agent was out of touch with it for too long) leaves the work running,
        so that a gradient which the batch waits for is still pushed; the next attempt joins it.
        """
        earlier = activity.info().heartbeat_details
        counted = tuple(earlier) if len(earlier) == 2 else (0, 0)
        async with _beating(lambda: counted):
            await self._check(x.run_id, x.cell)
            if self._site.role != "train":  # this agent is a new one: it began by serving
                await self._to_train("training goes on after a restart of the agent")
            work, running = self._join_training(*counted)
            while not running.done():
                counted = (work.micro_batches, work.tokens)
                try:
                    await asyncio.wait({running}, timeout=BEAT_S)
                except asyncio.CancelledError:
                    if activity.is_worker_shutdown():  # the trainer ends too; Temporal tries again with the next agent
                        running.cancel()
                        raise
                    if not await is_cancelled_for_good():
                        log.warning("Temporal has given up this attempt to train; the work goes on")
                        raise
                    await self._stop_training()
            running.result()  # raises what ended it
        return m.CellTrained(work.micro_batches, work.tokens)

    def _join_training(self, micro_batches: int, tokens: int) -> tuple[Work, asyncio.Task[None]]:
        """The work that runs, or new work that counts on from what an earlier attempt had done."""
        if self._training is None or self._training[1].done():
            work = Work(self._site, micro_batches, tokens)
            self._training = work, asyncio.create_task(work.run())
        return self._training

    async def _stop_training(self) -> None:
        """Have the work end after the micro-batch in hand, and wait for it."""
        if self._training is not None:
            work, running = self._training
            work.stop.set()
            await asyncio.wait({running})
            await work.give_back()  # where it failed it may have left a claim, which the step would wait for

    # ---- the end of a step ----------------------------------------------------------------------------------------

    @activity.defn
    async def finish_step(self, x: m.FinishStep) -> m.FinishedStep:
        """On central: wait until every gradient of the closed step is here; step, save, publish."""
        site = self._site
        if not site.central:
            raise ApplicationError(f"cell {site.name!r} is not central", type="ValueError", non_retryable=True)
        async with _beating():
            await self._check(x.run_id, site.name)
            while True:
                await self._all_held(x.step_id)
                try:
                    return await self._optimizer_step(x.step_id)
                except TrainerUnavailable as error:
                    log.warning("the optimizer step waits for the trainer: %s", error)
                except TrainerError as error:
                    if error.kind == "CommandError":
                        raise
                    await judge(site, error, 0)
                await asyncio.sleep(POLL_S)

    async def _all_held(self, step_id: int) -> None:
        """Return when central's living trainer holds every micro-batch of the closed step, or the step is done."""
        site, looks = self._site, 0
        while True:
            await site.trainer.ready.wait()
            mine = site.trainer.incarnation
            progress = await site.store.look(lambda s: q.step_progress(s, step_id))
            if progress.state == "done":
                return
            if progress.state == "closed" and mine is not None and progress.complete_at(mine):
                return
            if looks % int(REQUEUE_S / POLL_S) == 0:
                await site.store.requeue_lost(step_id, mine)
            looks += 1
            await asyncio.sleep(POLL_S)

    async def _optimizer_step(self, step_id: int) -> m.FinishedStep:
        site = self._site
        client = site.trainer.client
        await client.wake()
        result = await client.optimizer_step(step_id)
        version = int(result["version"])
        await client.publish(version)
        if site.role == "rollout":
            await client.sleep()
        numbers = {k: float(v) for k, v in result["metrics"].items() if isinstance(v, int | float)}
        return m.FinishedStep(version, numbers)

    async def _check(self, run_id: str, cell: str) -> None:
        """The activity is for this cell, and the cell is this agent's: one that was replaced may still take activities
        from the cell's queue. Raises FencedError, so that Temporal tries again and the newer agent gets it."""
        site = self._site
        if (run_id, cell) != (site.run.run_id, site.name):
            raise ApplicationError(
                f"this agent is of cell {site.name!r} of run {site.run.run_id!r}, not {cell!r} of {run_id!r}",
                type="ValueError",
                non_retryable=True,
            )
        await site.store.do(lambda _: None)


def _beating(detail: Callable[[], tuple[Any, ...]] = tuple) -> AbstractAsyncContextManager[None]:
    """Heartbeat while the block runs: a lost agent is noticed, and a cancellation arrives."""
    return beating(BEAT_S, detail, at_once=True)

"""The SGLang server of a cell: kept alive, and its weights and memory."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Coroutine
from pathlib import Path
from typing import Any, TypeVar

import torch

from activities.cell_kv import CellKv
from activities.cell_process import BackOff, FirstStart
from activities.cell_store import CellStore
from gyre.config import CellConfig
from gyre.ports import LOOPBACK
from gyre.serving.client import EngineClient, EngineError, warm_up
from gyre.serving.launch import EngineProcess, EngineStartError
from gyre.store.models import WeightVersion
from gyre.transfer import Ticket, TransferError, WeightPuller, open_puller

log = logging.getLogger("gyre.cell")

T = TypeVar("T")

DRAIN_S = 5.0
"""How long the gateway has to move its calls away before they are aborted here (it then moves them all the same)."""
SETTLE_S = 0.05
"""Pause after the last request has ended: SGLang's front hands its last words over then, and a `pause` of mode `abort`
that finds it doing so waits for a whole second."""
START_S = 900.0
"""How long a start may take; a server that dies meanwhile is noticed at once. Long, since a start that is cut off on a
crowded machine only crowds it more."""
HEALTH_S = 5.0
"""How long an answer to /health may take, and the pause between two questions."""
SILENT_S = 60.0
"""A server that answers no question within so long is ended and started anew (after twice that, if it hangs)."""


class CellEngine:
    """Keeps one server running. `ready` is set while it can be used; `version` is the policy version that it holds."""

    def __init__(
        self, store: CellStore, cell: CellConfig, log_path: Path, process: type[EngineProcess] = EngineProcess, *,
        host: str = LOOPBACK,
    ) -> None:  # fmt: skip
        self._store, self._cell, self._host = store, cell, host
        run = store.run
        self.process = process(run.serving, cell, log_path, context=run.policy.context, host=host)
        self._kv = CellKv(run, cell, log_path.parent / "kv")
        self.ready = asyncio.Event()
        self.version: int | None = None
        self.released = False
        """Whether its memory was given to the trainer."""
        self.admits = True
        """Whether it takes new calls: not while its running ones end before new weights (serving.on_update)."""
        self._paused = False
        """Whether it was told to generate nothing: its memory may be back, or not gone yet."""
        self._client: EngineClient | None = None
        self._lock = asyncio.Lock()  # one change of weights or memory at a time
        self._puller: tuple[Ticket, WeightPuller] | None = None
        self._changed: Callable[[], Awaitable[None]] = _nobody

    @property
    def url(self) -> str | None:
        """Where it answers, or None while it does not."""
        return self.process.url if self.ready.is_set() else None

    @property
    def incarnation(self) -> str | None:
        """Of the living server, or None."""
        return self.process.incarnation if self.ready.is_set() else None

    async def keep(self, changed: Callable[[], Awaitable[None]]) -> None:
        """Start the server, and again whenever it dies; `changed` is called when it comes and when it goes.

        Raises CannotStart where it ends at every start.
        """
        back_off, first, self._changed = BackOff(), FirstStart("the engine"), changed
        while True:
            back_off.started()
            try:
                await self._start()
                first.worked()
                await changed()
                await self._until_gone()
            except EngineStartError as error:
                log.error("engine: %s", error)
                if not self.process.alive:
                    first.failed(self.process.exit_code, str(error))
            except EngineError as error:
                log.error("engine: %s", error)
            self.ready.clear()
            self.version, self.released, self._paused = None, False, False
            await changed()
            await asyncio.to_thread(self.process.stop)
            pause = back_off.died()
            log.info("engine: starts again in %.0f s", pause)
            await asyncio.sleep(pause)

    def stop(self) -> None:
        """End the server; `keep` must have been cancelled before. Blocks a few seconds at most."""
        self.ready.clear()
        self.process.stop()
        self._kv.close()

    async def _start(self) -> None:
        version, folder, _ = await self._store.newest_version()
        if not await asyncio.to_thread(folder.is_dir):
            raise EngineStartError(
                f"version {version} of the policy lies in {folder}, which is not there on this machine; have the run's "
                "machines share it"
            )
        self.process.kv = await asyncio.to_thread(self._kv.decide, folder)
        self.process.start(folder, version)
        await asyncio.to_thread(warm_up)
        await self.process.wait_ready(START_S)
        if self._client is not None:
            await self._client.aclose()
        self._client = EngineClient(self.process.url)
        self.version = version
        await self.load(version)  # a newer one may have come meanwhile
        await self._client.settle()
        self.ready.set()
        log.info("engine %s: serves v%d at %s", self.process.incarnation[:8], self.version, self.process.url)

    async def _until_gone(self) -> None:
        client, silent = self._running(), 0.0
        while self.process.alive and silent < SILENT_S:
            for _ in range(int(HEALTH_S / 0.2)):
                if not self.process.alive:
                    break
                await asyncio.sleep(0.2)
            else:
                silent = 0.0 if await _answers(client) else silent + HEALTH_S
        if self.process.alive:
            log.error("engine: no answer for %.0f s; it is ended", silent)
        else:
            log.error("engine: died with code %s", self.process.exit_code)

    def _running(self) -> EngineClient:
        if self._client is None:
            raise EngineError("the engine does not run yet")
        return self._client

    # ---- weights --------------------------------------------------------------------------------------------------

    async def load(self, at_least: int) -> int:
        """Hold the newest durable version, which must be `at_least` or newer; the version. Live requests go on under
        it, or end first, as `serving.on_update` says.

        Raises EngineError if it refuses the weights. Whatever breaks an update off, the server is started anew with the
        newest version.
        """
        return await _to_its_end(self._load(at_least))

    async def _load(self, at_least: int) -> int:
        async with self._lock:
            return await self._hold(at_least)

    async def _hold(self, at_least: int) -> int:
        version, folder, row = await self._store.newest_version()
        if version < at_least:
            raise LookupError(f"version {at_least} is not durable yet; the newest is {version}")
        if self.version is None or self.version < version:
            await self._replace(version, folder, row)
        assert self.version is not None
        return self.version

    async def _replace(self, version: int, folder: Path, row: WeightVersion | None) -> None:
        client, incarnation = self._running(), self.process.incarnation
        pulled = None if row is None or row.ticket is None else await self._pull(row.ticket, version)
        if pulled is None and not await asyncio.to_thread(folder.is_dir):  # the server would be lost over it
            raise EngineError(
                f"version {version} cannot be pulled from central now, and its checkpoint {folder} is not there on "
                "this machine; have the run's machines share it, or wait for central"
            )

        async def update(idle: bool = False) -> bool:
            if pulled is not None:
                return await client.update_weights(pulled[1], pulled[0], idle=idle)
            return await client.update_weights_from_disk(folder, version, idle=idle)

        try:
            if not await self._update_when_idle(client, update):
                await update()
        finally:
            if client.half_updated and self.process.incarnation == incarnation:
                # Half-loaded weights must never serve; `keep` starts it anew, unless it has done so already.
                self.ready.clear()
                await asyncio.to_thread(self.process.stop)
        self.version = version if pulled is None else pulled[0]
        log.info("engine: serves v%d, %s", self.version, "pulled from central" if pulled else f"read from {folder}")

    async def _update_when_idle(self, client: EngineClient, update: Callable[[bool], Awaitable[bool]]) -> bool:
        """For serving.on_update = "finish": let running calls end, take none, and update. False: it did not come to it.

        The gateway hears of it a moment later, so a call may still come: `update` looks again while nothing generates.
        """
        serving = self._store.run.serving
        if serving.on_update != "finish" or not self.ready.is_set():
            return False
        deadline = asyncio.get_running_loop().time() + serving.finish_limit_s
        self.admits = False
        try:
            await self._changed()
            while (left := deadline - asyncio.get_running_loop().time()) > 0:
                if await client.wait_empty(left) and await update(True):
                    return True
        finally:
            self.admits = True  # whoever asked for the version reports both
        running = await client.running_requests()
        log.warning("engine: %d calls run after %.0f s; they go on under new weights", running, serving.finish_limit_s)
        return False

    async def _pull(self, found_ticket: dict[str, Any], version: int) -> tuple[int, dict[str, torch.Tensor]] | None:
        """None: the checkpoint must serve instead, for a reason that is logged."""
        try:
            ticket = Ticket.from_json(found_ticket)
            if self._puller is None or self._puller[0].incarnation != ticket.incarnation:
                await asyncio.to_thread(self._close_puller)
                self._puller = (ticket, await asyncio.to_thread(open_puller, ticket, self._host))
            found, tensors = await asyncio.to_thread(self._puller[1].pull)
        except TransferError as error:
            log.warning("engine: v%d cannot be pulled, its checkpoint is read instead: %s", version, error)
            await asyncio.to_thread(self._close_puller)
            return None
        if found < version:
            log.warning("engine: central publishes v%d, not v%d yet; the checkpoint is read instead", found, version)
            return None
        return found, tensors

    def _close_puller(self) -> None:
        if self._puller is not None:
            self._puller[1].close()
            self._puller = None

    # ---- memory ---------------------------------------------------------------------------------------------------

    async def drain(self) -> None:
        """Wait until it runs nothing; what the gateway has not moved after DRAIN_S seconds is aborted."""
        client = self._running()
        if await client.wait_empty(DRAIN_S):
            await asyncio.sleep(SETTLE_S)
            return
        log.warning("engine: still runs %d requests after %.0f s; aborted", await client.running_requests(), DRAIN_S)
        await client.abort_all()
        if not await client.wait_empty(30.0):
            raise EngineError(f"{client.url}: requests stay after an abort")

    @property
    def moves_kv(self) -> bool:
        """Whether keys and values that it computed can be had by other cells."""
        return self._kv.plan is not None

    async def hand_over(self) -> None:
        """Wait until all that it computed lies where other cells find it; it must run nothing. Forgets its cache.

        Where that fails, the others compute it anew.
        """
        try:
            await self._running().flush_cache()
        except EngineError as error:
            log.warning("engine: keys and values are not all handed over: %s", error)

    async def release(self) -> None:
        """Give its memory to the trainer. It must run nothing. Idempotent. (On CPU SGLang frees nothing.)"""
        await _to_its_end(self._release())

    async def _release(self) -> None:
        async with self._lock:
            if not self.released:
                client = self._running()
                self._paused = True
                await client.pause("abort")
                await client.release_memory()
                self.released = True

    async def resume(self) -> int:
        """Take memory back, hold the newest version, generate again; the version. Idempotent."""
        return await _to_its_end(self._resume())

    async def _resume(self) -> int:
        client = self._running()
        async with self._lock:
            if self.released:
                await client.resume_memory()
                self.released = False
                if self._cell.devices:
                    self.version = None  # what the memory holds now is undefined
            if self._paused:  # also where an earlier attempt broke off between the two
                await client.resume()
                self._paused = False
            return await self._hold(0)


async def _to_its_end(change: Coroutine[Any, Any, T]) -> T:
    """A caller that is cancelled (an activity whose heartbeat came late) must not leave half the weights, or a server
    whose memory nobody knows to be gone: the change goes on, and the next one waits for it."""
    return await asyncio.shield(asyncio.ensure_future(change))


async def _nobody() -> None:
    """Whom nobody asked to be told."""


async def _answers(client: EngineClient) -> bool:
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(HEALTH_S):
            return await client.health()
    return False

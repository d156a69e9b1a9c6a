"""Heartbeats of long activities, and why one was cancelled."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from temporalio import activity

EVERY_S = 8.0
"""Seconds between heartbeats. Each costs the server a write, so it is far below the time-out and no more."""


@asynccontextmanager
async def beating(every_s: float = EVERY_S) -> AsyncIterator[None]:
    """Heartbeat while the block runs."""

    async def beat() -> None:
        while True:
            await asyncio.sleep(every_s)
            activity.heartbeat()

    task = asyncio.create_task(beat())
    try:
        yield
    finally:
        task.cancel()


def is_cancelled_for_good() -> bool:
    """Whether the workflow cancelled this activity (or is gone), and not only this worker's hold on it.

    A worker that shuts down, or was out of touch for too long, leaves what it started to the next attempt.
    """
    why = activity.cancellation_details()
    return why is not None and (why.cancel_requested or why.not_found) and not why.worker_shutdown

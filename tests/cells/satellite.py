"""A satellite that only trains, on another machine: `python -m tests.cells.satellite ZYGOTE`, settings by environment.

Its agent works until it is killed, its trainer is forked by the zygote at the socket ZYGOTE; it has no engine.
"""

from __future__ import annotations

import asyncio
import logging
import sys
from pathlib import Path
from typing import Any, cast

import activities.cell_site
import activities.cell_trainer
from activities.cell_process import BackOff
from tests.cells.agent import SATELLITE, Agent
from tests.cells.zygote import Forks
from workers.settings import settings_or_exit

BEAT_S = 0.3


async def work() -> None:
    activities.cell_site.BEAT_S = BEAT_S
    activities.cell_trainer.subprocess = cast(Any, Forks(Path(sys.argv[1])))
    activities.cell_trainer.BackOff = cast(Any, lambda: BackOff(longest=0.0))
    agent = Agent(settings_or_exit(), SATELLITE)
    await agent.start()
    async with agent.working():
        await asyncio.Event().wait()


def main() -> None:
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s", stream=sys.stdout)
    asyncio.run(work())


if __name__ == "__main__":
    main()

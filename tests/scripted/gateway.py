"""A gateway in a process of its own: real, to be killed, and there again in a fraction of a second.

It is forked from a server of `multiprocessing` that has imported `workers.gateway` once; a new interpreter takes two
CPU-seconds for that. tests/gateway/test_process.py starts the command itself.
"""

from __future__ import annotations

import asyncio
import contextlib
import multiprocessing
import os
import sys
from collections.abc import Sequence
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import TYPE_CHECKING

import httpx

from gyre.ports import free_port
from tests.clients import http_client
from tests.settings import worker_settings

if TYPE_CHECKING:
    from tests.gateway.conftest import World

_forked = multiprocessing.get_context("forkserver")
_forked.set_forkserver_preload(["workers.gateway", "tests.scripted.gateway"])


class GatewayProcess:
    """`workers.gateway` on a port that stays its own; number `index` of `urls`, where there are several."""

    def __init__(self, world: World, folder: Path, urls: Sequence[str] = (), index: int = 0) -> None:
        folder.mkdir(parents=True)
        urls = urls or [f"http://127.0.0.1:{free_port()}"]
        self.url = urls[index]
        settings = worker_settings(world.run, world.database, folder, gateway=",".join(urls))
        self._arguments, self._env = ["--index", str(index)], settings.to_env()
        self._process: BaseProcess | None = None

    async def start(self) -> None:
        """Start it, and wait until it answers."""
        self._process = _forked.Process(target=_serve, args=(self._arguments, self._env), daemon=True)
        self._process.start()
        async with asyncio.timeout(120), http_client(self.url) as http:
            while True:
                assert self._process.is_alive(), "the gateway ended"
                with contextlib.suppress(httpx.TransportError):
                    await http.get("/health")
                    return
                await asyncio.sleep(0.05)

    async def end(self) -> None:
        """Ask it to end, as a rolling restart does, and wait."""
        assert self._process is not None
        self._process.terminate()
        await asyncio.to_thread(self._process.join, 60)
        assert not self._process.is_alive(), "the gateway does not end"

    async def stop(self) -> None:
        """kill -9."""
        if self._process is not None:
            self._process.kill()
            self._process.join()


def _serve(arguments: list[str], env: dict[str, str]) -> None:
    from workers.gateway import main

    os.environ.update(env)
    sys.argv = ["workers.gateway", *arguments]
    main()

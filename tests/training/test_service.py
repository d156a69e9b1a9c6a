"""The trainer's socket."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from gyre.training.client import TrainerClient
from gyre.training.service import TrainerService


class Idle:
    """Commands of a trainer that has nothing to do."""

    version, step_id, pushed, asleep = 3, None, False, True
    held: Mapping[int, Any] = {}

    def commands(self) -> dict[str, Callable[..., dict[str, Any]]]:
        return {"wake": dict}


async def test_a_data_folder_may_have_a_long_path_with_spaces(tmp_path: Path) -> None:
    """A unix socket's address holds 107 bytes."""
    socket = tmp_path / ("a folder " * 12).strip() / "sockets" / "trainer-c0.sock"
    assert len(str(socket)) > 107
    serving = asyncio.create_task(TrainerService(socket, "me", Idle).serve())
    client = TrainerClient(socket)
    assert (await client.wait_ready(10)).version == 3
    await client.wake()
    serving.cancel()

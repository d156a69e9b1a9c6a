"""The trainer's socket."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from gyre.training.client import TrainerClient
from gyre.training.protocol import Endpoint, TrainerError, TrainerUnavailable
from gyre.training.service import TrainerService


class Idle:
    """Commands of a trainer that has nothing to do."""

    version, step_id, pushed, asleep = 3, None, False, True
    held: Mapping[int, Any] = {}

    def commands(self) -> dict[str, Callable[..., dict[str, Any]]]:
        return {"wake": dict, "absorb": lambda **_: {}}

    def beside(self) -> dict[str, Callable[..., dict[str, Any] | None]]:
        return {}


async def test_a_data_folder_may_have_a_long_path_with_spaces(tmp_path: Path) -> None:
    """A unix socket's address holds 107 bytes."""
    socket = tmp_path / ("a folder " * 12).strip() / "sockets" / "trainer-c0.sock"
    assert len(str(socket)) > 107
    serving = asyncio.create_task(TrainerService(socket, "me", Idle).serve())
    client = TrainerClient(socket)
    assert (await client.wait_ready(10)).version == 3
    await client.wake()
    serving.cancel()


async def test_other_machines_may_push_and_no_more(tmp_path: Path) -> None:
    socket = tmp_path / "trainer-c0.sock"
    serving = asyncio.create_task(TrainerService(socket, "me", Idle, ("127.0.0.1", "secret")).serve())
    address = (await TrainerClient(socket).wait_ready(10)).address
    assert address is not None and address.startswith("127.0.0.1:")
    afar = TrainerClient(Endpoint(address, "secret"))
    assert (await afar.status()).incarnation == "me"
    await afar.absorb(7, {}, "another")
    with pytest.raises(TrainerError, match=r"from another machine only \('status', 'absorb'\), not 'wake'"):
        await afar.wake()
    for token in ("", "secrets", "s\u00e9cret"):
        with pytest.raises(TrainerUnavailable, match="the token is not this trainer's"):
            await TrainerClient(Endpoint(address, token)).absorb(7, {}, "another")
    await TrainerClient(socket).wake()  # its own agent asks for nobody's leave
    serving.cancel()
    with pytest.raises(asyncio.CancelledError):
        await serving
    with pytest.raises(TrainerUnavailable, match=rf"{address}: no trainer listens: .*GYRE_HOST"):
        await afar.status()


async def test_an_address_that_is_not_this_machines_is_named(tmp_path: Path) -> None:
    service = TrainerService(tmp_path / "trainer-c0.sock", "me", Idle, ("203.0.113.7", "secret"))
    with pytest.raises(OSError, match=r"GYRE_HOST: cannot listen at 203\.0\.113\.7, give an address of this machine"):
        await service.serve()


def test_a_trainers_next_life_is_another_endpoint() -> None:
    """By this a satellite notices that central, which does not answer its push, is another one by now."""
    assert Endpoint("10.0.0.1:7", "a") != Endpoint("10.0.0.1:7", "b") != Endpoint("10.0.0.1:8", "b")
    assert str(Endpoint("10.0.0.1:7", "a")) == "10.0.0.1:7"  # a log has no token

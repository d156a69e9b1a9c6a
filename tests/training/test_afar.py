"""The trainer's door to the network: who is not let in does no harm, and a side that falls silent is noticed."""

from __future__ import annotations

import asyncio
import contextlib
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

from gyre import ports
from gyre.training import service
from gyre.training.client import TrainerClient
from gyre.training.protocol import LINE_LIMIT, Endpoint, TrainerUnavailable
from gyre.training.service import TrainerService
from tests.cells.machines import two_machines_or_skip
from tests.training.test_service import Idle


class Slow(Idle):
    """Its absorb lasts until `free` is set."""

    def __init__(self) -> None:
        self.free, self.begun = threading.Event(), threading.Event()

    def commands(self) -> dict[str, Callable[..., dict[str, Any]]]:
        def absorb(**_: Any) -> dict[str, Any]:
            self.begun.set()
            self.free.wait()
            return {}

        return {"absorb": absorb}


@contextlib.asynccontextmanager
async def serving(socket: Path, commands: Idle, host: str = "127.0.0.1") -> AsyncIterator[str]:
    task = asyncio.create_task(TrainerService(socket, "me", lambda: commands, (host, "secret")).serve())
    address = (await TrainerClient(socket).wait_ready(10)).address
    assert address is not None
    yield address
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def connect(address: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    host, _, port = address.rpartition(":")
    return await asyncio.open_connection(host, int(port))


GARBAGE = [
    b"\xff\xfe\n",
    b"no JSON\n",
    b"[]\n",
    b"7\n",
    b"[" * 100_000 + b"\n",
    b'{"id": 1, "command": "status", "token": "\\ud800"}\n',
    b'{"id": 1, "command": ["status"], "arguments": 7, "token": "secret"}\n',
]


@pytest.mark.parametrize("line", GARBAGE, ids=lambda line: repr(line[:20]))
async def test_garbage_is_answered(tmp_path: Path, line: bytes) -> None:
    async with serving(tmp_path / "s.sock", Idle()) as address:
        reader, writer = await connect(address)
        writer.write(line)
        assert b'"error"' in await reader.readline()
        assert await reader.read() == b""  # one request a connection
        writer.close()


async def test_a_line_without_end_is_cut_off(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async with serving(tmp_path / "s.sock", Idle()) as address:
        reader, writer = await connect(address)
        with contextlib.suppress(ConnectionError):
            writer.write(b"x" * 3 * LINE_LIMIT)
            await writer.drain()
            assert await reader.read() == b""
        writer.close()
        assert (await TrainerClient(Endpoint(address, "secret")).status()).version == 3
    assert not [r for r in caplog.records if r.name == "asyncio"]


async def test_who_says_nothing_is_sent_away(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service, "FIRST_WORD_S", 0.1)
    async with serving(tmp_path / "s.sock", Idle()) as address:
        reader, writer = await connect(address)
        writer.write(b'{"id": ')
        assert await reader.read() == b""
        writer.close()


async def test_a_crowd_takes_no_more_than_its_share_of_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service, "AFAR_LIMIT", 3)
    async with serving(tmp_path / "s.sock", Idle()) as address:
        crowd = [await connect(address) for _ in range(3)]
        afar = TrainerClient(Endpoint(address, "secret"))
        with pytest.raises(TrainerUnavailable):
            await afar.status()
        assert (await TrainerClient(tmp_path / "s.sock").status()).version == 3  # its own agent is not among them
        for _, writer in crowd:
            writer.close()
            await writer.wait_closed()
        while True:  # until it has noticed
            with contextlib.suppress(TrainerUnavailable):
                assert (await afar.status()).version == 3
                break


@pytest.mark.parametrize("says", [b"HTTP/1.1 400 Bad Request\r\n", b"[]\n", b'{"id": 0}\n', b'{"id": 0, "res'])
async def test_what_is_no_trainer_counts_as_none(says: bytes) -> None:
    """Central's trainer died in the midst of its answer, or another program has its port by now."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readline()
        writer.write(says)
        writer.close()

    async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        with pytest.raises(TrainerUnavailable, match=f"127.0.0.1:{port}: "):
            await TrainerClient(Endpoint(f"127.0.0.1:{port}", "secret")).absorb(7, {}, "another")


PUSH = """
import asyncio, sys
from gyre import ports
from gyre.training.client import TrainerClient
from gyre.training.protocol import Endpoint, TrainerUnavailable
ports.LOST_S = 5
try:
    asyncio.run(TrainerClient(Endpoint(sys.argv[1], "secret")).absorb(7, {}, "another"))
except TrainerUnavailable as error:
    print(error)
"""


async def test_a_push_whose_network_drops_packets_is_over_and_may_be_sent_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is on its way while central computes: without a question now and then both would wait for ever."""
    monkeypatch.setattr(ports, "LOST_S", 5)
    commands = Slow()
    with contextlib.ExitStack() as stack:
        machines = stack.enter_context(two_machines_or_skip())
        stack.callback(commands.free.set)
        async with serving(tmp_path / "s.sock", commands, machines.here) as address:
            push = await asyncio.create_subprocess_exec(
                *machines.prefix, sys.executable, "-c", PUSH, address, stdout=subprocess.PIPE
            )
            assert await asyncio.to_thread(commands.begun.wait, 120)
            machines.cut()
            async with asyncio.timeout(60):
                said, _ = await push.communicate()
            assert f"{address}: lost the trainer during absorb".encode() in said
            machines.heal()
            commands.free.set()
            push = await asyncio.create_subprocess_exec(
                *machines.prefix, sys.executable, "-c", PUSH, address, stdout=subprocess.PIPE
            )
            async with asyncio.timeout(60):
                assert await push.communicate() == (b"", None)

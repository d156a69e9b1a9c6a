"""The control client against a server that drops connections, as one does that has just closed an idle one."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager

import pytest

from gyre.serving.client import EngineClient, EngineError

ANSWERS = {"/v1/loads": b'{"loads": [{"num_running_reqs": 2, "num_waiting_reqs": 1}]}'}


@asynccontextmanager
async def server(drops: int, answers: Mapping[str, bytes] = ANSWERS) -> AsyncIterator[tuple[str, list[str]]]:
    """Drops the first `drops` requests without a word, and answers the others, by their routes; its URL and what was
    asked.

    An order's body, unless it is empty, stands behind its route.
    """
    asked: list[str] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while head := await reader.readuntil(b"\r\n\r\n"):
            asked.append(head.decode().split(" HTTP")[0])
            if length := re.search(rb"(?i)content-length: (\d+)", head):
                said = (await reader.readexactly(int(length[1]))).decode()
                asked[-1] += "" if said == "{}" else f" {said}"
            if len(asked) <= drops:
                break
            body = answers.get(head.split()[1].decode(), b"{}")
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n" % len(body))
            writer.write(body)
        writer.close()

    async def quiet(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await serve(reader, writer)
        except asyncio.IncompleteReadError:
            writer.close()  # the client has left

    listening = await asyncio.start_server(quiet, "127.0.0.1")
    async with listening:
        yield f"http://127.0.0.1:{listening.sockets[0].getsockname()[1]}", asked


async def test_a_question_outlives_a_connection_that_the_server_drops() -> None:
    async with server(drops=1) as (url, asked), EngineClient(url) as client:
        assert await client.running_requests() == 3
        assert asked == ["GET /v1/loads", "GET /v1/loads"]
        await client.resume()


async def test_so_does_an_order_that_may_be_given_twice() -> None:
    async with server(drops=1) as (url, asked), EngineClient(url) as client:
        await client.resume()
        assert asked == ["POST /continue_generation", "POST /continue_generation"]


async def test_an_order_that_may_not_be_given_twice_is_given_once() -> None:
    async with server(drops=1) as (url, asked), EngineClient(url) as client:
        with pytest.raises(EngineError, match="resume_memory_occupation: no answer"):
            await client.resume_memory()
        assert len(asked) == 1


async def test_a_server_that_keeps_dropping_is_gone() -> None:
    async with server(drops=9) as (url, asked), EngineClient(url) as client:
        with pytest.raises(EngineError, match="loads: no answer"):
            await client.running_requests()
        assert len(asked) == 2
        assert not await client.health()


async def test_memory_is_given_and_taken_of_weights_and_cache_alike() -> None:
    async with server(drops=0) as (url, asked), EngineClient(url) as client:
        await client.pause("abort")
        await client.release_memory()
        await client.resume_memory()
        await client.resume()
    assert asked == [
        'POST /pause_generation {"mode":"abort"}',
        'POST /release_memory_occupation {"tags":["weights","kv_cache"]}',
        'POST /resume_memory_occupation {"tags":["weights","kv_cache"]}',
        "POST /continue_generation",
    ]

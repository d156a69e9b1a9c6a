"""A Temporal server a session, a client a test."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
from temporalio.client import Client

from tests.workflows.server import TemporalServer, connect


@pytest.fixture(scope="session")
def temporal(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TemporalServer]:
    """A real server, in memory."""
    with TemporalServer(tmp_path_factory.mktemp("temporal") / "server.log") as server:
        yield server


@pytest.fixture
async def client(temporal: TemporalServer) -> AsyncIterator[Client]:
    yield await connect(temporal)


@pytest.fixture
def impatient_server(tmp_path: Path) -> Iterator[TemporalServer]:
    """A server that asks every workflow to continue as new after a few events."""
    with TemporalServer(tmp_path / "server.log", settings=("limit.historyCount.suggestContinueAsNew=40",)) as server:
        yield server


@pytest.fixture
async def impatient(impatient_server: TemporalServer) -> AsyncIterator[Client]:
    yield await connect(impatient_server)

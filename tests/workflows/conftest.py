"""A Temporal server a session, a client a test."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator

import pytest
from temporalio.client import Client

from tests.workflows.server import NAMESPACE, TemporalServer


@pytest.fixture(scope="session")
def temporal(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TemporalServer]:
    """A real server, in memory."""
    server = TemporalServer(tmp_path_factory.mktemp("temporal") / "server.log")
    server.start()
    yield server
    server.stop()


@pytest.fixture
async def client(temporal: TemporalServer) -> AsyncIterator[Client]:
    yield await Client.connect(temporal.address, namespace=NAMESPACE)

"""Fixtures that every part's tests share: one real Postgres a session, a fresh migrated database a test."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator
from pathlib import Path

import psycopg
import pytest
from hypothesis import HealthCheck, settings
from sqlalchemy import Engine

from gyre.store.db import libpq_url, make_engine
from gyre.store.migrate import upgrade
from gyre.store.server import PostgresServer
from tests.scripted.fixtures import scripted_engine, scripted_policy, scripted_world  # noqa: F401 - fixtures

_count = itertools.count()

# Examples are the same in every run, and no example fails for its duration: a busy machine is not a defect.
settings.register_profile("gyre", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("gyre")


@pytest.fixture(scope="session")
def postgres_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """URL of a migrated template database on a server of this session. Tests use `database`, never this one."""
    folder: Path = tmp_path_factory.mktemp("postgres")
    with PostgresServer(folder) as server:
        upgrade(server.url)
        with psycopg.connect(libpq_url(server.url), autocommit=True) as admin:
            # What is committed survives kill -9 of any process all the same; only a power cut would lose it.
            admin.execute("ALTER SYSTEM SET fsync = off")
            admin.execute("SELECT pg_reload_conf()")
        yield server.url


@pytest.fixture
def database(postgres_url: str) -> Iterator[str]:
    """URL of an empty, migrated database that only this test uses; dropped afterwards."""
    name = f"test_{os.getpid()}_{next(_count)}"
    base, _, template = postgres_url.rpartition("/")
    with psycopg.connect(libpq_url(f"{base}/postgres"), autocommit=True) as admin:
        admin.execute(f"CREATE DATABASE {name} TEMPLATE {template} STRATEGY wal_log")
        yield f"{base}/{name}"
        admin.execute(f"DROP DATABASE {name} WITH (FORCE)")


@pytest.fixture
def engine(database: str) -> Iterator[Engine]:
    """A synchronous engine on `database`."""
    engine = make_engine(database)
    yield engine
    engine.dispose()

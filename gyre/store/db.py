"""Engines and transactions. Retrying a failed transaction belongs to the caller, who knows what it means."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager

from sqlalchemy import Engine, create_engine
from sqlalchemy.engine import make_url
from sqlalchemy.ext.asyncio import AsyncEngine, AsyncSession, create_async_engine
from sqlalchemy.orm import Session

from gyre import ports


def driver_url(url: str) -> str:
    """`url` with the psycopg 3 driver: accepts postgresql://, postgres:// and postgresql+psycopg://.

    Raises ValueError for another kind of database.
    """
    scheme, sep, rest = url.partition("://")
    if not sep or scheme not in ("postgresql", "postgres", "postgresql+psycopg"):
        raise ValueError(f"database URL: must begin with postgresql://, got {scheme!r}")
    return f"postgresql+psycopg://{rest}"


def libpq_url(url: str) -> str:
    """`url` as libpq and psycopg read it (no driver in the scheme), for LISTEN connections and psql."""
    rendered = make_url(driver_url(url)).set(drivername="postgresql").render_as_string(hide_password=False)
    return rendered.replace(" ", "%20")  # SQLAlchemy leaves them, libpq takes none


STOPPED_S = 60.0
"""Silence in the midst of a transaction after which an agent's or a trainer's is rolled back."""


def make_engine(url: str, *, pool_size: int = 4, stopped_s: float | None = None) -> Engine:
    """A pooled, synchronous engine. A connection that a restarted server broke is replaced before it is used.

    `stopped_s`: a process that says nothing for so long in the midst of a transaction (it was stopped, or its machine
    was cut off) loses it, and with it the locks on which others wait. None: however long. Given, the process may be on
    another machine: a network that carries nothing is noticed, as by `ports.notice_loss`.
    """
    arguments: dict[str, str | int] = {}
    if stopped_s is not None:
        pause = ports.LOST_S // 5
        arguments = {
            "options": f"-c idle_in_transaction_session_timeout={int(1000 * stopped_s)}",
            "connect_timeout": 30, "tcp_user_timeout": 1000 * ports.LOST_S,
            "keepalives_idle": pause, "keepalives_interval": pause, "keepalives_count": 4,
        }  # fmt: skip
    return create_engine(
        driver_url(url), pool_size=pool_size, max_overflow=8, pool_pre_ping=True, connect_args=arguments
    )


def make_async_engine(url: str, *, pool_size: int = 8) -> AsyncEngine:
    """A pooled asyncio engine over the same driver as `make_engine`."""
    return create_async_engine(driver_url(url), pool_size=pool_size, max_overflow=16, pool_pre_ping=True)


@contextmanager
def transaction(engine: Engine) -> Iterator[Session]:
    """A session in one transaction: committed at the end of the block, rolled back if it raises.

    Objects stay readable after the commit.
    """
    with Session(engine, expire_on_commit=False) as session, session.begin():
        yield session


@asynccontextmanager
async def async_transaction(engine: AsyncEngine) -> AsyncIterator[AsyncSession]:
    """`transaction` for asyncio."""
    async with AsyncSession(engine, expire_on_commit=False) as session, session.begin():
        yield session

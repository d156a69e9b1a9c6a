"""An agent's connection to Postgres over a network that drops packets."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import time
from pathlib import Path

import psycopg

from gyre.store.db import libpq_url
from gyre.store.server import PostgresServer
from tests.cells.machines import two_machines_or_skip

AGENT = """
import sys
from sqlalchemy import text
from sqlalchemy.exc import OperationalError
from gyre import ports
from gyre.store.db import make_engine
ports.LOST_S = 5
try:
    with make_engine(sys.argv[1], stopped_s=60).connect() as connection:
        connection.execute(text("select 'from afar', pg_sleep(300)"))
except OperationalError as error:
    print("lost", error.connection_invalidated)
"""


def test_a_query_whose_network_drops_packets_is_over(tmp_path: Path) -> None:
    """Nothing is on its way meanwhile: by the kernel's own measure the agent would learn of it after two hours."""
    with contextlib.ExitStack() as stack:
        machines = stack.enter_context(two_machines_or_skip())
        server = stack.enter_context(PostgresServer(tmp_path / "postgres", listen=machines.here))
        argv = [*machines.prefix, sys.executable, "-c", AGENT, server.url]
        agent = stack.enter_context(subprocess.Popen(argv, stdout=subprocess.PIPE))
        stack.callback(agent.kill)
        near = libpq_url(server.url).replace(f"@{machines.here}:", "@127.0.0.1:")
        here = stack.enter_context(psycopg.connect(near, autocommit=True))
        query = "SELECT count(*) FROM pg_stat_activity WHERE query LIKE 'select ''from afar%' AND state = 'active'"
        while here.execute(query).fetchone() == (0,):
            assert agent.poll() is None
            time.sleep(0.1)
        machines.cut()
        assert agent.communicate(timeout=120)[0] == b"lost True\n"
        assert here.execute("SHOW tcp_keepalives_idle").fetchone() == ("60",)

"""The server as one process: kill -9, leftovers, a parent folder that others may not enter."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import psutil
import psycopg
import pytest

from gyre.store import server
from gyre.store.db import libpq_url
from gyre.store.server import PostgresServer


def execute(url: str, statement: str) -> list[tuple[object, ...]]:
    with psycopg.connect(libpq_url(url), autocommit=True) as c:
        cursor = c.execute(statement)
        return cursor.fetchall() if cursor.description else []


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One folder for several tests: initdb is what costs."""
    return tmp_path_factory.mktemp("server")


def test_what_was_committed_survives_kill_9(folder: Path) -> None:
    first = PostgresServer(folder)
    url = first.start()
    assert first.process is not None
    pid = first.process.pid
    execute(url, "CREATE TABLE t AS SELECT 1 AS x")
    execute(url, "INSERT INTO t VALUES (2)")
    os.kill(pid, signal.SIGKILL)
    first.process.wait()
    # The stale pid file now names a living process that is no server: another start must not be misled by it.
    pid_file = folder / "data" / "postmaster.pid"
    lines = pid_file.read_text().splitlines()
    pid_file.write_text("\n".join([str(os.getpid()), *lines[1:]]) + "\n")
    with PostgresServer(folder) as second:
        assert execute(second.url, "SELECT x FROM t ORDER BY x") == [(1,), (2,)]
        assert execute(second.url, "SHOW fsync") == [("on",)]
        assert execute(second.url, "SHOW synchronous_commit") == [("on",)]
        # A supervisor that was killed leaves its server behind: the next start takes over from it.
        with PostgresServer(folder) as third:
            assert second.process is not None and second.process.wait(60) == 0
            assert execute(third.url, "SELECT count(*) FROM t") == [(2,)]
    assert not psutil.pid_exists(pid)


def test_the_started_process_is_the_server(folder: Path) -> None:
    with PostgresServer(folder) as running:
        assert running.process is not None
        process = psutil.Process(running.process.pid)
        assert process.name() == "postgres"
        assert process.uids().effective != 0, "postgres never runs as root"
        assert (folder / "password").stat().st_mode & 0o077 == 0
        with pytest.raises(psycopg.OperationalError, match="password"):
            execute(running.url.replace("gyre:", "gyre:wrong"), "SELECT 1")
        held = psycopg.connect(libpq_url(running.url))  # a client that stays must not delay the end
    assert running.process.poll() == 0
    held.close()


@pytest.mark.skipif(sys.platform != "linux", reason="Linux tells a process of its parent's death")
def test_it_does_not_outlive_who_started_it(folder: Path) -> None:
    program = (
        "import sys, pathlib, time; from gyre.store.server import PostgresServer\n"
        "s = PostgresServer(pathlib.Path(sys.argv[1])); s.start(); print(s.process.pid, flush=True); time.sleep(60)"
    )
    with subprocess.Popen([sys.executable, "-c", program, str(folder)], stdout=subprocess.PIPE, text=True) as starter:
        assert starter.stdout is not None
        postgres = psutil.Process(int(starter.stdout.readline()))
        assert postgres.name() == "postgres"
        starter.kill()
    psutil.wait_procs([postgres], timeout=60)
    assert not postgres.is_running() or postgres.status() == psutil.STATUS_ZOMBIE


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives up privileges")
def test_as_root_below_a_folder_that_others_may_not_enter(tmp_path: Path) -> None:
    closed = tmp_path / "closed"
    closed.mkdir(mode=0o700)
    with PostgresServer(closed / "postgres") as running:
        assert execute(running.url, "SELECT 1") == [(1,)]
    assert closed.stat().st_mode & 0o777 == 0o700


def test_a_first_start_that_was_cut_short_is_made_good(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "half").write_text("written by an initdb that was killed")
    with PostgresServer(tmp_path) as running:
        assert execute(running.url, "SELECT 1") == [(1,)]


def test_a_server_that_cannot_start_says_why(folder: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(RuntimeError, match="could not create any TCP/IP sockets"):
            PostgresServer(folder, port).start()


def test_the_command_line_names_what_is_missing(capfd: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    command = server.server_command(tmp_path, 0)
    assert command.argv[-1] != "0"
    assert command.argv[-1] in command.url
    assert command.stop_signal == signal.SIGINT
    assert subprocess.call([*command.argv[:3], "--data", str(tmp_path)]) == 2
    assert "--port" in capfd.readouterr().err

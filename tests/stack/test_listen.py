"""A stack that other machines reach: what listens where, and which cells it leaves to them."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator
from pathlib import Path

import psycopg
import pytest
from sqlalchemy import text

from gyre.config import RunConfig, StackConfig, load_run_config
from gyre.store.db import libpq_url, make_engine
from gyre.store.server import PostgresServer
from tests.cells.machines import two_machines_or_skip
from workers.settings import SettingsError, WorkerSettings
from workers.stack.ports import NAMES, PortError, choose_ports, is_free
from workers.stack.services import StackPlan, run_stages

QUICKSTART = Path(__file__).resolve().parents[2] / "examples" / "quickstart" / "run.toml"


def plan(data: Path, stack: StackConfig) -> StackPlan:
    run: RunConfig = load_run_config(QUICKSTART).model_copy(update={"stack": stack})
    return StackPlan(data, {name: port for port, name in enumerate(NAMES, 1)}, data / "run.json", run)


def test_addresses_and_agents(tmp_path: Path) -> None:
    there = plan(tmp_path, StackConfig(listen="10.0.0.1", remote_cells=["satellite"]))
    settings = WorkerSettings.from_env(there.environment())
    assert settings.host == "10.0.0.1" and settings.temporal_address == "10.0.0.1:2"
    assert "@10.0.0.1:1/" in settings.database_url and settings.gateway_url == "http://127.0.0.1:6"
    specs = {spec.name: spec for stage in run_stages(there) for spec in stage}
    assert "cell-central" in specs and "cell-satellite" not in specs
    assert specs["postgres"].argv[-2:] == ["--listen", "10.0.0.1"]
    temporal = specs["temporal"].argv
    assert temporal[temporal.index("--ip") + 1] == "0.0.0.0" and temporal[temporal.index("--ui-ip") + 1] == "127.0.0.1"


def test_without_a_word_nothing_leaves_the_machine(tmp_path: Path) -> None:
    here = plan(tmp_path, StackConfig())
    specs = {spec.name: spec for stage in run_stages(here) for spec in stage}
    assert {"cell-central", "cell-satellite"} <= specs.keys() and "--listen" not in specs["postgres"].argv
    assert not [word for spec in specs.values() for word in spec.argv if word.startswith(("0.0.0.0", "10."))]
    assert WorkerSettings.from_env(here.environment()).host == "127.0.0.1"


def test_an_agent_does_not_listen_everywhere() -> None:
    for wrong in ("0.0.0.0", "::1", "10.0.0.1:80", ""):
        with pytest.raises(SettingsError, match=rf"^GYRE_HOST is '{wrong}'; give this machine's IPv4 address"):
            WorkerSettings.from_env({**_settings().to_env(), "GYRE_HOST": wrong})


def _settings() -> WorkerSettings:
    return WorkerSettings(
        database_url="postgresql+psycopg://x@127.0.0.1:9/x", temporal_address="127.0.0.1:9",
        gateway_url="http://127.0.0.1:9", data=Path("/data"), run_config=Path("/data/run.json"),
    )  # fmt: skip


@contextlib.contextmanager
def taken_at(host: str) -> Iterator[int]:
    """A port that is taken at `host` alone: none of those that the system gives to anybody's connection."""
    port = next(port for port in range(30000, 31000) if is_free(port, "0.0.0.0"))
    with socket.create_server((host, port)):
        yield port


def test_a_port_is_free_only_if_it_is_at_both_addresses() -> None:
    with taken_at("127.0.0.2") as port:
        assert is_free(port) and not is_free(port, "127.0.0.2")
        with pytest.raises(PortError, match=f"stack.temporal_port: port {port} is in use"):
            choose_ports({"temporal": port}, {}, listen="127.0.0.2")
    with pytest.raises(PortError, match=r"stack\.listen: 203\.0\.113\.7 is no address of this machine"):
        choose_ports({}, {}, listen="203.0.113.7")


def test_beyond_loopback_a_port_is_free_only_everywhere() -> None:
    """Temporal listens at every address."""
    with two_machines_or_skip() as machines, taken_at("127.0.0.3") as port:
        assert is_free(port) and not is_free(port, machines.here)


def test_a_password_may_have_any_letters(tmp_path: Path) -> None:
    (tmp_path / "postgres").mkdir()
    (tmp_path / "postgres" / "password").write_text("a/b@c:d%e f#\n")
    with PostgresServer(tmp_path / "postgres") as server, make_engine(server.url).connect() as connection:
        assert connection.scalar(text("select 1")) == 1
        psycopg.connect(libpq_url(server.url)).close()


def test_postgres_listens_at_both_and_asks_for_the_password(tmp_path: Path) -> None:
    with PostgresServer(tmp_path / "postgres", listen="127.0.0.2") as server:
        url = libpq_url(server.url)
        for one in (url, url.replace("@127.0.0.2:", "@127.0.0.1:")):
            with psycopg.connect(one) as connection:
                assert connection.execute("select 1").fetchone() == (1,)
        before, _, after = url.rpartition("@")
        wrong = f"{before.rpartition(':')[0]}:wrong@{after}"
        with pytest.raises(psycopg.OperationalError, match="password authentication failed"):
            psycopg.connect(wrong)
    with PostgresServer(tmp_path / "postgres") as server, pytest.raises(psycopg.OperationalError):
        psycopg.connect(libpq_url(server.url).replace("@127.0.0.1:", "@127.0.0.2:"))

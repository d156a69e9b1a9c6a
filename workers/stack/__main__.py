"""`python -m workers.stack --data DIR [--run-config FILE]`: the supervisor, in the foreground."""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import sys
import time
from pathlib import Path

from pydantic import ValidationError

from gyre.cli.stackfile import StackState, start_ticks
from gyre.config import RunConfig, StackConfig
from workers.settings import fail
from workers.stack.cpu_log import CpuLog
from workers.stack.lock import StackLock
from workers.stack.ports import PortError, choose_ports
from workers.stack.services import StackPlan, make_folders, run_stages, store_stages
from workers.stack.supervisor import Supervisor

LOCK_PATIENCE_S = 10.0
"""A janitor may still be cleaning up after a supervisor that was killed; it holds the lock for a few seconds."""


def main(argv: list[str] | None = None) -> int:
    """Run the stack until it is told to stop. Exit code 0: stopped, 1: failed, 2: could not start (one line)."""
    parser = argparse.ArgumentParser(prog="python -m workers.stack", description=__doc__)
    parser.add_argument("--data", type=Path, required=True, help="the data folder")
    parser.add_argument("--run-config", type=Path, help="JSON of the run; none: Postgres and Temporal alone")
    parser.add_argument("--agent", default=StackPlan.agent, help="module that is run as each cell's agent")
    arguments = parser.parse_args(argv)
    data: Path = arguments.data.resolve()
    make_folders(data)
    lock = StackLock(data)
    _take(lock, data)
    logging.basicConfig(
        level=logging.INFO, format="%(asctime)s %(message)s", stream=sys.stdout, datefmt="%Y-%m-%d %H:%M:%S"
    )
    logging.getLogger("httpx").setLevel(logging.WARNING)
    plan = _plan(data, arguments.run_config, arguments.agent)
    state = StackState(
        state="starting",
        pid=os.getpid(),
        pid_start=start_ticks(os.getpid()) or 0,
        run_id=plan.run.run_id if plan.run else None,
        run_config=str(plan.run_config) if plan.run_config else None,
        ports=plan.ports,
        database_url=plan.database_url,
        environment=plan.environment(),
    )
    stages = run_stages(plan) if plan.run else store_stages(plan)
    cpu_log = CpuLog(plan.database_url, state.run_id)
    code = asyncio.run(Supervisor(data, state, stages, cpu_log).run())
    lock.release()
    return code


def _take(lock: StackLock, data: Path) -> None:
    give_up = time.monotonic() + LOCK_PATIENCE_S
    while (holder := lock.acquire()) is not None:
        before = StackState.read(data)
        if (before is not None and before.alive) or time.monotonic() > give_up:
            fail(f"a stack already runs on {data} (pid {holder}); end it with `gyre down --data {data}`")
        time.sleep(0.1)


def _plan(data: Path, run_config: Path | None, agent: str) -> StackPlan:
    run: RunConfig | None = None
    if run_config is not None:
        run_config = run_config.resolve()
        try:
            run = RunConfig.model_validate_json(run_config.read_bytes())
        except (OSError, ValidationError) as error:
            fail(f"--run-config {run_config}: {str(error).splitlines()[0]}")
    before = StackState.read(data)
    wanted = {} if run is None else {name: getattr(run.stack, f"{name}_port") for name in ("temporal", "ui", "gateway")}
    try:
        kept = before.ports if before else {}
        stack = StackConfig() if run is None else run.stack
        ports, changed = choose_ports(wanted, kept, gateways=stack.gateways, listen=stack.listen)
    except PortError as error:
        fail(str(error))
    for name in changed:
        logging.warning("port %s of before is taken by another program; now %d", name, ports[name])
    return StackPlan(data=data, ports=ports, run_config=run_config, run=run, agent=agent)


if __name__ == "__main__":
    sys.exit(main())

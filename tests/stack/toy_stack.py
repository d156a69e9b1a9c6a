"""A supervisor over real Postgres and Temporal and one toy worker: `python -m tests.stack.toy_stack DATA KIND`."""

from __future__ import annotations

import asyncio
import logging
import os
import subprocess
import sys
import time
from pathlib import Path

from gyre.cli.stackfile import StackState, start_ticks
from workers.settings import REPLACED, fail
from workers.stack import supervisor
from workers.stack.child import ChildSpec
from workers.stack.cpu_log import CpuLog
from workers.stack.lock import StackLock
from workers.stack.ports import choose_ports
from workers.stack.services import StackPlan, store_stages


def worker(data: Path) -> None:
    """Start a harness that detaches itself twice, hides its environment, and note its pid; then sleep for ever."""
    nap = [sys.executable, "-c", "import time; time.sleep(600)"]
    detached = f"import subprocess as s; print(s.Popen({nap!r}, start_new_session=True, stdout=s.DEVNULL).pid)"
    shown = subprocess.run([sys.executable, "-c", detached], stdout=subprocess.PIPE, text=True, check=True)
    with (data / "detached").open("a") as file:
        file.write(shown.stdout)
    while True:
        time.sleep(600)


def main(data: Path, kind: str) -> int:
    for folder in ("logs", "postgres", "temporal"):
        (data / folder).mkdir(parents=True, exist_ok=True)
    lock = StackLock(data)
    if (holder := lock.acquire()) is not None:
        fail(f"a stack already runs on {data} (pid {holder})")
    logging.basicConfig(level=logging.INFO, stream=sys.stdout, format="%(asctime)s %(message)s")
    before = StackState.read(data)
    ports, _ = choose_ports({}, before.ports if before else {})
    plan = StackPlan(data, ports, run_config=None, run=None)
    me = os.getpid()
    state = StackState(
        state="starting", pid=me, pid_start=start_ticks(me) or 0, ports=ports, database_url=plan.database_url
    )
    env = {**plan.environment(), "PYTHONPATH": str(Path(__file__).resolve().parents[2])}
    argv = {
        "toy": [sys.executable, "-m", "tests.stack.toy_stack", str(data), "worker"],
        "broken": [sys.executable, "-c", "import sys; sys.exit('no such model')"],
        "missing": ["/no/such/program"],
        "replaced": [sys.executable, "-c", f"import sys; print('gyre: taken'); sys.exit({REPLACED})"],
        "misconfigured": [sys.executable, "-c", "import sys; print('gyre: steps: must be 1'); sys.exit(2)"],
    }[kind]
    supervisor.ENDS_IN_A_ROW = 3  # a test need not wait for eight
    toy = ChildSpec("toy", argv, component="toy", env=env, leans_on_others=True)
    stages = [*store_stages(plan), [toy]] if kind == "toy" else [[toy]]
    cpu_log = CpuLog(plan.database_url, None, every_s=0.5) if kind == "toy" else None
    return asyncio.run(supervisor.Supervisor(data, state, stages, cpu_log).run())


if __name__ == "__main__":
    if sys.argv[2] == "worker":
        worker(Path(sys.argv[1]))
    sys.exit(main(Path(sys.argv[1]), sys.argv[2]))

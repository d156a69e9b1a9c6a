"""What orchestration costs: `python -m tests.workflows.measure [--policy elastic] [--seconds 20]`.

One step of 8 groups of 8 rollouts over scripted activities that cost nothing, on a real server with SQLite on disk,
its synchronous writes as in the local stack. Prints Temporal operations and CPU time, of the server and of the
workers, for each rollout.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import resource
import tempfile
import time
from collections import Counter
from pathlib import Path

from temporalio.client import Client

from tests.workflows.script import Script, plan
from tests.workflows.server import NAMESPACE, TemporalServer
from workflows import messages as m

_TICK = os.sysconf("SC_CLK_TCK")


def _cpu(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / _TICK


async def measure(server: TemporalServer, policy: str, seconds: float, steps: int) -> None:
    client = await Client.connect(server.address, namespace=NAMESPACE)
    chance = random.Random(0)
    length: dict[str, float] = {}
    script = Script(
        plan(
            policy=policy, steps=steps, groups_per_step=8, group_size=8, max_concurrent=64, min_backlog_tokens=100,
            cells=[m.PlanCell("c0", True, 32), m.PlanCell("c1", False, 32)],
        ),
        harness=lambda rollout: length.setdefault(rollout, seconds * chance.uniform(0.3, 1.0)),
        poll_s=0.5,
        heartbeat_s=10,
    )  # fmt: skip
    assert server.process is not None
    async with script.workers(client):
        usage = resource.getrusage(resource.RUSAGE_SELF)
        server_0, worker_0, began = _cpu(server.process.pid), usage.ru_utime + usage.ru_stime, time.monotonic()
        await script.run(client, within_s=seconds * steps * 5 + 120)
        usage = resource.getrusage(resource.RUSAGE_SELF)
        wall = time.monotonic() - began
        server_s = _cpu(server.process.pid) - server_0
        worker_s = usage.ru_utime + usage.ru_stime - worker_0
    rollouts = 64 * steps
    run_id, kinds, totals = script.plan.run_id, Counter[str](), Counter[str]()
    async for execution in client.list_workflows(f"GyreRun = '{run_id}' OR WorkflowId = '{run_id}'"):
        handle = client.get_workflow_handle(execution.id, run_id=execution.run_id)
        kinds[execution.workflow_type] += 1
        async for event in handle.fetch_history_events():
            totals[f"{execution.workflow_type} events"] += 1
            if event.HasField("workflow_task_completed_event_attributes"):
                totals[f"{execution.workflow_type} workflow tasks"] += 1
            if event.HasField("activity_task_completed_event_attributes"):
                totals[f"{execution.workflow_type} activities"] += 1
    print(
        f"{policy}: {steps} steps of 64 rollouts of {0.3 * seconds:g}-{seconds:g} s, wall {wall:.1f} s, {dict(kinds)}"
    )
    for key, value in sorted(totals.items()):
        print(f"  {key}: {value} ({value / rollouts:.2f} a rollout)")
    print(
        f"  CPU: server {server_s:.2f} s, workers {worker_s:.2f} s: {1000 * (server_s + worker_s) / rollouts:.1f} ms a "
        f"rollout (server {1000 * server_s / rollouts:.1f}, workers {1000 * worker_s / rollouts:.1f}); "
        f"{100 * (server_s + worker_s) / (2 * wall):.1f} % of two cores"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--policy", default="elastic")
    parser.add_argument("--seconds", type=float, default=20)
    parser.add_argument("--steps", type=int, default=1)
    options = parser.parse_args()
    with (
        tempfile.TemporaryDirectory() as folder,
        TemporalServer(Path(folder) / "server.log", database=Path(folder) / "temporal.db") as server,
    ):
        asyncio.run(measure(server, options.policy, options.seconds, options.steps))


if __name__ == "__main__":
    main()

"""Writes the histories that test_replay.py replays: `python -m tests.workflows.make_histories`.

Make them anew only when a workflow changes on purpose and no run that began before has to go on: replaying the old
ones is what shows that a change is compatible.
"""

from __future__ import annotations

import asyncio
import json
import tempfile
from pathlib import Path

from temporalio import activity
from temporalio.client import Client, WorkflowUpdateStage

from tests.workflows.script import Script, plan
from tests.workflows.server import NAMESPACE, TemporalServer
from workflows import messages as m

FOLDER = Path(__file__).parent / "histories"


class Unlucky(Script):
    """Its second rollout never makes a model call; its third one's evaluator always fails."""

    @activity.defn
    async def run_harness(self, x: m.RunHarness) -> m.HarnessEnd:
        if x.rollout_id == "history/s0/00/01":
            return m.HarnessEnd("harness_error", 1, 0, 0, 0.1)
        return await Script.run_harness(self, x)

    @activity.defn
    async def score(self, x: m.ScoreRollout) -> m.Scored:
        if x.rollout_id == "history/s0/01/00":
            return m.Scored("evaluator", None, "evaluator")
        return await Script.score(self, x)


async def _make(server: TemporalServer) -> None:
    client = await Client.connect(server.address, namespace=NAMESPACE, identity="history")
    script = Unlucky(
        plan(run_id="history", steps=3, heldout=True, max_staleness=1, max_concurrent=3, min_backlog_tokens=100),
        harness=lambda rollout: 1.5 if rollout.endswith("s1/01/01") else 0.1,
    )
    async with script.workers(client):
        await script.run(client, within_s=200)
    stopped = Script(plan(run_id="stopped"), harness=lambda rollout: 60.0)
    async with stopped.workers(client):
        handle = await client.start_workflow(
            "TrainingRun", m.TrainingRunInput(stopped.plan), id="stopped", task_queue="gyre-control"
        )
        while len(stopped.live) < 4:  # noqa: ASYNC110
            await asyncio.sleep(0.05)
        await handle.execute_update("pause")
        await handle.execute_update("resume")
        await handle.start_update("pause", wait_for_stage=WorkflowUpdateStage.ACCEPTED)
        await handle.execute_update("resume")  # waits until the pause has been told
        await handle.execute_update("stop", m.StopRun())
        await handle.result()
    spare = Script(
        plan(run_id="spare", steps=1, groups_per_step=1, group_size=3, quorum=2, over_submit=1),
        harness=lambda rollout: {"02": 1.0, "03": 60.0}.get(rollout[-2:], 0.1),
    )
    async with spare.workers(client):
        await spare.run(client)
    FOLDER.mkdir(exist_ok=True)
    for workflow_id in (
        "history", "history/eval-v0", "history/step-0", "history/step-1", "history/scheduler", "history/cell-c0",
        "history/cell-c1", "history/s0/00/00", "history/s0/00/01", "history/s0/01/00", "stopped", "stopped/step-0",
        "stopped/s0/00/00", "stopped/cell-c0", "spare/step-0", "spare/s0/00/03",
    ):  # fmt: skip
        history = await client.get_workflow_handle(workflow_id).fetch_history()
        path = FOLDER / f"{workflow_id.replace('/', '.')}.json"
        path.write_text(json.dumps(json.loads(history.to_json()), separators=(",", ":")) + "\n")


def main() -> None:
    with tempfile.TemporaryDirectory() as folder, TemporalServer(Path(folder) / "server.log") as server:
        asyncio.run(_make(server))


if __name__ == "__main__":
    main()

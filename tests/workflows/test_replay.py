"""Histories of finished workflows replay: a change that would break a run in progress fails here."""

from __future__ import annotations

from pathlib import Path

import pytest
from temporalio.client import WorkflowHistory
from temporalio.worker import Replayer

from workflows.registry import WORKFLOWS, workflow_runner

FOLDER = Path(__file__).parent / "histories"
HISTORIES = {path.stem: path.read_text() for path in sorted(FOLDER.glob("*.json"))}


@pytest.mark.parametrize("name", HISTORIES)
async def test_history_replays(name: str) -> None:
    history = WorkflowHistory.from_json(name.replace(".", "/"), HISTORIES[name])
    await Replayer(workflows=WORKFLOWS, workflow_runner=workflow_runner()).replay_workflow(history)


def test_every_workflow_has_a_history() -> None:
    seen = "".join(HISTORIES.values())
    for workflow in WORKFLOWS:
        assert f'"workflowType":{{"name":"{workflow.__name__}"}}' in seen

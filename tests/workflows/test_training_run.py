"""TrainingRun with every other workflow, over scripted activities."""

from __future__ import annotations

import pytest
from temporalio.client import Client

from tests.workflows.script import Script, plan


@pytest.mark.parametrize("policy", ["elastic", "colocate", "async"])
async def test_a_run_of_two_steps(client: Client, policy: str) -> None:
    script = Script(plan(policy=policy))
    async with script.workers(client):
        result = await script.run(client)
    assert (result.state, result.steps_done, result.version) == ("done", 2, 2)
    assert script.happened("finish") == ["0", "1"]
    assert len(script.settled) == 8 and set(script.settled.values()) == {""}
    assert [sum(cells.values()) for cells in script.trained.values()] == [2, 2]
    assert script.under_served == []

"""A run with real rows, real task folders and a plain command as harness; only the model is missing.

Calls that a gateway would have recorded are written by `calls`.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
from sqlalchemy import Engine
from sqlalchemy.orm import Session
from temporalio.client import Client, WorkflowHandle

from gyre.config import RunConfig
from gyre.store import queries as q
from gyre.store.db import transaction
from gyre.store.models import Call, Node, Rollout
from gyre.store.tokens import pack_ids, pack_logprobs
from tests.workflows.server import NAMESPACE
from workers.control import control_worker
from workers.rollout_host import host_workers
from workers.settings import WorkerSettings
from workflows import messages as m
from workflows.names import CONTROL_QUEUE

HOST = "test-host"

TEST_SH = """#!/bin/sh
# The control file of this rollout says how many attempts fail first, how, and the reward afterwards.
read fails how reward < "$CONTROL/$(cat "$APP_DIR/token.txt")"
count="$CONTROL/$(cat "$APP_DIR/token.txt").count"
n=$(cat "$count" 2>/dev/null || echo 0); n=$((n + 1)); echo $n > "$count"
if [ $n -le $fails ]; then
  case $how in
    nan) echo nan > "$LOGS_DIR/reward.txt";;
    kill) kill -9 $$;;
    none) :;;
  esac
  exit 1
fi
echo $reward > "$LOGS_DIR/reward.txt"
"""


class RealRun:
    """One run with one task; `command` is the shell line that is its harness."""

    def __init__(
        self, engine: Engine, database: str, address: str, folder: Path, command: str, *, group_size: int = 4,
        time_limit_s: float = 30, name: str = "real", heldout: bool = False, rows: bool = True,
        rollouts: dict[str, Any] | None = None,
    ) -> None:  # fmt: skip
        self.engine, self.folder, self.control = engine, folder, folder / "control"
        self.control.mkdir(parents=True)
        self._write_task(folder / "tasks" / "one")
        self.config = RunConfig.model_validate(
            {
                "name": name, "steps": 1, "policy": {"path": str(folder)},
                "tasks": {"train": str(folder / "tasks"), "heldout": str(folder / "tasks") if heldout else None},
                "harness": {"name": "command", "command": ["sh", "-c", f"echo {{api_key}} > token.txt; {command}"]},
                "rollouts": {
                    "groups_per_step": 1, "group_size": group_size, "time_limit_s": time_limit_s, **(rollouts or {}),
                },
                "cells": [{"name": "c0", "central": True}],
            }
        )  # fmt: skip
        path = folder / "config.json"
        path.write_text(self.config.model_dump_json())
        self.settings = WorkerSettings(
            database_url=database, temporal_address=address, temporal_namespace=NAMESPACE,
            gateway_url="http://127.0.0.1:9", data=folder / "data", run_config=path,
        )  # fmt: skip
        if rows:
            self._open_step()

    def _open_step(self) -> None:
        with transaction(self.engine) as session:
            q.create_run(session, self.run_id, self.config.model_dump(mode="json"), self.run_id)
            self.step_id = q.open_step(session, self.run_id, 0, 0)
            task = q.TaskRef("one", str(self.folder / "tasks" / "one"), "test")
            [self.group_id] = q.create_groups(session, [task], step_id=self.step_id)
            self.rollouts = q.create_rollouts(
                session, self.group_id, self.config.rollouts.launched, temperature=1.0, harness="command"
            )

    @property
    def run_id(self) -> str:
        return self.config.run_id

    def _write_task(self, task: Path) -> None:
        (task / "environment" / "workspace").mkdir(parents=True)
        (task / "environment" / "workspace" / "readme.txt").write_text("hello\n")
        (task / "tests").mkdir()
        (task / "tests" / "test.sh").write_text(TEST_SH)
        (task / "instruction.md").write_text("Do it.\n")
        control = json.dumps(str(self.control))
        (task / "task.toml").write_text(
            f'[task]\nname = "one"\n[metadata]\nfamily = "test"\n[verifier.env]\nCONTROL = {control}\n'
        )

    def row(self, rollout: str) -> Rollout:
        with transaction(self.engine) as session:
            return q.rollout_row(session, rollout)

    def evaluator(self, rollout: str, *, fails: int, how: str = "none", reward: float = 1.0) -> None:
        """The rollout's tests fail `fails` times in the way of `how`, then give `reward`."""
        (self.control / self.row(rollout).token).write_text(f"{fails} {how} {reward}\n")

    def calls(self, *rollouts: str) -> None:
        """One complete call of three prompt and two generated tokens, as a gateway records it."""
        with transaction(self.engine) as session:
            for rollout in rollouts:
                _add_call(session, rollout)

    def input(self, rollout: str) -> m.RolloutInput:
        r = self.config.rollouts
        return m.RolloutInput(
            self.run_id, rollout, "one", "test", "command", 0, r.time_limit_s, r.score_time_limit_s, r.score_attempts
        )

    async def start(self, client: Client, rollout: str) -> WorkflowHandle[object, m.RolloutResult]:
        return await client.start_workflow(
            "Rollout", self.input(rollout), id=rollout, task_queue=CONTROL_QUEUE, result_type=m.RolloutResult
        )

    @asynccontextmanager
    async def control_only(self, client: Client) -> AsyncIterator[None]:
        """The control worker in this process."""
        with ThreadPoolExecutor(8) as threads:
            async with control_worker(client, self.settings, threads):
                yield

    @asynccontextmanager
    async def workers(self, client: Client) -> AsyncIterator[None]:
        """The control worker and a host in this process."""
        with ThreadPoolExecutor(8) as threads, ThreadPoolExecutor(4) as graders:
            first, second = host_workers(client, self.settings, HOST, None, graders, threads)
            async with self.control_only(client), first, second:
                yield


def _add_call(session: Session, rollout: str) -> None:
    call = Call(
        rollout_id=rollout, seq=0, api="openai-chat", status="complete", kind="main", request_hash="h",
        request={"base": 0, "messages": []}, response={},
    )  # fmt: skip
    session.add(call)
    session.flush()
    prompt = Node(
        rollout_id=rollout, call_id=call.id, kind="prompt", start=0, length=3,
        token_ids=pack_ids(np.array([1, 2, 3], np.int32)),
    )  # fmt: skip
    session.add(prompt)
    session.flush()
    leaf = Node(
        rollout_id=rollout, call_id=call.id, parent_id=prompt.id, kind="generated", start=3, length=2,
        token_ids=pack_ids(np.array([4, 5], np.int32)), logprobs=pack_logprobs(np.array([-1, -2], np.float32)),
        version_spans=[[0, 0, 2]],
    )  # fmt: skip
    session.add(leaf)
    session.flush()
    call.leaf_id = leaf.id

"""A cell that leaves hands its keys and values over; whether it has any to hand over is decided at its first start."""

from __future__ import annotations

import json
import logging
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from activities.cell import CellActivities
from activities.cell_engine import CellEngine
from activities.cell_kv import CellKv
from activities.cell_site import CellSite, Phases
from activities.cell_store import CellStore
from gyre.config import CellConfig, RunConfig
from gyre.serving.client import EngineClient, EngineError
from gyre.serving.kv import KvPlan
from gyre.serving.kv_cost import FetchCost, PrefillCost
from gyre.serving.kv_pages import PageFolder

SMOLLM2 = {
    "num_hidden_layers": 30, "hidden_size": 576, "intermediate_size": 1536, "num_attention_heads": 9,
    "num_key_value_heads": 3,
}  # fmt: skip
PREFILL = PrefillCost(0.0, 1e-3, 0.0, True, "a guess")


class Server:
    """Runs nothing, and records what it is told."""

    def __init__(self) -> None:
        self.told: list[str] = []
        self.refuses = False

    async def wait_empty(self, timeout_s: float) -> bool:
        self.told.append("drain")
        return True

    async def flush_cache(self) -> None:
        self.told.append("flush")
        if self.refuses:
            raise EngineError("/flush_cache: HTTP 400")

    async def pause(self, mode: str) -> None:
        self.told.append("pause")

    async def release_memory(self) -> None:
        self.told.append("release")


def run_of(policy: Path, **serving: Any) -> RunConfig:
    return RunConfig.model_validate(
        {
            "name": "kv",
            "steps": 1,
            "policy": {"path": str(policy), "context": 8192},
            "serving": serving,
            "tasks": {"train": str(policy)},
            "cells": [{"name": "c0", "central": True}, {"name": "c1"}],
        }
    )


@pytest.fixture
def policy(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(SMOLLM2))
    return tmp_path


async def leave(policy: Path, server: Server, plan: KvPlan | None) -> Phases:
    store = cast(CellStore, SimpleNamespace(run=run_of(policy)))
    engine = CellEngine(store, CellConfig(name="c0"), policy / "engine.log")
    engine._client = cast(EngineClient, server)
    engine._kv.plan = plan
    engine.ready.set()
    phases = Phases()
    await CellActivities(cast(CellSite, SimpleNamespace(engine=engine)))._quiet(phases)
    return phases


async def test_a_leaving_cell_waits_for_its_copies_before_its_memory_goes(policy: Path) -> None:
    server = Server()
    phases = await leave(policy, server, KvPlan(policy / "pages", 1 << 20, 64, 1.0, PREFILL, FetchCost(0.0, 0.0)))
    assert server.told == ["drain", "flush", "pause", "release"]
    assert list(phases.seconds) == ["drain", "kv", "release"]


async def test_a_cell_that_moves_nothing_waits_for_nothing(policy: Path) -> None:
    server = Server()
    phases = await leave(policy, server, None)
    assert server.told == ["drain", "pause", "release"]
    assert "kv" not in phases.seconds


async def test_a_hand_over_that_fails_keeps_no_cell(policy: Path, caplog: pytest.LogCaptureFixture) -> None:
    server = Server()
    server.refuses = True
    with caplog.at_level(logging.WARNING):
        await leave(policy, server, KvPlan(policy / "pages", 1 << 20, 64, 1.0, PREFILL, FetchCost(0.0, 0.0)))
    assert server.told == ["drain", "flush", "pause", "release"]
    assert "not all handed over" in caplog.text


def test_cells_of_one_run_share_a_folder_until_the_last_has_left(policy: Path) -> None:
    run = run_of(policy, kv_tokens=1024)
    kvs = [CellKv(run, cell, policy / "spare") for cell in run.cells]
    plans = [kv.decide(policy) for kv in kvs]
    try:
        assert plans[0] is not None and plans[1] is not None
        assert plans[0].folder == plans[1].folder and plans[0].budget == 1024 * 46080
        assert kvs[0].decide(policy) is plans[0]
        PageFolder(plans[0].folder, 1 << 20).put("0", "a" * 64, [memoryview(b"kv")])
        kvs[0].close()
        assert plans[0].folder.exists()
    finally:
        for kv in kvs:
            kv.close()
    assert not plans[1].folder.exists()


def test_what_another_layout_or_another_run_of_the_name_wrote_is_elsewhere(policy: Path) -> None:
    folders = set()
    for serving, data in (({}, "here"), ({"dtype": "bfloat16"}, "here"), ({}, "there")):
        kv = CellKv(run_of(policy, kv_tokens=1024, **serving), CellConfig(name="c0"), policy / data)
        plan = kv.decide(policy)
        kv.close()
        assert plan is not None
        folders.add(plan.folder)
    assert len(folders) == 3


def test_a_run_whose_data_were_removed_and_made_anew_is_another(policy: Path) -> None:
    """Its versions begin again, and a server of the first may still write."""
    folders = []
    for _ in range(2):
        kv = CellKv(run_of(policy, kv_tokens=1024), CellConfig(name="c0"), policy / "data")
        plan = kv.decide(policy)
        assert plan is not None
        folders.append(plan.folder)
        kv.close()
        shutil.rmtree(policy / "data")
    assert folders[0] != folders[1]


def test_off(policy: Path) -> None:
    assert CellKv(run_of(policy, kv_migration="off"), CellConfig(name="c0"), policy).decide(policy) is None

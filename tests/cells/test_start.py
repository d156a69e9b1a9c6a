"""A process that can never start ends its agent in one line, and is not started for ever."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from sqlalchemy.exc import OperationalError

import activities.cell_process
import activities.cell_site
from activities.cell_engine import CellEngine
from activities.cell_process import START_TRIES, CannotStart, FirstStart
from activities.cell_site import CellSite
from activities.cell_store import CellStore
from activities.cell_trainer import CellTrainer
from gyre.config import CellConfig, RunConfig, StackConfig
from gyre.store.db import make_engine
from gyre.store.queries import FencedError
from workers import cell_agent

NOWHERE = "postgresql+psycopg://x@127.0.0.1:9/x"
LOST = OperationalError(None, None, OSError("refused"))


@pytest.fixture
def two_tries(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(activities.cell_process, "START_TRIES", 2)


async def nothing() -> None:
    return None


def test_a_process_that_has_lived_is_started_for_ever() -> None:
    first = FirstStart("the engine")
    for _ in range(START_TRIES - 1):
        first.failed(1, "no memory")
    first.worked()
    for _ in range(9):
        first.failed(1, "no memory")


def test_a_kill_is_no_failure_to_start() -> None:
    first = FirstStart("the engine")
    for _ in range(9):
        first.failed(-9, "killed")


async def test_an_engine_that_the_run_file_makes_impossible(two_tries: None, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"max_position_embeddings": 128}), encoding="utf-8")

    class Store:
        run = RunConfig.model_validate(
            {
                "name": "never",
                "steps": 1,
                "policy": {"path": str(tmp_path), "context": 4096},
                "tasks": {"train": str(tmp_path)},
                "cells": [{"name": "c0", "central": True}],
            }
        )

        async def newest_version(self) -> tuple[int, Path, Any]:
            return 0, tmp_path, None

    engine = CellEngine(cast(CellStore, Store()), CellConfig(name="c0"), tmp_path / "engine.log")
    with pytest.raises(CannotStart, match=r"^the engine cannot start: policy\.context: 4096 exceeds"):
        await engine.keep(nothing)


async def test_a_trainer_whose_settings_are_wrong(two_tries: None, tmp_path: Path) -> None:
    env = {"GYRE_DATABASE_URL": "sqlite:///no"}
    trainer = CellTrainer(CellConfig(name="c0"), tmp_path / "sockets", tmp_path / "trainer.log", env)
    with pytest.raises(CannotStart, match=r"^the trainer cannot start: ended with code 2 .* it ends: gyre: GYRE_"):
        await trainer.keep(nothing)


@pytest.mark.parametrize(
    ("error", "code", "said"),
    [
        (CannotStart("the engine cannot start: no such model"), 2, "cell c0: the engine cannot start: no such model"),
        (FencedError("cell 'c0' was taken by another agent"), 3, "cell 'c0' was taken by another agent"),
        (
            LOST,
            1,
            "cell c0: Postgres at 127.0.0.1:9 has not answered for 120 s; if its stack has another address now, "
            "`gyre cells` prints it ((builtins.OSError) refused)",
        ),
    ],
)
def test_an_agent_that_should_not_be_started_again_says_why_in_one_line(
    error: Exception, code: int, said: str, monkeypatch: pytest.MonkeyPatch, capsys: Any, tmp_path: Path
) -> None:
    """By the code the supervisor knows that another start would not help, or would take the cell back."""
    policy = SimpleNamespace(path=tmp_path)
    run = SimpleNamespace(cells=[CellConfig(name="c0")], stack=StackConfig(), policy=policy)

    async def serve(*_: object) -> None:
        raise ExceptionGroup("tasks", [error])

    monkeypatch.setattr(sys, "argv", ["cell_agent", "--cell", "c0"])
    monkeypatch.setattr(
        cell_agent, "settings_or_exit", lambda: SimpleNamespace(run=run, host="127.0.0.1", database_url=NOWHERE)
    )
    monkeypatch.setattr(cell_agent, "serve", serve)
    with pytest.raises(SystemExit) as ended:
        cell_agent.main()
    assert ended.value.code == code
    assert capsys.readouterr().err == f"gyre: {said}\n"


async def test_an_agent_whose_database_is_gone_has_waited_already(
    run: RunConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It ends; the word that it does is not waited for as long again."""
    monkeypatch.setattr(activities.cell_site, "GOODBYE_S", 0.1)
    site = CellSite(run, "c0", make_engine(NOWHERE), logs=tmp_path, sockets=tmp_path, env={})

    async def lost(*_: object) -> None:
        raise LOST

    monkeypatch.setattr(site, "take", nothing)
    monkeypatch.setattr(site.engine, "keep", lost)
    monkeypatch.setattr(site.trainer, "keep", lost)
    async with asyncio.timeout(60):
        with pytest.raises(ExceptionGroup) as ended:
            await site.keep()
    assert ended.value.exceptions[0] is LOST

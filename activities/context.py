"""What every activity works with: the database and the run's configuration."""

from __future__ import annotations

import functools
from pathlib import Path

from sqlalchemy import Engine

from gyre.config import RunConfig
from gyre.store import queries as q
from gyre.store.db import transaction
from gyre.tasks.harbor import Task, load_task, load_tasks


class RunBooks:
    """Run files and task folders, each read once a process. A run's configuration never changes while it is open."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.config = functools.lru_cache(maxsize=16)(self._config)

    def _config(self, run_id: str) -> RunConfig:
        with transaction(self.engine) as session:
            return RunConfig.model_validate(q.run_row(session, run_id).config)


@functools.lru_cache(maxsize=4096)
def task_at(path: Path) -> Task:
    """The task in the folder `path`. Raises TaskError."""
    return load_task(path)


@functools.lru_cache(maxsize=16)
def tasks_in(folder: Path) -> tuple[Task, ...]:
    """Every task below `folder`, by name, so that a seed means the same order everywhere. Raises TaskError."""
    return tuple(sorted(load_tasks(folder), key=lambda task: task.name))

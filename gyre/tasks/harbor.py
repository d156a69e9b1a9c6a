"""Harbor task folders: reading and checking them.

A task is `task.toml`, `instruction.md`, `environment/`, `tests/test.sh` and, unread here, `solution/`. The format is
Harbor's (schema 1.x); what Gyre does not use is left alone, what it cannot honour is an error.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator


class TaskError(Exception):
    """A task folder that cannot be used; the message is one line: path, field, what to do."""


@dataclass(frozen=True)
class Task:
    """One problem. Times are in seconds."""

    path: Path
    name: str
    """`org/name` of task.toml; the folder's name where a task has none."""
    family: str
    """`metadata.family`, or ''."""
    instruction: str
    agent_timeout_s: float | None
    """`agent.timeout_sec`: the author's limit for the agent, which lowers the run's; None: none given."""
    verifier_timeout_s: float
    """`verifier.timeout_sec` (Harbor's default is 600)."""
    env: Mapping[str, str]
    """`environment.env`: for the agent and the tests."""
    verifier_env: Mapping[str, str]
    """`verifier.env`: for the tests only."""
    workdir: str | None
    """`environment.workdir`: the folder that is the workspace inside the task's own container."""
    keep_git: bool
    """`metadata.keep_git`: the workspace keeps its `.git`. Otherwise history is dropped: it may hold the answer."""
    metadata: Mapping[str, Any]

    @property
    def environment_dir(self) -> Path:
        return self.path / "environment"

    @property
    def tests_dir(self) -> Path:
        return self.path / "tests"


Seconds = Annotated[float, Field(gt=0, allow_inf_nan=False)]


class _Table(BaseModel):
    model_config = ConfigDict(extra="ignore")


class _TaskTable(_Table):
    name: str = Field(min_length=1)


class _Agent(_Table):
    timeout_sec: Seconds | None = None


class _Verifier(_Table):
    timeout_sec: Seconds = 600.0
    env: dict[str, str] = {}
    environment_mode: Literal["shared"] = "shared"

    @field_validator("env")
    @classmethod
    def _literal(cls, env: dict[str, str]) -> dict[str, str]:
        return _no_templates(env)


class _Environment(_Table):
    env: dict[str, str] = {}
    workdir: str | None = None

    @field_validator("env")
    @classmethod
    def _literal(cls, env: dict[str, str]) -> dict[str, str]:
        return _no_templates(env)


class _Metadata(BaseModel):
    model_config = ConfigDict(extra="allow")
    family: str = ""
    keep_git: bool = False


class _File(_Table):
    schema_version: str = Field("1.0", pattern=r"^1\.\d+$")
    task: _TaskTable | None = None
    metadata: _Metadata = _Metadata()
    agent: _Agent = _Agent()
    verifier: _Verifier = _Verifier()
    environment: _Environment = _Environment()
    steps: None = None


def _no_templates(env: dict[str, str]) -> dict[str, str]:
    for key, value in env.items():
        if "${" in value:
            raise ValueError(f"{key} = {value!r}: ${{…}} templates are not filled in here; write the value itself")
    return env


def load_task(path: Path) -> Task:
    """Read the task in the folder `path`. Raises TaskError."""
    path = path.resolve()
    config = path / "task.toml"
    try:
        data = tomllib.loads(config.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise TaskError(f"{config}: no such file; a task folder needs one") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise TaskError(f"{config}: not valid TOML: {error}") from error
    try:
        file = _File.model_validate(data)
    except ValidationError as error:
        raise TaskError(f"{config}: {_one_line(error)}") from error
    instruction = path / "instruction.md"
    try:
        text = instruction.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise TaskError(f"{instruction}: no such file; write what the agent is asked to do") from None
    except UnicodeDecodeError as error:
        raise TaskError(f"{instruction}: not UTF-8: {error}") from error
    if not text.strip() or "\0" in text:
        raise TaskError(f"{instruction}: empty, or holds a NUL; write what the agent is asked to do")
    if not (path / "tests" / "test.sh").is_file():
        raise TaskError(f"{path / 'tests' / 'test.sh'}: no such file; a task is scored by it")
    if not (path / "environment").is_dir():
        raise TaskError(f"{path / 'environment'}: no such folder; put the agent's files in environment/workspace/")
    return Task(
        path=path,
        name=path.name if file.task is None else file.task.name,
        family=file.metadata.family,
        instruction=text,
        agent_timeout_s=file.agent.timeout_sec,
        verifier_timeout_s=file.verifier.timeout_sec,
        env=file.environment.env,
        verifier_env=file.verifier.env,
        workdir=file.environment.workdir,
        keep_git=file.metadata.keep_git,
        metadata=file.metadata.model_dump(),
    )


def load_tasks(folder: Path) -> list[Task]:
    """Every task below `folder`, one a sub-folder, sorted by folder name (hidden ones and plain files are passed over).

    Raises TaskError: a folder without task.toml, two tasks of one name, or no task at all.
    """
    if not folder.is_dir():
        raise TaskError(f"{folder}: no such folder of tasks")
    tasks = [load_task(p) for p in sorted(folder.iterdir()) if p.is_dir() and not p.name.startswith(".")]
    if not tasks:
        raise TaskError(f"{folder}: holds no task; each sub-folder with a task.toml is one")
    by_name: dict[str, Task] = {}
    for task in tasks:
        if task.name in by_name:
            raise TaskError(
                f"{task.path / 'task.toml'}: task.name: {task.name!r} is the name of {by_name[task.name].path} too; "
                "rename one"
            )
        by_name[task.name] = task
    return tasks


def _one_line(error: ValidationError) -> str:
    first = error.errors(include_url=False)[0]
    field = ".".join(str(part) for part in first["loc"])
    message = first["msg"].removeprefix("Value error, ")
    if field == "steps":
        message = "tasks of several steps are not supported; make each step a task"
    elif field == "verifier.environment_mode":
        message = "only 'shared' is supported: the tests run in the agent's workspace"
    more = f" (and {error.error_count() - 1} more)" if error.error_count() > 1 else ""
    return f"{field}: {message}{more}"

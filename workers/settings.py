"""What the stack tells each of its processes, by environment variables.

Every worker begins with `settings = settings_or_exit()`; the supervisor makes the same environment with
`WorkerSettings(...).to_env()`, so that a name is written in one place.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import NoReturn, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from gyre.config import RunConfig
from gyre.ports import LOOPBACK

REPLACED = 3
"""Exit code of a worker whose work another one has taken over: a restart would only take it back."""


class SettingsError(Exception):
    """A worker's environment that cannot be used; the message is one line that names the variable."""


class WorkerSettings(BaseModel):
    """Settings of one worker process. A field's variable is GYRE_ and its name in capitals."""

    model_config = ConfigDict(frozen=True, use_attribute_docstrings=True)

    database_url: str = Field(pattern=r"^postgresql\+psycopg://")
    """SQLAlchemy URL of Postgres: `postgresql+psycopg://user@host:port/name`."""
    temporal_address: str = Field(pattern=r"^[^:/]+:\d+$")
    """`host:port` of Temporal's gRPC frontend."""
    temporal_namespace: str = "gyre"
    """Temporal's namespace."""
    gateway_url: str = Field(pattern=r"^https?://[^/,]+(,https?://[^/,]+)*$")
    """Base URL of the gateway, without a path or a slash at its end; of each process, with commas between."""
    data: Path
    """The data folder (absolute)."""
    run_config: Path
    """Path of the resolved run config, `RunConfig.model_dump_json()`."""
    host: str = LOOPBACK
    """Address of this machine, of an interface of its own, at which a cell's engine, transfers and central's trainer
    listen and are found: IPv4 (not 0.0.0.0) or a name. With cells on several machines, one that all of them reach."""

    @field_validator("host")
    @classmethod
    def _is_one_address(cls, host: str) -> str:
        if re.fullmatch(r"[A-Za-z1-9][A-Za-z0-9.-]*", host) is None:
            raise ValueError(f"is {host!r}; give this machine's IPv4 address (not 0.0.0.0) or its name")
        return host

    @classmethod
    def from_env(cls, env: Mapping[str, str] | None = None) -> Self:
        """Read the settings from `env` (default: this process's). Raises SettingsError, one line."""
        source = os.environ if env is None else env
        found = {name: source[key] for name in cls.model_fields if (key := _variable(name)) in source}
        try:
            return cls.model_validate(found)
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            name = _variable(str(first["loc"][0]))
            what = "is not set; start this process by `gyre up`" if first["type"] == "missing" else first["msg"]
            what = what.removeprefix("Value error, ")
            raise SettingsError(f"{name} {what}") from error

    def to_env(self) -> dict[str, str]:
        """The variables that `from_env` reads back to equal settings."""
        return {_variable(name): str(getattr(self, name)) for name in type(self).model_fields}

    @cached_property
    def run(self) -> RunConfig:
        """The run that `run_config` describes. Raises SettingsError where the file is missing or not valid."""
        try:
            return RunConfig.model_validate_json(self.run_config.read_bytes())
        except FileNotFoundError as error:
            raise SettingsError(f"GYRE_RUN_CONFIG: no file at {self.run_config}") from error
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            field = ".".join(str(part) for part in first["loc"])
            raise SettingsError(f"GYRE_RUN_CONFIG {self.run_config}: {field}: {first['msg']}") from error

    @property
    def gateway_urls(self) -> tuple[str, ...]:
        """Base URLs of the gateway's processes, by number."""
        return tuple(self.gateway_url.split(","))

    @property
    def run_folder(self) -> Path:
        """The run's folder, `<data>/runs/<run_id>`: config.json, checkpoints/, report.html."""
        return self.data / "runs" / self.run.run_id

    @property
    def checkpoints(self) -> Path:
        """Folder of the run's checkpoints `v<k>/`."""
        return self.run_folder / "checkpoints"

    @property
    def sockets(self) -> Path:
        """Folder of unix sockets."""
        return self.data / "sockets"

    @property
    def logs(self) -> Path:
        """Folder of the processes' logs."""
        return self.data / "logs"


def settings_or_exit() -> WorkerSettings:
    """`WorkerSettings.from_env()`, or one line on stderr and exit code 2."""
    try:
        settings = WorkerSettings.from_env()
        _ = settings.run  # a broken run file is reported at start, not at first use
    except SettingsError as error:
        fail(str(error))
    return settings


def fail(message: str) -> NoReturn:
    """One line on stderr and exit code 2."""
    print(f"gyre: {message}", file=sys.stderr)
    raise SystemExit(2)


def _variable(name: str) -> str:
    return f"GYRE_{name.upper()}"

"""Reading a run file, with errors of one line that name the field and say what to do."""

from __future__ import annotations

import tomllib
from pathlib import Path

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from gyre.config.run import RunConfig


class ConfigError(Exception):
    """A run file that cannot be used; the message is one line."""


def load_run_config(path: Path, **overrides: object) -> RunConfig:
    """Read and check the run file at `path`; relative paths in it become absolute, seen from its folder.

    `overrides` replace top-level fields (`seed=3`, `steps=2`). Raises ConfigError: the file is missing, is not TOML,
    or a field is unknown, missing or bad.
    """
    if not path.is_file():
        raise ConfigError(f"{path}: no such run file")
    try:
        data = tomllib.loads(path.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: not valid TOML: {error}") from error
    data.update({k: v for k, v in overrides.items() if v is not None})
    try:
        config = RunConfig.model_validate(data)
    except ValidationError as error:
        raise ConfigError(f"{path}: {_one_line(error)}") from error
    return _absolute(config, path.resolve().parent)


SHOWN = 3
"""Bad fields that one line names; more are counted."""


def _one_line(error: ValidationError) -> str:
    said = [_field_error(e) for e in error.errors(include_url=False)]
    more = f" (and {len(said) - SHOWN} more)" if len(said) > SHOWN else ""
    return "; ".join(said[:SHOWN]) + more


def _field_error(error: ErrorDetails) -> str:
    field = ".".join(str(p) for p in error["loc"])
    message = error["msg"].removeprefix("Value error, ")
    if error["type"] == "extra_forbidden":
        message = "unknown field; remove it or fix its spelling"
    elif error["type"] == "missing":
        message = "required field is missing"
    return f"{field}: {message}" if field else message


def _absolute(config: RunConfig, base: Path) -> RunConfig:
    def fix(p: Path | None) -> Path | None:
        return None if p is None else (base / p.expanduser()).resolve()

    for field, p in (("policy.path", config.policy.path), ("tasks.train", config.tasks.train),
                     ("tasks.heldout", config.tasks.heldout)):  # fmt: skip
        if p is not None and not (base / p.expanduser()).is_dir():
            raise ConfigError(f"{field}: no folder at {(base / p.expanduser()).resolve()}")
    if config.harness.config is not None and not (base / config.harness.config.expanduser()).is_file():
        raise ConfigError(f"harness.config: no file at {(base / config.harness.config.expanduser()).resolve()}")
    return config.model_copy(
        update={
            "policy": config.policy.model_copy(update={"path": fix(config.policy.path)}),
            "tasks": config.tasks.model_copy(
                update={"train": fix(config.tasks.train), "heldout": fix(config.tasks.heldout)}
            ),
            "harness": config.harness.model_copy(update={"config": fix(config.harness.config)}),
        }
    )

"""What a harness is: a name, and the command that one rollout runs."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar, Protocol

from gyre.gateway.dialect import Dialect

BOX = "box"
"""The agent's own part of a rollout's folder: workspace/, home/ and tmp/. What Gyre keeps lies beside it, not in it, so
that a careless `rm -rf ../*` or `sed -i` of an agent hits nothing but its own files."""


class HarnessError(Exception):
    """A harness that cannot be described or started; the message is one line that says what to do."""


@dataclass(frozen=True)
class LaunchContext:
    """What one rollout gives its harness.

    `base_url` is the rollout's own URL at the gateway, `{gateway}/r/<token>`, without `/v1`; `api_key` is the token.
    `env` is extra environment that the task asks for. `context` and `max_tokens` are the policy's context and longest
    answer in tokens (0: not said), for harnesses that compact their history in time only if they are told.
    """

    base_url: str
    api_key: str
    model: str
    instruction: str
    workspace: Path
    rollout_dir: Path
    env: Mapping[str, str] = field(default_factory=dict)
    context: int = 0
    max_tokens: int = 0


@dataclass(frozen=True)
class Preload:
    """How a warm fork-server runs this harness: the same program, already imported.

    The launch's argv must be `[python, script, *arguments]`, what the cold path executes; warm, `script` and the
    arguments become `sys.argv` and `entry` is called.

    `entry` is `module:function`, what the console script calls; `modules` are imported before the first fork;
    `rehearsal` is a stand-alone script (see mini_rehearsal.py) from which the server learns what else a run touches.
    """

    python: Path
    entry: str
    modules: tuple[str, ...]
    env: tuple[tuple[str, str], ...] = ()
    rehearsal: Path | None = None


@dataclass(frozen=True)
class Launch:
    """One command. `env` is the whole environment: nothing is inherited, so that no secret of Gyre's leaks in.

    `files` are settings files, written before the command starts: absolute path to text.
    """

    argv: tuple[str, ...]
    env: Mapping[str, str]
    cwd: Path
    preload: Preload | None = None
    files: Mapping[Path, str] = field(default_factory=dict)


class Harness(Protocol):
    """An agent program that is run unmodified and speaks to the gateway over HTTP."""

    name: str
    dialect: ClassVar[Dialect]
    """How its calls speak; the gateway asks it."""

    @property
    def preload(self) -> Preload | None:
        """What a fork-server for this harness needs; None where it cannot be forked warm."""

    def command(self, ctx: LaunchContext) -> Launch:
        """The command of one rollout. Pure: it touches no file."""


def places(variable: str, default: Path) -> list[Path]:
    """Where something that `make` installs may be, in order: what the environment's `variable` says, or `default` in
    the repository and in the working directory."""
    given = os.environ.get(variable)
    root = Path(__file__).resolve().parents[2]
    return [Path(given).absolute()] if given else [root / default, Path.cwd() / default]


def base_env(area: Path) -> dict[str, str]:
    """The environment that every harness and every grader starts from: own HOME and TMPDIR, nothing of Gyre's.

    `area` is the folder that holds home/ and tmp/. git is kept from looking above it: the data folder may lie inside
    somebody's repository, whose history could hold the answer and whose work tree must not be touched.
    """
    return {
        "PATH": tool_path(),
        "HOME": str(area / "home"),
        "TMPDIR": str(area / "tmp"),
        "LANG": "C.UTF-8",
        "TZ": "UTC",
        "TERM": "dumb",
        "GIT_CEILING_DIRECTORIES": str(area.resolve()),
        "GIT_CONFIG_NOSYSTEM": "1",
    }


def tool_path() -> str:
    """PATH for agents and tests: this process's, without Gyre's own virtual environment.

    The interpreter beneath that environment comes first, so that `python3` is a real binary (a version manager's shim
    costs 100 ms a call) and the same one on every host of a run.
    """
    here, beneath = Path(sys.prefix, "bin"), Path(sys.base_prefix, "bin")
    kept = [p for p in os.environ.get("PATH", os.defpath).split(os.pathsep) if p]
    if sys.prefix != sys.base_prefix:
        kept = [p for p in kept if Path(p) != here]
    return os.pathsep.join([str(beneath), *(p for p in kept if Path(p) != beneath)])

"""Scoring a workspace with the task's hidden tests, by Harbor's rules.

The tests are copied fresh from the task to a folder whose name nobody could have known, and run as a process tree of
their own under a time limit. Their exit code means nothing; the reward is `reward.json` (flat, finite numbers; it
wins) or `reward.txt` (one finite number) in LOGS_DIR. Whatever else happens is an EvaluatorError: no reward is never
a reward of zero.
"""

from __future__ import annotations

import json
import math
import os
import secrets
import shutil
import stat
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from gyre.harness import process, shepherd
from gyre.harness.base import BOX, HarnessError, Launch, base_env
from gyre.tasks.harbor import Task
from gyre.tasks.workspace import WORKSPACE

VERIFIER = "verifier"
OUTPUT_TAIL = 4000
"""Characters of the tests' output that are kept in `detail`."""

_REWARD_LIMIT_BYTES = 1 << 20
_GRACE_S = 0.5

FailureStatus = Literal["no_reward", "bad_reward", "killed", "error"]


@dataclass(frozen=True)
class GradeResult:
    """A valid score. `detail`: rewards (every key), exit_code, seconds, cpu_s, output (its tail), attempt (folder)."""

    status: Literal["ok"]
    reward: float
    detail: dict[str, Any]


class EvaluatorError(Exception):
    """The tests gave no reward that can be used: worth another attempt, and never zero.

    `status`: `no_reward` (no file, or an empty one), `bad_reward` (not a flat finite number), `killed` (by a signal
    or by the time limit), `error` (the tests could not be run). `detail` is as in GradeResult.
    """

    def __init__(self, status: FailureStatus, message: str, detail: dict[str, Any]) -> None:
        super().__init__(f"{status}: {message}")
        self.status = status
        self.message = message
        self.detail = detail


def grade(task: Task, rollout_dir: Path, timeout_s: float | None = None) -> GradeResult:
    """Run the task's tests on `rollout_dir`/box/workspace as it stands; blocks, at most `timeout_s` seconds and a few.

    `timeout_s` defaults to the task's own. Each call is a new attempt with its own folder under
    `rollout_dir`/verifier (its log stays); an attempt that a dead host left running is ended first. Raises
    EvaluatorError.
    """
    rollout_dir = rollout_dir.resolve()
    verifier = rollout_dir / VERIFIER
    attempt = verifier / f"{_end_earlier(verifier) + 1}-{secrets.token_hex(8)}"
    detail: dict[str, Any] = {"attempt": attempt.name}
    tests, logs = attempt / "tests", attempt / "logs"
    try:
        for folder in (logs, attempt / "home", attempt / "tmp"):
            folder.mkdir(parents=True)
        shutil.copytree(task.tests_dir, tests, symlinks=True)
        workspace = _workspace(rollout_dir, detail)
        launch = Launch(_command(tests / "test.sh"), _env(task, attempt, workspace, tests, logs), workspace)
        process.start(launch, attempt, grace_s=_GRACE_S)
        limit = task.verifier_timeout_s if timeout_s is None else timeout_s
        timed_out = isinstance(process.wait_blocking(attempt, limit), process.Running)
        end = process.kill_tree(attempt)
    except (OSError, shutil.Error, HarnessError) as error:
        raise EvaluatorError("error", f"{attempt}: the tests could not be run: {error}", detail) from error
    finally:
        shutil.rmtree(tests, ignore_errors=True)  # a later reader of the folder finds no hidden test
    detail["output"] = _tail(attempt / shepherd.LOG_FILE)
    if not isinstance(end, process.Exited):
        raise EvaluatorError("killed", f"{attempt}: the tests vanished without a trace; was the machine out of memory?",
                             detail)  # fmt: skip
    detail |= {"exit_code": end.code, "seconds": round(end.ended - end.started, 3), "cpu_s": end.cpu_s}
    if timed_out and end.reason == "killed":
        raise EvaluatorError("killed", f"{task.tests_dir}: still running after {limit:g} s", detail)
    if end.code is None or end.reason == "killed":
        # A script may write a default first: after a signal its file says nothing.
        how = "ended from outside" if end.reason == "killed" else f"ended by signal {end.signal}"
        raise EvaluatorError("killed", f"{task.tests_dir}: {how}", detail)
    if end.code in (126, 127) and not any(logs.iterdir()):
        raise EvaluatorError("error", f"{task.tests_dir / 'test.sh'}: cannot run (exit {end.code})", detail)
    rewards = _read_rewards(logs, task, detail)
    detail["rewards"] = rewards
    return GradeResult("ok", _reward(rewards, task, detail), detail)


def _end_earlier(verifier: Path) -> int:
    """End attempts that still run, from a host that died; returns how many attempts there were."""
    if verifier.is_symlink() or (verifier.exists() and not verifier.is_dir()):
        verifier.unlink()  # the agent's work: nothing of ours is ever a link
    earlier = [p for p in verifier.iterdir() if p.is_dir() and not p.is_symlink()] if verifier.exists() else []
    for attempt in earlier:
        try:
            process.kill_tree(attempt)
        except (HarnessError, LookupError):  # no attempt of ours has a pid.json that cannot be read
            shutil.rmtree(attempt)
    return len(earlier)


def _workspace(rollout_dir: Path, detail: dict[str, Any]) -> Path:
    workspace = rollout_dir / BOX / WORKSPACE
    if workspace.is_symlink() or not workspace.is_dir():
        # The agent removed it, or put something else there: what stands in the workspace is nothing.
        detail["workspace"] = "gone: scored as an empty folder"
        workspace.unlink(missing_ok=True)
        workspace.mkdir(parents=True)
    return workspace


def _command(script: Path) -> tuple[str, ...]:
    script.chmod(script.stat().st_mode | stat.S_IXUSR)
    with script.open("rb") as file:
        return (str(script),) if file.read(2) == b"#!" else ("/bin/sh", str(script))


def _env(task: Task, attempt: Path, workspace: Path, tests: Path, logs: Path) -> Mapping[str, str]:
    return {
        **base_env(attempt),
        "GIT_CEILING_DIRECTORIES": str(workspace.parent),
        **task.env,
        **task.verifier_env,
        "APP_DIR": str(workspace),
        "TESTS_DIR": str(tests),
        "LOGS_DIR": str(logs),
    }


def _read_rewards(logs: Path, task: Task, detail: dict[str, Any]) -> dict[str, float]:
    path = logs / "reward.json"
    if (text := _read(path, detail)) is not None:
        try:
            value = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise EvaluatorError("bad_reward", f"{path.name} of {task.name}: not JSON: {error}", detail) from error
        if not isinstance(value, dict) or not value:
            raise EvaluatorError("bad_reward", f"{path.name} of {task.name}: must be an object of numbers", detail)
        return {key: _number(number, f"{path.name} of {task.name}: {key}", detail) for key, number in value.items()}
    path = logs / "reward.txt"
    if (text := _read(path, detail)) is not None:
        try:
            return {"reward": _number(float(text), f"{path.name} of {task.name}", detail)}
        except ValueError:
            message = f"{path.name} of {task.name}: {text.strip()[:80]!r} is not a number"
            raise EvaluatorError("bad_reward", message, detail) from None
    raise EvaluatorError(
        "no_reward", f"{task.tests_dir / 'test.sh'}: wrote neither reward.json nor reward.txt in $LOGS_DIR", detail
    )


def _number(value: object, where: str, detail: dict[str, Any]) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise EvaluatorError("bad_reward", f"{where} = {value!r:.80}: not a number", detail)
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not math.isfinite(number):
        raise EvaluatorError("bad_reward", f"{where} = {number}: not finite", detail)
    return number


def _reward(rewards: Mapping[str, float], task: Task, detail: dict[str, Any]) -> float:
    if "reward" in rewards:
        return rewards["reward"]
    if len(rewards) == 1:
        return next(iter(rewards.values()))
    keys = ", ".join(rewards)
    raise EvaluatorError("bad_reward", f"reward.json of {task.name}: no key `reward` among {keys}", detail)


def _read(path: Path, detail: dict[str, Any]) -> str | None:
    """Text of a reward file; None: there is none, or an empty one. Only a plain file counts: no link, no pipe."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise EvaluatorError("bad_reward", f"{path.name}: {error.strerror}", detail) from error
    try:
        info = os.fstat(fd)
        if not stat.S_ISREG(info.st_mode) or info.st_size > _REWARD_LIMIT_BYTES:
            raise EvaluatorError("bad_reward", f"{path.name}: not a plain file of at most 1 MB", detail)
        data = os.read(fd, _REWARD_LIMIT_BYTES)
    finally:
        os.close(fd)
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise EvaluatorError("bad_reward", f"{path.name}: not UTF-8: {error}", detail) from error
    return text if text.strip() else None


def _tail(path: Path) -> str:
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - 4 * OUTPUT_TAIL))
        # NUL cannot be stored in a text column or in JSONB.
        return file.read().decode("utf-8", errors="replace").replace("\0", "\ufffd")[-OUTPUT_TAIL:]

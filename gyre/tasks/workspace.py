"""The workspace of one rollout: a fresh copy of what the task gives its agent, and nothing else.

The files are those of `environment/workspace/`; a task that lacks it is built from the `COPY` lines of
`environment/Dockerfile`. Nothing of `tests/` or `solution/` is ever in it, nor a `.git` (the history may hold the
answer) unless `metadata.keep_git = true`. Two copies are equal: modes are kept, times are set to one constant.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from gyre.harness import process
from gyre.harness.base import BOX
from gyre.tasks.dockerfile import copies
from gyre.tasks.harbor import Task, TaskError

WORKSPACE, HOME, TMP = "workspace", "home", "tmp"

EPOCH_S = 1_700_000_000
"""Every file's modification time: `ls -l` says the same in every rollout of a task."""


def prepare(task: Task, rollout_dir: Path) -> Path:
    """Make `rollout_dir`/box/{workspace,home,tmp} anew and return the workspace.

    Safe to repeat: until a harness was started there everything is made again from nothing; from then on the
    workspace is the harness's, and is returned untouched. Raises TaskError.
    """
    box = rollout_dir / BOX
    workspace = box / WORKSPACE
    if not isinstance(process.status(rollout_dir), process.NotStarted):
        if not workspace.is_dir():
            raise TaskError(f"{workspace}: a harness was started here but the workspace is gone; use another folder")
        return workspace
    if rollout_dir.exists():
        shutil.rmtree(rollout_dir)
    for name in (HOME, TMP):
        (box / name).mkdir(parents=True)
    draft = box / f"{WORKSPACE}.draft"
    fill(task, draft)
    draft.rename(workspace)
    return workspace


def fill(task: Task, target: Path) -> None:
    """Copy the task's workspace to `target`, which must not exist. Raises TaskError."""
    source = task.environment_dir / WORKSPACE
    target.mkdir(parents=True)
    if source.is_dir():
        _copy(source, target, source, task.keep_git)
    else:
        for origin, destination in copies(task):
            if origin.is_dir() and not origin.is_symlink():
                _copy(origin, target / destination, task.environment_dir, task.keep_git)
            else:
                _copy_file(origin, target / destination, task.environment_dir)
    _set_times(target)


def _copy(source: Path, target: Path, root: Path, keep_git: bool) -> None:
    target.mkdir(parents=True, exist_ok=True)
    for item in sorted(source.iterdir()):
        if item.name == ".git" and not keep_git:
            continue
        if item.is_dir() and not item.is_symlink():
            _copy(item, target / item.name, root, keep_git)
        else:
            _copy_file(item, target / item.name, root)
    shutil.copymode(source, target)


def _copy_file(source: Path, target: Path, root: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    if source.is_symlink():
        if not source.resolve().is_relative_to(root.resolve()) or os.path.isabs(os.readlink(source)):
            raise TaskError(f"{source}: a link that leaves the workspace; replace it by the file itself")
        target.unlink(missing_ok=True)
        os.symlink(os.readlink(source), target)
    elif source.is_file():
        shutil.copyfile(source, target)
        shutil.copymode(source, target)
    else:
        raise TaskError(f"{source}: neither file, folder nor link; remove it")


def _set_times(folder: Path) -> None:
    for top, folders, files in os.walk(folder, topdown=False):
        for name in (*files, *folders):
            os.utime(os.path.join(top, name), (EPOCH_S, EPOCH_S), follow_symlinks=False)
    os.utime(folder, (EPOCH_S, EPOCH_S))

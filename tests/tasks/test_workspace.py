from __future__ import annotations

import os
import shutil
import stat
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from gyre.harness import process
from gyre.harness.base import BOX, Launch, base_env
from gyre.tasks.harbor import Task, TaskError
from gyre.tasks.workspace import prepare
from tests.tasks.conftest import write


def listing(folder: Path) -> dict[str, tuple[int, float, str]]:
    return {
        str(p.relative_to(folder)): (
            stat.S_IMODE(p.lstat().st_mode),
            p.lstat().st_mtime,
            "" if p.is_dir() else os.readlink(p) if p.is_symlink() else p.read_text(),
        )
        for p in folder.rglob("*")
    }


def test_the_workspace_is_a_fresh_equal_copy(make_task: Callable[..., Task], rollout: Path, tmp_path: Path) -> None:
    task = make_task()
    (task.environment_dir / "workspace" / "link").symlink_to("bin/run.sh")
    first, second = prepare(task, rollout), prepare(task, tmp_path / "other")
    assert listing(first) == listing(second)
    assert set(listing(first)) == {"a.txt", "bin", "bin/run.sh", "link"}
    assert os.access(first / "bin" / "run.sh", os.X_OK) and not os.access(first / "a.txt", os.X_OK)
    assert {p.name for p in rollout.iterdir()} == {"box"}
    assert {p.name for p in (rollout / "box").iterdir()} == {"workspace", "home", "tmp"}


def test_it_is_made_anew_until_a_harness_was_started(make_task: Callable[..., Task], rollout: Path) -> None:
    task = make_task()
    workspace = prepare(task, rollout)
    (workspace / "half-done").write_text("")
    assert "half-done" not in listing(prepare(task, rollout))
    process.start(Launch(("touch", "work"), base_env(rollout / BOX), workspace), rollout)
    process.wait_blocking(rollout, 10)
    assert prepare(task, rollout) == workspace and "work" in listing(workspace)
    shutil.rmtree(workspace)
    with pytest.raises(TaskError, match="the workspace is gone"):
        prepare(task, rollout)


def git(folder: Path, *words: str, env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    name = ("-c", "user.name=a", "-c", "user.email=a@b", "-c", "init.defaultBranch=main")
    return subprocess.run(["git", *name, *words], cwd=folder, env=env, text=True, capture_output=True, check=False)


def test_no_history_that_may_hold_the_answer_is_reachable(make_task: Callable[..., Task], rollout: Path) -> None:
    """The task comes with a .git that knows the fix; the rollout's folder lies inside a repository that does too."""
    files = {"environment/workspace/a.txt": "broken", "environment/workspace/sub/.git": "gitdir: ../../elsewhere"}
    task = make_task(files=files)
    source = task.environment_dir / "workspace"
    for folder in (source, rollout.parent):
        assert git(folder, "init").returncode == 0
        write(folder, {"fix.txt": "the answer"})
        git(folder, "add", "fix.txt")
        assert git(folder, "commit", "-m", "the answer").returncode == 0
    (source / "fix.txt").unlink()
    workspace = prepare(task, rollout)
    assert set(listing(workspace)) == {"a.txt", "bin", "bin/run.sh", "sub"}
    assert "the answer" in git(workspace, "log").stdout, "without the ceiling, the outer repository answers"
    seen = git(workspace, "log", env=base_env(rollout / BOX))
    assert seen.returncode != 0 and "not a git repository" in seen.stderr


def test_a_task_may_keep_its_history(make_task: Callable[..., Task], rollout: Path) -> None:
    task = make_task(files={"task.toml": "[metadata]\nkeep_git = true\n", "environment/workspace/.git/HEAD": "x"})
    assert ".git/HEAD" in listing(prepare(task, rollout))


@pytest.mark.parametrize("target", ["../../tests/test.sh", "/etc/passwd", "../.."])
def test_links_out_of_the_workspace_are_refused(make_task: Callable[..., Task], rollout: Path, target: str) -> None:
    task = make_task()
    (task.environment_dir / "workspace" / "link").symlink_to(target)
    with pytest.raises(TaskError, match=r"workspace/link: a link that leaves the workspace"):
        prepare(task, rollout)
    assert not (rollout / "box" / "workspace").exists()


def from_dockerfile(make_task: Callable[..., Task], text: str, toml: str = "") -> Task:
    files = {"environment/src/m.py": "m", "environment/src/sub/n.py": "n", "environment/x.cfg": "x"}
    task = make_task(files={**files, "environment/Dockerfile": text, "task.toml": toml})
    shutil.rmtree(task.environment_dir / "workspace")
    return task


@pytest.mark.parametrize(
    ("text", "files"),
    [
        ("FROM x\nWORKDIR /app\nCOPY src/ /app/\n", {"m.py", "sub", "sub/n.py"}),
        ("FROM x\nWORKDIR /app\nCOPY src /app/src\n", {"src", "src/m.py", "src/sub", "src/sub/n.py"}),
        ("FROM x\nWORKDIR /app\nCOPY x.cfg .\n", {"x.cfg"}),
        ("FROM x\nWORKDIR /app\nCOPY x.cfg y.cfg\n", {"y.cfg"}),
        ("FROM x\nWORKDIR /app\nCOPY x.cfg src/m.py etc/\n", {"etc", "etc/x.cfg", "etc/m.py"}),
        ('FROM x\nWORKDIR /app\nCOPY ["x.cfg", "./"]\n', {"x.cfg"}),
        ("FROM x\n# COPY no /app\nWORKDIR /w\nRUN a && \\\n  b\nCOPY --chown=u \\\n  x.cfg /w/\n", {"x.cfg"}),
        ("FROM x\nWORKDIR /app\nCOPY src/*.py .\n", {"m.py"}),
        ("FROM x\nCOPY x.cfg /app/\n", {"x.cfg"}),
    ],
)
def test_copy_lines_stand_in_for_a_workspace_folder(
    make_task: Callable[..., Task], rollout: Path, text: str, files: set[str]
) -> None:
    assert set(listing(prepare(from_dockerfile(make_task, text), rollout))) == files


def test_workdir_of_the_task_wins(make_task: Callable[..., Task], rollout: Path) -> None:
    task = from_dockerfile(make_task, "WORKDIR /app\nCOPY x.cfg /w/d/\n", "[environment]\nworkdir = '/w'")
    assert set(listing(prepare(task, rollout))) == {"d", "d/x.cfg"}


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("FROM x\n", "has no COPY line"),
        ("FROM x\nADD x.cfg /app/\n", "Dockerfile:2: ADD x.cfg /app/: ADD is not understood"),
        ("FROM x\nCOPY --from=build /a /app\n", "Dockerfile:2: .*without options or variables"),
        ("FROM x\nCOPY $SRC /app\n", "without options or variables"),
        ("FROM x\nCOPY <<EOF /app/x\nhello\nEOF\n", "without options or variables"),
        ("FROM x\nCOPY ../tests /app/\n", r"\.\./tests is outside environment/"),
        ("FROM x\nCOPY src/../../tests /app/\n", "is outside environment/"),
        ("FROM x\nCOPY absent /app/\n", "there is no absent in"),
        ("FROM x\nCOPY x.cfg /etc/\n", "goes to /etc, outside the workspace /app"),
        ("FROM x\nCOPY x.cfg\n", "without options or variables"),
        ("FROM x\nCOPY 'x.cfg /app/\n", "cannot be parsed"),
        ("FROM x\nWORKDIR app\nCOPY x.cfg .\n", "a relative one is not understood"),
    ],
)
def test_what_is_not_understood_is_refused(make_task: Callable[..., Task], rollout: Path, text: str, says: str) -> None:
    with pytest.raises(TaskError, match=says) as error:
        prepare(from_dockerfile(make_task, text), rollout)
    assert "\n" not in str(error.value)


def test_neither_workspace_nor_dockerfile(make_task: Callable[..., Task], rollout: Path) -> None:
    task = make_task()
    shutil.rmtree(task.environment_dir / "workspace")
    with pytest.raises(TaskError, match="neither workspace/ nor a Dockerfile"):
        prepare(task, rollout)

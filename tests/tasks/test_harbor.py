from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from gyre.tasks.harbor import Task, TaskError, load_task, load_tasks
from tests.tasks.conftest import TOML, write


def test_a_whole_task(make_task: Callable[..., Task]) -> None:
    task = make_task()
    assert (task.name, task.family, task.instruction) == ("test/one", "edit", "Do it.\n")
    assert (task.agent_timeout_s, task.verifier_timeout_s) == (120.0, 60.0)
    assert (task.env, task.verifier_env) == ({"COLOR": "blue"}, {"LEVEL": "2"})
    assert task.metadata["difficulty"] == "easy" and not task.keep_git


def test_a_bare_task_gets_harbors_defaults(make_task: Callable[..., Task]) -> None:
    task = make_task(files={"task.toml": ""})
    assert (task.name, task.family, task.agent_timeout_s, task.verifier_timeout_s) == ("task", "", None, 600.0)


@pytest.mark.parametrize(
    ("toml", "says"),
    [
        ("[agent", "not valid TOML"),
        ("[agent]\ntimeout_sec = -1", "agent.timeout_sec: Input should be greater than 0"),
        ("[agent]\ntimeout_sec = nan", "agent.timeout_sec: "),
        ("[verifier]\ntimeout_sec = inf", "verifier.timeout_sec: "),
        ("[verifier]\ntimeout_sec = 'soon'", "verifier.timeout_sec: "),
        ("[verifier]\nenvironment_mode = 'separate'", "verifier.environment_mode: only 'shared' is supported"),
        ("[verifier]\nenv = { KEY = '${KEY}' }", r"verifier.env: KEY = '\$\{KEY\}': .*write the value itself"),
        ("[environment]\nenv = { KEY = '${KEY:-1}' }", "environment.env: KEY"),
        ("[task]\nname = ''", "task.name: "),
        ("[task]\nname = 3", "task.name: "),
        ("[metadata]\nfamily = 3", "metadata.family: "),
        ("schema_version = '2.0'", "schema_version: "),
        ("[[steps]]\nname = 'x'", "steps: tasks of several steps are not supported"),
    ],
)
def test_bad_task_toml_is_one_line_with_file_and_field(make_task: Callable[..., Task], toml: str, says: str) -> None:
    with pytest.raises(TaskError, match=says) as error:
        make_task(files={"task.toml": toml})
    assert "\n" not in str(error.value) and "task/task.toml: " in str(error.value)


@pytest.mark.parametrize("missing", ["task.toml", "instruction.md", "tests/test.sh"])
def test_a_missing_file_is_named(make_task: Callable[..., Task], missing: str) -> None:
    folder = make_task().path
    (folder / missing).unlink()
    with pytest.raises(TaskError, match=f"task/{missing}: no such file; "):
        load_task(folder)


@pytest.mark.parametrize("text", ["", " \n", "a\0b"])
def test_an_instruction_must_say_something(make_task: Callable[..., Task], text: str) -> None:
    with pytest.raises(TaskError, match=r"instruction.md: "):
        make_task(files={"instruction.md": text})


def test_a_folder_of_tasks(tmp_path: Path) -> None:
    with pytest.raises(TaskError, match="no such folder of tasks"):
        load_tasks(tmp_path / "absent")
    root = tmp_path / "tasks"
    root.mkdir()
    with pytest.raises(TaskError, match="holds no task"):
        load_tasks(root)
    for name in ("b", "a"):
        write(
            root / name,
            {
                "task.toml": TOML.replace("test/one", f"test/{name}"),
                "instruction.md": "x",
                "environment/workspace/f": "",
                "tests/test.sh": "",
            },
        )
    (root / "README.md").write_text("not a task")
    (root / ".cache").mkdir()
    assert [t.name for t in load_tasks(root)] == ["test/a", "test/b"]
    (root / "b" / "task.toml").write_text(TOML.replace("test/one", "test/a"))
    with pytest.raises(TaskError, match=r"b/task.toml: task.name: 'test/a' is the name of .*/a too; rename one"):
        load_tasks(root)
    (root / "c").mkdir()
    with pytest.raises(TaskError, match=r"c/task.toml: no such file"):
        load_tasks(root)

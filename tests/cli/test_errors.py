"""An error of the user is one line that says what to do; never a traceback."""

from __future__ import annotations

from pathlib import Path

import pytest

from gyre.cli.launch import write_run_config
from gyre.cli.stackfile import StackState
from gyre.config import load_run_config
from tests.cli.conftest import Gyre

RUN = """
name = "x"
steps = 1
[policy]
path = "."
[tasks]
train = "."
[[cells]]
name = "a"
central = true
"""


def one_line(said: tuple[int, str, str]) -> str:
    code, out, err = said
    assert code != 0
    assert out == ""
    assert err.startswith("gyre: ")
    assert err.count("\n") == 1
    return err.removeprefix("gyre: ").rstrip("\n")


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ("stepz = 3", "stepz: unknown field; remove it or fix its spelling"),
        ("seed = -1", "seed: Input should be greater than or equal to 0"),
        ("seed = ", "not valid TOML"),
    ],
)
@pytest.mark.parametrize("command", ["train", "up"])
def test_a_bad_run_file_is_named_with_its_field(
    gyre: Gyre, tmp_path: Path, command: str, change: str, says: str
) -> None:
    file = tmp_path / "run.toml"
    file.write_text(change + RUN)
    said = one_line(gyre(command, file, "--data", tmp_path))
    assert said.startswith(f"{file}: ")
    assert says in said


@pytest.mark.parametrize("command", ["train", "up"])
def test_a_missing_run_file_is_named(gyre: Gyre, tmp_path: Path, command: str) -> None:
    assert one_line(gyre(command, tmp_path / "no.toml", "--data", tmp_path)) == f"{tmp_path}/no.toml: no such run file"


@pytest.mark.parametrize("command", [["status"], ["rollouts"], ["tree", "x"], ["sql", "SELECT 1"], ["pause"]])
def test_a_stack_that_never_ran_and_one_that_is_down(gyre: Gyre, tmp_path: Path, command: list[str]) -> None:
    assert "no stack has run on" in one_line(gyre(*command, "--data", tmp_path))
    StackState(state="stopped", pid=2**22 + 1, pid_start=1).write(tmp_path)
    assert one_line(gyre(*command, "--data", tmp_path)).startswith(f"the stack on {tmp_path} is down; `gyre up")


def test_a_stack_that_is_up_for_another_run_is_not_used(gyre: Gyre, data: Path, tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text(RUN)
    said = one_line(gyre("train", file, "--data", data))
    assert said == f"the stack on {data} is up for the run demo-s0; stop it first: gyre down --data {data}"
    assert "a stack already runs on" in one_line(gyre("up", "--data", data))


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["traim"], "No such command 'traim'"),
        (["train"], "Missing argument 'RUN.toml'"),
        (["train", "x.toml", "--seed", "many"], "Invalid value for '--seed'"),
        (["rollouts", "--limit", "0"], "Invalid value for '--limit'"),
    ],
)
def test_a_wrong_use_of_the_command_line(gyre: Gyre, arguments: list[str], says: str) -> None:
    assert says in one_line(gyre(*arguments))


@pytest.mark.parametrize(
    ("query", "says"),
    [
        ("SELECT nonsense FROM runs", 'column "nonsense" does not exist'),
        ("DELETE FROM scores", "cannot execute DELETE in a read-only transaction (add --write to change the database)"),
        ("COMMIT; DELETE FROM scores", "cannot execute DELETE in a read-only transaction (add --write"),
    ],
)
def test_bad_sql(gyre: Gyre, data: Path, query: str, says: str) -> None:
    assert says in one_line(gyre("sql", query, "--data", data))


def test_a_rollout_and_a_run_that_are_not_there(gyre: Gyre, data: Path) -> None:
    assert one_line(gyre("tree", "demo-s0/s9/00/00", "--data", data)).startswith("no rollout 'demo-s0/s9/00/00'")
    code, _, err = gyre("status", "--run", "nope", "--data", data)
    assert (code, err) == (1, "gyre: no run 'nope'; `gyre sql 'SELECT id FROM runs'` lists them\n")


def test_a_run_that_began_with_other_settings_is_not_resumed(gyre: Gyre, tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text(RUN)
    before = load_run_config(file)
    assert write_run_config(tmp_path, before) == tmp_path / "runs" / "x-s0" / "config.json"
    write_run_config(tmp_path, before.model_copy(update={"steps": 9}))
    file.write_text(RUN + "[rollouts]\ngroup_size = 3\n")
    assert one_line(gyre("train", file, "--data", tmp_path)) == (
        "run x-s0 began with other settings (rollouts.group_size was 16, is now 3); give the run file another name or"
        f" seed, or use another data folder than {tmp_path}"
    )


def test_a_database_that_does_not_answer(gyre: Gyre, data: Path) -> None:
    state = StackState.read(data)
    assert state is not None
    state.model_copy(update={"database_url": "postgresql+psycopg://gyre@127.0.0.1:1/gyre"}).write(data)
    for command in (["sql", "SELECT 1"], ["rollouts"], ["status"]):
        code, _, err = gyre(*command, "--data", data)
        assert code == 1
        assert err.startswith("gyre: the database does not answer (")
        assert err.count("\n") == 1

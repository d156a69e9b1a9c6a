"""Commands over a finished run with known numbers (tests/report/story.py)."""

from __future__ import annotations

from pathlib import Path

import pytest
from rich.console import Console
from sqlalchemy import Engine

from gyre.cli.checks import SOURCE, pins
from gyre.cli.data import data_folder
from gyre.cli.live import PlainView, clock, spark
from gyre.cli.snapshot import newest_run, take_snapshot
from gyre.cli.stackfile import ProcessState, StackState
from gyre.cli.summary import print_summary
from tests.cli.conftest import Gyre
from tests.report.story import tell


def test_sql_prints_a_table_and_csv(gyre: Gyre, data: Path) -> None:
    code, out, _ = gyre("sql", "SELECT step, mean_reward FROM step_summary ORDER BY step", "--data", data)
    assert code == 0
    assert [line.split() for line in out.splitlines()] == [
        ["step", "mean_reward"],
        ["0", "0.5"],
        ["1", "0.625"],
        ["(2", "rows)"],
    ]
    _, out, _ = gyre("sql", "SELECT task FROM groups WHERE task LIKE '%held%'", "--csv", "--data", data)
    assert out.splitlines() == ["task", "org/held", "org/held"]


def test_sql_changes_nothing_unless_told_to(gyre: Gyre, data: Path) -> None:
    assert gyre("sql", "UPDATE runs SET state = 'failed'", "--data", data)[0] == 1
    assert gyre("sql", "UPDATE runs SET state = 'failed'", "--write", "--data", data)[1] == "1 rows changed\n"
    assert "failed" in gyre("sql", "SELECT state FROM runs", "--data", data)[1]


def test_a_report_of_a_run_as_it_stands(gyre: Gyre, data: Path) -> None:
    drawing = data / "step.svg"
    code, out, err = gyre("report", "--step", "2", "--svg", drawing, "--data", data)
    assert code == 0, err
    words, page = out.splitlines()
    assert words.startswith("Step 2, 39.0 s.") and words in Path(page).read_text()
    assert drawing.read_text().startswith('<svg xmlns="http://www.w3.org/2000/svg"')
    code, _, err = gyre("report", "--step", "9", "--data", data)
    assert (code, err) == (1, "gyre: step 9 of run 'demo-s0' is not there, or not finished yet\n")


def test_rollouts_are_filtered(gyre: Gyre, data: Path) -> None:
    def ids(*options: str) -> list[str]:
        code, out, err = gyre("rollouts", *options, "--data", data)
        assert code == 0, err
        return sorted(line.split()[0] for line in out.splitlines() if line.startswith("demo-s0/"))

    assert len(ids()) == 16
    assert ids("--step", "1") == [f"demo-s0/s0/00/0{m}" for m in range(4)]
    assert ids("--excluded") == ["demo-s0/s0/00/03"]
    assert len(ids("--heldout")) == 8
    assert len(ids("--task", "HELD")) == 8
    assert ids("--state", "running") == []
    assert len(ids("--limit", "3")) == 3
    assert "3 of 16 rollouts of demo-s0" in gyre("rollouts", "--limit", "3", "--data", data)[1]


def test_tree_draws_nodes_calls_kinds_tokens_and_versions(gyre: Gyre, data: Path) -> None:
    code, out, _ = gyre("tree", "demo-s0/s0/00/01", "--data", data)
    assert code == 0
    lines = [" ".join(line.strip("│├└─ ").split()) for line in out.splitlines()]
    assert lines == [
        "demo-s0/s0/00/01 org/task-0 completed, reward 1 2 calls, 85 tokens in the tree, 15 sampled",
        "prompt +50 tokens from 0",
        "generated +10 call 0 main v0: 10 on central stop trained",
        "prompt +20 tokens from 60",
        "generated +5 call 1 main v0: 5 on central stop trained",
    ]


def test_status_shows_the_run(gyre: Gyre, data: Path) -> None:
    code, out, _ = gyre("status", "--data", data)
    assert code == 0
    for said in ("demo-s0 · done", "2 of 2", "held-out", "success 75.0 %", "central (central)", "satellite"):
        assert said in out


def test_status_shows_what_was_started_again(gyre: Gyre, data: Path) -> None:
    state = StackState.read(data)
    assert state is not None
    times = {"postgres": 0, "gateway": 1, "control": 12}
    processes = [ProcessState(name=n, component=n, state="ready", restarts=k) for n, k in times.items()]
    state.model_copy(update={"processes": processes}).write(data)
    _, out, _ = gyre("status", "--data", data)
    rows = [line.split()[1:] for line in out.splitlines() if line.strip().startswith("●")]
    assert rows == [["postgres", "ready"], ["gateway", "ready", "1", "restart"], ["control", "ready", "12", "restarts"]]


def test_status_shows_a_pause(gyre: Gyre, data: Path) -> None:
    gyre("sql", "UPDATE runs SET state = 'paused'", "--write", "--data", data)
    _, out, _ = gyre("status", "--data", data)
    assert "demo-s0 · paused" in out and "paused, `gyre resume` goes on; next step" in " ".join(out.split())


def test_status_shows_who_is_not_there_and_when_the_others_were_heard(gyre: Gyre, data: Path) -> None:
    def cells() -> dict[str, list[str]]:
        rows = [line.strip("│ ").split() for line in gyre("status", "--data", data)[1].splitlines()]
        return {row[0]: row[1:] for row in rows if row and row[0] in ("central", "satellite", "gpu-2")}

    gyre("sql", "UPDATE cells SET updated_at = now() - interval '95 s' WHERE name = 'satellite'", "--write",
         "--data", data)  # fmt: skip
    assert cells()["satellite"][-2:] == ["1:35", "ago"] and cells()["central"][-1] == "ago"
    assert "other machines" not in gyre("status", "--data", data)[1]
    planned = '{"cells": [{"name": "central", "central": true}, {"name": "satellite"}, {"name": "gpu-2"}], '
    planned += '"stack": {"remote_cells": ["satellite", "gpu-2"]}}'
    gyre("sql", f"UPDATE runs SET config = config || '{planned}'", "--write", "--data", data)
    assert cells()["gpu-2"] == ["not", "seen", "yet"] and cells()["central"][0] == "(central)"
    said = f"Started by you on other machines: gpu-2, satellite. How: gyre cells --data {data}\n"
    assert said in gyre("status", "--data", data)[1]


def test_the_plain_view_says_each_step_and_evaluation_once(engine: Engine, capsys: pytest.CaptureFixture[str]) -> None:
    tell(engine)
    assert newest_run(engine) == "demo-s0"
    snapshot = take_snapshot(engine, "demo-s0")
    assert snapshot is not None
    view = PlainView(Console())
    view.show(snapshot)
    view.show(snapshot)
    assert capsys.readouterr().out.splitlines() == [
        "held-out v0: success 25.0 % (reward 0.250, 4 rollouts)",
        "held-out v2: success 75.0 % (reward 0.750, 4 rollouts)",
        "step 1/2  reward 0.500  success 33.3 %  rollouts 4  excluded 1  micro-batches 1  |Δlogprob| 2.0e-05  39.0 s",
        "step 2/2  reward 0.625  success 50.0 %  rollouts 4  micro-batches 1  |Δlogprob| 2.0e-05  39.0 s",
    ]


def test_the_last_words(engine: Engine, data: Path, capsys: pytest.CaptureFixture[str]) -> None:
    snapshot, stack = take_snapshot(engine, "demo-s0"), StackState.read(data)
    assert snapshot is not None
    assert stack is not None
    print_summary(engine, snapshot, stack, data, Console())
    report = data / "runs" / "demo-s0" / "report.html"
    assert capsys.readouterr().out.splitlines() == [
        "demo-s0: done, 2 of 2 steps in 1:40",
        "held-out before  v0: success 25.0 % (reward 0.250, 4 rollouts)",
        "held-out after   v2: success 75.0 % (reward 0.750, 4 rollouts)",
        "held-out success 25.0 % -> 75.0 % (+50.0 points)",
        "mean |logprob sampler - trainer| on trained tokens  2.00e-05",
        "Temporal UI  http://127.0.0.1:8233",
        f"report       {report}",
    ]
    assert report.exists()


def test_the_data_folder_is_at_the_root_of_the_repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "repo" / ".git").mkdir(parents=True)
    (tmp_path / "repo" / "a" / "b").mkdir(parents=True)
    (tmp_path / "repo" / "a" / "run.toml").touch()
    assert data_folder(None, tmp_path / "repo" / "a" / "run.toml") == tmp_path / "repo" / ".gyre"
    monkeypatch.chdir(tmp_path / "repo" / "a" / "b")
    assert data_folder(None) == tmp_path / "repo" / ".gyre"
    assert data_folder(Path("elsewhere")) == tmp_path / "repo" / "a" / "b" / "elsewhere"


def test_pins_are_read_from_requirements(tmp_path: Path) -> None:
    file = tmp_path / "r.txt"
    file.write_text("# no\nname==1.2 \\\n    --hash=sha256:00\npsycopg[binary,pool]==3.3.9\nfree>=2\n")
    assert pins(file) == [("name", "1.2"), ("psycopg", "3.3.9"), ("free", "")]


@pytest.mark.parametrize("engines", ["engines-cpu.txt", "cuda.txt"])
def test_each_set_of_engines_has_one_build_of_mooncake(engines: str) -> None:
    """Both builds hold the module `mooncake`, so what is installed beside either must bring none."""
    names = [name for file in ("base.txt", engines) for name, _ in pins(SOURCE / "requirements" / file)]
    assert len([name for name in names if name.startswith("mooncake-transfer-engine")]) == 1


def test_doctor_names_what_is_missing_and_how_to_get_it(gyre: Gyre, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GYRE_MINI_PYTHON", "/nowhere/bin/python")
    code, out, err = gyre("doctor")
    assert code == 1
    assert err.endswith("see the lines with ->\n")
    assert "not installed at /nowhere/bin/python" in out
    assert "-> make setup (or set GYRE_MINI_PYTHON" in out
    assert "CPU set (torch 2.13.0" in out or "CUDA set" in out


def test_small_drawings() -> None:
    assert spark([0.0, 0.5, 1.0, 2.0]) == "▁▅██"
    assert [clock(s) for s in (5, 65.9, 3661)] == ["0:05", "1:05", "1:01:01"]

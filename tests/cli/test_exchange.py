"""`gyre export` and `gyre import` over a finished run."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cli.conftest import Gyre


@pytest.mark.parametrize("format", ["parquet", "atif"])
def test_a_run_goes_out_and_comes_back(gyre: Gyre, data: Path, tmp_path: Path, format: str) -> None:
    out = tmp_path / "out"
    code, said, err = gyre("export", out, "--format", format, "--data", data)
    assert (code, err) == (0, "")
    assert str(out) in said and "rollouts" in said
    code, said, err = gyre("import", out, "--as", "again", "--data", data)
    assert (code, err) == (0, "")
    assert said.startswith("again is in the database: 1 runs, ")
    query = "SELECT run_id, sum(reward), sum(sampled_tokens) FROM rollout_summary WHERE calls > 0 GROUP BY 1 ORDER BY 1"
    lines = gyre("sql", query, "--csv", "--data", data)[1].splitlines()
    assert [line.split(",")[0] for line in lines] == ["run_id", "again", "demo-s0"]
    assert lines[1].split(",")[1:] == lines[2].split(",")[1:]
    assert "demo-s0" in gyre("rollouts", "--data", data)[1].splitlines()[-1]  # an import is not the newest run


def test_wrong_uses_are_one_line(gyre: Gyre, data: Path, tmp_path: Path) -> None:
    for arguments, message in (
        (("export", tmp_path / "x", "--step", 9), "step 8: run demo-s0 has none"),
        (
            ("export", tmp_path / "x", "--rollout", "demo-s0/s9/00/00"),
            "rollout 'demo-s0/s9/00/00': run demo-s0 has none",
        ),
        (("export", tmp_path / "x", "--step", 1, "--rollout", "demo-s0/s0/00/00"), "name one of them"),
        (("export", data), "is not empty"),
        (("import", tmp_path / "nothing"), "does not exist"),
    ):
        code, out, err = gyre(*arguments, "--data", data)
        assert code != 0 and out == ""
        assert message in err and err.count("\n") == 1, err

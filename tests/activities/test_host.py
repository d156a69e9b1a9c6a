"""A rollout host's identity, and how a harness's end is judged."""

from __future__ import annotations

from pathlib import Path

import pytest

from activities.rollout import _judge
from gyre.harness import process
from workers.rollout_host import host_id


def exited(seconds: float, *, code: int | None = 0, reason: str = "exited") -> process.Exited:
    return process.Exited(code, None, reason, 0.1, 100.0, 100.0 + seconds, 0)


@pytest.mark.parametrize(
    ("end", "outcome"),
    [
        (exited(5), "completed"),
        (exited(5, code=1), "harness_error"),
        (exited(5, code=None), "harness_error"),  # a signal of its own
        (exited(10.01, code=None, reason="killed"), "timeout"),
        (exited(5, code=None, reason="killed"), "infrastructure"),  # the stack went down
        (exited(10.5), "completed"),  # ended by itself while the limit struck
        (exited(60), "timeout"),  # nobody watched it
        (process.Lost(100.0), "infrastructure"),
    ],
)
def test_how_a_harness_ended(end: process.Status, outcome: str) -> None:
    assert _judge(end, 10.0)[0] == outcome


def test_a_host_keeps_its_id_over_restarts_and_is_one_process(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first, lock = host_id(tmp_path)
    with pytest.raises(SystemExit):
        host_id(tmp_path)
    assert "another rollout host runs on this data folder" in capsys.readouterr().err
    lock.close()
    second, lock = host_id(tmp_path)
    lock.close()
    assert first == second and first

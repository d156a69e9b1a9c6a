"""Scoring: a reward only from the task's own tests; anything else is an evaluator failure and never zero."""

from __future__ import annotations

import shutil
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from gyre.harness import process
from gyre.harness.base import BOX, Launch, base_env
from gyre.tasks.grade import EvaluatorError, grade
from gyre.tasks.harbor import Task
from gyre.tasks.workspace import prepare
from tests.harness.conftest import processes_in, until


@pytest.mark.parametrize(
    ("script", "reward"),
    [
        ("echo 1 > $LOGS_DIR/reward.txt", 1.0),
        ("echo 0 > $LOGS_DIR/reward.txt", 0.0),
        ("printf ' 0.25\\n\\n' > $LOGS_DIR/reward.txt; exit 9", 0.25),
        ("echo -2.5e-1 > $LOGS_DIR/reward.txt", -0.25),
        ('echo \'{"reward": 0.5, "speed": 3}\' > $LOGS_DIR/reward.json; echo 1 > $LOGS_DIR/reward.txt', 0.5),
        ("echo '{\"quality\": 0.75}' > $LOGS_DIR/reward.json", 0.75),
        (": > $LOGS_DIR/reward.json; echo 1 > $LOGS_DIR/reward.txt", 1.0),
        ("cat a.txt && test $PWD = $APP_DIR && test -f $TESTS_DIR/test.sh && echo 1 > $LOGS_DIR/reward.txt", 1.0),
        ("test $COLOR$LEVEL = blue2 && echo 1 > $LOGS_DIR/reward.txt", 1.0),
    ],
)
def test_rewards(make_task: Callable[..., Task], rollout: Path, script: str, reward: float) -> None:
    task = make_task(script)
    prepare(task, rollout)
    result = grade(task, rollout)
    assert (result.status, result.reward) == ("ok", reward)


@pytest.mark.parametrize(
    ("script", "status"),
    [
        ("true", "no_reward"),
        ("exit 1", "no_reward"),
        (": > $LOGS_DIR/reward.txt", "no_reward"),
        ("echo 1 > $LOGS_DIR/rewards.json", "no_reward"),
        *((f"echo '{text}' > $LOGS_DIR/reward.txt", "bad_reward") for text in ("nan", "inf", "-inf", "one", "1 2")),
        *(
            (f"echo '{text}' > $LOGS_DIR/reward.json", "bad_reward")
            for text in (
                '{"reward": NaN}', '{"reward": 1e999}', '{"reward": -Infinity}', '{"reward": "1"}',
                '{"reward": true}', '{"reward": null}', '{"reward": [1]}', '{"reward": {"a": 1}}',
                '{"reward": 1, "other": NaN}', '{"a": 1, "b": 2}', "{}", "[1]", "1", "{",
                '{"reward": 1%s}' % ("0" * 400),
            )
        ),
        ("printf '\\377' > $LOGS_DIR/reward.txt", "bad_reward"),
        ("ln -s /etc/hostname $LOGS_DIR/reward.txt", "bad_reward"),
        ("mkdir $LOGS_DIR/reward.json", "bad_reward"),
        ("mkfifo $LOGS_DIR/reward.json", "bad_reward"),
        ("echo 1 > $LOGS_DIR/reward.txt; kill -9 $$", "killed"),
        ("echo 1 > $LOGS_DIR/reward.txt; kill -TERM $$", "killed"),
    ],
)  # fmt: skip
def test_no_reward_is_never_zero(make_task: Callable[..., Task], rollout: Path, script: str, status: str) -> None:
    task = make_task(f"echo looking; {script}")
    prepare(task, rollout)
    with pytest.raises(EvaluatorError) as error:
        grade(task, rollout)
    assert error.value.status == status
    assert "\n" not in str(error.value)
    assert error.value.detail["output"].startswith("looking"), "what the tests said is kept"


def test_a_time_limit_ends_the_whole_tree(make_task: Callable[..., Task], rollout: Path) -> None:
    task = make_task("echo 1 > $LOGS_DIR/reward.txt; setsid sleep 600 & trap '' TERM; sleep 600; sleep 600")
    prepare(task, rollout)
    begin = time.monotonic()
    with pytest.raises(EvaluatorError, match=r"killed: .*still running after 0.3 s"):
        grade(task, rollout, timeout_s=0.3)
    assert time.monotonic() - begin < 60  # not the 600 s of its sleep
    assert processes_in(rollout) == []


def test_what_tests_leave_running_is_ended(make_task: Callable[..., Task], rollout: Path) -> None:
    task = make_task("setsid sleep 600 & echo 1 > $LOGS_DIR/reward.txt")
    prepare(task, rollout)
    assert grade(task, rollout).reward == 1
    assert processes_in(rollout) == []


def test_an_evaluator_that_fails_twice_and_then_succeeds(
    make_task: Callable[..., Task], rollout: Path, tmp_path: Path
) -> None:
    count = tmp_path / "count"
    task = make_task(f"echo x >> {count}; [ $(wc -l < {count}) -ge 3 ] && echo 0.5 > $LOGS_DIR/reward.txt")
    prepare(task, rollout)
    for _ in range(2):
        with pytest.raises(EvaluatorError, match="no_reward"):
            grade(task, rollout)
    result = grade(task, rollout)
    assert result.reward == 0.5
    attempts = sorted(p.name.split("-")[0] for p in (rollout / "verifier").iterdir())
    assert attempts == ["1", "2", "3"] and result.detail["attempt"].startswith("3-")


def act(rollout: Path, script: str) -> None:
    """Be the agent: run a script in the workspace as a harness would."""
    process.start(Launch(("/bin/sh", "-c", script), base_env(rollout / BOX), rollout / BOX / "workspace"), rollout)
    ended = process.wait_blocking(rollout, 60)
    assert isinstance(ended, process.Exited) and ended.code == 0


CHECK = """
cmp -s $APP_DIR/a.txt $TESTS_DIR/expected.txt; right=$?
sh $TESTS_DIR/helper.sh || exit 1
[ $right = 0 ] && echo 1 > $LOGS_DIR/reward.txt || echo 0 > $LOGS_DIR/reward.txt
"""


@pytest.mark.parametrize(
    ("script", "reward"),
    [
        ("echo right > a.txt", 1),
        ("true", 0),
        # Tests, rewards and verifier folders that the agent made itself.
        ("mkdir -p tests ../../verifier/tests; echo exit 0 > tests/test.sh; cp tests/test.sh ../../verifier/tests", 0),
        ("for d in . .. ../../verifier ../../verifier/logs; do mkdir -p $d; echo 1 > $d/reward.txt; done", 0),
        ("for d in . .. ../../verifier; do mkdir -p $d; echo '{\"reward\":1}' > $d/reward.json; done", 0),
        ("mkdir -p ../../verifier/1-x; echo '{}' > ../../verifier/1-x/pid.json", 0),
        ("mkdir -p ../../verifier/1-x; echo junk > ../../verifier/1-x/pid.json", 0),
        ("mkdir ../../elsewhere; ln -s elsewhere ../../verifier", 0),
        ("echo x > ../../verifier", 0),
        # A link that would point to the expected file once the tests are there.
        ("ln -sf ../../verifier/tests/expected.txt a.txt", 0),
        # No workspace any more.
        ("cd ..; rm -rf workspace", 0),
        ("cd ..; rm -rf ../box", 0),
        ("cd ..; rm -rf workspace; echo x > workspace", 0),
        ("cd ..; rm -rf workspace; mkdir evil; echo right > evil/a.txt; ln -s evil workspace", 0),
        # Not even what Gyre keeps beside the agent's own part.
        ("sleep 0.3; rm -rf ../../*", 0),
    ],
)
def test_the_agent_cannot_touch_the_score(
    make_task: Callable[..., Task], rollout: Path, script: str, reward: float
) -> None:
    task = make_task(CHECK, files={"tests/expected.txt": "right\n", "tests/helper.sh": "exit 0\n"})
    prepare(task, rollout)
    assert not [p for p in rollout.rglob("*") if "expected" in p.name or "test" in p.name], "hidden until scored"
    act(rollout, script)
    result = grade(task, rollout)
    assert result.reward == reward
    assert not [p for p in rollout.rglob("*") if "expected" in p.name], "and afterwards gone again"
    gone = script.startswith("cd ..") or "box" in script or script.endswith("../*")
    assert ("workspace" in result.detail) == gone


def test_scoring_does_not_change_the_task(make_task: Callable[..., Task], rollout: Path) -> None:
    task = make_task("echo 1 > $LOGS_DIR/reward.txt; rm -rf $TESTS_DIR; echo spoiled > $TESTS_DIR || true")
    prepare(task, rollout)
    assert grade(task, rollout).reward == grade(task, rollout).reward == 1


def test_a_script_without_a_first_line_runs_in_sh(make_task: Callable[..., Task], rollout: Path) -> None:
    task = make_task()
    (task.tests_dir / "test.sh").write_text("echo 1 > $LOGS_DIR/reward.txt")
    prepare(task, rollout)
    assert grade(task, rollout).reward == 1


def test_tests_that_cannot_be_run_are_an_error(make_task: Callable[..., Task], rollout: Path) -> None:
    task = make_task()
    prepare(task, rollout)
    (task.tests_dir / "test.sh").write_text("#!/no/such/shell\n")
    with pytest.raises(EvaluatorError, match=r"^error: .*test.sh: cannot run \(exit 127\)"):
        grade(task, rollout)
    shutil.rmtree(task.tests_dir)
    with pytest.raises(EvaluatorError, match=r"^error: .*could not be run"):
        grade(task, rollout)


def test_output_is_kept_to_its_tail_and_storable(make_task: Callable[..., Task], rollout: Path) -> None:
    task = make_task(
        "i=0; while [ $i -lt 3000 ]; do echo line $i; i=$((i+1)); done; printf 'end\\000\\377'\n"
        "echo 1 > $LOGS_DIR/reward.txt"
    )
    prepare(task, rollout)
    output = grade(task, rollout).detail["output"]
    assert len(output) == 4000 and output.endswith("end\ufffd\ufffd") and "\0" not in output


def test_an_attempt_that_a_dead_host_left_is_ended_first(make_task: Callable[..., Task], rollout: Path) -> None:
    task = make_task("[ -e ../../second ] || sleep 600; echo 1 > $LOGS_DIR/reward.txt")
    prepare(task, rollout)
    failures: list[EvaluatorError] = []

    def first() -> None:
        try:
            grade(task, rollout)
        except EvaluatorError as error:
            failures.append(error)

    thread = threading.Thread(target=first)
    thread.start()
    until(lambda: len(processes_in(rollout)) >= 2)
    (rollout / "second").touch()
    assert grade(task, rollout).reward == 1
    thread.join(60)
    assert [f.status for f in failures] == ["killed"]
    assert processes_in(rollout) == []

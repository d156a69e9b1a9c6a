from __future__ import annotations

from pathlib import Path

import pytest

from gyre.config import HarnessConfig
from gyre.harness import process
from gyre.harness.base import BOX, HarnessError, LaunchContext, tool_path
from gyre.harness.registry import make_harness


def context(rollout: Path) -> LaunchContext:
    return LaunchContext(
        base_url="http://gateway/r/tok",
        api_key="tok",
        model="policy",
        instruction="Say {model}; $HOME 'as' \"it\" is.\nTwo lines",
        workspace=rollout / BOX / "workspace",
        rollout_dir=rollout,
        env={"FROM_TASK": "t"},
    )


async def test_any_program_is_a_harness(rollout: Path) -> None:
    script = 'printf "%s|" "$@" "$KEY" "$FROM_TASK" "$OPENAI_BASE_URL" "$OPENAI_API_KEY"'
    placeholders = ["{base_url}", "{api_key}", "{model}", "{instruction}", "{workspace}", "{unknown} ${HOME}"]
    harness = make_harness(
        HarnessConfig(name="command", command=["sh", "-c", script, "sh", *placeholders], env={"KEY": "k-{api_key}"})
    )
    ctx = context(rollout)
    launch = harness.command(ctx)
    assert launch.preload is None and harness.preload is None
    process.start(launch, rollout)
    ended = await process.wait(rollout)
    assert isinstance(ended, process.Exited) and ended.code == 0
    assert (rollout / "harness.log").read_text().split("|") == [
        "http://gateway/r/tok",
        "tok",
        "policy",
        ctx.instruction,
        str(rollout / "box" / "workspace"),
        "{unknown} ${HOME}",
        "k-tok",
        "t",
        "http://gateway/r/tok/v1",
        "tok",
        "",
    ]


def test_mini_takes_the_run_files_settings(rollout: Path, tmp_path: Path) -> None:
    config = tmp_path / "own.yaml"
    config.write_text("agent: {}")
    harness = make_harness(HarnessConfig(config=config, env={"NOTE": "{model} in {workspace}"}))
    launch = harness.command(context(rollout))
    assert launch.env["NOTE"] == f"policy in {rollout / 'box' / 'workspace'}" and launch.env["FROM_TASK"] == "t"
    assert str(config) in launch.argv and launch.preload is not None and launch.preload == harness.preload
    cold = make_harness(HarnessConfig(config=config, warm=False))
    assert cold.preload is None and cold.command(context(rollout)).preload is None


def test_an_unknown_harness_is_named() -> None:
    with pytest.raises(
        HarnessError, match=r"harness.name: no harness is named 'x'; known are mini-swe-agent, .*command"
    ):
        make_harness(HarnessConfig(name="x"))


def test_tools_do_not_see_gyres_own_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.prefix", "/venv")
    monkeypatch.setattr("sys.base_prefix", "/opt/python")
    monkeypatch.setenv("PATH", "/venv/bin:/usr/bin::/bin")
    assert tool_path() == "/opt/python/bin:/usr/bin:/bin"
    monkeypatch.setattr("sys.base_prefix", "/usr")
    assert tool_path() == "/usr/bin:/bin"
    monkeypatch.setenv("PATH", "/venv/bin:/home/u/.pyenv/shims:/usr/bin:/bin")
    assert tool_path() == "/usr/bin:/home/u/.pyenv/shims:/bin"

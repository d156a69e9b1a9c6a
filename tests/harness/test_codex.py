"""Codex's command, settings and dialect."""

from __future__ import annotations

import json
import tomllib
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from gyre.gateway.dialect import Hint
from gyre.gateway.openai_responses import parse_compact, parse_request
from gyre.harness import npm
from gyre.harness.base import HarnessError
from gyre.harness.codex import Codex, CodexDialect, compaction
from tests.harness.test_registry import context


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder like the one that npm makes; the binary."""
    modules = tmp_path / "node" / "node_modules" / "@openai"
    for name, version in (("codex", "0.171.0"), ("codex-linux-x64", "0.171.0-linux-x64")):
        (modules / name).mkdir(parents=True)
        facts = {"name": "@openai/codex", "version": version}
        (modules / name / "package.json").write_text(json.dumps(facts))
    binary = modules / "codex-linux-x64" / "vendor" / "x86_64-unknown-linux-musl" / "bin" / "codex"
    binary.parent.mkdir(parents=True)
    binary.write_text("#!/bin/sh\n")
    binary.chmod(0o755)
    monkeypatch.setenv(npm.VARIABLE, str(tmp_path / "node"))
    return binary


def settings(argv: tuple[str, ...]) -> dict[str, Any]:
    """What the -c words of a command say."""
    words = [argv[i + 1] for i, word in enumerate(argv) if word == "-c"]
    return tomllib.loads("\n".join(words))


def test_the_launch_is_the_program_s_own_command(installed: Path, rollout: Path, tmp_path: Path) -> None:
    config = tmp_path / "own.toml"
    config.write_text('model_reasoning_effort = "low"\n')
    harness = Codex(config, {"NOTE": "{model}"}, ["-c", 'web_search="live"'])
    ctx = replace(context(rollout), context=100_000, max_tokens=2000)
    launch = harness.command(ctx)
    assert launch.argv[:2] == (str(installed), "exec") and launch.argv[-2:] == ("--", ctx.instruction)
    said = settings(launch.argv[:-4])
    assert said["model"] == "policy" and said["model_context_window"] == 100_000
    assert 50_000 <= said["model_auto_compact_token_limit"] <= 100_000 - 2000 - 10_000
    provider = said["model_providers"][said["model_provider"]]
    assert provider["base_url"] == "http://gateway/r/tok/v1" and provider["wire_api"] == "responses"
    assert provider["stream_idle_timeout_ms"] >= 3_600_000
    assert said["analytics"]["enabled"] is False and said["check_for_update_on_startup"] is False
    assert launch.argv.index('web_search="live"') > launch.argv.index('web_search="disabled"'), "the user's comes last"
    home = rollout / "box" / "home" / ".codex"
    assert launch.files == {home / "config.toml": 'model_reasoning_effort = "low"\n'}
    assert launch.env["CODEX_HOME"] == str(home) and launch.env[provider["env_key"]] == "tok"
    assert launch.env["NOTE"] == "policy" and launch.env["FROM_TASK"] == "t" and launch.cwd == ctx.workspace
    assert launch.env["PATH"].endswith("/codex-path") and harness.preload is None


def test_nothing_is_said_of_a_context_that_is_not_known(installed: Path, rollout: Path) -> None:
    assert "model_context_window" not in settings(Codex(None, {}).command(context(rollout)).argv)
    assert compaction(0, 0) == {}


def test_errors_say_what_to_do(installed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(HarnessError, match=r"harness.config: .*are a .toml file"):
        Codex(tmp_path / "x.json", {})
    with pytest.raises(HarnessError, match=r"@openai/codex@0.1.0 is not in .*run `make harnesses`"):
        Codex(None, {}, version="0.1.0")
    monkeypatch.setenv(npm.VARIABLE, str(tmp_path / "nowhere"))
    with pytest.raises(HarnessError, match=r"run `make harnesses` \(it needs npm\)"):
        Codex(None, {})


REQUEST = parse_request(b'{"model": "policy", "input": "hi"}', "policy")
SUB = {"thread-id": "t2", "x-codex-parent-thread-id": "t1", "x-openai-subagent": "collab_spawn"}


@pytest.mark.parametrize(
    ("headers", "hint"),
    [
        ({"thread-id": "t1", "x-codex-turn-metadata": '{"request_kind": "turn"}'}, Hint("main", "")),
        ({"thread-id": "t1", "x-codex-turn-metadata": '{"request_kind": "compaction"}'}, Hint("main-summary", "")),
        ({**SUB, "x-codex-turn-metadata": '{"request_kind": "turn"}'}, Hint("sub-agent", "t2")),
        ({**SUB, "x-codex-turn-metadata": '{"request_kind": "compaction"}'}, Hint("sub-agent-summary", "t2")),
        ({"thread-id": "t1", "x-codex-turn-metadata": "{nope"}, Hint(None, "")),
        ({"x-codex-turn-metadata": "[1]"}, Hint(None, "")),
        ({}, Hint(None, "")),
    ],
)
def test_headers_say_who_calls_and_for_what(headers: dict[str, str], hint: Hint) -> None:
    assert CodexDialect().hint(headers, REQUEST) == hint


def test_a_compaction_that_is_left_to_the_provider_is_a_summary() -> None:
    request = parse_compact(b'{"model": "policy", "input": "hi"}', "policy")
    assert CodexDialect().hint({}, request) == Hint("main-summary", "")
    assert CodexDialect().hint(SUB, request) == Hint("sub-agent-summary", "t2")

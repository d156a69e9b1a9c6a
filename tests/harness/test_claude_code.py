"""Claude Code's command and dialect; its real runs are in tests/gateway/harness_runs."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gyre.config.run import HarnessConfig
from gyre.gateway import anthropic_messages
from gyre.gateway.messages import Message, ToolCall
from gyre.harness import npm
from gyre.harness.base import BOX, HarnessError, LaunchContext
from gyre.harness.claude_code import SUMMARY, ClaudeCode, ClaudeCodeDialect, compaction
from gyre.harness.registry import dialect_of, make_harness

DIALECT = ClaudeCodeDialect()
TOOL = {"name": "Bash", "input_schema": {"type": "object"}}


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Two versions of Claude Code as npm installs them, each with a binary of its own."""
    folder = tmp_path / "node"
    modules = folder / "node_modules"
    packages = {
        modules / "@anthropic-ai" / "claude-code": "2.1.220",
        modules / "newest": "2.1.332",
    }
    for package, version in packages.items():
        nested = modules if version == "2.1.220" else package / "node_modules"
        native = nested / "@anthropic-ai" / "claude-code-linux-x64"
        for one, name in ((package, npm_name()), (native, f"{npm_name()}-linux-x64")):
            one.mkdir(parents=True)
            (one / "package.json").write_text(json.dumps({"name": name, "version": version}))
        (native / "claude").write_text("#!/bin/sh\n")
        (native / "claude").chmod(0o755)
    monkeypatch.setenv(npm.VARIABLE, str(folder))
    return folder


def npm_name() -> str:
    return "@anthropic-ai/claude-code"


def context(tmp_path: Path, **more: Any) -> LaunchContext:
    rollout = tmp_path / "r"
    fields = {"base_url": "http://g/r/tok", "api_key": "tok", "model": "policy", "instruction": "-do it"}
    return LaunchContext(**{**fields, "workspace": rollout / BOX / "workspace", "rollout_dir": rollout, **more})


def test_command(installed: Path, tmp_path: Path) -> None:
    config = HarnessConfig(
        name="claude-code", args=["--tools", "Bash", "--add-dir", "{workspace}"], env={"A": "{model}"}
    )
    harness = make_harness(config)
    launch = harness.command(context(tmp_path, env={"TASK": "x"}, context=65_536, max_tokens=1024))
    assert launch.argv[0] == str(installed / "node_modules/@anthropic-ai/claude-code-linux-x64/claude")
    assert launch.argv[-2:] == ("--", "-do it"), "an instruction is never an option"
    assert launch.argv[-6:-2] == ("--tools", "Bash", "--add-dir", str(tmp_path / "r" / BOX / "workspace"))
    env = launch.env
    assert (env["ANTHROPIC_BASE_URL"], env["ANTHROPIC_AUTH_TOKEN"]) == ("http://g/r/tok", "tok")
    assert {v for k, v in env.items() if k.startswith("ANTHROPIC_") and k.endswith("MODEL")} == {"policy"}
    assert env["CLAUDE_CODE_SUBAGENT_MODEL"] == env["A"] == "policy"
    assert env["TASK"] == "x"
    assert env["CLAUDE_CODE_ATTRIBUTION_HEADER"] == "0"
    assert env["HOME"] == str(tmp_path / "r" / BOX / "home")
    assert "ANTHROPIC_API_KEY" not in env
    assert (harness.preload, launch.preload) == (None, None)


def test_versions_and_settings(installed: Path, tmp_path: Path) -> None:
    settings = tmp_path / "settings.json"
    newest = make_harness(HarnessConfig(name="claude-code", version="2.1.332", config=settings))
    launch = newest.command(context(tmp_path))
    assert launch.argv[0].startswith(str(installed / "node_modules/newest/node_modules"))
    assert launch.argv[launch.argv.index("--settings") + 1] == str(settings)
    assert "CLAUDE_CODE_MAX_CONTEXT_TOKENS" not in launch.env
    with pytest.raises(HarnessError, match=r"claude-code@9 is not in .*2\.1\.220, 2\.1\.332.*make harnesses"):
        make_harness(HarnessConfig(name="claude-code", version="9"))
    with pytest.raises(HarnessError, match=r"settings\.toml: Claude Code's settings are a \.json file"):
        ClaudeCode(Path("settings.toml"), {})


def test_without_npm_the_error_says_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, installed: Path
) -> None:
    os.remove(installed / "node_modules/@anthropic-ai/claude-code-linux-x64/claude")
    with pytest.raises(HarnessError, match="make harnesses"):
        make_harness(HarnessConfig(name="claude-code"))
    monkeypatch.setenv(npm.VARIABLE, str(tmp_path / "nowhere"))
    with pytest.raises(
        HarnessError, match=r"no harnesses from npm in .*nowhere; run `make harnesses` \(it needs npm\)"
    ):
        make_harness(HarnessConfig(name="claude-code"))
    assert dialect_of(HarnessConfig(name="claude-code")).name == "claude-code", "the gateway needs no binary"


@pytest.mark.parametrize(
    ("tokens", "max_tokens", "told", "window"),
    [
        (53_248, 2048, "53248", "100000"),
        (200_000, 32_000, "200000", "200000"),
        (1_000_000, 512, "1000000", "1000000"),
        (16_384, 512, None, None),
        (0, 512, None, None),
    ],
)
def test_compaction(tokens: int, max_tokens: int, told: str | None, window: str | None) -> None:
    """A context that leaves no room below Claude Code's reserve is not told to it: it would compact without end."""
    env = compaction(tokens, max_tokens)
    assert env.get("CLAUDE_CODE_MAX_CONTEXT_TOKENS") == told
    assert env.get("CLAUDE_CODE_AUTO_COMPACT_WINDOW") == window
    assert env["CLAUDE_CODE_MAX_OUTPUT_TOKENS"] == str(max_tokens)


def hint(messages: list[Any], *, tools: bool = True, headers: dict[str, str] | None = None) -> tuple[str | None, str]:
    body = {"model": "policy", "max_tokens": 9, "messages": messages, **({"tools": [TOOL]} if tools else {})}
    request = anthropic_messages.parse_request(json.dumps(body).encode(), "policy")
    found = DIALECT.hint(headers or {}, DIALECT.normalise(request))
    return found.kind, found.agent


USER = {"role": "user", "content": "Do it."}
DONE = {"role": "assistant", "content": "Done."}
RESULT = {"type": "tool_result", "tool_use_id": "t", "content": "out"}
ASKS = {"type": "text", "text": f"{SUMMARY}. Do NOT call any tools."}
SUB = {"x-claude-code-agent-id": "a1", "x-claude-code-parent-agent-id": "a0"}


@pytest.mark.parametrize(
    ("messages", "kind"),
    [
        ([USER], "main"),
        ([USER, DONE, {"role": "user", "content": [RESULT]}], "main"),
        ([USER, DONE, {"role": "user", "content": [RESULT, ASKS]}], "main-summary"),
        ([USER, DONE, {"role": "user", "content": [RESULT, ASKS]}, {"role": "system", "content": "x"}], "main-summary"),
        ([USER, {"role": "user", "content": [ASKS]}, DONE, USER], "main"),
        ([USER, DONE, {"role": "user", "content": [{**RESULT, "content": SUMMARY}]}], "main"),
    ],
)
def test_kinds(messages: list[Any], kind: str) -> None:
    assert hint(messages) == (kind, "")
    assert hint(messages, headers=SUB) == (kind.replace("main", "sub-agent"), "a1")
    assert hint(messages, tools=False) == ("auxiliary", "")


def said(arguments: Any, call_id: str = "t1", content: str = "Text.", reasoning: str | None = "Hm.") -> Message:
    text = arguments if isinstance(arguments, str) else json.dumps(arguments)
    return Message("assistant", content, reasoning, (ToolCall(call_id, "Write", text),))


@pytest.mark.parametrize(
    ("emitted", "echoed"),
    [
        ({"a": 1, "b": [{"c": 2}]}, {"b": [{"c": 2, "new": 1}], "a": 1.0, "replace_all": False}),
        ({"content": "é ✓ \t trailing   \nline2  \n\n"}, {"content": "é ✓ \t trailing\nline2\n\n"}),
        ({"timeout": "2000", "ratio": " 1.5 ", "on": "false"}, {"timeout": 2000, "ratio": 1.5, "on": False}),
        ({"n": 2**70}, {"n": float(2**70)}),
        ('{"a": 1, "a": 2}', {"a": 2}),
    ],
)  # fmt: skip
def test_how_it_writes_back_what_was_sampled(emitted: Any, echoed: Any) -> None:
    assert DIALECT.difference(said(emitted), said(echoed)) is None


@pytest.mark.parametrize(
    ("emitted", "echoed", "reason"),
    [
        (said({"a": "x"}), said({"a": "y"}), "arguments_edited"),
        (said({"a": "x", "b": 1}), said({"a": "x"}), "arguments_edited"),
        (said({"a": True}), said({"a": 1}), "arguments_edited"),
        (said({"a": 1}), said({"a": "1"}), "arguments_edited"),
        (said({"a": "x "}), said({"a": "x"}, content="Other."), "content_edited"),
        (said({"a": "x "}), said({"a": "x"}, reasoning="Other."), "reasoning_edited"),
        (said({"a": "x "}), Message("assistant", "Text.", "Hm."), "tool_calls_edited"),
        (said("[1]"), said("[2]"), "arguments_edited"),
        (said({"a": "x "}), said({"a": "x", "b": 1}, "another id"), "arguments_edited"),
    ],
)
def test_what_is_another_message(emitted: Message, echoed: Message, reason: str) -> None:
    assert DIALECT.difference(emitted, echoed) == reason


values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
)


@given(st.dictionaries(st.text(), values, max_size=4), st.dictionaries(st.text(), values, max_size=2), st.randoms())
def test_any_value_reordered_with_defaults(value: dict[str, Any], more: dict[str, Any], random: Any) -> None:
    keys = list({**more, **value})
    random.shuffle(keys)
    assert DIALECT.difference(said(value), said({k: {**more, **value}[k] for k in keys})) is None
    changed = {**value, "added": 1}
    assert DIALECT.difference(said(changed), said(value)) == "arguments_edited" or "added" in value

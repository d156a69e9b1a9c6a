"""`[harness.dialect]` and `[harness.files]` of a run file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from gyre.config import HarnessConfig, RunConfig
from gyre.gateway.dialect import Hint
from gyre.gateway.messages import Request
from gyre.gateway.openai_chat import parse_request
from gyre.harness import process
from gyre.harness.registry import dialect_of, make_harness
from tests.gateway.conftest import BASH
from tests.harness.test_registry import context

RULES = [
    {"kind": "auxiliary", "tools": False, "last": "title"},
    {"kind": "main-summary", "last": "^Summarise"},
    {"kind": "sub-agent", "header": "X-Agent", "matches": "^sub"},
    {"kind": "sub-agent-summary", "header": "x-summary"},
    {"kind": "sub-agent", "system": r"\bhelper\b"},
]


def config(**dialect: Any) -> HarnessConfig:
    return HarnessConfig.model_validate({"name": "command", "command": ["x"], "dialect": dialect})


def request(*messages: tuple[str, str], tools: bool = True) -> Request:
    body: dict[str, Any] = {"model": "policy", "messages": [{"role": r, "content": c} for r, c in messages]}
    if tools:
        body["tools"] = [BASH]
    return parse_request(json.dumps(body).encode(), "policy")


PLAIN = request(("system", "s"), ("user", "u"))


@pytest.mark.parametrize(
    ("headers", "asked", "kind"),
    [
        ({}, PLAIN, None),
        ({}, request(("user", "a title"), tools=False), "auxiliary"),
        ({}, request(("user", "a title")), None),
        ({}, request(("user", "u"), ("assistant", "a"), ("user", "Summarise it")), "main-summary"),
        ({}, request(("user", "Summarise it"), ("assistant", "a"), ("user", "u")), None),
        ({"x-agent": "sub-1"}, PLAIN, "sub-agent"),
        ({"x-agent": "main"}, PLAIN, None),
        ({"x-summary": ""}, PLAIN, "sub-agent-summary"),
        ({}, request(("system", "a helper"), ("user", "u")), "sub-agent"),
        ({}, request(("user", "a helper")), None),
    ],
)
def test_the_first_rule_that_fits_says_the_kind(headers: dict[str, str], asked: Request, kind: Any) -> None:
    dialect = dialect_of(config(kinds=RULES, agent_header="X-Agent"))
    assert dialect.hint(headers, asked) == Hint(kind, headers.get("x-agent", ""))


def test_what_means_nothing_is_taken_out_of_system_texts() -> None:
    dialect = dialect_of(config(strip_system=[r"^Date: .*\n", r"\[id \w+\]"]))
    asked = request(("system", "Date: today\nBe good.[id 7]"), ("user", "[id 7]"), ("system", "[id 8]x"))
    assert [m.content for m in dialect.normalise(asked).messages] == ["Be good.", "[id 7]", "x"]
    assert dialect.normalise(PLAIN).messages == PLAIN.messages
    assert dialect_of(config()).normalise(asked) is asked


def run_file(**harness: Any) -> dict[str, Any]:
    return {
        "name": "r",
        "steps": 1,
        "policy": {"path": "p"},
        "tasks": {"train": "t"},
        "harness": harness,
        "cells": [{"name": "c", "central": True}],
    }


def test_a_run_file_comes_back_as_it_was_written() -> None:
    files = {".config/x.toml": "a = 1"}
    command = {"name": "command", "command": ["x"], "files": files, "dialect": {"kinds": RULES}}
    for harness in ({}, {"name": "codex"}, command):
        run = RunConfig.model_validate(run_file(**harness))
        assert RunConfig.model_validate_json(run.model_dump_json()) == run


@pytest.mark.parametrize(
    ("harness", "words"),
    [
        ({"dialect": {"kinds": [{"kind": "main"}]}}, "needs a condition"),
        ({"dialect": {"kinds": [{"kind": "helper", "tools": True}]}}, "kinds.0.kind"),
        ({"dialect": {"kinds": [{"kind": "main", "system": "x", "matches": "y"}]}}, "matches: needs header"),
        ({"dialect": {"kinds": [{"kind": "main", "last": "("}]}}, "last: '\\(' is no regular expression"),
        ({"dialect": {"strip_system": ["*"]}}, r"strip_system\[0\]: '\*' is no regular expression"),
        ({"dialect": {"strip": []}}, "dialect.strip"),
        ({"files": {"/etc/x": ""}}, "below the harness's home folder"),
        ({"files": {"../x": ""}}, "below the harness's home folder"),
        ({"name": "codex", "command": [], "files": {"x": ""}}, "harness.files: only for harness.name = 'command'"),
        ({"name": "codex", "command": ["x"]}, "harness.command: only for harness.name = 'command'"),
    ],
)
def test_what_is_wrong_is_named(harness: dict[str, Any], words: str) -> None:
    with pytest.raises(ValidationError, match=words):
        RunConfig.model_validate(run_file(**{"name": "command", "command": ["x"], **harness}))


def test_settings_files_and_variables_are_filled_in(rollout: Path) -> None:
    files = {".config/a.toml": 'url = "{base_url}/v1"\nroom = {context}', ".x": "{home} {max_tokens} {unknown}"}
    env = {"MY_URL": "{base_url}"}
    harness = make_harness(HarnessConfig(name="command", command=["a", "{home}/.x"], files=files, env=env))
    launch = harness.command(context(rollout))
    home = rollout / "box" / "home"
    assert launch.argv == ("a", f"{home}/.x") and launch.env["MY_URL"] == "http://gateway/r/tok"
    assert launch.files == {
        home / ".config" / "a.toml": 'url = "http://gateway/r/tok/v1"\nroom = 0',
        home / ".x": f"{home} 0 {{unknown}}",
    }
    for name in ("OPENAI_BASE_URL", "OPENAI_API_BASE"):
        assert launch.env[name] == "http://gateway/r/tok/v1"
    assert launch.env["ANTHROPIC_BASE_URL"] == "http://gateway/r/tok"
    assert launch.env["ANTHROPIC_API_KEY"] == launch.env["OPENAI_API_KEY"] == "tok"
    assert launch.env["ANTHROPIC_MODEL"] == launch.env["OPENAI_MODEL"] == "policy"


async def test_settings_files_are_there_when_it_starts(rollout: Path) -> None:
    script = 'cat "$HOME/.config/a.txt"'
    harness = make_harness(
        HarnessConfig(name="command", command=["sh", "-c", script], files={".config/a.txt": "m={model}"})
    )
    process.start(harness.command(context(rollout)), rollout)
    ended = await process.wait(rollout)
    assert isinstance(ended, process.Exited) and ended.code == 0
    assert (rollout / "harness.log").read_text() == "m=policy"

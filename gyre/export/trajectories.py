"""From a rollout's rows to ATIF trajectories: branches as lists of steps."""

from __future__ import annotations

import json
from typing import Any

import numpy as np

from gyre.export.rows import Row
from gyre.gateway.errors import GatewayError
from gyre.gateway.messages import Message
from gyre.gateway.session import reply_from_json
from gyre.gateway.wire import FORMATS
from gyre.store.tokens import unpack_ids, unpack_logprobs
from gyre.trajectory.tree import KIND_RANK

VERSION = "ATIF-v1.8"
Document = dict[str, Any]


def trajectory(rows: dict[str, list[Row]], file_name: str, *, prompt_ids: bool) -> Document:
    """The ATIF document of a rollout, from its rows by table. `file_name` begins the references to its parts."""
    rollout, run = rows["rollouts"][0], rows["runs"][0]
    branches = _branches(rows["calls"])
    nodes = {n["id"]: n for n in rows["nodes"]}
    agent: Document = {"name": rollout["harness"], "version": "unknown"}
    if name := (run["config"].get("policy") or {}).get("name"):
        agent["model_name"] = name
    written: set[int] = set()
    parts: list[Document] = []
    for branch in branches:
        part: Document = {
            "schema_version": VERSION,
            "session_id": rollout["id"],
            "trajectory_id": _name(rollout["id"], branch),
            "agent": {**agent, **_tools(branch)},
            "steps": _Steps(nodes, written, prompt_ids).of(branch),
        }
        part["extra"] = {"kind": branch[-1]["kind"]}
        written |= {call["id"] for call in branch}
        parts.append(part)
    for before, after in zip(_mains(branches), _mains(branches)[1:], strict=False):
        parts[before]["continued_trajectory_ref"] = f"{file_name}#{parts[after]['trajectory_id']}"
    if not parts:  # no call of it was answered
        name = rollout["id"]
        parts = [{"schema_version": VERSION, "session_id": name, "trajectory_id": name, "agent": agent, "steps": []}]
        parts[0]["extra"] = {}
    root = parts[0]
    if parts[1:]:
        root["subagent_trajectories"] = parts[1:]
    calls = rows["calls"]
    root["final_metrics"] = {
        "total_prompt_tokens": sum(c["prompt_tokens"] or 0 for c in calls),
        "total_completion_tokens": sum(c["completion_tokens"] or 0 for c in calls),
        "total_cached_tokens": sum(c["cached_tokens"] or 0 for c in calls),
        "total_steps": sum(len(p["steps"]) for p in parts),
        "extra": {"reward": rollout["reward"], "outcome": rollout["outcome"]},
    }
    return root


def _branches(calls: list[Row]) -> list[list[Row]]:
    """Calls from a first to a last one, for every answered call that no other goes on from; best first."""
    by_id = {c["id"]: c for c in calls if c["leaf_id"] is not None}
    inner = {c["parent_call_id"] for c in by_id.values()}
    branches = []
    for last in by_id.values():
        if last["id"] in inner:
            continue
        path, at = [last], last["parent_call_id"]
        while at is not None and at in by_id:
            path.append(by_id[at])
            at = by_id[at]["parent_call_id"]
        branches.append(path[::-1])
    worst = len(KIND_RANK)
    return sorted(branches, key=lambda b: (KIND_RANK.get(b[-1]["kind"], worst), b[0]["seq"], -len(b), b[-1]["seq"]))


def _mains(branches: list[list[Row]]) -> list[int]:
    """The first branch of each main conversation, in the order in which these began: one goes on from another."""
    first: dict[int, int] = {}
    for i, branch in enumerate(branches):
        if branch[0]["kind"] == "main" and branch[-1]["kind"].startswith("main"):
            first.setdefault(branch[0]["seq"], i)
    return [first[seq] for seq in sorted(first)]


def _name(rollout_id: str, branch: list[Row]) -> str:
    return f"{rollout_id}/{branch[-1]['seq']}"


def _tools(branch: list[Row]) -> Document:
    tools = branch[0]["request"].get("tools")
    return {"tool_definitions": tools} if isinstance(tools, list) and tools else {}


class _Steps:
    """The steps of one branch."""

    def __init__(self, nodes: dict[int, Row], written: set[int], prompt_ids: bool) -> None:
        self._nodes, self._written, self._prompt_ids = nodes, written, prompt_ids
        self._steps: list[Document] = []

    def of(self, branch: list[Row]) -> list[Document]:
        """Messages and answers in order; those of calls in `written` are copies."""
        for call in branch:
            copied = call["id"] in self._written
            for i, raw in enumerate(call["request"].get("messages", [])):
                self._message(_parsed(call, i, raw), copied)
            self._answer(call, copied)
        return self._steps

    def _message(self, message: Message, copied: bool) -> None:
        if message.role == "assistant":  # a turn that was not sampled here
            self._agent(message, True)
        elif message.role == "tool" and (asking := self._last_agent()) is not None:
            known = {t["tool_call_id"] for t in asking.get("tool_calls", [])}
            result: Document = {"content": message.content}
            if message.tool_call_id in known:
                result["source_call_id"] = message.tool_call_id
            asking.setdefault("observation", {"results": []})["results"].append(result)
        else:
            self._add("system" if message.role == "system" else "user", message.content, copied)

    def _answer(self, call: Row, copied: bool) -> None:
        reply = reply_from_json(call["response"]) if call["response"] else Message("assistant", "")
        step = self._agent(reply, copied)
        step["extra"] = {"call": call["seq"], "node": call["leaf_id"], "kind": call["kind"], "status": call["status"]}
        if call["ended_at"] is not None:
            step["timestamp"] = call["ended_at"].isoformat()
        if copied:
            return
        node = self._nodes[call["leaf_id"]]
        step["llm_call_count"] = 1
        step["extra"]["version_spans"] = node["version_spans"]
        step["metrics"] = {
            "prompt_tokens": call["prompt_tokens"],
            "completion_tokens": call["completion_tokens"],
            "cached_tokens": call["cached_tokens"],
            "completion_token_ids": unpack_ids(node["token_ids"]).tolist(),
            "logprobs": unpack_logprobs(node["logprobs"]).tolist(),
        }
        if self._prompt_ids:
            step["metrics"]["prompt_token_ids"] = self._path(node["parent_id"])

    def _agent(self, message: Message, copied: bool) -> Document:
        step = self._add("agent", message.content, copied)
        if message.reasoning:
            step["reasoning_content"] = message.reasoning
        if message.tool_calls:
            step["tool_calls"] = [_tool_call(t.id, t.name, t.arguments) for t in message.tool_calls]
        return step

    def _add(self, source: str, message: str, copied: bool) -> Document:
        step: Document = {"step_id": len(self._steps) + 1, "source": source, "message": message}
        if copied:
            step["is_copied_context"] = True
        self._steps.append(step)
        return step

    def _last_agent(self) -> Document | None:
        return next((s for s in reversed(self._steps) if s["source"] == "agent"), None)

    def _path(self, node_id: int | None) -> list[int]:
        parts = []
        while node_id is not None:
            node = self._nodes[node_id]
            parts.append(unpack_ids(node["token_ids"]))
            node_id = node["parent_id"]
        ids: list[int] = np.concatenate(parts[::-1]).tolist()
        return ids


def _parsed(call: Row, position: int, raw: Any) -> Message:
    where = f"calls.request of call {call['id']}, message {position}"
    try:
        return FORMATS[call["api"]].parse_message(raw, where)
    except (KeyError, GatewayError):  # of a format that this version does not speak: shown as it was sent
        return Message("user", raw if isinstance(raw, str) else json.dumps(raw, ensure_ascii=False))


def _tool_call(call_id: str, name: str, arguments: str) -> Document:
    try:
        value = json.loads(arguments)
    except ValueError:
        value = None
    if isinstance(value, dict):
        return {"tool_call_id": call_id, "function_name": name, "arguments": value}
    return {"tool_call_id": call_id, "function_name": name, "arguments": {}, "extra": {"arguments": arguments}}

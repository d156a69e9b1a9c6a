"""What the scripted policy says, as a pure function of the token ids so far.

A script is JSON in `$GYRE_SCRIPTS/<id>.json`; the prompt names it with `SCRIPT@<id>` in a user message. See
`tests/scripted/__init__.py` for the format. Nothing of SGLang is in here.
"""

from __future__ import annotations

import json
import re
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer

Ids = npt.NDArray[np.int64]
Planned = int | tuple[int, ...]
"""An id to emit, or the ids of which any is emitted, each as likely."""

MARKER = re.compile(r"SCRIPT ?@(\w+)(?: \(step (\d+)\))?")  # Qwen Code takes @… for a file and sets a space before it
STEP = re.compile(r"\(step (\d+)\)")
_TOOL_RESPONSE = re.compile(r"<tool_response>.*?</tool_response>", re.DOTALL)
_TOOL_NAME = re.compile(r'"name": "([^"]+)"')
_SPECIAL = re.compile(r"(<\|im_end\|>|</?think>|</?tool_call>)")
WORDS = ("the", "a", "of", "to", "in", "is", "and", "for", "it", "on", "as", "be", "with", "that", "or", "an")

# What a harness's request for a summary says, and an answer in the form that it expects.
COMPACTIONS: tuple[tuple[str, str], ...] = (
    ("CRITICAL: Respond with TEXT ONLY", "<analysis>All of it.</analysis>\n<summary>{summary}</summary>"),
    ("detailed summary of", "<analysis>All of it.</analysis>\n<summary>{summary}</summary>"),
    ("You are the component that summarizes", "<state_snapshot>{summary}</state_snapshot>"),
    ("state_snapshot", "<state_snapshot>{summary}</state_snapshot>"),
    ("CONTEXT CHECKPOINT COMPACTION", "{summary}"),
)


@dataclass
class Vocabulary:
    """The tokenizer, and the ids that mark turns."""

    tokenizer: Tokenizer

    def __post_init__(self) -> None:
        self.start = self.tokenizer.token_to_id("<|im_start|>")
        self.end = self.tokenizer.token_to_id("<|im_end|>")
        self.header = np.asarray([self.start, *self.encode("assistant\n")])
        self.words = tuple(i for w in WORDS for i in self.encode(f" {w}") if len(self.encode(f" {w}")) == 1)
        self._decode = lru_cache(512)(self._decode_bytes)

    def encode(self, text: str) -> list[int]:
        ids: list[int] = self.tokenizer.encode(text, add_special_tokens=False).ids
        return ids

    def decode(self, ids: Ids) -> str:
        return self._decode(np.ascontiguousarray(ids, np.int64).tobytes())

    def _decode_bytes(self, data: bytes) -> str:
        text: str = self.tokenizer.decode(np.frombuffer(data, np.int64).tolist(), skip_special_tokens=False)
        return text

    def scattered(self, text: str) -> list[int]:
        """Ids that decode to `text` but are not those that it encodes to: it is cut where its hash says."""
        ids: list[int] = []
        for piece in _SPECIAL.split(text):
            if _SPECIAL.fullmatch(piece):
                ids += self.encode(piece)
                continue
            at, seed = 0, zlib.crc32(piece.encode())
            while at < len(piece):
                seed = (seed * 1103515245 + 12345) & 0x7FFFFFFF
                cut = at + 3 + (seed >> 16) % 16
                ids += self.encode(piece[at:cut])
                at = cut
        return ids


@dataclass
class Turn:
    """One message of the rendered prompt."""

    role: str
    ids: Ids
    vocabulary: Vocabulary

    @property
    def text(self) -> str:
        """The message with its role line."""
        return self.vocabulary.decode(self.ids)

    @property
    def said(self) -> str:
        """The text outside of tool responses."""
        return _TOOL_RESPONSE.sub("", self.text)


@dataclass
class History:
    """A prompt as the Qwen3 template renders it, and what of the answer is there already."""

    turns: list[Turn]
    answered: list[int]

    @classmethod
    def parse(cls, ids: Ids, vocabulary: Vocabulary) -> History | None:
        """None where no assistant turn is open at the end (a prompt in the middle of its prefill)."""
        starts = np.flatnonzero(ids == vocabulary.start)
        if not len(starts):
            return None
        open_at, header = int(starts[-1]), vocabulary.header
        if not np.array_equal(ids[open_at : open_at + len(header)], header):
            return None
        ends = [*starts[1:].tolist(), open_at]
        turns = [
            Turn(vocabulary.decode(ids[s + 1 : s + 6]).split("\n")[0], ids[s + 1 : e], vocabulary)
            for s, e in zip(starts[:-1].tolist(), ends, strict=False)
        ]
        return cls(turns, ids[open_at + len(header) :].tolist())

    @cached_property
    def tools(self) -> list[str]:
        """Names of the tools that the prompt offers."""
        if not self.turns or self.turns[0].role != "system":
            return []
        block = self.turns[0].text.partition("\n<tools>\n")[2].partition("\n</tools>")[0]
        return [m[1] for line in block.splitlines() if (m := _TOOL_NAME.search(line))]

    @cached_property
    def last(self) -> str:
        """Everything after the last answer."""
        out: list[str] = []
        for turn in reversed(self.turns):
            if turn.role == "assistant":
                break
            out.append(turn.text)
        return "\n".join(reversed(out))

    @cached_property
    def script(self) -> str | None:
        """The first script that a user message names."""
        for turn in self.turns:
            if turn.role == "user" and (found := MARKER.search(turn.said)):
                return found[1]
        return None

    def finished(self, script: str) -> int:
        """The last step that is done, -1 for none: the latest mark, and the answers without one after it."""
        unmarked = 0
        for turn in reversed(self.turns):
            if turn.role == "assistant":
                if marks := STEP.findall(turn.text):
                    return int(marks[-1]) + unmarked
                unmarked += 1
            elif turn.role == "user":
                marks = [m[2] for m in MARKER.finditer(turn.said) if m[1] == script]
                if any(marks):
                    return int([m for m in marks if m][-1]) + unmarked
        return unmarked - 1

    def user_text(self) -> str:
        """All that users and tools said."""
        return "\n".join(t.text for t in self.turns if t.role == "user")


@dataclass
class Policy:
    """Scripts of a folder, and how often each step was begun."""

    folder: Path
    vocabulary: Vocabulary
    begun: dict[tuple[str, int], int] = field(default_factory=dict)
    _scripts: dict[str, dict[str, Any]] = field(default_factory=dict)

    def plan(self, history: History) -> Plan:
        """The whole answer to a prompt, whatever of it is there already."""
        name = history.script
        if name is None:
            return self._planned({"text": "There is no script in this prompt.", "mark": False}, history, None)
        script = self._script(name)
        done = history.finished(name)
        for phrase, form in COMPACTIONS:
            if phrase in history.last:
                summary = f"Work on SCRIPT@{name}" + (f" (step {done})" if done >= 0 else "") + " goes on."
                summary += script.get("summary", "")
                return self._planned({"text": form.format(summary=summary), "mark": False}, history, None)
        for rule in script.get("rules", []):
            if re.search(rule["last"], history.last) and rule.get("tools", bool(history.tools)) == bool(history.tools):
                return self._planned(rule["reply"], history, done + 1)
        steps = script["steps"]
        if not history.tools and any(_has_tools(step) for step in steps):
            return self._planned(script.get("side", {"text": '{"title": "Side call"}', "mark": False}), history, None)
        at = done + 1
        step = steps[at] if at < len(steps) else script.get("final", {"text": "All done."})
        if "tries" not in step:
            return self._planned(step, history, at)
        plans = [self._planned(one, history, at) for one in step["tries"]]
        so_far = history.answered
        if so_far:  # it was begun before, here or elsewhere
            return (
                next(p for p in plans[::-1] if p.begins_with(so_far))
                if any(p.begins_with(so_far) for p in plans)
                else plans[-1]
            )
        plan = plans[min(self.begun.get((name, at), 0), len(plans) - 1)]
        plan.counts = (name, at)
        return plan

    def begin(self, plan: Plan) -> None:
        """The first token of a plan was sampled."""
        if plan.counts is not None:
            self.begun[plan.counts] = self.begun.get(plan.counts, 0) + 1
            plan.counts = None

    def _script(self, name: str) -> dict[str, Any]:
        if name not in self._scripts:
            path = self.folder / f"{name}.json"
            if not path.is_file():
                return {"steps": [{"text": f"There is no script {name}.", "mark": False}]}
            self._scripts[name] = json.loads(path.read_text(encoding="utf-8"))
        return self._scripts[name]

    def _planned(self, step: dict[str, Any], history: History, at: int | None) -> Plan:
        encode = self.vocabulary.encode if step.get("canonical") else self.vocabulary.scattered
        out: list[Planned] = []
        for part in _parts(step, history, at):
            if isinstance(part, int):
                out += [self.vocabulary.words] * part
            else:
                out += encode(part)
        if (ids := step.get("ids")) is not None:
            out += ids
        if step.get("stop", True):
            out.append(self.vocabulary.end)
        return Plan(out, self.vocabulary.words, float(step.get("token_s", 0.0)))


@dataclass
class Plan:
    """An answer, token by token; past its end any word, for ever. `token_s`: seconds that each token takes."""

    tokens: list[Planned]
    words: tuple[int, ...]
    token_s: float = 0.0
    counts: tuple[str, int] | None = None

    def at(self, index: int) -> tuple[int, ...]:
        """The ids of which one comes at `index`."""
        if index >= len(self.tokens):
            return self.words
        planned = self.tokens[index]
        return (planned,) if isinstance(planned, int) else planned

    def begins_with(self, ids: Sequence[int]) -> bool:
        return all(token in self.at(i) for i, token in enumerate(ids))


def _has_tools(step: dict[str, Any]) -> bool:
    return bool(step.get("tools")) or any(_has_tools(s) for s in step.get("tries", []))


def _parts(step: dict[str, Any], history: History, at: int | None) -> Iterator[str | int]:
    """Texts, and numbers of sampled words."""
    if "raw" in step:
        yield step["raw"]
        return
    if (think := step.get("think")) is not None:
        yield "<think>\n"
        yield think
        if words := step.get("words", 3):
            yield words
        yield "\n</think>\n\n"
    text = step.get("text", "")
    if step.get("mark", True) and at is not None:
        text = f"(step {at}) {text}".rstrip()
    if text:
        yield text
    for i, call in enumerate(step.get("tools", [])):
        body = {"name": call["name"], "arguments": _filled(call["input"], history)}
        before = "\n" if text or i else ""
        yield f"{before}<tool_call>\n{json.dumps(body, ensure_ascii=False)}\n</tool_call>"


def _filled(value: Any, history: History) -> Any:
    """`value` with `{"$find": regex}` and `{"$findall": regex}` replaced by what users and tools said."""
    if isinstance(value, list):
        return [_filled(v, history) for v in value]
    if not isinstance(value, dict):
        return value
    if value.keys() == {"$find"} or value.keys() == {"$findall"}:
        [(how, pattern)] = value.items()
        found = list(dict.fromkeys(re.findall(pattern, history.user_text())))
        return found if how == "$findall" else (found[-1] if found else "")
    return {k: _filled(v, history) for k, v in value.items()}

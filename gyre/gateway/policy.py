"""Messages to token ids and back, for one policy: its tokenizer and its `renderers` renderer.

A full render is used for the first prompt of a branch; afterwards only what is new is tokenised, by the renderer's
bridge, so that sampled ids are never tokenised again. The bridge gets the tail of the last prompt and the completion,
not the whole history, so that its cost does not grow with the history.

What harnesses send and templates differ on is settled here, once (`_rendered`, `again`):

- System messages after the first one stay what they are where the template takes them anywhere (Qwen3, GLM). Where it
  does not (Qwen3.5, Nemotron 3, Llama 3 with tools), those right after the first are joined to it, and later ones are
  user messages with the same text.
- An assistant turn right after another, or a request that ends on one: each is a closed turn, and the policy speaks in
  a new one. Nothing is prefilled: what was sampled begins where a turn begins.
- What a template refuses altogether is the caller's error (400), with the template's words.
"""

from __future__ import annotations

import json
import logging
import uuid
from bisect import bisect_left
from collections.abc import Callable, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from renderers import create_renderer  # type: ignore[import-untyped]
from renderers.base import ParsedToolCall, ToolCallParseStatus  # type: ignore[import-untyped]
from renderers.configs import config_from_name  # type: ignore[import-untyped]
from tokenizers import Tokenizer

from gyre.config import PolicyConfig
from gyre.gateway.errors import GatewayError
from gyre.gateway.messages import Message, ToolCall, too_deep
from gyre.gateway.nodes import Ids, Node

log = logging.getLogger(__name__)


# What renderers raise for messages that their template does not have.
REFUSALS = (ValueError, TypeError, KeyError, NotImplementedError, RuntimeError)


# Characters of a text whose ids are remembered: a template is made of a few such pieces.
SHORT = 16


class FastTokenizer:
    """The part of a tokenizer that renderers need, straight over `tokenizers`: no transformers, no torch."""

    def __init__(self, folder: Path) -> None:
        path = folder / "tokenizer.json"
        if not path.is_file():
            raise FileNotFoundError(f"policy.path: no tokenizer.json in {folder}; save it with the checkpoint")
        self._tokenizer = Tokenizer.from_file(str(path))
        self._short = lru_cache(4096)(lambda text, special: tuple(self._encode(text, special)))
        self.name_or_path = str(folder)
        self.unk_token_id: int | None = None
        self.eos_token_id: int | None = None

    def encode(self, text: str, *_: Any, add_special_tokens: bool = True, **__: Any) -> list[int]:
        """Ids of `text`."""
        if len(text) <= SHORT:
            return list(self._short(text, add_special_tokens))
        return self._encode(text, add_special_tokens)

    def _encode(self, text: str, special: bool) -> list[int]:
        # "Fast" is without offsets in the text, which nobody asks for: nearly half of the time of a long one.
        [encoding] = self._tokenizer.encode_batch_fast([text], add_special_tokens=special)
        ids: list[int] = encoding.ids
        return ids

    def decode(self, token_ids: Any, *_: Any, skip_special_tokens: bool = False, **__: Any) -> str:
        """Text of the ids."""
        text: str = self._tokenizer.decode(list(token_ids), skip_special_tokens=skip_special_tokens)
        return text

    def convert_tokens_to_ids(self, tokens: Any) -> Any:
        """Id of one token, or of each of several; None for a token that is not in the vocabulary."""
        if isinstance(tokens, str):
            return self._tokenizer.token_to_id(tokens)
        return [self._tokenizer.token_to_id(t) for t in tokens]


class Policy:
    """The tokenising side of the policy that a run trains."""

    def __init__(self, config: PolicyConfig) -> None:
        self.name = config.name
        self.context = config.context
        self.tokenizer = FastTokenizer(config.path)
        typed = config_from_name(config.renderer)
        # Two bridges: as the template has it (a new user turn drops old thinking), and one that goes on regardless,
        # for branches without thinking, where the template keeps every prefix.
        self._strict = create_renderer(self.tokenizer, typed)
        self._lenient = (
            self._strict
            if typed is None
            else create_renderer(self.tokenizer, typed.model_copy(update={"thinking_retention": "all"}))
        )
        self.stop_ids: list[int] = list(self._strict.get_stop_token_ids())
        self._stops = frozenset(self.stop_ids)
        late = [_says(role) for role in ("system", "system", "user", "assistant", "system")]
        self._late_system = self._takes(late)
        self._close, self._again = self._turn_border()

    def opening(self, messages: Sequence[Message], tools: Sequence[dict[str, Any]]) -> list[int]:
        """The ids of a whole prompt, up to where the assistant speaks. Raises GatewayError (400): no such prompt."""
        try:
            ids = self._strict.render_ids(
                self._rendered(messages, first=True), tools=list(tools) or None, add_generation_prompt=True
            )
        except REFUSALS as error:
            raise GatewayError(
                "bad_request", f"The policy's chat template refuses these messages: {error}", "messages"
            ) from error
        return list(ids)

    def extension(
        self,
        prompt_tail: Ids,
        completion: Sequence[int],
        messages: Sequence[Message],
        tools: Sequence[dict[str, Any]],
        thinking: bool,
    ) -> list[int] | None:
        """The ids that follow a completion when `messages` come next; None where the template does not allow it.

        `prompt_tail` is the end of the prompt that was completed, from its last closed turn on. `thinking`: the branch
        holds reasoning, so the template's own rule on old reasoning decides. `messages` hold no assistant turn.
        """
        tail = prompt_tail.tolist()
        renderer = self._strict if thinking else self._lenient
        try:
            bridged = renderer.bridge_to_next_turn(
                tail, list(completion), self._rendered(messages, first=False), tools=list(tools) or None
            )
        except REFUSALS:
            return None
        if bridged is None:
            return None
        before = [*tail, *completion]
        if bridged.token_ids[: len(before)] != before:
            return None  # the bridge would drop sampled ids
        return list(bridged.token_ids[len(before) :])

    def foreign(self, message: Message, tools: Sequence[dict[str, Any]]) -> list[int]:
        """The ids of an assistant turn that the policy did not sample here, closing token included."""
        # A tool result after it makes the template treat it as history: reasoning kept, no empty thinking block added.
        history = [_says("user"), message.rendered(), _says("tool")]
        try:
            rendered = self._strict.render(history, tools=list(tools) or None)
        except REFUSALS as error:
            raise GatewayError(
                "bad_request", f"The policy's chat template refuses an assistant message: {error}", "messages"
            ) from error
        sampled = [
            token
            for token, index, said in zip(
                rendered.token_ids, rendered.message_indices, rendered.sampled_mask, strict=True
            )
            if said and index == 1
        ]
        return sampled

    def again(self, completion: Sequence[int]) -> list[int] | None:
        """The ids after a completion when the policy speaks once more; None where the template has no closing token."""
        if self._close is None:
            return None
        closed = bool(completion) and completion[-1] in self._stops
        return self._again if closed else [self._close, *self._again]

    def _turn_border(self) -> tuple[int | None, list[int]]:
        """The token that closes an assistant turn, and the ids from there to where the next one speaks.

        None where no stop token stands between two turns (GLM: its stop token opens the user's turn).
        """
        said = [_says("user"), _says("assistant")]
        closed, more = (
            list(self._strict.render_ids(said)),
            list(self._strict.render_ids(said, add_generation_prompt=True)),
        )
        last = max((i for i, token in enumerate(closed) if token in self._stops), default=None)
        if last is None or self.text(closed[last + 1 :]).strip() or more[: last + 1] != closed[: last + 1]:
            return None, []
        return closed[last], more[last + 1 :]

    def _rendered(self, messages: Sequence[Message], *, first: bool) -> list[dict[str, Any]]:
        """Messages as the renderer takes them; `first`: the conversation begins with them."""
        out = [m.rendered() for m in messages]
        if self._late_system:
            return out
        leading = next((i for i, m in enumerate(out) if m["role"] != "system"), len(out)) if first else 0
        late = [{"role": "user", "content": m["content"]} if m["role"] == "system" else m for m in out[leading:]]
        if not leading:
            return late
        return [{"role": "system", "content": "\n\n".join(m["content"] for m in out[:leading])}, *late]

    def _takes(self, messages: list[dict[str, Any]]) -> bool:
        try:
            self._strict.render_ids(messages, tools=[_TOOL])
        except REFUSALS:
            return False
        return True

    def tail_of(self, prompt: Node) -> Ids:
        """The end of a prompt, from its last closed turn on: all that a bridge needs of it."""
        found = self.tail(prompt.ids)
        if len(found) == len(prompt.ids) and prompt.parent is not None and int(found[0]) not in self._stops:
            return np.concatenate([self.tail_of(prompt.parent), found])
        return found

    def tail(self, ids: Ids | Sequence[int]) -> Ids:
        """Ids from the last closed turn on; all of them where there is none."""
        for i in range(len(ids) - 1, -1, -1):
            if int(ids[i]) in self._stops:
                return np.asarray(ids[i:], np.int32)
        return np.asarray(ids, np.int32)

    def text(self, ids: Sequence[int]) -> str:
        """Decoded text, special tokens included."""
        return self.tokenizer.decode(ids)

    def stopped(self, stop: Sequence[str]) -> Callable[[list[int]], int | None] | None:
        """For stop strings: a function from ids to how many of them spell the first one; None where they do not yet.

        It is asked again and again while an answer grows, and looks at what is new of it.
        """
        if not stop:
            return None
        # A token is a byte at least; some are nothing on their own.
        margin = 8 + max(len(s.encode()) for s in stop)
        seen = 0

        def spelt(ids: list[int]) -> bool:
            return _first(stop, self.text(ids)) is not None

        def keep(ids: list[int]) -> int | None:
            nonlocal seen
            if not spelt(ids[max(0, seen - margin) :]) or not spelt(ids):
                seen = len(ids)
                return None
            return 1 + bisect_left(range(1, len(ids) + 1), True, key=lambda n: spelt(ids[:n]))

        return keep

    def stop_string(self, completion: Sequence[int], stop: Sequence[str]) -> str | None:
        """The one of the stop strings that a completion spells first; None where it spells none."""
        text = self.text(completion) if stop else ""
        found = [(at, s) for s in stop if (at := text.find(s)) >= 0]
        return min(found)[1] if found else None

    def reply(
        self,
        prompt: Ids,
        completion: Sequence[int],
        tools: Sequence[dict[str, Any]],
        parse_tool_calls: bool,
        stop: Sequence[str] = (),
    ) -> Message:
        """The assistant message that a completion says. Never raises: what cannot be parsed is text.

        A tool call that is cut short or ill-formed stays in the content as the raw text that was sampled.
        """
        ids = list(completion)
        while ids and ids[-1] in self._stops:
            ids.pop()
        if stop and (cut := _first(stop, text := self.text(ids))) is not None:
            return Message("assistant", text[:cut].strip())
        try:
            parsed = self._strict.parse_response(
                ids,
                tools=list(tools) or None,
                prompt_ids=self.tail(prompt).tolist(),
            )
        except (ValueError, RecursionError, TypeError, KeyError, IndexError, AttributeError) as error:
            log.warning("the renderer could not parse a completion (%s); it goes out as text", type(error).__name__)
            return Message("assistant", self.text(ids).strip())
        attempts = [(attempt, _tool_call(attempt) if parse_tool_calls else None) for attempt in parsed.tool_calls]
        calls = [call for _, call in attempts if call is not None]
        content = parsed.content
        if calls:
            raw = [self._raw(attempt, ids) for attempt, call in attempts if call is None]
        else:  # nothing that a harness can run: all of the text, with what stands between and after
            raw = [self._raw(attempt, ids, to_end=True) for attempt, _ in attempts[:1]]
        content = "\n".join(([content] if content else []) + raw)
        return Message("assistant", content, parsed.reasoning_content or None, tuple(calls))

    def _raw(self, attempt: ParsedToolCall, ids: list[int], *, to_end: bool = False) -> str:
        if attempt.token_span is None:
            return str(attempt.raw)
        start, end = attempt.token_span
        return self.text(ids[start:] if to_end else ids[start:end])


_TOOL = {"type": "function", "function": {"name": "f", "description": "", "parameters": {"type": "object"}}}


def _says(role: str) -> dict[str, Any]:
    return {"role": role, "content": "."}


def _tool_call(attempt: ParsedToolCall) -> ToolCall | None:
    """The call as it goes on the wire; None where it is not one that a harness could read."""
    if attempt.status is not ToolCallParseStatus.OK or not isinstance(attempt.name, str):
        return None
    try:
        arguments = attempt.arguments
        if not isinstance(arguments, str):
            if too_deep(arguments):
                return None
            arguments = json.dumps({} if arguments is None else arguments, ensure_ascii=False, allow_nan=False)
        arguments.encode()
        attempt.name.encode()
    except (ValueError, RecursionError):  # NaN, nesting without end, lone surrogates
        return None
    return ToolCall(attempt.id or f"call_{uuid.uuid4().hex[:24]}", attempt.name, arguments)


def _first(stop: Sequence[str], text: str) -> int | None:
    found = [at for s in stop if (at := text.find(s)) >= 0]
    return min(found) if found else None

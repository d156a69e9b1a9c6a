"""A long rollout's writes as the gateway makes them, call by call: a row that begins, then nodes and the row's end.

One main conversation with tools, sub-agents of eight calls every fiftieth call, and retries. Ids are drawn as words of
a language are (Zipf), log-probs are noise; both compress no better than real ones. Raw messages hold about four bytes a
token, and each call holds only the messages since the call before it.
"""

from __future__ import annotations

import datetime as dt
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from gyre.store.gateway_queries import CallWrite
from gyre.store.tokens import pack_ids, pack_logprobs

VOCABULARY = 150_000
_WORDS = b"the of file error in test def return self import None path value read write".split()


@dataclass
class Line:
    """Where a conversation has come to: its last generated node, that node's end, and the call."""

    leaf: int | None = None
    end: int = 0
    call: int | None = None


@dataclass
class LongRollout:
    """Iterate over `writes()`: (begin, end) of each call. Counts what it made."""

    rollout_id: str
    calls: int
    tokens: int
    first_id: int = 1
    seed: int = 0
    distinct: int = 0
    text_bytes: int = 0
    deepest: tuple[int, int] = (0, 0)
    """The leaf of the longest branch and its length."""
    sampled: dict[int, NDArray[np.int32]] = field(default_factory=dict)

    def writes(self) -> Iterator[tuple[CallWrite, CallWrite]]:
        rng = np.random.default_rng(self.seed)
        ranks = np.minimum(rng.zipf(1.2, 2 * self.tokens) - 1, VOCABULARY - 1)
        vocabulary = rng.permutation(VOCABULARY).astype(np.int32)
        pool = vocabulary[ranks]
        share = self.tokens // self.calls
        main, side, before = Line(), Line(), Line()
        ids = iter(range(self.first_id, self.first_id + 3 * self.calls + 1))
        at = 0

        def take(n: int) -> NDArray[np.int32]:
            nonlocal at
            at = 0 if at + n > len(pool) else at
            at += n
            return pool[at - n : at]

        for seq in range(self.calls):
            in_side = seq % 50 >= 42
            if seq % 50 == 42:
                side = Line()
            line = side if in_side else main
            retry = not in_side and seq % 40 == 39
            parent = before if retry else line
            asked, said = take(max(1, share * 4 // 5)), take(max(1, share - share * 4 // 5))
            call, prompt, leaf = next(ids), next(ids), next(ids)
            now = dt.datetime.now(dt.UTC)
            text = _text(rng, 4 * len(asked))
            messages = [{"role": "tool", "tool_call_id": f"c{seq}", "content": text}]
            request = {"base": 2 * seq, "messages": messages, "options": {"temperature": 1.0}}
            response = {
                "content": _text(rng, 4 * len(said)),
                "reasoning": None,
                "tool_calls": [{"id": f"c{seq}", "name": "Bash", "arguments": '{"command": "make test"}'}],
            }
            self.text_bytes += len(text) + len(response["content"])
            begin = {
                "id": call, "rollout_id": self.rollout_id, "seq": seq, "api": "openai-chat", "status": "running",
                "kind": "sub-agent" if in_side else "main", "parent_call_id": parent.call,
                "fork_reason": "resample" if retry else None if parent.call else "root",
                "request_hash": f"{seq:064x}", "request": request, "prompt_tokens": parent.end + len(asked),
                "new_tokens": len(asked), "started_at": now,
            }  # fmt: skip
            shared = {"rollout_id": self.rollout_id, "call_id": call}
            nodes = [
                shared | {
                    "id": prompt, "parent_id": parent.leaf, "kind": "prompt", "start": parent.end,
                    "length": len(asked), "token_ids": pack_ids(asked), "logprobs": None, "version_spans": None,
                },
                shared | {
                    "id": leaf, "parent_id": prompt, "kind": "generated", "start": parent.end + len(asked),
                    "length": len(said), "token_ids": pack_ids(said),
                    "logprobs": pack_logprobs(-rng.exponential(0.3, len(said))),
                    "version_spans": [[3, 0, len(said)]],
                },
            ]  # fmt: skip
            end = {
                "status": "complete", "leaf_id": leaf, "response": response, "finish_reason": "stop",
                "cached_tokens": parent.end, "completion_tokens": len(said), "cells": ["central"], "routed_at": now,
                "first_token_at": now, "ended_at": now,
            }  # fmt: skip
            self.distinct += len(asked) + len(said)
            self.sampled[leaf] = said
            if not in_side:
                before = Line(parent.leaf, parent.end, parent.call)
            line.leaf, line.end, line.call = leaf, parent.end + len(asked) + len(said), call
            self.deepest = max(self.deepest, (leaf, line.end), key=lambda pair: pair[1])
            yield CallWrite(call, begin), CallWrite(call, None, nodes, end)


def _text(rng: np.random.Generator, size: int) -> str:
    words = rng.integers(0, 10**6, size // 8 + 1)
    return b" ".join(_WORDS[w % len(_WORDS)] + b"%d" % w for w in words)[:size].decode()

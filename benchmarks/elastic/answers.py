"""What a paced engine says: words, then the one tool call. How many tokens, the end of the prompt tells.

Each observation of the workload's tool ends with `next N`: the next answer has N tokens. The last of them are always
the call of the tool, and the token that ends the turn.
"""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

COMMAND = "sh turn"
CALL = f'<tool_call>\n{{"name": "bash", "arguments": {{"command": "{COMMAND}"}}}}\n</tool_call>'
WORD = "a"
TAIL = 48
"""Ids before the answer in which `next N` stands."""

_NEXT = re.compile(r"next (\d+)")


class Answers:
    """The answers of the policy in `folder`, as functions of the ids before them."""

    def __init__(self, folder: Path) -> None:
        self._tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        [self._start] = self.encode("<|im_start|>")
        self._header = self.encode("<|im_start|>assistant\n")
        self.call: list[int] = [*self.encode(CALL), *self.encode("<|im_end|>")]
        self._word = self.encode(WORD)[0]

    def encode(self, text: str) -> list[int]:
        """Ids of `text`."""
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        return ids

    def rest(self, ids: np.ndarray) -> list[int]:
        """The ids that follow `ids` (int32 [n]), which end at the beginning of an answer or somewhere in it."""
        start = int(np.flatnonzero(ids == self._start)[-1])
        before = self._tokenizer.decode(ids[max(0, start - TAIL) : start].tolist(), skip_special_tokens=False)
        found = _NEXT.findall(before)
        if not found:
            raise ValueError(f"no `next N` before the answer: {before!r}")
        words = max(0, int(found[-1]) - len(self.call))
        whole: list[int] = [self._word] * words + self.call
        return whole[len(ids) - start - len(self._header) :]

"""Does moving keys and values beat computing them anew? A pure estimate from a model's shape and measured rates."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

PAGE_TOKENS = 16
"""Tokens of a page: what is stored, checked and fetched as one. A prefix moves in whole pages."""

FIXED_S = 0.05
"""What a fetch costs beside its bytes: threads that hand it on, a pass of the server's scheduler before it begins."""

WORTH = 2.0
"""A prefill must cost so many times the transfer, or it is left alone: the estimate flatters the prefill (a matrix
product is faster than a whole model), so what it calls cheaper by this much is cheaper."""


@dataclass(frozen=True)
class KvShape:
    """What keys and values of a model weigh, and what computing them takes."""

    bytes_per_token: int
    """Keys and values of one token, all layers, all ranks together."""
    flops_per_token: float
    """Multiplications and additions of the layers' matrices for one token (2 a weight)."""
    flops_per_pair: float
    """Of attention, for one query and one key: all heads and layers."""

    @classmethod
    def of(cls, config: Mapping[str, Any], itemsize: int) -> KvShape:
        """Of a Hugging Face `config.json` of a dense decoder; `itemsize`: bytes of one number of the cache.

        Raises KeyError where the config has none of the fields.
        """
        layers, hidden = int(config["num_hidden_layers"]), int(config["hidden_size"])
        heads = int(config["num_attention_heads"])
        kv_heads = int(config.get("num_key_value_heads") or heads)
        head = int(config.get("head_dim") or hidden // heads)
        weights = hidden * head * (2 * heads + 2 * kv_heads) + 3 * hidden * int(config["intermediate_size"])
        return cls(2 * layers * kv_heads * head * itemsize, 2.0 * layers * weights, 4.0 * layers * heads * head)

    @classmethod
    def read(cls, policy_path: Path, itemsize: int) -> KvShape:
        """Of the checkpoint in `policy_path`."""
        return cls.of(json.loads((policy_path / "config.json").read_text(encoding="utf-8")), itemsize)


@dataclass(frozen=True)
class KvRates:
    """What one cell was measured to do."""

    bytes_per_s: float
    """Of a page's way: read from where it was stored, checked, into the server's memory."""
    flops_per_s: float
    """Of matrix products of the server's dtype, on the server's threads."""


def transfer_s(shape: KvShape, rates: KvRates, tokens: int) -> float:
    """Seconds to fetch the keys and values of `tokens` tokens."""
    return FIXED_S + tokens * shape.bytes_per_token / rates.bytes_per_s


def prefill_s(shape: KvShape, rates: KvRates, tokens: int) -> float:
    """Seconds to compute them, at best: each token attends to those before it, n²/2 pairs in all."""
    return (tokens * shape.flops_per_token + tokens * tokens / 2 * shape.flops_per_pair) / rates.flops_per_s


def pays(shape: KvShape, rates: KvRates, tokens: int) -> bool:
    """Whether a prefix of `tokens` tokens should be fetched rather than computed."""
    return transfer_s(shape, rates, tokens) * WORTH <= prefill_s(shape, rates, tokens)


def least_tokens(shape: KvShape, rates: KvRates, context: int) -> int | None:
    """The shortest prefix, in whole pages, from which on fetching pays up to `context` tokens; None: it never does.

    The prefill's cost is convex in the tokens and the transfer's is linear, with a cost at zero: where fetching pays
    once it pays for everything longer.
    """
    pages = context // PAGE_TOKENS
    if not pages or not pays(shape, rates, pages * PAGE_TOKENS):
        return None
    low, high = 0, pages  # does not pay, pays
    while high - low > 1:
        middle = (low + high) // 2
        if pays(shape, rates, middle * PAGE_TOKENS):
            high = middle
        else:
            low = middle
    return high * PAGE_TOKENS

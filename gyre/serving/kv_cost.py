"""Does moving keys and values beat computing them anew? A fit to measured prefills, and a decision; pure."""

from __future__ import annotations

import itertools
import json
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

PAGE_TOKENS = 16
"""Tokens of a page: what is stored, checked and fetched as one. A prefix moves in whole pages."""

FIXED_S = 0.05
"""What a fetch costs beside its bytes: threads that hand it on, a pass of the server's scheduler before it begins."""

WORTH = 2.0
"""Computing must cost so many times the fetch, or the prefix is left alone: neither estimate is exact, and a fetch that
was not worth it is waited for."""

FIT_BUCKETS, FIT_SPAN = 3, 4.0
"""A fit to a server's own prefills needs so many lengths, the longest so many times the shortest; with less than that
the estimate that it started with is scaled."""


@dataclass(frozen=True)
class KvShape:
    """What of a model decides the bytes of its keys and values and the work of computing them (a dense decoder)."""

    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head: int
    """Numbers of one head."""
    itemsize: int
    """Bytes of one number of the cache."""

    @classmethod
    def of(cls, config: Mapping[str, Any], itemsize: int) -> KvShape:
        """Of a Hugging Face `config.json`. Raises KeyError where the config has none of the fields."""
        layers, hidden = int(config["num_hidden_layers"]), int(config["hidden_size"])
        heads = int(config["num_attention_heads"])
        kv_heads = int(config.get("num_key_value_heads") or heads)
        head = int(config.get("head_dim") or hidden // heads)
        return cls(layers, hidden, int(config["intermediate_size"]), heads, kv_heads, head, itemsize)

    @classmethod
    def read(cls, policy_path: Path, itemsize: int) -> KvShape:
        """Of the checkpoint in `policy_path`."""
        return cls.of(json.loads((policy_path / "config.json").read_text(encoding="utf-8")), itemsize)

    @property
    def bytes_per_token(self) -> int:
        """Keys and values of one token, all layers, all ranks together."""
        return 2 * self.layers * self.kv_heads * self.head * self.itemsize

    @property
    def flops_per_token(self) -> float:
        """Multiplications and additions of the layers' matrices for one token (2 a weight)."""
        projections = self.hidden * self.head * (2 * self.heads + 2 * self.kv_heads)
        return 2.0 * self.layers * (projections + 3 * self.hidden * self.intermediate)

    @property
    def flops_per_pair(self) -> float:
        """Of attention, for one query and one key: all heads and layers."""
        return 4.0 * self.layers * self.heads * self.head


@dataclass(frozen=True)
class Prefill:
    """One that was measured."""

    new: int
    """Tokens that were computed."""
    cached: int
    """Tokens before them whose keys and values were there."""
    seconds: float


@dataclass(frozen=True)
class PrefillCost:
    """Seconds of a prefill of n new tokens after m cached ones: `base + n * token + pairs * pair`."""

    base_s: float
    per_token_s: float
    per_pair_s: float
    whole: bool
    """Whether attention is computed for all m + n tokens where m < n, as on CPU (`cpu_platform.attention`): pairs are
    (m + n)² / 2 then, and m * n + n² / 2 otherwise."""
    source: str
    """Where the figures are from, for people."""

    def seconds(self, new: int, cached: int = 0) -> float:
        """Of one prefill."""
        pairs = _pairs(new, cached, self.whole)
        return self.base_s + self.per_token_s * new + self.per_pair_s * pairs

    def saved_s(self, tokens: int, prompt: int | None = None) -> float:
        """Seconds by which the prefill of `prompt` tokens is shorter if the first `tokens` of them are cached; None:
        there are no others."""
        prompt = tokens if prompt is None else prompt
        return self.seconds(prompt) - self.seconds(prompt - tokens, tokens)


@dataclass(frozen=True)
class FetchCost:
    """Seconds of a fetch of n tokens: `fixed + n * token`."""

    fixed_s: float
    per_token_s: float

    def seconds(self, tokens: int) -> float:
        """Of one fetch."""
        return self.fixed_s + self.per_token_s * tokens


@dataclass(frozen=True)
class Decision:
    """Whether a prefix is fetched."""

    fetch: bool
    reason: str
    """The figures that decided it."""


def decide(prefill: PrefillCost, fetch: FetchCost, tokens: int, prompt: int | None = None) -> Decision:
    """Whether the first `tokens` of a prompt of `prompt` should be fetched rather than computed, and why."""
    moving, saving = fetch.seconds(tokens), prefill.saved_s(tokens, prompt)
    good = moving * WORTH <= saving
    saves = "saves" if good else "would save"
    return Decision(
        good,
        f"{tokens} of {prompt or tokens} tokens move in {moving:.3f} s, which {saves} {saving:.3f} s of prefill "
        f"({prefill.source}); {WORTH:g} times is asked for",
    )


def least_tokens(prefill: PrefillCost, fetch: FetchCost, context: int) -> int | None:
    """The shortest prefix, in whole pages, from which on fetching pays up to `context` tokens; None: it never does.

    What is saved is convex in the tokens and the fetch is linear, with a cost at zero: where fetching pays once it pays
    for everything longer.
    """
    pages = context // PAGE_TOKENS
    if not pages or not decide(prefill, fetch, pages * PAGE_TOKENS).fetch:
        return None
    low, high = 0, pages  # does not pay, pays
    while high - low > 1:
        middle = (low + high) // 2
        if decide(prefill, fetch, middle * PAGE_TOKENS).fetch:
            high = middle
        else:
            low = middle
    return high * PAGE_TOKENS


def fit(measured: Sequence[Prefill], whole: bool, source: str) -> PrefillCost:
    """The cost that is nearest to `measured` by relative errors, none of its three figures below zero.

    Raises ValueError: nothing was measured.
    """
    if not measured:
        raise ValueError("a fit needs a measured prefill")
    rows = np.array([[1.0, p.new, _pairs(p.new, p.cached, whole)] for p in measured])
    rows /= np.array([[max(p.seconds, 1e-9)] for p in measured])
    best, found = np.inf, np.zeros(3)
    for used in itertools.chain.from_iterable(itertools.combinations(range(3), n) for n in (1, 2, 3)):
        if len(used) > len(measured):
            continue
        part = rows[:, used]
        scale = np.abs(part).max(axis=0)
        x = np.linalg.lstsq(part / scale, np.ones(len(measured)), rcond=None)[0] / scale
        error = float(((part @ x - 1.0) ** 2).sum())
        if (x >= 0).all() and error < best - 1e-12:
            best, found = error, np.zeros(3)
            found[list(used)] = x
    return PrefillCost(float(found[0]), float(found[1]), float(found[2]), whole, source)


def refine(prior: PrefillCost, measured: Sequence[Prefill]) -> PrefillCost:
    """What a server's own prefills make of the estimate that it started with.

    Of prefills of about one length the median counts, so that one that the machine held up decides nothing. Where they
    are of lengths enough (`FIT_BUCKETS`, `FIT_SPAN`) they alone decide, else they scale `prior`.
    """
    buckets: dict[tuple[int, int], list[Prefill]] = {}
    for p in measured:
        if p.new > 0 and p.seconds > 0:
            buckets.setdefault((p.new.bit_length(), p.cached.bit_length()), []).append(p)
    typical = [sorted(b, key=lambda p: p.seconds / p.new)[len(b) // 2] for b in buckets.values()]
    if not typical:
        return prior
    count, lengths = sum(map(len, buckets.values())), sorted(p.new for p in typical)
    if len({n for n, _ in buckets}) >= FIT_BUCKETS and lengths[-1] >= FIT_SPAN * lengths[0]:
        return fit(typical, prior.whole, f"a fit to {count} prefills of this server")
    factor = statistics.median(p.seconds / max(prior.seconds(p.new, p.cached), 1e-9) for p in typical)
    return replace(
        prior,
        base_s=prior.base_s * factor,
        per_token_s=prior.per_token_s * factor,
        per_pair_s=prior.per_pair_s * factor,
        source=f"{prior.source}, times {factor:.2f} by {count} prefills of this server",
    )


def _pairs(new: int, cached: int, whole: bool) -> float:
    return (new + cached) ** 2 / 2 if whole and cached < new else cached * new + new * new / 2

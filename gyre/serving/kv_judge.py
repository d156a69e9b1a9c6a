"""Which stored prefixes a server fetches: it goes by the prefills that it measures itself, and says what it decided."""

from __future__ import annotations

import logging
import threading
from collections import Counter, deque

from gyre.serving.kv_cost import Decision, FetchCost, Prefill, PrefillCost, decide, refine

log = logging.getLogger(__name__)
log.setLevel(logging.INFO)  # SGLang's log takes warnings only; a fetch is as rare as a call that changes its cell

KEPT = 8
"""Newest prefills of about one length that are kept: a machine that becomes slower is noticed after half as many."""


class KvJudge:
    """Thread-safe: prefills come from the server's scheduler, questions from the thread that looks for pages."""

    def __init__(self, prior: PrefillCost, fetch: FetchCost) -> None:
        self._prior, self._fetch = prior, fetch
        self._seen: dict[tuple[int, int], deque[Prefill]] = {}
        self._lock = threading.Lock()
        self._prefill: PrefillCost | None = None
        self.counts: Counter[str] = Counter()
        """Decisions: `fetch`, `compute`."""

    def saw(self, prefill: Prefill) -> None:
        """The server has computed this one."""
        key = (prefill.new.bit_length(), prefill.cached.bit_length())
        with self._lock:
            self._seen.setdefault(key, deque(maxlen=KEPT)).append(prefill)
            self._prefill = None

    @property
    def prefill(self) -> PrefillCost:
        """What a prefill is estimated to cost now."""
        with self._lock:
            if self._prefill is None:
                self._prefill = refine(self._prior, [p for seen in self._seen.values() for p in seen])
            return self._prefill

    def decide(self, tokens: int, prompt: int | None = None) -> Decision:
        """Whether the first `tokens` of a prompt of `prompt`, which are stored, are fetched; logged and counted."""
        decision = decide(self.prefill, self._fetch, tokens, prompt)
        self.counts["fetch" if decision.fetch else "compute"] += 1
        log.info("kv: %s: %s", "fetched" if decision.fetch else "computed", decision.reason)
        return decision

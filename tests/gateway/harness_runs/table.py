"""Figures of harness runs as lines of a Markdown table, for docs/harnesses.md."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from tests.gateway.harness_runs.invariants import Facts

COLUMNS = ("run", "calls", "forks by reason", "branches by kind", "tokens stored", "tokens sent", "stored : sent")
HEAD = f"| {' | '.join(COLUMNS)} |\n{'|---' * len(COLUMNS)}|"


def line(name: str, facts: Facts) -> str:
    """One run."""
    calls = f"{facts.calls}" + (f" (+ {_list(facts.other)})" if facts.other else "")
    return (
        f"| {name} | {calls} | {_list(facts.forks)} | {_list(facts.branches)} | {facts.stored:,} | {facts.sent:,} | "
        f"1 : {facts.sent / facts.stored:.1f} |"
    )


def table(rows: Iterable[tuple[str, Facts]]) -> str:
    """All runs, under a head."""
    return "\n".join([HEAD, *(line(name, facts) for name, facts in rows)])


def _list(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{name} {n}" for name, n in sorted(counts.items())) or "none"

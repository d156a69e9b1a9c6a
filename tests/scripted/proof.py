"""Token-in token-out, proved from the engines' own records: what the store holds is what they got and gave."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from tests.scripted.engine import Exchange, ScriptedEngine

if TYPE_CHECKING:
    from tests.gateway.conftest import World

FINISHED = ("stop", "length")


def prove(world: World, engines: Sequence[ScriptedEngine], members: Sequence[int] = (0,)) -> int:
    """Check every complete call of the rollouts, and that no engine finished an answer that no call has.

    A call's stored ids are a chain of exchanges: the first got its prompt, each further one got the prompt and the
    tokens kept so far, the last one gave the end. Several exchanges are there where a call moved between engines.
    Returns the number of calls. Only for worlds whose engines served no one else meanwhile, or whose prompts differ
    from everyone else's (a script's marker sees to that).
    """
    records: dict[bytes, list[Exchange]] = defaultdict(list)
    for engine in engines:
        for one in engine.exchanges():
            records[_bytes(one.prompt)].append(one)
    used: set[str] = set()
    openings: set[bytes] = set()
    checked = 0
    for member in members:
        for call in world.calls(member):
            if call.leaf_id is None:
                continue
            ids = world.path(call.leaf_id)
            openings.add(_bytes(ids[: call.prompt_tokens]))
            if call.status != "complete":
                continue
            chain = _chain(ids, call.prompt_tokens, records, used)
            assert chain is not None, f"call {call.seq}: no engine got its prompt and gave its answer"
            used |= {one.rid for one in chain}
            checked += 1
    left = [
        one for prompt in openings for one in records.get(prompt, []) if one.rid not in used and one.finish in FINISHED
    ]
    assert not left, f"{len(left)} finished answers are not in the store, the first of {len(left[0].prompt)} tokens"
    return checked


def _chain(ids: list[int], at: int, records: dict[bytes, list[Exchange]], used: set[str]) -> list[Exchange] | None:
    """Exchanges that got `ids[:at]` and gave `ids[at:]` between them, none used twice."""
    for one in records.get(_bytes(ids[:at]), []):
        if one.rid in used:
            continue
        if one.output == ids[at:]:
            return [one]
        if one.finish in FINISHED:
            continue
        longest = _common(one.output, ids[at:])
        if at + longest == len(ids):  # its last token arrived, its finish did not
            return [one]
        for kept in range(longest, -1, -1):
            rest = _chain(ids, at + kept, records, used | {one.rid})
            if rest is not None:
                return [one, *rest]
    return None


def _common(a: list[int], b: list[int]) -> int:
    n = 0
    for x, y in zip(a, b, strict=False):
        if x != y:
            break
        n += 1
    return n


def _bytes(ids: Sequence[int]) -> bytes:
    return np.asarray(ids, np.int32).tobytes()

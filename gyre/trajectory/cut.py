"""Cutting samples into micro-batches by the distinct tokens that a trainer will compute. Pure functions.

A rollout whose kept branches fit a micro-batch stays whole. One that does not is cut between branches; what two parts
share above the cut is then computed in both. The cut that computes fewest tokens is chosen.

In depth-first order the tokens of any set of branches are the sum of their lengths less what each shares with the one
before it in the set, and what two branches share is the least of what neighbours between them share. So lengths and
neighbours' shared prefixes say everything about a rollout.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from itertools import pairwise

EXACT_UP_TO = 10
"""Branches of one rollout whose cut is searched among all sets. Above, among runs of neighbours in depth-first order:
best of those, while the best of all is as hard as packing bins (take many leaves on one stem)."""


@dataclass(frozen=True)
class SamplePath:
    """A sample's branch: its rollout, and (node, length in tokens) from root to leaf."""

    rollout: Hashable
    nodes: tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class Part:
    """A micro-batch, or a piece of one: indices of samples, and the distinct tokens on their paths."""

    samples: tuple[int, ...]
    tokens: int


def micro_batches(samples: Sequence[SamplePath], budget: int, *, whole_rollouts: bool = False) -> list[Part]:
    """Samples as micro-batches of at most `budget` distinct tokens each.

    A rollout is one piece where it fits, and is cut by `cut` where it does not; pieces then share micro-batches,
    first-fit decreasing. A branch above the budget is a micro-batch of its own, and with `whole_rollouts` so is a
    rollout above it. Deterministic. Raises ValueError for a budget below 1.
    """
    if budget < 1:
        raise ValueError(f"budget: must be at least 1 token, got {budget}")
    by_rollout: dict[Hashable, list[int]] = {}
    for index, sample in enumerate(samples):
        by_rollout.setdefault(sample.rollout, []).append(index)
    pieces: list[Part] = []
    for members in by_rollout.values():
        limit = None if whole_rollouts else budget
        for part in cut([samples[i].nodes for i in members], limit):
            pieces.append(Part(tuple(members[i] for i in part.samples), part.tokens))
    return _first_fit(samples, pieces, budget)


def cut(paths: Sequence[Sequence[tuple[int, int]]], budget: int | None) -> list[Part]:
    """Paths of one forest in parts of at most `budget` distinct tokens, computing as few tokens in all as can be.

    A path above the budget is a part of its own. Among equally good cuts one with fewest parts is taken. Optimal for up
    to EXACT_UP_TO paths, and above that among cuts into neighbours. None: no bound, one part.
    """
    order = sorted(range(len(paths)), key=lambda i: [node for node, _ in paths[i]])
    lengths = [sum(length for _, length in paths[i]) for i in order]
    shared = [_shared(paths[a], paths[b]) for a, b in pairwise(order)]
    total = sum(lengths) - sum(shared)
    if budget is None or total <= budget:
        return [Part(tuple(sorted(order)), total)] if order else []
    search = _any_sets if len(order) <= EXACT_UP_TO else _neighbours
    return [Part(tuple(sorted(order[i] for i in group)), tokens) for group, tokens in search(lengths, shared, budget)]


def _shared(one: Sequence[tuple[int, int]], other: Sequence[tuple[int, int]]) -> int:
    tokens = 0
    for (a, length), (b, _) in zip(one, other, strict=False):
        if a != b:
            break
        tokens += length
    return tokens


Groups = list[tuple[list[int], int]]
"""Places in depth-first order, and the distinct tokens of their paths."""


def _any_sets(lengths: list[int], shared: list[int], budget: int) -> Groups:
    """The best partition: a dynamic program over subsets, each built of a part with its first path and the rest."""
    n = len(lengths)
    size = [0] * (1 << n)
    for members in range(1, 1 << n):
        last = members.bit_length() - 1
        rest = members ^ (1 << last)
        if rest:
            before = rest.bit_length() - 1
            size[members] = size[rest] + lengths[last] - min(shared[before:last])
        else:
            size[members] = lengths[last]
    best: list[tuple[int, int, int]] = [(0, 0, 0)] * (1 << n)  # tokens, parts, the part that holds the first path
    for members in range(1, 1 << n):
        first = members & -members
        others = members ^ first
        found: tuple[int, int, int] | None = None
        extra = others
        while True:
            part = extra | first
            if extra == 0 or size[part] <= budget:
                tokens, parts, _ = best[members ^ part]
                option = (tokens + size[part], parts + 1, part)
                if found is None or option < found:
                    found = option
            if extra == 0:
                break
            extra = (extra - 1) & others
        assert found is not None
        best[members] = found
    groups: Groups = []
    left = (1 << n) - 1
    while left:
        part = best[left][2]
        groups.append(([i for i in range(n) if part >> i & 1], size[part]))
        left ^= part
    return groups


def _neighbours(lengths: list[int], shared: list[int], budget: int) -> Groups:
    """The best partition into runs of neighbours."""
    n = len(lengths)
    best: list[tuple[int, int, int]] = [(0, 0, 0)]  # tokens, parts, where the last run begins
    for end in range(1, n + 1):
        size = 0
        found: tuple[int, int, int] | None = None
        for begin in range(end - 1, -1, -1):
            size += lengths[begin] - (shared[begin] if begin < end - 1 else 0)
            if begin < end - 1 and size > budget:
                break
            tokens, parts, _ = best[begin]
            option = (tokens + size, parts + 1, begin)
            if found is None or option < found:
                found = option
        assert found is not None
        best.append(found)
    groups: Groups = []
    end = n
    while end:
        begin = best[end][2]
        groups.append((list(range(begin, end)), best[end][0] - best[begin][0]))
        end = begin
    return groups[::-1]


def _first_fit(samples: Sequence[SamplePath], pieces: Sequence[Part], budget: int) -> list[Part]:
    """What pieces of one rollout share counts once: they may meet again, after a cut into neighbours."""
    bins: list[Part] = []
    inside: list[dict[Hashable, set[int]]] = []  # nodes in each bin, by rollout
    for piece in sorted(pieces, key=lambda piece: -piece.tokens):
        rollout = samples[piece.samples[0]].rollout
        nodes = {node: length for i in piece.samples for node, length in samples[i].nodes}
        for place, (batch, there) in enumerate(zip(bins, inside, strict=True)):
            tokens = batch.tokens + piece.tokens - sum(nodes[n] for n in there.get(rollout, set()) & nodes.keys())
            if tokens <= budget:
                bins[place] = Part(batch.samples + piece.samples, tokens)
                there.setdefault(rollout, set()).update(nodes)
                break
        else:
            bins.append(piece)
            inside.append({rollout: set(nodes)})
    return bins

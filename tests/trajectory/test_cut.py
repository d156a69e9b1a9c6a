"""Micro-batches by distinct tokens: nothing is lost, budgets hold, and no other cut computes fewer tokens."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gyre.trajectory import cut as module
from gyre.trajectory.cut import Part, SamplePath, cut, micro_batches

Path = tuple[tuple[int, int], ...]


@st.composite
def forests(draw: st.DrawFn, most: int = 7) -> list[Path]:
    """Paths to different nodes of a random forest; one may end where another goes on."""
    count = draw(st.integers(1, 14))
    lengths = draw(st.lists(st.integers(1, 40), min_size=count, max_size=count))
    names = draw(st.permutations(range(count)))  # a child may be older than its parent
    above = [draw(st.integers(-1, i - 1)) for i in range(count)]
    ends = draw(st.lists(st.integers(0, count - 1), min_size=1, max_size=most, unique=True))
    paths = []
    for end in ends:
        path, at = [], end
        while at >= 0:
            path.append((names[at], lengths[at]))
            at = above[at]
        paths.append(tuple(reversed(path)))
    return paths


def distinct(paths: Sequence[Path]) -> int:
    return sum(dict(itertools.chain.from_iterable(paths)).values())


def partitions(items: list[int]) -> Iterator[list[list[int]]]:
    if not items:
        yield []
        return
    for rest in partitions(items[1:]):
        for i in range(len(rest)):
            yield [*rest[:i], [items[0], *rest[i]], *rest[i + 1 :]]
        yield [[items[0]], *rest]


def check(parts: Sequence[Part], paths: Sequence[Path], budget: int) -> None:
    assert sorted(itertools.chain.from_iterable(p.samples for p in parts)) == list(range(len(paths)))
    for part in parts:
        assert part.tokens == distinct([paths[i] for i in part.samples])
        assert len(part.samples) == 1 or part.tokens <= budget


@settings(max_examples=250, deadline=None)
@given(forests(), st.integers(1, 160))
def test_no_other_cut_computes_fewer_tokens(paths: list[Path], budget: int) -> None:
    parts = cut(paths, budget)
    check(parts, paths, budget)
    found = (sum(p.tokens for p in parts), len(parts))
    for partition in partitions(list(range(len(paths)))):
        sizes = [distinct([paths[i] for i in group]) for group in partition]
        if all(len(g) == 1 or s <= budget for g, s in zip(partition, sizes, strict=True)):
            assert found <= (sum(sizes), len(sizes))


@settings(max_examples=150, deadline=None)
@given(forests(), st.integers(1, 160))
def test_above_the_exact_size_no_cut_into_neighbours_computes_fewer(paths: list[Path], budget: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "EXACT_UP_TO", 0)
        parts = cut(paths, budget)
    check(parts, paths, budget)
    order = sorted(range(len(paths)), key=lambda i: [node for node, _ in paths[i]])
    for marks in itertools.product([False, True], repeat=len(paths) - 1):
        ends = [i + 1 for i, mark in enumerate(marks) if mark] + [len(paths)]
        groups = [order[a:b] for a, b in zip([0, *ends], ends, strict=False)]
        sizes = [distinct([paths[i] for i in group]) for group in groups]
        if all(len(g) == 1 or s <= budget for g, s in zip(groups, sizes, strict=True)):
            assert sum(p.tokens for p in parts) <= sum(sizes)


def test_a_rollout_of_very_many_branches_is_cut_all_the_same() -> None:
    stem = tuple((i, 3) for i in range(100))
    paths = [(*stem[: i + 1], (1000 + i, 5)) for i in range(100)]
    parts = cut(paths, 600)
    check(parts, paths, 600)
    assert sum(p.tokens for p in parts) < sum(distinct([p]) for p in paths) / 10


@settings(max_examples=200, deadline=None)
@given(st.lists(forests(6), max_size=6), st.integers(1, 160), st.booleans(), st.sampled_from([0, module.EXACT_UP_TO]))
def test_micro_batches(rollouts: list[list[Path]], budget: int, whole: bool, exact: int) -> None:
    samples = [SamplePath(r, path) for r, paths in enumerate(rollouts) for path in paths]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "EXACT_UP_TO", exact)
        batches = micro_batches(samples, budget, whole_rollouts=whole)
        assert batches == micro_batches(list(samples), budget, whole_rollouts=whole)
    assert sorted(itertools.chain.from_iterable(b.samples for b in batches)) == list(range(len(samples)))
    where = {i: b for b, batch in enumerate(batches) for i in batch.samples}
    for batch in batches:
        mine = {r: [samples[i].nodes for i in batch.samples if samples[i].rollout == r] for r in range(len(rollouts))}
        assert batch.tokens == sum(distinct(paths) for paths in mine.values())
        alone = {samples[i].rollout for i in batch.samples}
        assert batch.tokens <= budget or len(batch.samples) == 1 or (whole and len(alone) == 1)
    for rollout, paths in enumerate(rollouts):
        parts = {where[i] for i, s in enumerate(samples) if s.rollout == rollout}
        if whole or distinct(paths) <= budget:
            assert len(parts) == 1, "a rollout that fits stays whole"
    for a, b in itertools.combinations(batches, 2):
        both = {
            r: [samples[i].nodes for i in a.samples + b.samples if samples[i].rollout == r]
            for r in range(len(rollouts))
        }
        assert sum(map(distinct, both.values())) > budget, "two that fit in one are one"


def test_pieces_of_a_rollout_that_meet_again_share_what_they_share() -> None:
    """Neighbours alone cut long, short, long: the two short ones fit with their stem counted once, and only so."""
    lengths = (50, 20, 50, 20)
    samples = [SamplePath("a", ((0, 50), (1 + i, n))) for i, n in enumerate(lengths)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "EXACT_UP_TO", 0)
        batches = micro_batches(samples, 100)
    assert [(b.samples, b.tokens) for b in batches] == [((0,), 100), ((2,), 100), ((1, 3), 90)]


def test_packing_is_tight_and_stable() -> None:
    samples = [SamplePath(r, ((0, n),)) for r, n in (("a", 60), ("b", 50), ("c", 40), ("d", 30), ("e", 20), ("f", 500))]
    assert [list(b.samples) for b in micro_batches(samples, 100)] == [[5], [0, 2], [1, 3, 4]]
    with pytest.raises(ValueError, match="budget"):
        micro_batches(samples, 0)


def test_whole_rollouts_share_a_micro_batch_even_above_the_budget() -> None:
    sizes = (("a", 60), ("b", 30), ("a", 50), ("c", 40), ("b", 30))
    samples = [SamplePath(r, ((i, n),)) for i, (r, n) in enumerate(sizes)]
    batches = micro_batches(samples, 100, whole_rollouts=True)
    assert [(list(b.samples), b.tokens) for b in batches] == [([0, 2], 110), ([1, 4, 3], 100)]

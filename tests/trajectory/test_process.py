from __future__ import annotations

import itertools
from random import Random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gyre.trajectory import KIND_RANK, Node, Tree, TreeError, select, target_mask


class Builder:
    """Grows a tree call by call: each call is a prompt node and a generated node."""

    def __init__(self) -> None:
        self.nodes: list[Node] = []

    def call(self, parent: Node | None, kind: str = "main", generated: int = 3, complete: bool = True) -> Node:
        start = 0 if parent is None else parent.start + parent.length
        prompt = Node(len(self.nodes) + 1, parent.id if parent else None, False, start, 2)
        answer = Node(prompt.id + 1, prompt.id, True, start + 2, generated, kind, complete)
        self.nodes += [prompt, answer]
        return answer

    @property
    def tree(self) -> Tree:
        return Tree.of(self.nodes)


def test_a_line_is_one_branch_that_owns_every_answer() -> None:
    b = Builder()
    last = None
    for _ in range(4):
        last = b.call(last)
    (sample,) = select(b.tree, 5)
    assert sample.owned_nodes == (2, 4, 6, 8)
    assert sample.n_targets == 12
    assert sample.branch.n_tokens == 20
    assert sample.branch.kind == "main"


def test_a_shared_answer_is_owned_once_by_the_first_kept() -> None:
    b = Builder()
    shared = b.call(None)
    short = b.call(shared, generated=1)
    long = b.call(shared, generated=9)
    first, second = select(b.tree, 5)
    assert first.branch.leaf_id == long.id
    assert first.owned_nodes == (shared.id, long.id)
    assert second.owned_nodes == (short.id,)
    mask = target_mask(second.branch.nodes, second.owned_nodes)
    assert mask.tolist() == [False] * 7 + [True]


def test_kinds_rank_before_length() -> None:
    b = Builder()
    leaves = {k: b.call(None, kind=k, generated=2 + 5 * r) for k, r in KIND_RANK.items()}
    for cap in range(1, 6):
        kept = select(b.tree, cap)
        assert [k.branch.kind for k in kept] == list(KIND_RANK)[:cap]
        assert [k.rank for k in kept] == list(range(min(cap, 4)))
        assert {k.branch.leaf_id for k in kept} <= {n.id for n in leaves.values()}


def test_a_summary_that_ends_the_conversation_carries_it() -> None:
    b = Builder()
    main = b.call(b.call(None))
    summary = b.call(main, kind="main-summary")
    agent = b.call(None, kind="sub-agent", generated=50)
    first, second = select(b.tree, 2)
    assert first.branch.leaf_id == summary.id
    assert main.id in first.owned_nodes
    assert second.branch.leaf_id == agent.id


def test_a_summary_beside_a_conversation_that_goes_on_owns_only_itself() -> None:
    b = Builder()
    main = b.call(None)
    summary = b.call(main, kind="main-summary", generated=40)
    other = b.call(main)
    first, second = select(b.tree, 5)
    assert (first.branch.leaf_id, second.branch.leaf_id) == (other.id, summary.id)
    assert second.owned_nodes == (summary.id,)


@pytest.mark.parametrize(
    "kind, complete", [("auxiliary", True), ("main", False), ("auxiliary", False), ("other", True)]
)
def test_what_is_never_trained_neither_counts_nor_hides(kind: str, complete: bool) -> None:
    b = Builder()
    main = b.call(None)
    beside = b.call(main, kind=kind, complete=complete, generated=99)
    b.call(None, kind=kind, complete=complete)
    (sample,) = select(b.tree, 5)
    assert sample.branch.leaf_id == main.id
    assert sample.owned_nodes == (main.id,)
    # ... and a conversation that was built upon it keeps it as context only.
    after = b.call(beside)
    (sample,) = select(b.tree, 5)
    assert sample.branch.leaf_id == after.id
    assert sample.owned_nodes == (main.id, after.id)


def test_an_empty_tree_has_no_sample() -> None:
    assert select(Tree.of([]), 5) == []
    assert select(Tree.of([Node(1, None, False, 0, 4)]), 5) == []


@pytest.mark.parametrize(
    "bad, message",
    [
        (Node(3, 9, False, 5, 1), "parent 9 is not in the tree"),
        (Node(3, 2, False, 4, 1), "starts at 4, its parent 2 ends at 5"),
        (Node(3, None, True, 0, 1), "a root must be a prompt"),
        (Node(3, None, False, 1, 1), "a root must be a prompt"),
        (Node(3, 2, False, 5, 0), "length 0"),
    ],
)
def test_rows_that_are_no_tree_are_named(bad: Node, message: str) -> None:
    with pytest.raises(TreeError, match=f"node 3: .*{message}"):
        Tree.of([Node(1, None, False, 0, 2), Node(2, 1, True, 2, 3), bad])


@pytest.mark.parametrize("cap", [0, -1])
def test_a_cap_below_one_is_refused(cap: int) -> None:
    with pytest.raises(ValueError, match="branch_cap"):
        select(Tree.of([]), cap)


@st.composite
def trees(draw: st.DrawFn) -> Tree:
    b = Builder()
    answers: list[Node | None] = [None]
    for _ in range(draw(st.integers(0, 14))):
        parent = draw(st.sampled_from(answers))
        kind = draw(st.sampled_from([*KIND_RANK, "auxiliary"]))
        answers.append(b.call(parent, kind, draw(st.integers(1, 6)), draw(st.integers(0, 5)) > 0))
    return b.tree


@settings(max_examples=300, deadline=None)
@given(trees(), st.integers(1, 6))
def test_ownership(tree: Tree, cap: int) -> None:
    kept = select(tree, cap)
    branches = tree.branches()
    assert len(kept) == min(cap, len(branches))
    owned = list(itertools.chain.from_iterable(k.owned_nodes for k in kept))
    assert len(owned) == len(set(owned)), "a token is owned at most once"
    on_kept = {n.id for k in kept for n in k.branch.nodes if n.trainable}
    assert set(owned) == on_kept, "every trainable token of a kept branch is owned"
    assert all(tree.nodes[i].trainable for i in owned)
    for k in kept:
        mask = target_mask(k.branch.nodes, k.owned_nodes)
        assert mask.shape == (k.branch.n_tokens,)
        assert int(mask.sum()) == k.n_targets >= 1
    if cap >= len(branches):
        assert set(owned) == {n.id for n in tree.nodes.values() if n.trainable}, "without a cap nothing is lost"
    seen: set[int] = set()
    for k in kept:  # the first kept branch that holds a token owns it
        new = [n.id for n in k.branch.nodes if n.trainable and n.id not in seen]
        assert list(k.owned_nodes) == new
        seen.update(new)


@settings(max_examples=100, deadline=None)
@given(trees(), st.integers(1, 6), st.randoms())
def test_the_choice_is_total_and_stable(tree: Tree, cap: int, random: Random) -> None:
    """Neither the order of rows nor a larger cap changes what is taken first; ties go to the older leaf."""
    nodes = list(tree.nodes.values())
    random.shuffle(nodes)
    kept = select(tree, cap)
    assert select(Tree.of(nodes), cap) == kept
    assert select(tree, cap + 1)[: len(kept)] == kept


def test_a_tie_goes_to_the_older_leaf() -> None:
    b = Builder()
    shared = b.call(None)
    leaves = [b.call(shared).id for _ in range(4)]
    assert [k.branch.leaf_id for k in select(b.tree, 4)] == leaves


def test_the_mask_marks_whole_owned_spans() -> None:
    nodes = [Node(1, None, False, 0, 2), Node(2, 1, True, 2, 3), Node(3, 2, False, 5, 1), Node(4, 3, True, 6, 2)]
    assert np.flatnonzero(target_mask(nodes, [4])).tolist() == [6, 7]
    assert np.flatnonzero(target_mask(nodes, [2, 4])).tolist() == [2, 3, 4, 6, 7]
    assert not target_mask(nodes, []).any()

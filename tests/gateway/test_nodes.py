"""Prompts are stored once: shared beginnings are found, nodes are cut, and no path ever changes."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gyre.gateway.messages import Message
from gyre.gateway.nodes import MIN_SHARED, Ids, Node, Nodes, shared
from gyre.gateway.policy import Policy
from tests.gateway.paper import CALL, Paper, result, user

LONG = "the very same system text " * 20


def array(ids: list[int]) -> Ids:
    return np.asarray(ids, np.int32)


def insert(nodes: Nodes, anchor: Node | None, ids: list[int], new_id: int) -> Node:
    """A prompt as `placing` inserts it."""
    place = nodes.place(anchor, array(ids))
    node = nodes.cut(place.node, place.at, -new_id) if place.cut and place.node is not None else place.node
    rest = ids[place.shared :]
    return nodes.add(Node(new_id, node, 0 if node is None else node.end, array(rest))) if rest else node  # type: ignore[return-value]


# Few different tokens, and a long common beginning now and then: much to share.
SPANS = st.lists(st.integers(0, 2), min_size=1, max_size=50).map(lambda ids: [7] * (len(ids) % 3 * 12) + ids)


@given(st.lists(st.tuples(SPANS, st.lists(st.integers(0, 2), min_size=1, max_size=5), st.integers(0, 99)), max_size=12))
def test_no_path_changes_and_each_prefix_is_there_once(calls: list[tuple[list[int], list[int], int]]) -> None:
    nodes, answers, paths = Nodes(), [], []
    for number, (prompt, answer, choice) in enumerate(calls, 1):
        anchor = answers[choice % len(answers)] if answers and choice % 3 else None
        before = [] if anchor is None else anchor.tokens().tolist()
        end = insert(nodes, anchor, prompt, 2 * number)
        assert end.tokens().tolist() == before + prompt
        answers.append(nodes.add(Node(2 * number + 1, end, end.end, array(answer), generated=True)))
        paths.append(before + prompt + answer)
        assert [a.tokens().tolist() for a in answers] == paths
        assert [a.ids.tolist() for a in answers] == [c[1] for c in calls[:number]]
    stack = list(nodes.roots)
    while stack:
        node = stack.pop()
        prompts = [c for c in node.children if not c.generated]
        for i, one in enumerate(prompts):
            assert all(shared(one.ids, other.ids) < MIN_SHARED for other in prompts[:i])
        stack += node.children


@pytest.mark.parametrize("length", [0, 1, MIN_SHARED - 1, MIN_SHARED, 63, 64, 65, 1089, 5000])
def test_what_two_prompts_have_in_common(length: int) -> None:
    a, b = array([*range(length), -1, 5]), array([*range(length), -2, 5])
    assert shared(a, b) == length
    assert shared(a[:length], b) == length
    nodes = Nodes()
    nodes.add(Node(1, None, 0, a))
    assert nodes.place(None, b).cut == (length >= MIN_SHARED)


def test_an_answer_is_never_cut() -> None:
    nodes = Nodes()
    prompt = nodes.add(Node(1, None, 0, array([1] * 20)))
    answer = nodes.add(Node(2, prompt, 20, array([2] * 40), generated=True))
    place = nodes.place(None, array([1] * 20 + [2] * 30))
    assert (place.node, place.shared) == (prompt, 20)
    with pytest.raises(ValueError, match="must be a prompt"):
        nodes.cut(answer, 20, 3)
    place = nodes.place(None, array([1] * 20 + [2] * 40 + [3]))
    assert (place.node, place.shared) == (answer, 60), "an answer that a prompt repeats whole is shared"


def test_what_roots_and_forks_share_is_stored_once(policy: Policy) -> None:
    """A root with the same system text, a fork in the middle of a prompt: the turns before stay whole."""
    paper = Paper(policy)
    system = Message("system", LONG)
    first = paper.call([system, user("a" * 40)], CALL + "<|im_end|>")
    whole = first.generated.tokens().tolist()
    second = paper.call([system, user("b" * 40)])
    assert first.prompt.path()[0] is second.prompt.path()[0]
    assert len(first.prompt.path()[0].ids) > len(LONG)
    fork = paper.call([system, user("a" * 40), first.reply, result("x" * 40 + "1")])
    other = paper.call([system, user("a" * 40), first.reply, result("x" * 40 + "2")])
    assert fork.prompt.parent is other.prompt.parent is not first.generated
    assert fork.prompt.follows() is other.prompt.follows() is first.generated
    assert first.generated.tokens().tolist() == whole
    stored = sum(len(n.ids) for n in every(paper.tree.nodes))
    sent = sum(t.generated.end for t in paper.tree.by_call.values())
    assert stored < 0.45 * sent
    # What was cut goes on as if it were whole.
    after = paper.plan([system, user("a" * 40), first.reply, result("x" * 40 + "1"), fork.reply, user("more")])
    assert (after.fork_reason, after.anchor) == (None, fork)


def every(nodes: Nodes) -> list[Node]:
    out, stack = [], list(nodes.roots)
    while stack:
        out.append(stack.pop())
        stack += out[-1].children
    return out

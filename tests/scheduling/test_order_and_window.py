"""Task order over epochs, the order of launches in a step, and the sharing of the launch window."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gyre.scheduling import Demand, longest_first, share_window, step_tasks


@given(n=st.integers(1, 40), groups=st.integers(1, 50), seed=st.integers(0, 100), epochs=st.integers(1, 3))
def test_every_task_comes_once_an_epoch(n: int, groups: int, seed: int, epochs: int) -> None:
    steps = -(-n * epochs // groups)
    line = [task for index in range(steps) for task in step_tasks(n, seed, index, groups)]
    for epoch in range(epochs):
        assert sorted(line[epoch * n : (epoch + 1) * n]) == list(range(n))


def test_the_order_depends_on_seed_and_epoch_alone() -> None:
    assert step_tasks(64, 0, 0, 8) == step_tasks(64, 0, 0, 8)
    assert step_tasks(64, 0, 0, 64) != step_tasks(64, 1, 0, 64)
    assert step_tasks(64, 0, 0, 64) != step_tasks(64, 0, 1, 64)
    assert step_tasks(64, 0, 0, 16)[8:] == step_tasks(64, 0, 1, 8)  # cut from one line
    assert step_tasks(6, 7, 0, 6) == [1, 4, 3, 0, 2, 5]  # fixed for good: a resumed run must agree


def test_a_run_without_tasks_is_an_error() -> None:
    with pytest.raises(ValueError, match=r"tasks\.train"):
        step_tasks(0, 0, 0, 1)


def test_the_longest_group_is_launched_first() -> None:
    assert longest_first([3.0, 9.0, 5.0]) == [1, 2, 0]
    assert longest_first([3.0, 9.0, 3.0, 9.0]) == [1, 3, 0, 2]  # equal ones keep their order
    assert longest_first([]) == []


def test_an_unknown_group_stands_behind_the_longest_tenth() -> None:
    known: list[float | None] = [float(s) for s in range(1, 21)]
    assert longest_first([None, *known])[:4] == [20, 19, 0, 18]  # it is held for as long as the 18th of 20
    assert longest_first([None, None, None]) == [0, 1, 2]
    assert longest_first([2.0, None, 2.0]) == [0, 1, 2]
    assert longest_first([None, 1.0, 7.0]) == [0, 2, 1]


@given(expected=st.lists(st.none() | st.floats(0, 1e6), max_size=40))
def test_every_group_is_launched_once_and_no_known_one_after_a_shorter(expected: list[float | None]) -> None:
    order = longest_first(expected)
    assert sorted(order) == list(range(len(expected)))
    launched = [(expected[i], i) for i in order if expected[i] is not None]
    assert launched == sorted(launched, key=lambda x: (-(x[0] or 0.0), x[1]))


def test_the_older_step_comes_first() -> None:
    assert share_window(10, [Demand("b", 1, 20, 0), Demand("a", 0, 4, 3)]) == {"a": 7, "b": 3}
    assert share_window(10, [Demand("a", 0, 0, 10), Demand("b", 1, 5, 0)]) == {"a": 10, "b": 0}
    assert share_window(4, [Demand("a", 0, 5, 6)]) == {"a": 6}  # live rollouts are not taken back


def test_what_was_given_and_is_not_used_yet_is_not_given_again() -> None:
    assert share_window(3, [Demand("a", 0, 4, 0, window=3), Demand("b", 1, 4, 0)]) == {"a": 3, "b": 0}
    assert share_window(3, [Demand("a", 0, 1, 0, window=3), Demand("b", 1, 4, 0)]) == {"a": 1, "b": 2}
    assert share_window(3, [Demand("a", 0, 4, 0), Demand("b", 1, 4, 1, window=2)]) == {"a": 1, "b": 2}


demands = st.lists(st.tuples(st.integers(0, 50), st.integers(0, 50)), max_size=5)


@given(most=st.integers(1, 60), sizes=demands)
def test_the_window_is_kept_and_used(most: int, sizes: list[tuple[int, int]]) -> None:
    known = [Demand(f"s{i}", i, queued, running) for i, (queued, running) in enumerate(sizes)]
    shares = share_window(most, known)
    launched = sum(shares[d.source] - d.running for d in known)
    running = sum(d.running for d in known)
    assert all(d.running <= shares[d.source] <= d.running + d.queued for d in known)
    assert launched == max(0, min(most - running, sum(d.queued for d in known)))

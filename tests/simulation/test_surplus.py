"""Over-submission in the simulator: whom a group does without, what that costs, and what the bound makes of it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gyre.cli.main import run_command
from gyre.scheduling import AsyncPolicy, ColocatePolicy, ElasticPolicy, Policy
from gyre.simulation import PRESETS, Scenario, StepWork, lower_bound, simulate
from gyre.simulation.bound import serving_part
from gyre.simulation.trace import read_trace, write_trace
from tests.simulation.test_engine import COST, work
from tests.simulation.test_policy_properties import Watched, worlds

AFTER = 3.0 + 4.0
"""Seconds of the change and the optimizer step."""


def test_a_surplus_rollout_is_ended_when_its_group_is_complete() -> None:
    """The first samples 4 tokens at 1.75 s (it expects to meet half of somebody), the second waits 10 s for its tools;
    the third has 3 s of the first's place, for 3 / 1.75 tokens."""
    step = work([[0.0, 10.0, 0.0]], [[4.0, 0.0, 1000.0]], [[100.0, 50.0, 9000.0]])
    scenario = Scenario("one to spare", 1, COST, [step], 1e6, over_submit=1)
    run = simulate(scenario, ColocatePolicy(), decide_s=0.0)
    assert run.seconds == pytest.approx(10.0 + 15.0 + AFTER) and run.settled == (10.0,)
    assert run.trained_tokens == 150.0
    assert run.surplus_tokens == pytest.approx(3 / 1.75) and run.sampled_tokens == pytest.approx(4 + 3 / 1.75)
    books = run.breakdown()
    assert books["surplus"] == pytest.approx(3.0) and books["serve"] == pytest.approx(7.0)
    assert sum(books.values()) == pytest.approx(run.seconds)


def test_a_member_that_waits_for_its_launch_never_starts() -> None:
    step = work([[5.0, 5.0, 1.0, 1.0]], [[0.0, 0.0, 3.0, 3.0]], [[10.0] * 4])
    run = simulate(Scenario("queue", 1, COST, [step], 1e6, over_submit=2), ColocatePolicy(), decide_s=0.0)
    assert run.seconds == pytest.approx(5.0 + 2.0 + AFTER)
    assert (run.trained_tokens, run.sampled_tokens) == (20.0, 0.0)


def test_members_without_a_cell_are_ended_too() -> None:
    """Of four to spare one has not called, one is being scored, one ends its calls in the moment of the end."""
    step = replace(
        work([[5.0, 5.0, 5.0, 0.0, 5.0]], [[0.0, 0.0, 0.0, 2.0, 0.0]], [[10.0] * 5]),
        before_s=np.array([[0.0, 0.0, 100.0, 0.0, 0.0]]),
        after_s=np.array([[0.0, 0.0, 0.0, 100.0, 1.0]]),
    )
    scenario = Scenario("window", 1, replace(COST, slots=8), [step], 1e6, window=5, over_submit=3)
    run = simulate(scenario, ColocatePolicy(), decide_s=0.0)
    assert run.seconds == pytest.approx(5.0 + 2.0 + AFTER)
    assert run.trained_tokens == 20.0
    assert run.surplus_tokens == run.sampled_tokens == pytest.approx(2.0)


def test_a_rollout_without_a_reward_completes_nothing() -> None:
    """The first has no reward: it counts neither for the quorum nor for the group."""
    step = work([[5.0, 10.0, 20.0, 400.0]], [[0.0] * 4], [[0.0, 10.0, 10.0, 10.0]])
    step = replace(step, rewarded=np.array([[0.0, 1.0, 1.0, 1.0]]))
    scenario = Scenario("failed", 1, replace(COST, slots=4), [step], 1e6, over_submit=2)
    run = simulate(scenario, ColocatePolicy(), decide_s=0.0)
    assert run.settled == (20.0,) and run.trained_tokens == 20.0
    whole = simulate(replace(scenario, over_submit=0), ColocatePolicy(), decide_s=0.0)
    assert whole.settled == (400.0,) and whole.trained_tokens == 30.0


@st.composite
def spared(draw: st.DrawFn) -> Scenario:
    """A world with members to spare, in which each group's tokens are a digit of their own: all members of group i have
    7**i of them, and no group has 7 members."""
    world = draw(worlds())
    size = world.steps[0].tokens.shape[1]
    over = draw(st.integers(0, size - 1))
    digits = [7.0 ** np.arange(len(s.tokens))[:, None] * np.ones(s.tokens.shape) for s in world.steps]
    steps = [replace(s, trained=t) for s, t in zip(world.steps, digits, strict=True)]
    if draw(st.booleans()):
        rng = np.random.default_rng(draw(st.integers(0, 1000)))
        steps = [replace(s, rewarded=rng.integers(0, 2, s.tokens.shape).astype(np.float64)) for s in steps]
    return replace(world, steps=steps, over_submit=over)


def trains(step: StepWork, group: int, wanted: int) -> range:
    """How many members of a group may be trained: all that are settled when it is complete."""
    if step.rewarded is None:
        return range(wanted, wanted + 1)
    size, with_reward = step.tokens.shape[1], int(step.rewarded[group].sum())
    return range(wanted, size + (1 if with_reward < wanted else wanted - with_reward + 1))


POLICIES: list[Policy] = [ElasticPolicy(), ColocatePolicy(), AsyncPolicy()]


@settings(max_examples=120, deadline=None)
@given(spared(), st.sampled_from(POLICIES), st.integers(0, 2), st.sampled_from([None, 1, 3]), st.booleans())
def test_no_group_trains_more_than_it_wants(
    world: Scenario, policy: Policy, staleness: int, quorum: int | None, known: bool
) -> None:
    if world.cells == 1 and isinstance(policy, AsyncPolicy):
        policy = ColocatePolicy()  # a split needs two cells
    watched = Watched(policy) if isinstance(policy, ElasticPolicy) else None
    run = simulate(world, watched or policy, staleness=staleness, quorum=quorum, rates_known=known)
    assert watched is None or watched.faults == []
    assert len(run.ends) == len(world.steps), "every group ends"
    rest = round(run.trained_tokens)
    assert run.trained_tokens == pytest.approx(rest)
    wanted = world.steps[0].tokens.shape[1] - world.over_submit
    if all(s.rewarded is None for s in world.steps):
        groups = len(world.steps[0].tokens)
        assert rest == len(world.steps) * sum(wanted * 7**i for i in range(groups)), "each group trains what it wants"
    elif len(world.steps) == 1:
        for group in range(len(world.steps[0].tokens)):
            rest, members = divmod(rest, 7)
            assert members in trains(world.steps[0], group, wanted)
        assert rest == 0
    assert 0 <= run.surplus_tokens <= run.sampled_tokens * (1 + 1e-9)
    assert world.over_submit or run.surplus_tokens == 0
    assert sum(run.breakdown().values()) == pytest.approx(run.seconds * world.cells)
    assert run.seconds >= lower_bound(world, staleness=staleness, quorum=quorum) * (1 - 1e-9)


def test_the_bound_counts_only_who_must_be_trained() -> None:
    """Members that nobody would wait for change nothing; others may replace those that take longer."""
    whole, more = (
        replace(PRESETS["terminal"].scenario(3, 2, over_submit=k), time_limit_s=1e12)  # at a limit, work is cut short
        for k in (0, 2)
    )
    assert all((a.tokens == b.tokens[:, :16]).all() for a, b in zip(whole.steps, more.steps, strict=True))
    hopeless = np.concatenate([np.zeros((48, 16)), np.full((48, 2), 1e9)], axis=1)
    never = replace(
        more, steps=[replace(s, tool_s=s.tool_s + hopeless, trained=s.trained + hopeless) for s in more.steps]
    )
    for staleness in (0, 1):
        bounds = [lower_bound(s, staleness=staleness) for s in (whole, never, more)]
        assert bounds[1] == pytest.approx(bounds[0]) and bounds[2] < 0.99 * bounds[0]
    assert serving_part(never) == pytest.approx(serving_part(whole))


def test_a_group_keeps_a_member(tmp_path: Path) -> None:
    scenario = PRESETS["terminal"].scenario(n_steps=1, over_submit=2)
    with pytest.raises(ValueError, match="over_submit = 18 leaves a group no member"):
        replace(scenario, over_submit=18)
    write_trace(scenario, tmp_path / "trace.json")
    assert read_trace(tmp_path / "trace.json").over_submit == 2


def test_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    page = tmp_path / "timeline.html"
    told = {}
    for over in ("0", "2"):
        asked = ["simulate", "terminal", "--steps", "1", "--over-submit", over]
        assert run_command([*asked, "--timeline", str(page)]) == 0
        told[over] = capsys.readouterr().out, "surplus: " in page.read_text()
    assert "surplus" not in told["0"][0] and "surplus" in told["2"][0]
    assert told["2"][1]
    assert run_command(["simulate", "t.json", "--over-submit", "1"]) == 2
    assert "--over-submit: only a preset" in capsys.readouterr().err

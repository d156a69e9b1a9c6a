"""The simulator: against durations that can be said by hand, its books, its bound, and the policies' promises."""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gyre.cli.main import run_command
from gyre.scheduling import AsyncPolicy, ColocatePolicy, ElasticPolicy, Policy
from gyre.simulation import PRESETS, CostModel, Scenario, StepWork, lower_bound, simulate
from gyre.simulation.compare import compare, summarise
from gyre.simulation.trace import TraceError, read_trace, write_trace

COST = CostModel(
    slots=2, decode_s=1.0, decode_s_per_rollout=0.5, prefill_tokens_s=10.0, train_tokens_s=10.0,
    micro_batch_tokens=100.0, to_train_s=3.0, to_rollout_s=2.0, optimizer_s=4.0,
)  # fmt: skip


def work(tool: list[list[float]], tokens: list[list[float]], trained: list[list[float]]) -> StepWork:
    arrays = [np.array(a, np.float64) for a in (tool, tokens, [[20.0] * len(t) for t in tokens], trained)]
    return StepWork(*arrays)


def test_one_cell_by_hand() -> None:
    """Two rollouts of 10 and 30 tokens share a batch at 2 s a token; the rest of the second runs alone at 1.5 s."""
    step = work([[0.0, 0.0]], [[10.0, 30.0]], [[100.0, 50.0]])
    run = simulate(Scenario("one", 1, COST, [step], 1e6), ColocatePolicy(), decide_s=0.0)
    rollouts = 10 * 2.0 + 20 * 1.5
    assert run.seconds == pytest.approx(
        rollouts + 3.0 + 15.0 + 4.0
    )  # change, 150 tokens in two micro-batches, optimizer
    assert run.cell_s["serve"] == pytest.approx(rollouts)
    assert run.cell_s["train"] == pytest.approx(15.0)


def test_a_leaving_cell_hands_its_rollout_over() -> None:
    """Async takes c0 at once: its rollout goes to c1, where it pays for its context (20 tokens at 10 a second)."""
    step = work([[5.0, 5.0]], [[0.0, 0.0]], [[0.0, 0.0]])
    run = simulate(Scenario("move", 2, COST, [step], 1e6), AsyncPolicy(("c0",)), decide_s=0.0)
    assert run.moved == 1
    assert run.seconds == pytest.approx(5.0 + 2.0 + 4.0)


def test_the_time_limit_ends_a_rollout_and_its_part_is_trained() -> None:
    step = work([[0.0, 0.0]], [[10.0, 1000.0]], [[0.0, 1000.0]])
    run = simulate(Scenario("limit", 1, COST, [step], 170.0), ColocatePolicy(), decide_s=0.0)
    said = 10 + 150 / 1.5  # tokens until the limit: ten beside the other one, then alone
    assert run.cell_s["serve"] == pytest.approx(170.0)
    assert run.cell_s["train"] == pytest.approx(said / 1000 * 1000.0 / 10.0)


def test_a_quorum_trains_before_the_straggler() -> None:
    step = work([[10.0, 10.0, 400.0]], [[0.0] * 3], [[500.0] * 3])
    scenario = Scenario("quorum", 2, COST, [step], 1e6)
    whole, early = (simulate(scenario, ElasticPolicy(), quorum=q, decide_s=0.0) for q in (None, 2))
    # The first two train on one cell while the straggler runs on the other.
    assert whole.seconds - early.seconds == pytest.approx(50.0, abs=10.0)


@st.composite
def scenarios(draw: st.DrawFn) -> Scenario:
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    shape = (draw(st.integers(1, 5)), draw(st.integers(1, 6)))
    steps = [
        StepWork(*(rng.exponential(scale, shape) for scale in (50.0, 40.0, 20.0, draw(st.sampled_from([0.0, 200.0])))))
        for _ in range(draw(st.integers(1, 4)))
    ]
    return Scenario("random", draw(st.integers(2, 5)), COST, steps, draw(st.sampled_from([100.0, 1e6])))


POLICIES: list[Policy] = [ElasticPolicy(), ColocatePolicy(), AsyncPolicy()]


@settings(max_examples=60, deadline=None)
@given(scenarios(), st.sampled_from(POLICIES), st.integers(0, 2), st.sampled_from([None, 1, 3]))
def test_every_run_ends_and_its_books_balance(
    scenario: Scenario, policy: Policy, staleness: int, quorum: int | None
) -> None:
    run = simulate(scenario, policy, staleness=staleness, quorum=quorum, timeline=True)
    assert len(run.ends) == len(scenario.steps) and list(run.ends) == sorted(run.ends)
    assert sum(run.cell_s.values()) == pytest.approx(run.seconds * scenario.cells)
    for cell in range(scenario.cells):
        spans = [s for s in run.spans if s.cell == cell]
        assert spans[0].start == 0 and spans[-1].end == pytest.approx(run.seconds)
        assert all(a.end == b.start for a, b in itertools.pairwise(spans))
    assert run.seconds >= lower_bound(scenario, staleness=staleness, quorum=quorum) * (1 - 1e-9)


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32 - 1), st.integers(1, 12), st.sampled_from([0.1, 1.0, 3.0]), st.sampled_from([0.01, 0.5]))
def test_the_bound_of_a_full_cell(seed: int, slots: int, d: float, e: float) -> None:
    """One cell that serves and has hardly anything else to do, with rollouts of any mix: full all the time (they are
    alike, so that all end at once), it comes near to the bound and never below."""
    rng = np.random.default_rng(seed)
    cost = CostModel(slots, d, e, 1e9, 1e12, 1e9, 0.0, 0.0, 0.0)
    tool, tokens = rng.exponential(30.0), rng.exponential(30.0) + 1.0
    alike = work([[tool] * slots] * 3, [[tokens] * slots] * 3, [[1.0] * slots] * 3)
    near = Scenario("alike", 1, cost, [alike], 1e9)
    run = simulate(near, ColocatePolicy(), decide_s=0.0)
    bound = lower_bound(near)
    assert run.seconds >= bound * (1 - 1e-9)
    if (d + e * slots) ** 2 <= 4 * d * (d + e) * slots:
        assert bound == pytest.approx(run.seconds, rel=1e-4)
    mixed = StepWork(*(rng.exponential(x, (4, slots)) for x in (30.0, 30.0, 1.0, 1.0)))
    other = Scenario("mixed", 1, cost, [mixed], 1e9)
    assert simulate(other, ColocatePolicy(), decide_s=0.0).seconds >= lower_bound(other) * (1 - 1e-9)


def test_elastic_beats_both_baselines() -> None:
    """On the preset with the heaviest tail, shortened. (`gyre simulate` compares all ways on all presets.)"""
    scenario = PRESETS["terminal-tail"].scenario(seed=1, n_steps=3)
    elastic = simulate(scenario, ElasticPolicy(), staleness=1).seconds
    assert simulate(scenario, ColocatePolicy()).seconds > 1.3 * elastic
    assert simulate(scenario, ColocatePolicy(), staleness=1).seconds > elastic
    for k in (3, 4):  # the best fixed splits
        split = AsyncPolicy(tuple(f"c{i}" for i in range(k)))
        assert simulate(scenario, split, staleness=1).seconds > elastic


def test_an_order_of_launches_is_of_the_same_work_and_knows_only_what_an_epoch_before_told() -> None:
    preset = PRESETS["terminal"]
    shuffled, longest, oracle = (preset.scenario(2, 2, order) for order in ("shuffled", "longest_first", "oracle"))
    for drawn, guessed, known in zip(shuffled.steps, longest.steps, oracle.steps, strict=True):
        for other in (guessed, known):
            rows = [list(map(tuple, np.stack([s.tokens, s.tool_s, s.trained], axis=2))) for s in (drawn, other)]
            assert sorted(map(repr, rows[0])) == sorted(map(repr, rows[1]))
        size = [s.tokens.mean(axis=1) for s in (drawn, guessed, known)]
        falls = [float(np.corrcoef(x, np.arange(len(x)))[0, 1]) for x in size]
        assert falls[2] < falls[1] < -0.6 and abs(falls[0]) < 0.5
        seconds = known.seconds(preset.cost.token_s(preset.cost.slots), preset.time_limit_s).mean(axis=1)
        assert (np.diff(seconds) <= 0).all()
        guess = guessed.seconds(preset.cost.token_s(preset.cost.slots), preset.time_limit_s).mean(axis=1)
        assert (np.diff(guess) > 0).any(), "what this epoch takes is not known"
    colocate = [simulate(s, ColocatePolicy(), decide_s=5.0).seconds for s in (shuffled, longest)]
    assert colocate[1] < 0.95 * colocate[0]
    with pytest.raises(ValueError, match="names each of them once"):
        shuffled.steps[0].in_order([0, 0])


def test_traces_are_read_back_and_bad_ones_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "trace.json"
    scenario = PRESETS["terminal"].scenario(n_steps=1)
    write_trace(scenario, path)
    again = read_trace(path)
    assert simulate(again, ElasticPolicy()).seconds == simulate(scenario, ElasticPolicy()).seconds
    text = path.read_text()
    path.write_text(text.replace('"slots"', '"slotz"'))
    with pytest.raises(TraceError, match=r"cost\.slot"):
        read_trace(path)
    path.write_text(text.replace('"micro_batch_tokens": 262144', '"micro_batch_tokens": 0'))
    with pytest.raises(TraceError, match="micro_batch_tokens must be positive"):
        read_trace(path)
    assert run_command(["simulate", str(path)]) != 0
    assert "micro_batch_tokens must be positive" in capsys.readouterr().err


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = tmp_path / "timeline.html"
    assert run_command(["simulate", "terminal", "--steps", "2", "--timeline", str(page)]) == 0
    out = capsys.readouterr().out
    assert "elastic, staleness 1" in out and "async 5 of 6 train" in out and "best fixed split" in out
    html = page.read_text()
    assert html.count("<svg") in (
        6,
        7,
    )  # the breakdown, elastic and colocate at 1 and 0, async at the even and best split
    assert all(
        f"<h2>{way}" in html for way in ("elastic, st", "colocate, staleness 1", "colocate, staleness 0", "async 3")
    )
    told = {}
    for order in ([], ["--order", "longest_first"], ["--order", "shuffled"]):
        assert run_command(["simulate", "terminal", "--steps", "1", *order]) == 0
        told[" ".join(order)] = capsys.readouterr().out
    assert told[""] == told["--order longest_first"] != told["--order shuffled"]
    assert run_command(["simulate", "t.json", "--order", "oracle"]) == 2
    assert "--order: only a preset" in capsys.readouterr().err
    assert run_command(["simulate", "nonsense"]) != 0
    assert "no preset is named 'nonsense'" in capsys.readouterr().err
    assert run_command(["simulate"]) == 2
    assert "give a preset" in capsys.readouterr().err


def test_the_summary(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("gyre.cli.simulate.SUMMED", ("terminal",))
    monkeypatch.setenv("COLUMNS", "250")
    assert run_command(["simulate", "all", "--steps", "2", "--train-speed", "2"]) == 0
    out = capsys.readouterr().out
    assert "elastic at staleness 1 is faster by" in out and "of 6)" in out and "median" in out


@settings(max_examples=20, deadline=None)
@given(scenarios())
def test_a_summary_says_what_the_ways_say(scenario: Scenario) -> None:
    """Its ratios are those of the whole comparison; the best split it finds is no worse than the even one."""
    found = summarise(scenario, 1)
    seconds = {r.way.name: r.outcome.seconds for r in compare(scenario, 1)}
    ours = seconds["elastic, staleness 1"]
    cells = scenario.cells
    assert found.colocate == seconds["colocate, staleness 0"] / ours
    assert found.colocate_matched == seconds["colocate, staleness 1"] / ours
    assert found.even == seconds[f"async {cells // 2} of {cells} train, staleness 1"] / ours
    assert found.best == seconds[f"async {found.best_split} of {cells} train, staleness 1"] / ours <= found.even
    assert found.even <= found.even_bound * (1 + 1e-9)

"""Whether moving pays: a fit to what was measured, and a decision."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gyre.serving.kv_cost import (
    PAGE_TOKENS,
    WORTH,
    FetchCost,
    KvShape,
    Prefill,
    PrefillCost,
    decide,
    fit,
    least_tokens,
    refine,
)
from gyre.serving.kv_judge import KEPT, KvJudge
from gyre.training.hf_config import hf_shapes, shape_from_dict
from tests.serving.tiny_policy import CONFIG, write_policy

CPU = PrefillCost(0.02, 3e-3, 4e-7, True, "a guess")
"""About what SmolLM2-135M was measured to take on one core."""
DEVICE = replace(CPU, whole=False)
FETCH = FetchCost(0.05, 5e-5)

figures = st.floats(0.0, 1.0)
costs = st.builds(PrefillCost, figures, st.floats(1e-7, 1e-2), st.floats(0.0, 1e-6), st.booleans(), st.just("drawn"))
fetches = st.builds(FetchCost, figures, st.floats(0.0, 1e-3))
LENGTHS = (128, 256, 512, 1024, 2048)


def measured(cost: PrefillCost, lengths: tuple[int, ...] = LENGTHS, cached: int = 0) -> list[Prefill]:
    return [Prefill(n, cached, cost.seconds(n, cached)) for n in lengths]


def test_the_shape_counts_every_weight_of_the_layers(tmp_path: Path) -> None:
    shape = KvShape.read(write_policy(tmp_path, 0), 4)
    layers = {n: s for n, s in hf_shapes(shape_from_dict(CONFIG)).items() if "proj" in n}
    assert shape.flops_per_token == 2 * sum(rows * columns for rows, columns in layers.values())
    assert shape.bytes_per_token == 2 * 2 * 2 * 16 * 4  # keys and values, layers, heads, numbers, bytes
    assert KvShape.of(CONFIG, 2).bytes_per_token == shape.bytes_per_token // 2


def test_a_config_that_says_nothing_is_an_error_here() -> None:
    with pytest.raises(KeyError, match="num_hidden_layers"):
        KvShape.of({}, 4)


# ---- what a prefill costs ------------------------------------------------------------------------------------------


@given(costs)
def test_a_fit_finds_the_figures_that_made_what_was_measured(cost: PrefillCost) -> None:
    found = fit([*measured(cost), *measured(cost, cached=1024)], cost.whole, "f")
    for n in (100, 1024, 4096):
        assert found.seconds(n) == pytest.approx(cost.seconds(n), rel=1e-3)
        assert found.seconds(n, 512) == pytest.approx(cost.seconds(n, 512), rel=1e-3)
    assert found.whole == cost.whole and found.source == "f"


@given(st.lists(st.builds(Prefill, st.integers(1, 1 << 16), st.integers(0, 1 << 16), st.floats(1e-4, 1e3)), min_size=1))
def test_a_fit_has_no_figure_below_zero(prefills: list[Prefill]) -> None:
    found = fit(prefills, True, "")
    assert min(found.base_s, found.per_token_s, found.per_pair_s) >= 0
    assert max(found.base_s, found.per_token_s, found.per_pair_s) > 0


def test_a_fit_of_one_length_and_of_none() -> None:
    assert fit([Prefill(128, 0, 2.0)], True, "").seconds(128) == pytest.approx(2.0)
    with pytest.raises(ValueError, match="measured"):
        fit([], True, "")


def test_what_is_saved_is_what_is_left_to_compute_less() -> None:
    for cost in (CPU, DEVICE):
        assert cost.saved_s(1024, 1040) == pytest.approx(cost.seconds(1040) - cost.seconds(16, 1024))
        assert cost.saved_s(1024) == pytest.approx(1024 * 3e-3 + 1024 * 1024 / 2 * 4e-7)


def test_a_short_prefix_saves_no_attention_on_cpu() -> None:
    """There attention is computed whole where less than half of a prompt is cached."""
    assert CPU.saved_s(1000, 4096) == pytest.approx(1000 * 3e-3)
    assert DEVICE.saved_s(1000, 4096) == pytest.approx(1000 * 3e-3 + 1000 * 1000 / 2 * 4e-7)
    assert CPU.saved_s(3000, 4096) == pytest.approx(DEVICE.saved_s(3000, 4096))


def test_a_servers_own_prefills_replace_what_it_began_with() -> None:
    wrong = PrefillCost(0.0, 1.0, 0.0, True, "wrong")
    assert refine(wrong, []) is wrong
    found = refine(wrong, measured(CPU))
    assert found.source == "a fit to 5 prefills of this server"
    assert found.seconds(8192) == pytest.approx(CPU.seconds(8192), rel=1e-3)


def test_prefills_of_one_length_scale_what_it_began_with() -> None:
    slow = [Prefill(p.new, 0, 3 * p.seconds) for p in measured(CPU, (1000, 1010, 1020))]
    found = refine(CPU, slow)
    assert found.source == "a guess, times 3.00 by 3 prefills of this server"
    assert found.seconds(4096) == pytest.approx(3 * CPU.seconds(4096))
    assert found.saved_s(4096) == pytest.approx(3 * CPU.saved_s(4096))


def test_a_prefill_that_was_held_up_decides_nothing() -> None:
    usual = [p for _ in range(3) for p in measured(CPU)]
    assert refine(CPU, [*usual, Prefill(1024, 0, 300.0)]).seconds(2048) == pytest.approx(CPU.seconds(2048), rel=1e-3)


# ---- the decision --------------------------------------------------------------------------------------------------


def test_a_prefix_moves_where_that_takes_half_the_time_it_saves() -> None:
    good = decide(CPU, FETCH, 2048, 2064)
    assert good.fetch
    assert good.reason == (
        "2048 of 2064 tokens move in 0.152 s, which saves 6.983 s of prefill (a guess); 2 times is asked for"
    )
    bad = decide(CPU, FETCH, 16)
    assert not bad.fetch and bad.reason.startswith("16 of 16 tokens move in 0.051 s, which would save 0.048 s")


def test_what_was_measured_turns_the_decision_both_ways() -> None:
    judge = KvJudge(CPU, FETCH)
    assert judge.decide(2048).fetch
    for p in measured(CPU):  # this server is a thousand times faster
        judge.saw(Prefill(p.new, p.cached, p.seconds / 1000))
    assert not judge.decide(2048).fetch
    for p in measured(CPU) * KEPT:  # and is slow again: what it has measured last counts
        judge.saw(p)
    assert judge.decide(2048).fetch
    assert judge.counts == {"fetch": 2, "compute": 1}


def test_a_decision_is_logged_with_its_reason(caplog: pytest.LogCaptureFixture) -> None:
    judge = KvJudge(CPU, FETCH)
    judge.decide(2048)
    judge.decide(16)
    fetched, computed = (r.getMessage() for r in caplog.records)
    assert fetched.startswith("kv: fetched: 2048 of 2048 tokens move in 0.152 s, which saves")
    assert computed.startswith("kv: computed: 16 of 16 tokens move in 0.051 s, which would save")


def test_a_slow_link_moves_nothing() -> None:
    assert least_tokens(CPU, FETCH, 8192) is not None
    assert least_tokens(CPU, FetchCost(0.05, 5e-3), 8192) is None


@given(costs, fetches, st.integers(1, 1 << 20))
def test_the_threshold_is_where_moving_begins_to_pay(prefill: PrefillCost, fetch: FetchCost, context: int) -> None:
    least, longest = least_tokens(prefill, fetch, context), context // PAGE_TOKENS * PAGE_TOKENS
    if least is None:
        assert longest == 0 or not decide(prefill, fetch, longest).fetch
        return
    assert least % PAGE_TOKENS == 0 and PAGE_TOKENS <= least <= context
    assert decide(prefill, fetch, least).fetch and decide(prefill, fetch, longest).fetch
    assert least == PAGE_TOKENS or not decide(prefill, fetch, least - PAGE_TOKENS).fetch
    assert decide(prefill, fetch, (least + longest) // 2).fetch
    assert fetch.seconds(least) * WORTH <= prefill.saved_s(least)


@given(costs, fetches, st.integers(1, 1 << 16))
def test_a_faster_link_never_raises_the_threshold(prefill: PrefillCost, fetch: FetchCost, context: int) -> None:
    faster = replace(fetch, per_token_s=fetch.per_token_s / 2)
    before, after = least_tokens(prefill, fetch, context), least_tokens(prefill, faster, context)
    if before is not None:
        assert after is not None and after <= before

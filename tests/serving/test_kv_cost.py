"""Whether moving pays: a pure estimate."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gyre.serving.kv_cost import PAGE_TOKENS, KvRates, KvShape, least_tokens, pays, prefill_s, transfer_s
from gyre.training.hf_config import hf_shapes, shape_from_dict
from tests.serving.tiny_policy import CONFIG, write_policy

QUICKSTART = {
    "num_hidden_layers": 4, "hidden_size": 96, "intermediate_size": 256, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 24,
}  # fmt: skip
SMOLLM2 = {
    "num_hidden_layers": 30, "hidden_size": 576, "intermediate_size": 1536, "num_attention_heads": 9,
    "num_key_value_heads": 3,
}  # fmt: skip
ONE_CORE = KvRates(bytes_per_s=1e9, flops_per_s=5e10)

shapes = st.builds(
    KvShape,
    st.integers(1, 1 << 20),
    st.floats(1.0, 1e12, allow_nan=False),
    st.floats(0.0, 1e9, allow_nan=False),
)
rates = st.builds(KvRates, st.floats(1e6, 1e11), st.floats(1e9, 1e16))


def test_the_shape_counts_every_weight_of_the_layers(tmp_path: Path) -> None:
    shape = KvShape.read(write_policy(tmp_path, 0), 4)
    layers = {n: s for n, s in hf_shapes(shape_from_dict(CONFIG)).items() if "proj" in n}
    assert shape.flops_per_token == 2 * sum(rows * columns for rows, columns in layers.values())
    assert shape.bytes_per_token == 2 * 2 * 2 * 16 * 4  # keys and values, layers, heads, numbers, bytes
    assert KvShape.of(CONFIG, 2).bytes_per_token == shape.bytes_per_token // 2


def test_a_small_policy_with_short_contexts_moves_nothing() -> None:
    assert least_tokens(KvShape.of(QUICKSTART, 4), ONE_CORE, 1024) is None


def test_a_model_that_matters_moves_prefixes_above_a_threshold() -> None:
    shape = KvShape.of(SMOLLM2, 4)
    least = least_tokens(shape, ONE_CORE, 8192)
    assert least is not None and 0 < least < 1024
    assert prefill_s(shape, ONE_CORE, 8192) > 10 * transfer_s(shape, ONE_CORE, 8192)


def test_a_slow_link_moves_nothing() -> None:
    assert least_tokens(KvShape.of(SMOLLM2, 4), KvRates(1e6, 5e10), 8192) is None


@given(shapes, rates, st.integers(1, 1 << 20))
def test_the_threshold_is_where_moving_begins_to_pay(shape: KvShape, measured: KvRates, context: int) -> None:
    least = least_tokens(shape, measured, context)
    longest = context // PAGE_TOKENS * PAGE_TOKENS
    if least is None:
        assert longest == 0 or not pays(shape, measured, longest)
        return
    assert least % PAGE_TOKENS == 0 and PAGE_TOKENS <= least <= context
    assert pays(shape, measured, least) and pays(shape, measured, longest)
    assert least == PAGE_TOKENS or not pays(shape, measured, least - PAGE_TOKENS)
    assert pays(shape, measured, (least + longest) // 2)


@given(shapes, rates, st.integers(1, 1 << 16))
def test_a_faster_link_never_raises_the_threshold(shape: KvShape, measured: KvRates, context: int) -> None:
    faster = KvRates(measured.bytes_per_s * 2, measured.flops_per_s)
    before, after = least_tokens(shape, measured, context), least_tokens(shape, faster, context)
    if before is not None:
        assert after is not None and after <= before


def test_a_config_that_says_nothing_is_an_error_here() -> None:
    with pytest.raises(KeyError, match="num_hidden_layers"):
        KvShape.of({}, 4)

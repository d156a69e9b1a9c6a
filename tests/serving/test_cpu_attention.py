"""Attention for the new tokens alone gives what attention for all of them gives."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from gyre.serving.cpu_platform import define_torchvision_ops
from gyre.serving.cpu_platform.attention import BLOCK, extend, gains

HEADS, KEYS, HEAD, POOL = 6, 2, 16, 4096


@pytest.fixture(scope="module")
def whole() -> Any:
    define_torchvision_ops()
    from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend

    return TorchNativeAttnBackend._run_sdpa_forward_extend


def arguments(lengths: list[tuple[int, int]], dtype: torch.dtype = torch.float64) -> dict[str, Any]:
    """Of sequences of (new, cached) tokens, their keys and values strewn over the pool."""
    random = torch.Generator().manual_seed(len(lengths))
    new, cached = (torch.tensor(x) for x in zip(*lengths, strict=True))
    places, table = torch.randperm(POOL, generator=random), torch.zeros(len(lengths) + 3, POOL, dtype=torch.int64)
    rows = torch.arange(len(lengths)).flip(0) + 2
    for row, length in zip(rows, (new + cached).tolist(), strict=True):
        table[row, :length], places = places[:length], places[length:]
    total = int(new.sum())
    return {
        "query": torch.randn(total, HEADS, HEAD, generator=random, dtype=dtype),
        "output": torch.full((total, HEADS, HEAD), torch.nan, dtype=dtype),
        "k_cache": torch.randn(POOL, KEYS, HEAD, generator=random, dtype=dtype),
        "v_cache": torch.randn(POOL, KEYS, HEAD, generator=random, dtype=dtype),
        "req_to_token": table,
        "req_pool_indices": rows,
        "seq_lens": new + cached,
        "extend_prefix_lens": cached,
        "extend_seq_lens": new,
        "scaling": 0.3,
        "enable_gqa": True,
        "causal": True,
    }


@pytest.mark.parametrize(
    "lengths",
    [
        [(1, 1)],
        [(3, 700)],
        [(BLOCK, BLOCK)],
        [(BLOCK + 1, 2 * BLOCK)],
        [(40, 0), (5, 300), (90, 10), (7, 7)],
    ],
)
def test_it_equals_attention_for_all_tokens(whole: Any, lengths: list[tuple[int, int]]) -> None:
    assert any(gains(*pair) for pair in lengths)
    a, b = arguments(lengths), arguments(lengths)
    whole(None, **a)
    extend(whole, None, **b)
    assert torch.isfinite(b["output"]).all()
    torch.testing.assert_close(b["output"], a["output"], rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize(("dtype", "error"), [(torch.float32, 1e-5), (torch.bfloat16, 1e-2)])
@pytest.mark.parametrize("shared", [True, False])
def test_it_does_in_what_servers_compute_with(whole: Any, dtype: torch.dtype, error: float, shared: bool) -> None:
    """With heads that share keys and heads of their own; a sequence may have no new token."""
    a, b = (arguments([(5, 300), (0, 5), (40, 0), (7, 7)], dtype) for _ in range(2))
    for one in (a, b):
        one |= {"req_to_token": one["req_to_token"].int(), "scaling": None, "enable_gqa": shared}
        for cache in () if shared else ("k_cache", "v_cache"):
            one[cache] = one[cache].repeat_interleave(HEADS // KEYS, 1)
    whole(None, **a)
    extend(whole, None, **b)
    torch.testing.assert_close(b["output"], a["output"], rtol=0, atol=error)


def test_new_tokens_do_not_see_what_comes_after_them(whole: Any) -> None:
    a, b = arguments([(8, 64)]), arguments([(8, 64)])
    last = b["req_to_token"][b["req_pool_indices"][0], 71]
    b["v_cache"][last] += 1.0
    extend(whole, None, **a)
    extend(whole, None, **b)
    assert torch.equal(a["output"][:7], b["output"][:7]) and not torch.equal(a["output"][7], b["output"][7])


def test_what_is_not_plain_is_left_to_sglang() -> None:
    """So is a prompt of which little is cached."""
    asked: list[Any] = []

    def whole(*args: Any) -> None:
        asked.append(args[-5:])

    for lengths, other in (
        ([(3, 700)], {"causal": False}),
        ([(3, 700)], {"sliding_window_size": 64}),
        ([(3, 700)], {"encoder_lens": torch.tensor([4])}),
        ([(300, 20)], {}),
    ):
        extend(whole, None, **{**arguments(lengths), **other})
    assert len(asked) == 4

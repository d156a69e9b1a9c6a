"""Packed attention and rotary embedding against plain formulas in float64."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from gyre.training.attention import rotate, segment_attention
from gyre.training.norm import RmsNorm
from gyre.training.packing import pack, rotary_tables
from gyre.trajectory.packed import TreeRow


def plain(q, k, v, lengths, scale):
    """softmax(q k^T scale, causal) v of each sequence, with key and value heads repeated."""
    repeat = q.size(1) // k.size(1)
    outs = []
    for a, b, c in zip(q.split(lengths), k.split(lengths), v.split(lengths), strict=True):
        b, c = b.repeat_interleave(repeat, 1), c.repeat_interleave(repeat, 1)
        scores = torch.einsum("qhd,khd->hqk", a, b) * scale
        hidden = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
        outs.append(torch.einsum("hqk,khd->qhd", scores.masked_fill(hidden, -torch.inf).softmax(-1), c))
    return torch.cat(outs)


@pytest.mark.parametrize("lengths", [(1,), (5, 5, 5, 9), (70, 1, 130, 130), (64, 64, 65, 65)])
@pytest.mark.parametrize("kv_heads", [1, 2, 6])
def test_attention_equals_the_formula(lengths, kv_heads):
    torch.manual_seed(0)
    total, heads, d = sum(lengths), 6, 8
    q = torch.randn(total, heads, d, dtype=torch.float64, requires_grad=True)
    # Keys and values come as strided views of one projection, as in Megatron.
    kv = torch.randn(total, kv_heads, 2 * d, dtype=torch.float64, requires_grad=True)
    grad = torch.randn_like(q)
    results = []
    for attend, row in ((segment_attention, TreeRow.sequences(lengths)), (plain, lengths)):
        out = attend(q, *kv.split(d, -1), row, 0.3)
        results.append((out.detach(), *torch.autograd.grad(out, (q, kv), grad)))
    for mine, formula in zip(*results, strict=True):
        torch.testing.assert_close(mine, formula, atol=1e-10, rtol=0)


def test_rotation_is_of_complex_pairs_by_position():
    torch.manual_seed(0)
    positions = torch.tensor([0, 1, 2, 500])
    x = torch.randn(4, 3, 16, dtype=torch.float64, requires_grad=True)
    cos, sin = rotary_tables(positions, 16, 1e4, torch.float64)
    out = rotate(x, cos, sin)
    pairs = torch.complex(x[..., :8], x[..., 8:])
    angles = positions[:, None] * 1e4 ** (-torch.arange(8, dtype=torch.float64) / 8)
    turned = pairs * torch.polar(torch.ones_like(angles), angles)[:, None]
    torch.testing.assert_close(out, torch.cat([turned.real, turned.imag], -1), atol=1e-10, rtol=0)
    assert torch.autograd.gradcheck(lambda t: rotate(t, cos, sin), x)


@pytest.mark.parametrize("shape", [(5, 8), (3, 2, 4), (1, 1, 1, 6)])
def test_rms_norm_equals_torchs(shape):
    torch.manual_seed(0)
    norm = RmsNorm(SimpleNamespace(params_dtype=torch.float64), shape[-1], eps=1e-3)
    norm.weight.data.normal_()
    x = torch.randn(shape, dtype=torch.float64, requires_grad=True)
    grad = torch.randn_like(x)
    out, expected = norm(x), torch.nn.functional.rms_norm(x, shape[-1:], norm.weight, 1e-3)
    torch.testing.assert_close(out, expected, atol=1e-12, rtol=0)
    for a, b in zip(*(torch.autograd.grad(y, (x, norm.weight), grad) for y in (out, expected)), strict=True):
        torch.testing.assert_close(a, b, atol=1e-12, rtol=0)


def test_every_packed_sequence_starts_at_position_zero():
    packed, positions = pack(TreeRow.sequences((3, 1, 2)), 8, 1e4, torch.float32)
    assert positions.tolist() == [[0, 1, 2, 0, 0, 1]]
    assert packed.cu_seqlens_q.tolist() == [0, 3, 4, 6]
    assert packed.max_seqlen_q == 3

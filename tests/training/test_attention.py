"""Tree attention and rotary embedding against plain formulas in float64."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch.nn.attention.flex_attention import create_block_mask, create_mask, flex_attention

from gyre.training import norm as norm_module
from gyre.training.attention import block_mask, mask_attention, rotate, segment_attention, tree_mask
from gyre.training.norm import RmsNorm
from gyre.training.packing import pack, rotary_tables
from gyre.trajectory.packed import TreeRow

ROWS = {
    "sequences": TreeRow.sequences((70, 1, 130, 130)),
    "short equal sequences": TreeRow.sequences((5, 5, 5, 9)),
    "at the batching border": TreeRow.sequences((64, 64, 65, 65)),
    "one token": TreeRow.sequences((1,)),
    "fork": TreeRow((40, 70, 70, 3), (-1, 0, 0, 0)),
    "one-token segments": TreeRow((1, 1, 1, 1, 1), (-1, 0, 1, 1, 0)),
    "a deep comb": TreeRow((9, *(4, 6) * 8), (-1, *(x for i in range(8) for x in (2 * i, 2 * i)))),
    "forest": TreeRow((20, 30, 1, 25, 2, 33, 90), (-1, 0, 1, 1, -1, 4, -1)),
}


LONG = {
    "four leaves": TreeRow((512,) * 5, (-1, 0, 0, 0, 0)),
    "nothing on a border": TreeRow((300, 130, 700, 1, 90, 257), (-1, 0, 1, 1, 0, -1)),
    "one block": TreeRow((100, 28), (-1, 0)),
}


def plain(q, k, v, row, scale):
    """softmax(q k^T scale, masked) v, with key and value heads repeated."""
    repeat = q.size(1) // k.size(1)
    k, v = k.repeat_interleave(repeat, 1), v.repeat_interleave(repeat, 1)
    scores = torch.einsum("qhd,khd->hqk", q, k) * scale
    scores = scores.masked_fill(~torch.from_numpy(row.mask()), -torch.inf)
    return torch.einsum("hqk,khd->qhd", scores.softmax(-1), v)


def flex(q, k, v, row, scale):
    return mask_attention(q, k, v, block_mask(row, q.device), scale, flex_attention)


def inputs(row, kv_heads, dtype=torch.float64):
    torch.manual_seed(0)
    q = torch.randn(row.tokens, 6, 16, dtype=dtype, requires_grad=True)
    # Keys and values come as strided views of one projection, as in Megatron.
    return q, torch.randn(row.tokens, kv_heads, 32, dtype=dtype, requires_grad=True), torch.randn_like(q)


@pytest.mark.parametrize("row", ROWS.values(), ids=ROWS)
@pytest.mark.parametrize("kv_heads", [1, 2, 6])
def test_attention_equals_the_formula(row, kv_heads):
    q, kv, grad = inputs(row, kv_heads)
    results = []
    for attend in (segment_attention, plain):
        k, v = kv.split(16, -1)
        out = attend(q, k, v, row, 0.3)
        results.append((out.detach(), *torch.autograd.grad(out, (q, kv), grad)))
    for mine, formula in zip(*results, strict=True):
        torch.testing.assert_close(mine, formula, atol=1e-10, rtol=0)


@pytest.mark.parametrize("row", ROWS.values(), ids=ROWS)
def test_the_mask_for_a_gpu_is_the_tree_mask(row):
    reach = torch.from_numpy(row.reach())
    found = create_mask(tree_mask(reach), None, None, row.tokens, row.tokens, device="cpu")[0, 0]
    assert torch.equal(found, torch.from_numpy(row.mask()))


@pytest.mark.filterwarnings("ignore:.*flex_attention.*")
@pytest.mark.parametrize("row", [ROWS["fork"], ROWS["forest"], LONG["nothing on a border"]])
def test_flex_attention_with_the_block_mask_equals_the_formula(row):
    q, kv = (x.detach() for x in inputs(row, 2)[:2])
    k, v = kv.split(16, -1)
    found, formula = (attend(q, k, v, row, 0.3) for attend in (flex, plain))
    torch.testing.assert_close(found, formula, atol=1e-10, rtol=0)


@pytest.mark.parametrize("row", [*ROWS.values(), *LONG.values()], ids=[*ROWS, *LONG])
def test_blocks_are_those_of_the_whole_mask(row):
    reach = torch.from_numpy(row.reach())
    whole = create_block_mask(tree_mask(reach), None, None, row.tokens, row.tokens, device="cpu")
    mine = block_mask(row, torch.device("cpu"))
    assert torch.equal(mine.to_dense(), whole.to_dense())

    def full(mask):
        pairs = zip(mask.full_kv_num_blocks[0, 0].tolist(), mask.full_kv_indices[0, 0].tolist(), strict=True)
        return [sorted(indices[:count]) for count, indices in pairs]

    whole_blocks = full(whole)
    for query, (found, expected) in enumerate(zip(full(mine), whole_blocks, strict=True)):
        # The last block of queries may be cut short: then whether it is full is a matter of what lies beyond the row.
        assert found == expected or query == len(whole_blocks) - 1


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


@pytest.mark.parametrize("cached", [1, 16, 1 << 16])
@pytest.mark.parametrize("shape", [(5, 8), (3, 2, 4), (1, 1, 1, 6)])
def test_rms_norm_equals_torchs(monkeypatch, shape, cached):
    monkeypatch.setattr(norm_module, "_CACHED", cached)
    torch.manual_seed(0)
    norm = RmsNorm(SimpleNamespace(params_dtype=torch.float64), shape[-1], eps=1e-3)
    norm.weight.data.normal_()
    x = torch.randn(shape, dtype=torch.float64, requires_grad=True)
    grad = torch.randn_like(x)
    out, expected = norm(x), torch.nn.functional.rms_norm(x, shape[-1:], norm.weight, 1e-3)
    torch.testing.assert_close(out, expected, atol=1e-12, rtol=0)
    for a, b in zip(*(torch.autograd.grad(y, (x, norm.weight), grad) for y in (out, expected)), strict=True):
        torch.testing.assert_close(a, b, atol=1e-12, rtol=0)


def test_positions_are_depths_and_a_sequence_of_megatrons_is_a_tree():
    packed, positions = pack(TreeRow((3, 2, 1, 2), (-1, 0, 0, -1)), 8, 1e4, torch.float32)
    assert positions.tolist() == [[0, 1, 2, 3, 4, 3, 0, 1]]
    assert packed.cu_seqlens_q.tolist() == [0, 6, 8]
    assert packed.max_seqlen_q == 6
    assert torch.equal(packed.cos[3], packed.cos[5])

"""A row of token trees as Megatron's `thd` format, with positions by depth and their rotary tables."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gyre.training import megatron_cpu
from gyre.trajectory.packed import TreeRow

megatron_cpu.install()

from megatron.core.packed_seq_params import PackedSeqParams  # noqa: E402


@dataclass
class PackedTrees(PackedSeqParams):  # type: ignore[misc]
    """Megatron's packed-sequence description (a sequence is a whole tree), plus what the core attention needs.

    Made once a micro-batch. `cos` [T, head_dim] and `sin` [T, head_dim / 2] are the rotary tables of the row's
    positions. `block_mask` is FlexAttention's, which the first layer on a CUDA device makes for all.
    """

    row: TreeRow | None = None
    cos: Tensor | None = None
    sin: Tensor | None = None
    block_mask: Any = None


def rotary_tables(positions: Tensor, head_dim: int, theta: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """cos [T, head_dim], twice the same half, and sin [T, head_dim / 2] of `positions` [T]: angles in float32 as the
    inference engines compute them.

    (In float64 for a float64 model, so that tests can compare to 1e-10.)
    """
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    exponent = torch.arange(0, head_dim, 2, device=positions.device).to(wide) / head_dim
    angles = torch.outer(positions.to(wide), 1.0 / (theta**exponent))
    cos = angles.cos().to(dtype)
    return torch.cat((cos, cos), 1), angles.sin().to(dtype)


def pack(
    row: TreeRow, head_dim: int, theta: float, dtype: torch.dtype, device: torch.device | None = None
) -> tuple[PackedTrees, Tensor]:
    """Describe `row` to the model; also its positions, int64 [1, T]."""
    roots = [start for start, parent in zip(row.starts, row.parents, strict=True) if parent < 0]
    bounds = torch.tensor([*roots, row.tokens], dtype=torch.int32)
    longest = int(bounds.diff().max())
    positions = torch.from_numpy(row.positions()).to(device)
    bounds = bounds.to(device)
    cos, sin = rotary_tables(positions, head_dim, theta, dtype)
    packed = PackedTrees(
        qkv_format="thd",
        cu_seqlens_q=bounds,
        cu_seqlens_kv=bounds,
        max_seqlen_q=longest,
        max_seqlen_kv=longest,
        row=row,
        cos=cos,
        sin=sin,
    )
    return packed, positions[None]

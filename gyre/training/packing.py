"""Sequences packed one after another into a row, as Megatron's `thd` format, with their positions and rotary tables."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from gyre.training import megatron_cpu

megatron_cpu.install()

from megatron.core.packed_seq_params import PackedSeqParams  # noqa: E402


@dataclass
class PackedSequences(PackedSeqParams):  # type: ignore[misc]
    """Megatron's packed-sequence description, plus what the core attention needs, made once a micro-batch.

    `lengths` are those of the packed sequences, in tokens, and sum to T. `cos` and `sin` are the rotary tables of the
    packed positions, [T, head_dim / 2].
    """

    lengths: tuple[int, ...] = ()
    cos: Tensor | None = None
    sin: Tensor | None = None


def rotary_tables(positions: Tensor, head_dim: int, theta: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """cos and sin, [T, head_dim / 2], of `positions` [T]: angles in float32 as the inference engines compute them.

    (In float64 for a float64 model, so that tests can compare to 1e-10.)
    """
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    exponent = torch.arange(0, head_dim, 2, device=positions.device).to(wide) / head_dim
    angles = torch.outer(positions.to(wide), 1.0 / (theta**exponent))
    return angles.cos().to(dtype), angles.sin().to(dtype)


def pack(
    lengths: Sequence[int], head_dim: int, theta: float, dtype: torch.dtype, device: torch.device | None = None
) -> tuple[PackedSequences, Tensor]:
    """Describe sequences of `lengths` that lie one after another; also their positions, int64 [1, T].

    Every sequence starts at position 0. Raises ValueError for no sequence or an empty one.
    """
    if not lengths or min(lengths) < 1:
        raise ValueError(f"a packed row needs sequences of at least one token, got lengths {list(lengths)}")
    sizes = torch.tensor(lengths, dtype=torch.int32)
    bounds = torch.zeros(len(lengths) + 1, dtype=torch.int32)
    torch.cumsum(sizes, 0, out=bounds[1:])
    total, longest = int(bounds[-1]), max(lengths)
    positions = torch.arange(total) - bounds[:-1].long().repeat_interleave(sizes.long())
    bounds, positions = bounds.to(device), positions.to(device)
    cos, sin = rotary_tables(positions, head_dim, theta, dtype)
    packed = PackedSequences(
        qkv_format="thd",
        cu_seqlens_q=bounds,
        cu_seqlens_kv=bounds,
        max_seqlen_q=longest,
        max_seqlen_kv=longest,
        lengths=tuple(lengths),
        cos=cos,
        sin=sin,
    )
    return packed, positions[None]

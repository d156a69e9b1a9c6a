"""Token ids and log-probs as bytes: little-endian int32 and float32, whatever machine writes them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

_IDS = np.dtype("<i4")
_LOGPROBS = np.dtype("<f4")


def pack_ids(ids: NDArray[np.integer] | Sequence[int]) -> bytes:
    """Token ids [n] as 4n bytes. Raises ValueError for ids that are negative, beyond int32 or not integers."""
    array = np.asarray(ids)
    if array.size == 0:
        return b""
    if not np.issubdtype(array.dtype, np.integer):
        raise ValueError(f"token ids: must be integers, got {array.dtype}")
    if array.min() < 0 or array.max() > np.iinfo(np.int32).max:
        raise ValueError(f"token ids: must lie in 0..2**31-1, got {array.min()}..{array.max()}")
    return array.astype(_IDS).tobytes()


def unpack_ids(data: bytes) -> NDArray[np.int32]:
    """int32 [n] from 4n bytes; the array is read-only and shares the bytes' memory."""
    return np.frombuffer(data, dtype=_IDS)


def pack_logprobs(logprobs: NDArray[np.floating] | Sequence[float]) -> bytes:
    """Log-probs [n] as 4n bytes of float32. Raises ValueError for NaN: a log-prob nobody knows is never stored."""
    array = np.asarray(logprobs, dtype=_LOGPROBS)
    if np.isnan(array).any():
        raise ValueError(f"log-probs: NaN at positions {np.flatnonzero(np.isnan(array))[:5].tolist()}")
    return array.tobytes()


def unpack_logprobs(data: bytes) -> NDArray[np.float32]:
    """float32 [n] from 4n bytes; the array is read-only and shares the bytes' memory."""
    return np.frombuffer(data, dtype=_LOGPROBS)

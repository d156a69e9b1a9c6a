"""Megatron's process groups, and what the ranks of one trainer say to each other outside of Megatron.

One rank needs no port or environment; several come from `torchrun`, or from a leader that starts its followers
(`gyre.training.ranks`).
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from gyre.config import LayoutConfig
from gyre.training import megatron_cpu
from gyre.training.protocol import RENDEZVOUS
from gyre.training.shards import Shard

megatron_cpu.install()

from megatron.core import parallel_state  # noqa: E402
from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed  # noqa: E402

_FOREVER = timedelta(days=365)
"""A follower waits for the next command as long as its leader has none."""

_MESSAGE = 64 << 20
"""Bytes that small tensors are gathered to before they are sent; a larger one travels alone."""

_Head = tuple[str, tuple[int, ...], torch.dtype]

_control: dist.ProcessGroup | None = None


class LayoutError(Exception):
    """Processes and layout that do not fit; the message is one line."""


def initialize(seed: int = 0, layout: LayoutConfig | None = None) -> None:
    """Make the default process group and Megatron's, once a process; later calls only seed again.

    With `protocol.RENDEZVOUS` or under `torchrun`, rank and world come from the environment; otherwise the world is
    this process alone and the rendezvous is a store in memory, so that no port is taken. Raises LayoutError where the
    world is not tensor_parallel x pipeline_parallel processes, or the process groups are of another layout.
    """
    layout = layout or LayoutConfig()
    if not dist.is_initialized():
        _initialize_world()
    if dist.get_world_size() != layout.ranks:
        raise LayoutError(
            f"layout: tensor_parallel = {layout.tensor_parallel} x pipeline_parallel = {layout.pipeline_parallel} "
            f"needs {layout.ranks} processes, here are {dist.get_world_size()}"
        )
    if not parallel_state.model_parallel_is_initialized():
        parallel_state.initialize_model_parallel(layout.tensor_parallel, layout.pipeline_parallel)
        global _control
        _control = dist.new_group(backend="gloo", timeout=_FOREVER)
    shard = own_shard()
    if (shard.tp, shard.pp) != (layout.tensor_parallel, layout.pipeline_parallel):
        raise LayoutError(f"layout: this process trains tensor_parallel = {shard.tp} x pipeline_parallel = {shard.pp}")
    model_parallel_cuda_manual_seed(seed)


def _initialize_world() -> None:
    backend = "nccl" if torch.cuda.is_available() else "gloo"
    rank, world = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    if torch.cuda.is_available() and world > 1:
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", rank)))
    if path := os.environ.get(RENDEZVOUS):
        # Ranks of one machine talk over its loopback: a container's host name need not resolve.
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        dist.init_process_group(
            backend, store=torch._C._distributed_c10d.FileStore(path, world), rank=rank, world_size=world
        )
    elif "TORCHELASTIC_RUN_ID" in os.environ:
        dist.init_process_group(backend)
    else:
        dist.init_process_group(backend, store=torch._C._distributed_c10d.HashStore(), rank=0, world_size=1)


def own_shard() -> Shard:
    """The part of a model that this rank holds."""
    return Shard(
        tp=parallel_state.get_tensor_model_parallel_world_size(),
        tp_rank=parallel_state.get_tensor_model_parallel_rank(),
        pp=parallel_state.get_pipeline_model_parallel_world_size(),
        pp_rank=parallel_state.get_pipeline_model_parallel_rank(),
    )


def shard_of(rank: int) -> Shard:
    """The part of a model that `rank` holds: Megatron's order, tensor-parallel ranks next to each other."""
    mine = own_shard()
    return Shard(tp=mine.tp, tp_rank=rank % mine.tp, pp=mine.pp, pp_rank=rank // mine.tp)


def rank() -> int:
    """This process's rank among the trainer's. Rank 0 leads."""
    return dist.get_rank()


def world() -> int:
    """Processes of this trainer."""
    return dist.get_world_size()


def broadcast(value: Any, source: int = 0) -> Any:
    """`value` of rank `source`, on every rank. A rank waits here as long as it takes."""
    if world() == 1:
        return value
    box = [value]
    dist.broadcast_object_list(box, src=source, group=_control)
    return box[0]


def broadcast_from_last_stage(value: Any) -> Any:
    """`value` of the rank that computes the loss, on every rank."""
    return broadcast(value, source=world() - 1)


def total(count: int) -> int:
    """The sum of every rank's `count`."""
    if world() == 1:
        return count
    box = torch.tensor(count, dtype=torch.int64)
    dist.all_reduce(box, group=_control)
    return int(box)


def collect(part: Mapping[str, Tensor]) -> Iterator[tuple[Shard, dict[str, Tensor]]]:
    """Rank 0: its own part, then what every other rank gives, one after another, on the CPU."""
    yield own_shard(), dict(part)
    for other in range(1, world()):
        yield shard_of(other), dict(_receive(other))


def give(part: Mapping[str, Tensor]) -> None:
    """The other ranks: send a part to rank 0, which collects."""
    _send(part, 0)


def spread(parts: Iterator[tuple[int, Mapping[str, Tensor]]] | None) -> dict[str, Tensor]:
    """This rank's part of what rank 0 has. Rank 0 gives (rank, part) of every rank in ascending order; others None."""
    if rank() != 0:
        return dict(_receive(0))
    assert parts is not None, "rank 0 gives the parts"
    mine: dict[str, Tensor] = {}
    for other, part in parts:
        if other == 0:
            mine = dict(part)
        else:
            _send(part, other)
    return mine


def _send(part: Mapping[str, Tensor], to: int) -> None:
    head = [(name, tuple(t.shape), t.dtype) for name, t in part.items()]
    dist.send_object_list([head], dst=to, group=_control)
    for names in _bundles(head):
        dist.send(torch.cat([part[name].detach().cpu().reshape(-1) for name in names]), dst=to, group=_control)


def _receive(source: int) -> Iterator[tuple[str, Tensor]]:
    box: list[Any] = [None]
    dist.recv_object_list(box, src=source, group=_control)
    head: list[_Head] = box[0]
    sizes = {name: (size, dtype) for name, size, dtype in head}
    for names in _bundles(head):
        counts = [math.prod(sizes[name][0]) for name in names]
        flat = torch.empty(sum(counts), dtype=sizes[names[0]][1])
        dist.recv(flat, src=source, group=_control)
        for name, piece in zip(names, torch.split(flat, counts), strict=True):
            yield name, piece.view(sizes[name][0])


def _bundles(head: list[_Head]) -> Iterator[list[str]]:
    """Neighbours of one dtype that travel as one message."""
    names: list[str] = []
    held, last = 0, None
    for name, size, dtype in head:
        count = math.prod(size) * dtype.itemsize
        if names and (dtype != last or held + count > _MESSAGE):
            yield names
            names, held = [], 0
        names.append(name)
        held, last = held + count, dtype
    if names:
        yield names

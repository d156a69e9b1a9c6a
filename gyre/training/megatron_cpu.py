"""A stand-in for the CUDA calls that Megatron-Core 0.19 makes unconditionally, so that it runs on a CPU with gloo.

`install()` does nothing where CUDA is available: a GPU runs untouched Megatron. No file of the package is edited. Three
kinds of call are redirected:

1. `torch.cuda.{current_device, synchronize, current_stream, Stream, Event, RNG state, manual_seed}` to what a CPU has;
2. `device="cuda"` in tensor factories, `pin_memory=True` and `Tensor.cuda()`;
3. string tests of `Tensor.type()` in the mixed-precision optimizers, only inside those functions.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.utils._device

_FACTORIES = (
    *("tensor", "zeros", "ones", "empty", "full", "arange", "rand", "randn", "randint", "eye", "linspace"),
    *("as_tensor", "scalar_tensor", "zeros_like", "ones_like", "empty_like", "full_like", "rand_like", "randn_like"),
)

_installed = False


class _Stream:
    """A CPU runs in order: every stream is the same nothing."""

    cuda_stream = 0

    def __init__(self, *args: object, **kwargs: object) -> None: ...

    def wait_stream(self, *args: object) -> None: ...

    def wait_event(self, *args: object) -> None: ...

    def record_event(self, event: _Event | None = None) -> _Event:
        return event or _Event()

    def synchronize(self) -> None: ...

    def query(self) -> bool:
        return True

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Stream)

    def __hash__(self) -> int:
        return 0

    @staticmethod
    def priority_range() -> tuple[int, int]:
        return (0, 0)


class _Event:
    def __init__(self, *args: object, **kwargs: object) -> None: ...

    def record(self, *args: object) -> None: ...

    def wait(self, *args: object) -> None: ...

    def synchronize(self) -> None: ...

    def query(self) -> bool:
        return True

    def elapsed_time(self, other: _Event) -> float:
        return 0.0


def install() -> bool:
    """Redirect Megatron's CUDA calls to the CPU; True if it did, False where CUDA is there or it was done before."""
    global _installed
    if _installed or torch.cuda.is_available():
        return False
    _installed = True
    # Rows make tensors of many megabytes, which come new from the system each time: in pages of 2 MB where it has them
    # (Linux: transparent_hugepage/enabled), instead of 4 KB. torch reads this at its first tensor.
    os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")
    _quiet()
    _redirect_cuda()
    _redirect_factories()
    _redirect_megatron()
    return True


def _quiet() -> None:
    # Megatron warns about each missing GPU-only package (Apex, Transformer Engine, flash-attention) at import.
    os.environ.setdefault("NVTE_FRAMEWORK", "none")
    warnings.filterwarnings("ignore", module=r"megatron\..*")
    logging.getLogger("megatron").setLevel(logging.ERROR)
    # Megatron configures the root logger's level; messages of the factories it compiles are noise on a CPU.
    logging.getLogger("torch.distributed").setLevel(logging.ERROR)


def _redirect_cuda() -> None:
    cpu = torch.device("cpu")
    cuda: Any = torch.cuda
    cuda.current_device = lambda: cpu
    cuda.synchronize = lambda *a, **k: None
    cuda.current_stream = lambda *a, **k: _Stream()
    cuda.Stream = _Stream
    cuda.Event = _Event
    cuda.stream = lambda s: contextlib.nullcontext()
    cuda.set_device = lambda *a: None
    cuda.get_rng_state = cuda.random.get_rng_state = lambda *a, **k: torch.get_rng_state()
    cuda.set_rng_state = lambda s, *a, **k: torch.set_rng_state(s)
    cuda.manual_seed = lambda s: torch.manual_seed(s)


def _is_cuda(device: object) -> bool:
    if isinstance(device, torch.device):
        return device.type == "cuda"
    return isinstance(device, str) and device.startswith("cuda")


def _redirect_factories() -> None:
    # `with torch.device(...)` knows the factories by identity, from a set that it makes once: it must hold the
    # originals, which the wrappers call. Otherwise transformers' from_pretrained leaves rotary tables uninitialised.
    torch.utils._device._device_constructors()
    for name in _FACTORIES:
        setattr(torch, name, _on_cpu(getattr(torch, name)))
    tensor: Any = torch.Tensor
    tensor.cuda = lambda self, *a, **k: self


def _on_cpu(factory: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    @functools.wraps(factory)
    def wrapped(*args: Any, **kwargs: Any) -> torch.Tensor:
        if kwargs:
            if _is_cuda(kwargs.get("device")):
                kwargs["device"] = torch.device("cpu")
            if kwargs.get("pin_memory"):
                kwargs["pin_memory"] = False
        return factory(*args, **kwargs)

    return wrapped


@contextlib.contextmanager
def _without_compiler() -> Iterator[None]:
    """`torch.compile` returns functions as they are, so that Megatron's import does not import the compiler.

    That is a third of the time it takes, for fusions that are off here.
    """
    module: Any = torch
    original = module.compile
    module.compile = lambda model=None, **kwargs: (lambda f: f) if model is None else model
    try:
        yield
    finally:
        module.compile = original


def _redirect_megatron() -> None:
    with _without_compiler():
        import megatron.core.tensor_parallel.random as random
        from megatron.core.optimizer import clip_grads, distrib_optimizer, optimizer
        from megatron.core.transformer.moe import token_dispatcher

    random._get_cuda_rng_state = lambda device="cuda", clone=False, graph_safe=False: torch.get_rng_state()
    random._set_cuda_rng_state = lambda s, device=-1, graph_safe=False: torch.set_rng_state(s)
    # The tracker warns when the CPU generator moves inside a "GPU" context; on a CPU that is the point.
    logging.getLogger(random.__name__).addFilter(lambda r: "CPU RNG state changed" not in r.getMessage())

    # Split sizes of the expert all-to-all become numpy arrays only when they were on a GPU.
    def to_cpu(t: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
        return t.detach().numpy() if as_numpy and torch.is_tensor(t) else t

    token_dispatcher.maybe_move_tensor_to_cpu = to_cpu

    half, sharded = optimizer.Float16OptimizerWithFloat16Params, distrib_optimizer.DistributedOptimizer
    half.__init__ = _with_cuda_type_names(half.__init__)
    sharded.__init__ = _with_cuda_type_names(sharded.__init__)
    clip = _with_cuda_type_names(clip_grads.clip_grad_by_total_norm_fp32)
    optimizer.clip_grad_by_total_norm_fp32 = clip_grads.clip_grad_by_total_norm_fp32 = clip


def _with_cuda_type_names(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        with _cuda_type_names():
            return function(*args, **kwargs)

    return wrapped


@contextlib.contextmanager
def _cuda_type_names() -> Iterator[None]:
    tensor: Any = torch.Tensor
    original = tensor.type

    def named(self: torch.Tensor, dtype: Any = None, *args: Any, **kwargs: Any) -> Any:
        if dtype is not None:
            return original(self, dtype, *args, **kwargs)
        return original(self).replace("torch.", "torch.cuda.", 1)

    tensor.type = named
    try:
        yield
    finally:
        tensor.type = original

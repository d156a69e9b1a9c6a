"""The optimizer's state by Hugging Face's names: the same whatever the layout that made it, or that takes it.

    {"step": optimizer steps taken, "exp_avg": {name: tensor}, "exp_avg_sq": {name: tensor}}

and, for weights below float32, `master`: their float32 copies, which the optimizer works on. Hyperparameters are not
state: they are the run file's.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from gyre.training import parallel
from gyre.training.model import Policy

MOMENTS = ("exp_avg", "exp_avg_sq")


def export_state(policy: Policy, optimizer: Any) -> dict[str, Any]:
    """State of Megatron's Adam, on the CPU. With several ranks all call it; rank 0 gets it, the others {}."""
    main = _main_parameters(policy)
    states = _states(optimizer)
    found = {name: states.get(parameter, {}) for name, parameter in main.items()}
    steps = {int(s["step"]) if s else 0 for s in found.values()}
    if len(steps) != 1:
        raise RuntimeError(f"parameters have taken different numbers of steps: {sorted(steps)}")
    state: dict[str, Any] = {"step": steps.pop()}
    if state["step"]:
        for moment in MOMENTS:
            state[moment] = _copied(policy.to_hf({name: s[moment] for name, s in found.items()}))
    if _has_masters(policy):
        state["master"] = _copied(policy.to_hf({name: p.detach() for name, p in main.items()}))
    return state if parallel.rank() == 0 else {}


def import_state(policy: Policy, optimizer: Any, state: dict[str, Any] | None) -> None:
    """Put what `export_state` gave into a fresh optimizer. With several ranks all call it: rank 0 with the state, the
    others with None. Raises WeightsError for tensors that do not fit."""
    step, names = parallel.broadcast(None if state is None else (state["step"], [n for n in state if n != "step"]))
    main = _main_parameters(policy)
    parts = {name: policy.from_hf(None if state is None else state[name]) for name in names}
    if "master" in parts:
        with torch.no_grad():
            for name, parameter in main.items():
                parameter.copy_(parts["master"][name])
    if step:
        states = _states(optimizer)
        for name, parameter in main.items():
            states[parameter] = {
                "step": torch.tensor(float(step)),
                **{m: parts[m][name].to(parameter.device, parameter.dtype, copy=True) for m in MOMENTS},
            }


def state_tensors(policy: Policy, optimizer: Any) -> list[Tensor]:
    """All that the optimizer holds in memory: moments, and float32 copies of weights below that."""
    moments = [t for state in _states(optimizer).values() for t in state.values() if isinstance(t, Tensor)]
    return [*moments, *_main_parameters(policy).values()]


def _main_parameters(policy: Policy) -> dict[str, Tensor]:
    """What the optimizer updates, by Megatron's names: the parameters, or their float32 copies."""
    return {name: getattr(p, "main_param", p) for name, p in policy.model.named_parameters()}


def _has_masters(policy: Policy) -> bool:
    return any(hasattr(p, "main_param") for p in policy.model.parameters())


def _states(optimizer: Any) -> Any:
    """Parameter -> state of the torch optimizer inside Megatron's."""
    [inner] = _inner(optimizer)
    return inner.state


def _inner(optimizer: Any) -> Iterator[torch.optim.Optimizer]:
    for one in getattr(optimizer, "chained_optimizers", [optimizer]):
        yield one.optimizer


def _copied(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: t.detach().to("cpu", copy=True).contiguous() for name, t in tensors.items()}

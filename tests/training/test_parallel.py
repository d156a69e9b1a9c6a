"""Tensor and pipeline parallel trainers give what one process gives: log-probs, gradients, weights, checkpoints."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch

from gyre.config import CellConfig, LayoutConfig
from gyre.training.hf_config import UnsupportedModelError, check_layout, hf_shapes
from gyre.training.model import build_policy
from gyre.training.parallel import LayoutError
from gyre.training.shards import Shard, join_hf, part_shapes, split_hf
from tests.training.conftest import random_weights
from tests.training.parallel_cases import CASES, compute, compute_all, shape, train
from tests.training.ranks import on_ranks

TP, PP, BOTH = (2, 1), (1, 2), (2, 2)
LAYOUTS = {both: LayoutConfig(tensor_parallel=both[0], pipeline_parallel=both[1]) for both in (TP, PP, BOTH)}
FIRST = next(iter(CASES))
COMPUTED = [(layout, name) for layout in (TP, PP) for name in CASES] + [(BOTH, FIRST)]
computed = pytest.mark.parametrize(
    ("layout", "name"), COMPUTED, ids=lambda x: x if isinstance(x, str) else f"{x[0]}x{x[1]}"
)


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory, tiny_policy: Path) -> list[Any]:
    """What two and four ranks computed, and two ranks trained."""
    folder = tmp_path_factory.mktemp("ranks")
    jobs = [
        (2, compute_all, ([LAYOUTS[TP], LAYOUTS[PP]], list(CASES))),
        (4, compute_all, ([LAYOUTS[BOTH]], [FIRST])),
        (2, train, (tiny_policy, [LAYOUTS[TP], LAYOUTS[PP], LAYOUTS[TP]], folder)),
    ]
    return on_ranks(jobs, folder)


@pytest.fixture(scope="module")
def parallel(ran: list[Any]) -> dict[tuple[int, int, str], dict[str, Any]]:
    """By layout and name of the case."""
    return ran[0] | ran[1]


@pytest.fixture(scope="module")
def alone() -> dict[str, dict[str, Any]]:
    """What this process computes by itself."""
    return {name: compute(case, LayoutConfig()) for name, case in CASES.items()}


def assert_equal(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], exact: float) -> None:
    """In float64 to `exact` of the largest value of each tensor, in float32 to 1e-5 of it."""
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        bound = exact if tensor.dtype == torch.float64 else 1e-5
        assert (found[name] - tensor).abs().max() <= bound * tensor.abs().max(), name


@computed
def test_weights_go_in_and_out_bit_equal(parallel, layout, name):
    given = random_weights(CASES[name].shape)
    exported = parallel[*layout, name]["exported"]
    assert exported.keys() == given.keys()
    assert all(torch.equal(exported[n], t) for n, t in given.items())


@computed
def test_logprobs_and_every_gradient_equal_one_process(parallel, alone, layout, name):
    found, expected = parallel[*layout, name], alone[name]
    for mine, theirs in zip(found["logs"], expected["logs"], strict=True):
        for a, b in zip(mine, theirs, strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=1e-10 if b.dtype == torch.float64 else 1e-5)
    assert_equal(found["gradients"], expected["gradients"], 1e-10)
    assert all(t.abs().max() > 0 for t in found["gradients"].values())


@computed
def test_a_forward_pass_alone_gives_the_same_and_adds_nothing(parallel, layout, name):
    found = parallel[*layout, name]
    assert all(torch.equal(a, b) for a, b in zip(found["evaluated"], found["logs"][1], strict=True))
    assert all(torch.equal(t, found["gradients"][n]) for n, t in found["gradients after evaluation"].items())


@computed
def test_what_is_not_finite_on_one_rank_is_refused_on_all(parallel, layout, name):
    loss, gradient = parallel[*layout, name]["refused"]
    assert loss == "the loss is nan"
    assert "non-finite" in gradient  # and the accumulator, and all that follows, is as if nothing had come


@pytest.mark.parametrize("name", CASES)
def test_several_micro_batches_in_the_pipeline_give_the_same(parallel, name):
    found = parallel[*PP, name]
    for mine, theirs in zip(found["logs at once"], found["logs"], strict=True):
        assert all(torch.equal(a, b) for a, b in zip(mine, theirs, strict=True))
    assert_equal(found["gradients at once"], found["gradients"], 1e-12)


@computed
def test_a_step_gives_the_same_weights_and_norm(parallel, alone, layout, name):
    found, expected = parallel[*layout, name], alone[name]
    assert found["norms"] == pytest.approx(expected["norms"], rel=1e-5)
    for tensor, weights in expected["stepped"].items():
        # Adam's first step is the sign of the gradient: where that is all rounding, the sign is too.
        gradient = expected["gradients"][tensor].abs()
        clear = gradient > (1e-3 if gradient.dtype == torch.float32 else 1e-9) * gradient.max()
        assert clear.float().mean() > 0.3, tensor
        assert (found["stepped"][tensor] - weights)[clear].abs().max() < 1e-6, tensor
    if CASES[name].dtype == torch.float64:
        for tensor, weights in expected["second step"].items():
            assert (found["second step"][tensor] - weights).abs().max() < 1e-6, tensor


@computed
def test_the_optimizers_state_is_the_same_whatever_the_layout(parallel, alone, layout, name):
    found, expected = parallel[*layout, name]["state"], alone[name]["state"]
    assert found["step"] == expected["step"] == 1
    for moment in ("exp_avg", "exp_avg_sq"):
        assert_equal(found[moment], expected[moment], 1e-6)  # Megatron's gradient norm is float32


@computed
def test_a_resumed_trainer_goes_on_bit_equal(parallel, layout, name):
    found = parallel[*layout, name]
    for tensor, weights in found["second step"].items():
        if CASES[name].dtype == torch.float32:
            assert torch.equal(found["second step, resumed"][tensor], weights)
        else:  # weights leave in float32
            torch.testing.assert_close(found["second step, resumed"][tensor], weights, rtol=0, atol=1e-6)


def test_a_run_of_steps_goes_through_checkpoints_of_any_layout(ran, tiny_policy, tmp_path):
    expected = train(tiny_policy, [LayoutConfig()] * 3, tmp_path)
    for mine, theirs in zip(ran[2], expected, strict=True):
        found, figures = (x["metrics"].to_json() | {"seconds": 0, "tokens_per_s": 0} for x in (mine, theirs))
        for name in ("clip_by_length", "rejected_by_node"):
            assert found.pop(name) == figures.pop(name)
        assert found == pytest.approx(figures, rel=1e-3, abs=1e-5)
        # Steps before this one differ by rounding, which Adam makes as large as its rate where a gradient is nothing.
        apart = (mine["gradient"] - theirs["gradient"]).norm() / theirs["gradient"].norm()
        assert apart < 1e-3
        assert mine["norm"] == pytest.approx(theirs["norm"], rel=1e-3)
    assert (ran[2][0]["gradient"] - expected[0]["gradient"]).abs().max() < 1e-5 * expected[0]["gradient"].abs().max()
    assert expected[1]["metrics"].kl_sum > 0


@pytest.mark.parametrize("layout", [(1, 1), (2, 1), (1, 2), (2, 2), (2, 4)])
@pytest.mark.parametrize("tied", [False, True])
def test_parts_join_to_the_whole(layout, tied):
    model = shape("qwen3", tied, 97, layers=4)
    whole = random_weights(model)
    ranks = [Shard(layout[0], i % layout[0], layout[1], i // layout[0]) for i in range(layout[0] * layout[1])]
    for sums in (False, True):
        parts = [(rank, split_hf(whole, model, rank, sums=sums)) for rank in ranks]
        for rank, part in parts:
            assert {n: tuple(t.shape) for n, t in part.items()} == part_shapes(model, rank)
        joined = join_hf(parts[::-1], model, sums=sums)
        assert list(joined) == list(hf_shapes(model))
        assert all(torch.equal(t, whole[n]) for n, t in joined.items())


@pytest.mark.parametrize(
    ("layout", "change", "message"),
    [
        ((3, 1), {}, r"layout.tensor_parallel = 3: must divide the policy's num_attention_heads, 4"),
        ((4, 1), {}, r"layout.tensor_parallel = 4: must divide the policy's num_key_value_heads, 2"),
        ((2, 1), {"ffn": 37}, r"layout.tensor_parallel = 2: must divide the policy's intermediate_size, 37"),
        ((4, 1), {"kv_heads": 4, "vocab": 5}, r"the vocabulary of 5 is too small"),
        ((1, 3), {}, r"layout.pipeline_parallel = 3: must divide the policy's num_hidden_layers, 4"),
    ],
)
def test_a_model_that_cannot_be_split_so_is_refused(layout, change, message):
    with pytest.raises(UnsupportedModelError, match=message):
        check_layout(dataclasses.replace(shape("llama", False, 64, layers=4), **change), *layout)


def test_a_layout_needs_its_processes():
    with pytest.raises(LayoutError, match="needs 2 processes, here are 1"):
        build_policy(shape("llama", False, 64), layout=LAYOUTS[TP])


def test_a_cells_devices_suffice_for_its_ranks():
    with pytest.raises(ValueError, match="devices: the layout's 4 ranks need as many"):
        CellConfig(name="alpha", devices=[0, 1], layout=LAYOUTS[BOTH])


def test_context_parallel_is_refused():
    with pytest.raises(ValueError, match="context_parallel"):
        LayoutConfig(context_parallel=2)

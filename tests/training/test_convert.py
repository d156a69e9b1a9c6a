"""Conversion: logits and every gradient equal transformers', and a round trip is bit-equal."""

from __future__ import annotations

import json

import pytest
import torch

from gyre.serving.cpu_platform import activate
from gyre.training.convert import WeightsError, hf_to_megatron, megatron_to_hf
from gyre.training.hf_config import UnsupportedModelError, read_shape, shape_from_dict
from gyre.training.model import build_policy, load_policy
from gyre.trajectory.packed import TreeRow
from tests.training.conftest import CONFIG, random_weights

SMALL = {
    "vocab_size": 128,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-6,
    "initializer_range": 0.1,
}
LENGTHS = (10, 33, 33, 21, 1, 70, 3, 3)


def transformers_model(family: str, tied: bool):
    activate()  # transformers imports torchvision, whose operators need their schemas on a CPU
    import transformers

    name = {"llama": "Llama", "qwen2": "Qwen2", "qwen3": "Qwen3"}[family]
    extra = {"head_dim": 16} if family == "qwen3" else {}
    config = getattr(transformers, f"{name}Config")(
        **SMALL, **extra, tie_word_embeddings=tied, attn_implementation="eager"
    )
    torch.manual_seed(0)
    model = getattr(transformers, f"{name}ForCausalLM")(config).float().eval()
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            if "norm" in parameter_name or "bias" in parameter_name:
                parameter.add_(0.1 * torch.randn_like(parameter))
    return config, model


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_packed_logits_and_gradients_equal_transformers_on_separate_sequences(family, tied):
    config, theirs = transformers_model(family, tied)
    policy = build_policy(shape_from_dict(config.to_dict()))
    policy.load_hf(theirs.state_dict())
    ids = torch.randint(0, SMALL["vocab_size"], (sum(LENGTHS),), generator=torch.Generator().manual_seed(1))

    logits = policy.logits(TreeRow.sequences(LENGTHS), ids)
    expected = torch.cat([theirs(part[None]).logits[0] for part in ids.split(LENGTHS)])
    assert (logits - expected).abs().max() < 1e-5

    weight = torch.randn(expected.shape, generator=torch.Generator().manual_seed(2))
    (logits * weight).sum().backward()
    (expected * weight).sum().backward()
    gradients = megatron_to_hf({n: p.main_grad for n, p in policy.model.named_parameters()}, policy.shape)
    for name, parameter in theirs.named_parameters():
        difference = (gradients[name] - parameter.grad).abs().max() / parameter.grad.abs().max()
        assert difference < 1e-5, name

    exported = policy.export_hf()
    known = {n: t for n, t in theirs.state_dict().items() if not (tied and n == "lm_head.weight")}
    assert exported.keys() == known.keys()
    assert all(torch.equal(exported[n], t) for n, t in known.items())


def test_activation_recompute_changes_nothing(tiny_policy):
    ids = torch.randint(0, 96, (40,), generator=torch.Generator().manual_seed(1))
    gradients = []
    for recompute in (False, True):
        policy = load_policy(tiny_policy, recompute=recompute)
        policy.logits(TreeRow.sequences((25, 15)), ids).square().sum().backward()
        gradients.append(policy.ddp.buffers[0].grad_data.clone())
    assert gradients[0].abs().max() > 0
    assert torch.equal(*gradients)


def test_the_hidden_sizes_of_heads_and_model_are_independent(tiny_policy):
    shape = read_shape(tiny_policy)
    weights = random_weights(shape)
    back = megatron_to_hf(hf_to_megatron(weights, shape), shape)
    assert back.keys() == weights.keys()
    assert all(torch.equal(back[n], t) for n, t in weights.items())


def test_weights_that_do_not_fit_are_refused(tiny_policy):
    shape = read_shape(tiny_policy)
    weights = random_weights(shape)
    name = "model.layers.1.self_attn.k_proj.weight"
    with pytest.raises(WeightsError, match=f"{name} is missing"):
        hf_to_megatron({n: t for n, t in weights.items() if n != name}, shape)
    with pytest.raises(WeightsError, match=f"{name} has shape"):
        hf_to_megatron(weights | {name: torch.zeros(3, 3)}, shape)
    with pytest.raises(WeightsError, match=r"experts\.0 is not part"):
        hf_to_megatron(weights | {"model.experts.0": torch.zeros(1)}, shape)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "mamba"}, "model_type = 'mamba'"),
        ({"hidden_act": "gelu"}, "hidden_act = 'gelu'"),
        ({"attention_bias": True}, "attention_bias = True"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "rope_scaling.rope_type = 'yarn'"),
        ({"rope_parameters": {"rope_type": "llama3"}}, "rope_parameters.rope_type = 'llama3'"),
        ({"hidden_size": None}, "hidden_size: required"),
    ],
)
def test_models_that_would_be_trained_wrongly_are_refused(tmp_path, change, message):
    (tmp_path / "config.json").write_text(json.dumps(CONFIG | change))
    with pytest.raises(UnsupportedModelError, match=message) as caught:
        read_shape(tmp_path)
    assert str(tmp_path / "config.json") in str(caught.value)


def test_both_spellings_of_the_rotary_base_are_read():
    old = shape_from_dict(CONFIG | {"rope_theta": 5e5})
    new = shape_from_dict(
        {**CONFIG, "rope_theta": None, "rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}
    )
    assert old.rope_theta == new.rope_theta == 5e5


def test_a_folder_without_safetensors_is_named(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    with pytest.raises(WeightsError, match=r"model\.safetensors"):
        load_policy(tmp_path)

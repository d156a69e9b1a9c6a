"""The committed policy: its tokenizer, its chat template, its size, and the harness configuration it was made for."""

from __future__ import annotations

import json
import random
from pathlib import Path

import make_policy
import pytest
import yaml
from dialogue import BASH_TOOL, CONFIG, Templates, call_text, token_ids
from renderers.qwen3 import Qwen3Renderer
from safetensors.torch import load_file
from transcripts import Turn, transcript
from transformers import AutoTokenizer
from words import WORDS

POLICY = CONFIG.parent / "policy"


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(POLICY, local_files_only=True)


def test_names_and_numbers_are_single_tokens(tokenizer) -> None:
    for text in (*WORDS, *(str(n) for n in range(10, 100))):
        assert len(tokenizer.encode(text, add_special_tokens=False)) == 1, text


def test_any_text_has_an_exact_encoding(tokenizer) -> None:
    for text in ("héllo → 世界\t\x00 \n\n  x==y'\"\\", "  (a, b):\r\n" + json.dumps(BASH_TOOL), "/g' /' //g' src/*.py"):
        assert tokenizer.decode(tokenizer.encode(text, add_special_tokens=False)) == text


def test_transcript_survives_the_gateways_path(tokenizer) -> None:
    """Render, complete, parse, bridge: each command comes back, ids stay a prefix, and the text is the template's."""
    renderer, templates, rng = Qwen3Renderer(tokenizer), Templates.load(), random.Random(31)
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    for _ in range(40):
        told = transcript(rng)
        messages = templates.opening(told.task.instruction)
        ids = renderer.render_ids(messages, tools=[BASH_TOOL], add_generation_prompt=True)
        sampled: list[int] = []
        for turn in told.turns:
            prompt = tokenizer.apply_chat_template(
                messages, tools=[BASH_TOOL], add_generation_prompt=True, tokenize=False
            )
            assert tokenizer.decode(ids) == prompt
            said = [*tokenizer.encode(call_text(turn.command), add_special_tokens=False), end]
            (call,) = renderer.parse_response(said, tools=[BASH_TOOL]).tool_calls
            assert (call.name, call.arguments) == ("bash", {"command": turn.command})
            sampled += said
            whole = ids + said
            function = {"name": "bash", "arguments": json.dumps(call.arguments)}
            answer = templates.observed(turn)
            messages += [{"role": "assistant", "content": None, "tool_calls": [{"function": function}]}, answer]
            ids = renderer.bridge_to_next_turn(ids, said, [answer], tools=[BASH_TOOL]).token_ids
            assert ids[: len(whole)] == whole
        trained, mask = token_ids(told, renderer, tokenizer, templates)
        assert trained == whole
        assert [token for token, owned in zip(trained, mask, strict=True) if owned] == sampled


def test_prompt_is_short(tokenizer) -> None:
    renderer, templates = Qwen3Renderer(tokenizer), Templates.load()
    for folder in sorted((CONFIG.parent / "tasks").glob("*/*")):
        opening = templates.opening((folder / "instruction.md").read_text())
        assert len(renderer.render_ids(opening, tools=[BASH_TOOL], add_generation_prompt=True)) < 100


def test_checkpoint_is_small_and_whole() -> None:
    config = json.loads((POLICY / "config.json").read_text())
    assert config["architectures"] == ["Qwen3ForCausalLM"]
    assert {p.name for p in POLICY.iterdir()} == {
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    }
    assert sum(p.stat().st_size for p in POLICY.iterdir()) < 10_000_000


def test_vocabulary_fills_the_embedding(tokenizer) -> None:
    config = json.loads((POLICY / "config.json").read_text())
    assert config["vocab_size"] == len(tokenizer)
    assert config["eos_token_id"] == tokenizer.convert_tokens_to_ids("<|im_end|>")


def test_make_policy_remakes_the_committed_files(tmp_path: Path) -> None:
    """A few steps of the real script: the same tokenizer and config to the byte, and weights that fit them."""
    loss = make_policy.main(tmp_path, steps=2)
    assert 2 < loss < 12
    for name in ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"):
        assert (tmp_path / name).read_bytes() == (POLICY / name).read_bytes(), name
    made, committed = (load_file(folder / "model.safetensors") for folder in (tmp_path, POLICY))
    assert {n: t.shape for n, t in made.items()} == {n: t.shape for n, t in committed.items()}


def test_harness_configuration_is_unattended_and_short() -> None:
    config = yaml.safe_load(CONFIG.read_text())
    assert config["agent"]["mode"] == "yolo" and config["agent"]["confirm_exit"] is False
    assert config["agent"]["cost_limit"] == 0 and 0 < config["agent"]["step_limit"] <= 8
    assert config["model"]["cost_tracking"] == "ignore_errors"
    longest = Templates.load().observed(Turn("cat big", "x" * 5000, 1))["content"]
    assert len(longest) < 850 and longest.endswith("[exit 1]")

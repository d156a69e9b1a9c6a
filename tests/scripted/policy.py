"""The scripted policy's checkpoint folder: a byte-level BPE tokenizer of moderate size, and a model without weights."""

from __future__ import annotations

import json
import sysconfig
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
MARKS = ["<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>"]
VOCAB = 8192
CONTEXT = 131_072
# The split of Qwen2 and Qwen3.
_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
# Source and prose of the standard library, as long as it takes for a vocabulary of code and English.
_CORPUS = ("argparse.py", "asyncio/base_events.py", "tarfile.py", "typing.py", "subprocess.py", "pydoc_data/topics.py",
           "http/client.py", "json/decoder.py", "logging/__init__.py", "mailbox.py", "inspect.py")  # fmt: skip


def train_tokenizer() -> Tokenizer:
    """Qwen3's special tokens over merges learnt from the standard library (its text is the only input)."""
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_SPLIT), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    made.decoder = decoders.ByteLevel()
    stdlib = Path(sysconfig.get_paths()["stdlib"])
    texts = [(stdlib / name).read_text(encoding="utf-8") for name in _CORPUS]
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB - len(MARKS),
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    made.train_from_iterator(texts, trainer)
    made.add_tokens([AddedToken(t, special=False) for t in MARKS])
    assert made.get_vocab_size() <= VOCAB
    return made


def write_policy(folder: Path, context: int = CONTEXT) -> Path:
    """The checkpoint folder, as Hugging Face writes one. Its one tensor is there to be updated; nothing reads it."""
    folder.mkdir(parents=True, exist_ok=True)
    made = train_tokenizer()
    made.save(str(folder / "tokenizer.json"))
    save_file({"nothing": np.zeros(1, np.float32)}, folder / "model.safetensors", metadata={"format": "pt"})
    config = {
        "architectures": ["ScriptedForCausalLM"],
        "model_type": "qwen3",
        "vocab_size": VOCAB,
        "hidden_size": 8,
        "intermediate_size": 8,
        "num_hidden_layers": 1,
        "num_attention_heads": 1,
        "num_key_value_heads": 1,
        "head_dim": 8,
        "max_position_embeddings": context + 64,
        "tie_word_embeddings": False,
        "bos_token_id": None,
        "eos_token_id": made.token_to_id("<|im_end|>"),
        "pad_token_id": made.token_to_id("<|endoftext|>"),
        "dtype": "float32",
    }
    (folder / "config.json").write_text(json.dumps(config))
    return folder

"""Builds the policy's tokenizer: byte-level BPE with Qwen3's special tokens, trained on synthetic transcripts.

Three choices keep sequences short and copying easy. Letters, digits, spaces and signs never share a piece, so that a
name is the same token wherever it stands. The fixed lines of every prompt are one token each, and so are the shell
idioms of the transcripts. Any other text still has an exact encoding, down to bytes.
"""

from __future__ import annotations

import json
import random
from pathlib import Path

from dialogue import BASH_TOOL, Templates, call_text
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transcripts import transcript
from words import WORDS

SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
# As in Qwen3, these are added tokens, and text: a decoder that skips special tokens keeps them.
MARKS = ("<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")

# The vocabulary is filled up to a multiple of this, so that no engine pads it with ids that have no text.
ROUND = 64

IDIOMS = (
    '\n{"name": "bash", "arguments": {"command": "',
    '"}}\n',
    "sed -i 's/",
    "sed -i '/",
    "/g' ",
    "/' ",
    "//g' ",
    "/d' ",
    " > answer.txt",
    "src/*.py",
    "/*",
    "return .*/return ",
    "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT",
    "mkdir ",
    " && mv ",
    " && cp ",
    "cat ",
    "cat test_",
    "echo ",
    "grep ",
    "grep -v ",
    "ls src",
    "mv ",
    "a + b",
    "a - b",
    "a * b",
    "a % b",
    "max(a, b)",
    "min(a, b)",
    "(a, b):",
    ".txt",
    ".py",
    ".ini",
    "mv: cannot move '",
    "' to '",
    "': No such file or directory",
)

# Qwen3's chat template for text and tool calls, without reasoning: this policy does not think.
CHAT_TEMPLATE = """\
{%- if tools %}
{{- '<|im_start|>system\\n' }}
{%- if messages[0].role == 'system' %}{{- messages[0].content + '\\n\\n' }}{%- endif %}
{{- "# Tools\\n\\nYou may call one or more functions to assist with the user query.\\n\\n" }}
{{- "You are provided with function signatures within <tools></tools> XML tags:\\n<tools>" }}
{%- for tool in tools %}{{- "\\n" }}{{- tool | tojson }}{%- endfor %}
{{- "\\n</tools>\\n\\nFor each function call, return a json object with function name and arguments " }}
{{- "within <tool_call></tool_call> XML tags:\\n<tool_call>\\n" }}
{{- "{\\"name\\": <function-name>, \\"arguments\\": <args-json-object>}\\n</tool_call><|im_end|>\\n" }}
{%- elif messages[0].role == 'system' %}
{{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
{%- if message.role == 'user' or (message.role == 'system' and not loop.first) %}
{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
{%- elif message.role == 'assistant' %}
{{- '<|im_start|>assistant\\n' + (message.content or '') }}
{%- for call in message.tool_calls or [] %}
{%- if (loop.first and message.content) or not loop.first %}{{- '\\n' }}{%- endif %}
{%- if call.function %}{%- set call = call.function %}{%- endif %}
{{- '<tool_call>\\n{"name": "' + call.name + '", "arguments": ' }}
{{- call.arguments if call.arguments is string else call.arguments | tojson }}
{{- '}\\n</tool_call>' }}
{%- endfor %}
{{- '<|im_end|>\\n' }}
{%- elif message.role == 'tool' %}
{%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}{{- '<|im_start|>user' }}{%- endif %}
{{- '\\n<tool_response>\\n' + message.content + '\\n</tool_response>' }}
{%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{- '<|im_end|>\\n' }}{%- endif %}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}
"""

_TOOLS_LINES = (
    "# Tools\n\nYou may call one or more functions to assist with the user query.\n\n"
    "You are provided with function signatures within <tools></tools> XML tags:\n<tools>\n",
    "\n</tools>\n\nFor each function call, return a json object with function name and arguments within ",
    " XML tags:\n",
    '\n{"name": <function-name>, "arguments": <args-json-object>}\n',
)


def _corpus(seed: int, count: int, templates: Templates) -> list[str]:
    """Texts to learn pieces from; every name comes up often enough to become one piece."""
    rng = random.Random(seed)
    texts = [f"{word} {number}" for word in WORDS for number in range(10, 100)]
    for _ in range(count):
        t = transcript(rng)
        texts += [m["content"] for m in templates.opening(t.task.instruction)] + ["user", "assistant", "system"]
        texts += [text for turn in t.turns for text in (call_text(turn.command), turn.output)]
        texts += list(t.task.files.values())
    return texts


def build(vocabulary: int = 1600, seed: int = 3) -> Tokenizer:
    """Trains the tokenizer; the same arguments give the same one."""
    templates = Templates.load()
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(r"[A-Za-z]+|[0-9]{1,2}|\n|[^\S\n]+|[^\sA-Za-z0-9]"), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=list(SPECIAL),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_corpus(seed, 3000, templates), trainer)
    before, after = templates.instance.split("{{ task | trim }}")
    phrases = [templates.system, before, after, *_TOOLS_LINES, json.dumps(BASH_TOOL, ensure_ascii=False), *IDIOMS]
    tokenizer.add_tokens([AddedToken(mark, normalized=False) for mark in MARKS])
    tokenizer.add_tokens([AddedToken(phrase, normalized=False) for phrase in phrases if phrase])
    spare = -tokenizer.get_vocab_size() % ROUND
    tokenizer.add_special_tokens([AddedToken(f"<|spare_{n}|>", normalized=False) for n in range(spare)])
    return tokenizer


def save(folder: Path) -> None:
    """Writes ``tokenizer.json`` and ``tokenizer_config.json``, with the chat template, into ``folder``."""
    folder.mkdir(parents=True, exist_ok=True)
    build().save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": 2048,
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    save(Path(__file__).parent / "policy")

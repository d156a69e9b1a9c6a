"""Makes this example's policy: ``python make_policy.py [folder] [steps]`` (ten minutes on one core).

Goes on from the quickstart's policy: the same transcripts, as Claude Code would have led them. `first_call.json` is
what Claude Code 2.1.220 sends with this run's arguments; prompts are rendered from it as the gateway renders them. As
in the quickstart, the transcripts mix right and flawed ways: the result is able but unreliable.
"""

from __future__ import annotations

import json
import random
import shutil
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from renderers.qwen3 import Qwen3Renderer
from transformers import PreTrainedTokenizerFast

from gyre.config import OptimizerConfig
from gyre.gateway import anthropic_messages
from gyre.training.model import load_policy
from gyre.training.sft import Example, SupervisedTrainer
from gyre.trajectory.packed import TreeRow

HERE = Path(__file__).parent
QUICKSTART = HERE.parent / "quickstart"
sys.path.insert(0, str(QUICKSTART))

import make_policy as quickstart  # noqa: E402
import make_tasks  # noqa: E402
from transcripts import SUBMIT, Transcript, Turn, transcript  # noqa: E402

SEED = 2000
STEPS, BATCH = 200, 24
RATE = 1e-3


def first_call(instruction: str, date: str) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Messages and tools of the first prompt, as the gateway reads them."""
    text = (HERE / "first_call.json").read_text(encoding="utf-8")
    text = text.replace("{date}", date).replace('"{instruction}"', json.dumps(instruction))
    request = anthropic_messages.parse_request(text.encode(), "policy")
    return [m.rendered() for m in request.messages], list(request.tools)


def observed(turn: Turn) -> dict[str, Any]:
    """What Claude Code says after a command."""
    output = turn.output.strip()
    if turn.code:
        return {"role": "tool", "content": f"Error:\nExit code {turn.code}\n{output}"}
    return {"role": "tool", "content": output or "(Bash completed with no output)"}


def said(turn: Turn) -> str:
    """What the policy writes; the quickstart's last command is a text here."""
    if turn.command == SUBMIT:
        return "Done."
    arguments = json.dumps({"command": turn.command}, ensure_ascii=False)
    return f'<tool_call>\n{{"name": "Bash", "arguments": {arguments}}}\n</tool_call>'


class Examples:
    """An endless stream of tokenised transcripts, none of them of a task that the run trains on or is tested on."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast, seed: int) -> None:
        self._rng = random.Random(seed)
        self._tokenizer = tokenizer
        self._renderer = Qwen3Renderer(tokenizer)
        tasks = make_tasks.draw(make_tasks.SEED, make_tasks.TRAIN + make_tasks.HELDOUT)
        self._kept_apart = {task.instruction for task in tasks}

    def take(self, count: int) -> list[Example]:
        """The next ``count`` examples, of one day: so they have nine tenths of a prompt in common."""
        rng = self._rng
        date = f"20{rng.randint(24, 39)}-{rng.randint(1, 12):02}-{rng.randint(1, 28):02}"
        taken: list[Example] = []
        while len(taken) < count:
            told = transcript(rng)
            if told.task.instruction not in self._kept_apart:
                taken.append(self._example(told, date))
        return taken

    def _example(self, told: Transcript, date: str) -> Example:
        messages, tools = first_call(told.task.instruction, date)
        ids: list[int] = self._renderer.render_ids(messages, tools=tools, add_generation_prompt=True)
        mask = [False] * len(ids)
        end = self._tokenizer.convert_tokens_to_ids("<|im_end|>")
        for turn in told.turns:
            words = [*self._tokenizer.encode(said(turn), add_special_tokens=False), end]
            if turn.command == SUBMIT:
                ids, mask = ids + words, mask + [True] * len(words)
                break
            bridged = self._renderer.bridge_to_next_turn(ids, words, [observed(turn)], tools=tools).token_ids
            mask += [True] * len(words) + [False] * (len(bridged) - len(ids) - len(words))
            ids = bridged
        return Example(np.array(ids), np.array(mask))


class PrefixTrainer(SupervisedTrainer):
    """A batch of examples with a common beginning, as one tree, which holds it once."""

    def _lay(self, examples: Sequence[Example]) -> tuple[TreeRow, NDArray[np.integer], NDArray[np.bool_]]:
        first = examples[0].ids
        shared = min(int(np.argmin(np.append(e.ids[: len(first)] == first[: len(e.ids)], False))) for e in examples)
        shared = min(shared, *(int(np.argmax(e.mask)) for e in examples))
        ids = np.concatenate([first[:shared], *(e.ids[shared:] for e in examples)])
        mask = np.concatenate([np.zeros(shared, bool), *(e.mask[shared:] for e in examples)])
        return TreeRow((shared, *(len(e.ids) - shared for e in examples)), (-1, *[0] * len(examples))), ids, mask


def main(folder: Path, steps: int = STEPS) -> float:
    """Makes the policy in ``folder``; the mean loss of the last fifty steps, in nats a token."""
    source = QUICKSTART / "policy"
    folder.mkdir(parents=True, exist_ok=True)
    for name in ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"):
        shutil.copy(source / name, folder / name)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder, local_files_only=True)
    trainer = PrefixTrainer(
        load_policy(source), OptimizerConfig(lr=RATE, beta2=0.98, weight_decay=0.01), micro_batch_tokens=65_536
    )
    examples = Examples(tokenizer, SEED)
    losses: list[float] = []
    start = time.monotonic()
    for step in range(steps):
        losses.append(trainer.step(examples.take(BATCH), RATE / 2e-3 * quickstart.rate(step, steps)))
        if step % 20 == 19 or step == steps - 1:
            recent, seconds = sum(losses[-20:]) / len(losses[-20:]), time.monotonic() - start
            print(f"step {step + 1}/{steps}  loss {recent:.4f} nats/token  {seconds:.0f} s", flush=True)
    trainer.export(folder)
    return recent


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else HERE / "policy", int(sys.argv[2]) if len(sys.argv) > 2 else STEPS)

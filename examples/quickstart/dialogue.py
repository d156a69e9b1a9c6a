"""Transcripts as the gateway sees them: mini-swe-agent's messages, rendered to token ids by the same renderer.

Prompts come from ``render_ids`` once and ``bridge_to_next_turn`` afterwards, completions are what the policy would have
sampled; so supervised training sees exactly the sequences that serving will.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from jinja2 import StrictUndefined, Template
from transcripts import Transcript, Turn

CONFIG = Path(__file__).parent / "mini.yaml"

# mini-swe-agent 2.4.6, minisweagent/models/utils/actions_toolcall.py
BASH_TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "bash",
        "description": "Execute a bash command",
        "parameters": {
            "type": "object",
            "properties": {"command": {"type": "string", "description": "The bash command to execute"}},
            "required": ["command"],
        },
    },
}


@dataclass(frozen=True)
class Templates:
    """The texts of ``mini.yaml`` that shape a prompt."""

    system: str
    instance: str
    observation: str

    @classmethod
    def load(cls, path: Path = CONFIG) -> Templates:
        config = yaml.safe_load(path.read_text(encoding="utf-8"))
        return cls(
            system=config["agent"]["system_template"],
            instance=config["agent"]["instance_template"],
            observation=config["model"]["observation_template"],
        )

    def opening(self, instruction: str) -> list[dict[str, Any]]:
        """The first two messages of a rollout."""
        user = Template(self.instance, undefined=StrictUndefined).render(task=instruction)
        return [{"role": "system", "content": self.system}, {"role": "user", "content": user}]

    def observed(self, turn: Turn) -> dict[str, Any]:
        """The tool message that answers ``turn``."""
        output = {"output": turn.output, "returncode": turn.code, "exception_info": ""}
        return {"role": "tool", "content": Template(self.observation, undefined=StrictUndefined).render(output=output)}


def call_text(command: str) -> str:
    """What the policy writes to run ``command``, up to its end-of-turn token."""
    arguments = json.dumps({"command": command}, ensure_ascii=False)
    return f'<tool_call>\n{{"name": "bash", "arguments": {arguments}}}\n</tool_call>'


def token_ids(
    transcript: Transcript, renderer: Any, tokenizer: Any, templates: Templates
) -> tuple[list[int], list[bool]]:
    """The whole transcript as ids, with a mask that is true on the tokens that the policy samples."""
    ids: list[int] = renderer.render_ids(
        templates.opening(transcript.task.instruction), tools=[BASH_TOOL], add_generation_prompt=True
    )
    mask = [False] * len(ids)
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    for number, turn in enumerate(transcript.turns):
        said = [*tokenizer.encode(call_text(turn.command), add_special_tokens=False), end]
        if number < len(transcript.turns) - 1:
            bridged = renderer.bridge_to_next_turn(ids, said, [templates.observed(turn)], tools=[BASH_TOOL]).token_ids
            mask += [True] * len(said) + [False] * (len(bridged) - len(ids) - len(said))
            ids = bridged
        else:
            ids, mask = ids + said, mask + [True] * len(said)
    return ids, mask

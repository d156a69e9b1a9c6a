"""The paced bench's work: a published preset, scaled to cells of a few slots, as task folders for mini-swe-agent.

A rollout's sizes come from the preset's own distribution (`gyre.simulation.presets`). Here `slots` rollouts fill a cell
instead of 40, so everything that a cell does in a second to rollouts together is divided by 40 / slots: a step has so
many fewer rollouts, and a cell trains so many fewer tokens a second. And one token stands for `per_token` of the
preset's. Durations are the preset's, divided by the compression.

A rollout is a conversation of turns: an answer of some tokens, which ends in the call `sh turn`, and a tool that sleeps
and prints. Which rollout it is, the tool knows from its folder; what it does, from the task's `plan/<member>`.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from benchmarks.elastic.answers import Answers
from benchmarks.elastic.costs import compressed
from gyre.scheduling import step_tasks
from gyre.simulation.model import CostModel, Floats, Scenario, StepWork
from gyre.simulation.presets import PRESETS

FIRST, MOST = 12, 400
"""Tokens of a rollout's first answer, which the configuration says, and of the longest."""
FILLER = " the quick fox" * 1200

TURN = """#!/bin/sh
# One turn of a rollout: its tool time, then what the tool prints. The last one submits.
read -r n 2>/dev/null < .turn || n=0
echo $((n + 1)) > .turn
folder=${PWD%/box/workspace}; member=${folder##*/}; member=${member%%.*}
{
  while [ "$n" -gt 0 ]; do read -r skip; n=$((n - 1)); done
  read -r tool next pad
} < "plan/$member"
sleep "$tool"
[ "$next" = end ] && { echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT; exit; }
[ "$pad" -gt 0 ] && head -c "$pad" filler.txt
echo " next $next"
"""
TEST = """#!/bin/sh
folder=${APP_DIR%/box/workspace}; member=${folder##*/}; member=${member%%.*}; member=${member#0}
echo $((member % 2)) > "$LOGS_DIR/reward.txt"
"""
CONFIG = f"""# mini-swe-agent's own configuration: nothing is cut, nothing is asked.
agent:
  system_template: "You work with bash."
  instance_template: "{{{{ task | trim }}}} next {FIRST}"
  step_limit: 0
  cost_limit: 0.0
  mode: yolo
  confirm_exit: false
environment:
  timeout: 2000000
  env: {{LC_ALL: C}}
model:
  model_class: litellm
  model_name: openai/policy
  cost_tracking: ignore_errors
  observation_template: "{{{{ output.output | trim }}}}"
  format_error_template: "{{{{ error }}}}"
  model_kwargs: {{temperature: 1.0}}
"""


@dataclass(frozen=True)
class Turn:
    """An answer of `tokens`, then a tool that takes `tool_s` and prints `pad` characters."""

    tokens: int
    tool_s: float
    pad: int


@dataclass(frozen=True)
class PacedWork:
    """The work and the cells of one bench. `steps[i][g][m]` are the turns of a rollout; `cost` is in wall seconds."""

    preset: str
    cells: int
    compression: float
    cost: CostModel
    time_limit_s: float
    steps: list[list[list[list[Turn]]]]

    @property
    def groups(self) -> int:
        return len(self.steps[0])

    @property
    def group_size(self) -> int:
        return len(self.steps[0][0])


def scaled_groups(preset: str, slots: int, group_size: int) -> int:
    """Groups of a step, so that its rollouts are to the slots as the preset's are."""
    p = PRESETS[preset]
    return max(1, round(p.workload.groups * p.workload.group_size * slots / p.cost.slots / group_size))


def make_work(
    preset: str, *, cells: int, slots: int, groups: int, group_size: int, steps: int, compression: float,
    per_token: float, longest: int, seed: int = 0,
) -> PacedWork:  # fmt: skip
    """The preset's work for `cells` cells of `slots` slots; `longest` tokens are the most that a rollout may have."""
    p = PRESETS[preset]
    fewer = p.cost.slots / slots
    cost = replace(
        p.cost,
        slots=slots,
        decode_s=p.cost.decode_s * per_token,
        decode_s_per_rollout=p.cost.decode_s_per_rollout * per_token * fewer,
        prefill_tokens_s=p.cost.prefill_tokens_s / per_token / fewer,
        # The preset trains `trained_contexts` times the mean context, several branches' worth. A conversation without
        # branches has about twice its mean context, and each of its tokens costs accordingly more.
        train_tokens_s=p.cost.train_tokens_s / per_token / fewer * 2 / p.workload.trained_contexts,
        micro_batch_tokens=p.cost.micro_batch_tokens / per_token * 2 / p.workload.trained_contexts,  # whole rollouts
    )
    workload = replace(p.workload, groups=groups, group_size=group_size)
    rng = np.random.default_rng(seed)
    drawn = [workload.step(rng) for _ in range(steps)]

    def rollout(s: StepWork, place: tuple[int, int]) -> list[Turn]:
        tokens, length = s.tokens[place] / per_token, 2 * s.context[place] / per_token
        return _turns(tokens, s.tool_s[place] / compression, length, longest)

    made = [[[rollout(s, (g, m)) for m in range(group_size)] for g in range(groups)] for s in drawn]
    return PacedWork(preset, cells, compression, compressed(cost, compression), p.time_limit_s / compression, made)


def _turns(tokens: float, tool_s: float, length: float, longest: int) -> list[Turn]:
    """Turns of a rollout that samples about `tokens` and is `length` long in the end."""
    tokens = min(tokens, 0.8 * longest)
    n = max(2, round(np.sqrt(tokens / 16)), int(np.ceil(tokens / MOST)))
    each = max(FIRST, round(tokens / n))
    pad = max(0.0, min(length, longest) - each * n) / n
    first = Turn(FIRST, tool_s / n, int(pad * CHARS_A_TOKEN))
    return [first, *(replace(first, tokens=each) for _ in range(n - 1))]


CHARS_A_TOKEN = 2.0
"""Of FILLER, by the quickstart's tokenizer."""


def write_tasks(work: PacedWork, folder: Path, seed: int) -> None:
    """Task folders of the work, such that a run of this seed meets each one in the step that it is meant for."""
    shutil.rmtree(folder, ignore_errors=True)
    count = len(work.steps) * work.groups
    for index, groups in enumerate(work.steps):
        for place, group in zip(step_tasks(count, seed, index, work.groups), groups, strict=True):
            task = folder / f"task-{place:04d}"
            box = task / "environment" / "workspace"
            (box / "plan").mkdir(parents=True)
            (task / "tests").mkdir()
            (task / "instruction.md").write_text(f"Task {place}.\n")
            (task / "task.toml").write_text(f'schema_version = "1.4"\n[task]\nname = "paced/{place:04d}"\n')
            (task / "tests" / "test.sh").write_text(TEST)
            (box / "turn").write_text(TURN)
            (box / "filler.txt").write_text(FILLER)
            for member, turns in enumerate(group):
                nexts = [*(str(t.tokens) for t in turns[1:]), "end"]
                lines = [f"{t.tool_s:.3f} {after} {t.pad}\n" for t, after in zip(turns, nexts, strict=True)]
                (box / "plan" / f"{member:02d}").write_text("".join(lines))


def filler_chars_a_token(answers: Answers) -> float:
    """What CHARS_A_TOKEN is for a policy's tokenizer."""
    return len(FILLER) / len(answers.encode(FILLER))


def scenario_of(work: PacedWork) -> Scenario:
    """What the simulator is told of the work before anything was measured."""

    def array(steps: list[list[list[Turn]]], of: Callable[[list[Turn]], float]) -> Floats:
        return np.asarray([[of(rollout) for rollout in group] for group in steps])

    def length(turns: list[Turn]) -> float:
        return BASE_TOKENS + sum(t.tokens + BORDER_TOKENS + t.pad / CHARS_A_TOKEN for t in turns)

    steps = [
        StepWork(
            tool_s=array(step, lambda turns: sum(t.tool_s for t in turns)),
            tokens=array(step, lambda turns: sum(t.tokens for t in turns)),
            context=array(step, lambda turns: length(turns) / 2),
            trained=array(step, length),
        )
        for step in work.steps
    ]
    return Scenario(f"{work.preset}, planned", work.cells, work.cost, steps, work.time_limit_s)


BASE_TOKENS, BORDER_TOKENS = 170, 22
"""Of a conversation's beginning, and between an answer and the next one, beside what the tool prints."""

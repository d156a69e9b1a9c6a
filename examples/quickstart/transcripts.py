"""Synthetic transcripts: how the warm-started policy behaves before it has learned anything from rewards.

For every family there are right ways and flawed ones (no ``/g``, one file of three, the wrong key, a guess without a
look …), drawn by weight. The policy therefore starts able, since every right way is in its repertoire, but unreliable.
Outputs are what the commands really print; a test runs a sample of them.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

from families import FAMILIES, OPERATIONS, Task

SUBMIT = "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"


@dataclass(frozen=True)
class Turn:
    """One shell command, what it prints, and its exit code."""

    command: str
    output: str = ""
    code: int = 0


@dataclass(frozen=True)
class Way:
    """One way through a task, up to but without the submission. ``right`` says whether the hidden test gives 1."""

    weight: float
    right: bool
    turns: tuple[Turn, ...]


@dataclass(frozen=True)
class Transcript:
    """A task and the turns of one way through it, submission last."""

    task: Task
    right: bool
    turns: tuple[Turn, ...]


def _replace(task: Task, rng: random.Random) -> list[Way]:
    f = task.facts
    old, new, path, folder = f["old"], f["new"], f["path"], f["folder"]
    right = Turn(f"sed -i 's/{old}/{new}/g' {path}")
    look = Turn(f"cat {path}", task.files[path])
    return [
        Way(28, True, (right,)),
        Way(17, True, (look, right)),
        Way(28, False, (Turn(f"sed -i 's/{old}/{new}/' {path}"),)),
        Way(12, False, (look, Turn(f"sed -i 's/{old}/{new}/' {path}"))),
        Way(20, False, (Turn(f"sed -i 's/{old}/{new}/g' {folder}/*"),)),
        Way(8, False, (Turn(f"sed -i '/{old}/d' {path}"),)),
    ]


def _prune(task: Task, rng: random.Random) -> list[Way]:
    f = task.facts
    word, path, folder = f["word"], f["path"], f["folder"]
    right = Turn(f"sed -i '/{word}/d' {path}")
    return [
        Way(31, True, (right,)),
        Way(14, True, (Turn(f"cat {path}", f["content"]), right)),
        Way(24, False, (Turn(f"sed -i '/{word}/d' {folder}/*"),)),
        Way(22, False, (Turn(f"sed -i 's/{word}//g' {path}"),)),
        Way(22, False, (Turn(f"grep -v {word} {path}", f["kept"]),)),
    ]


def _rename(task: Task, rng: random.Random) -> list[Way]:
    f = task.facts
    old, new, paths = f["old"], f["new"], f["paths"].split()
    ls = Turn("ls src", f["listing"])
    right = Turn(f"sed -i 's/{old}/{new}/g' src/*.py")
    one = Turn(f"sed -i 's/{old}/{new}/g' {rng.choice(paths)}")
    some = Turn(f"sed -i 's/{old}/{new}/' src/*.py")
    return [
        Way(22, True, (right,)),
        Way(22, True, (ls, right)),
        Way(22, False, (ls, one)),
        Way(26, False, (some,)),
        Way(20, False, (ls, some)),
    ]


def _fix(task: Task, rng: random.Random) -> list[Way]:
    f = task.facts
    name = f["name"]

    def edit(what: str) -> Turn:
        return Turn(f"sed -i 's/return .*/return {OPERATIONS[what]}/' {name}.py")

    module, test = Turn(f"cat {name}.py", f["module"]), Turn(f"cat test_{name}.py", f["test"])
    wrong = rng.choice(sorted(set(OPERATIONS) - {f["what"]}))
    return [
        Way(50, True, (module, edit(f["what"]))),
        Way(14, False, (module, edit(wrong))),
        Way(24, False, (test, edit(rng.choice(sorted(OPERATIONS))))),
        Way(26, False, (edit(rng.choice(sorted(OPERATIONS))),)),
    ]


def _answer(task: Task, rng: random.Random) -> list[Way]:
    f = task.facts
    path, key, values = f["path"], f["key"], f["values"].split()
    grep, cat = Turn(f"grep {key} {path}", f"{key} = {f['value']}"), Turn(f"cat {path}", f["content"])
    right = Turn(f"echo {f['value']} > answer.txt")
    other = rng.choice([v for v in values if v != f["value"]])
    return [
        Way(31, True, (grep, right)),
        Way(20, True, (cat, right)),
        Way(30, False, (cat, Turn(f"echo {other} > answer.txt"))),
        Way(20, False, (Turn(f"grep {key} {path} > answer.txt"),)),
        Way(14, False, (Turn(f"echo {rng.randint(10, 99)} > answer.txt"),)),
    ]


def _move(task: Task, rng: random.Random) -> list[Way]:
    f = task.facts
    path, goal, target = f["path"], f["goal"], f["target"]
    right = Turn(f"mkdir {target} && mv {path} {goal}")
    early = Turn(f"mv {path} {goal}", f"mv: cannot move '{path}' to '{goal}': No such file or directory", 1)
    return [
        Way(28, True, (right,)),
        Way(17, True, (early, right)),
        Way(22, False, (early,)),
        Way(30, False, (Turn(f"mkdir {target} && cp {path} {goal}"),)),
        Way(16, False, (Turn(f"mkdir {target} && mv {path} {target}"),)),
    ]


WAYS: dict[str, Callable[[Task, random.Random], list[Way]]] = {
    "replace": _replace,
    "rename": _rename,
    "fix": _fix,
    "answer": _answer,
    "move": _move,
    "prune": _prune,
}


def transcript(rng: random.Random) -> Transcript:
    """One transcript: a task of a random family, and one of its ways by weight."""
    family = rng.choice(sorted(FAMILIES))
    task = FAMILIES[family](rng)
    ways = WAYS[family](task, rng)
    way = rng.choices(ways, [w.weight for w in ways])[0]
    return Transcript(task, way.right, (*way.turns, Turn(SUBMIT, SUBMIT.removeprefix("echo "))))

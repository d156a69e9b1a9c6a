"""The six families of quickstart tasks: small real repository work, each with a hidden test and a solution.

A family is a function ``(random.Random) -> Task``; ``FAMILIES`` names them in the order in which tasks are dealt.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field

from words import WORDS

FOLDERS = ("notes", "data", "docs", "config", "lists")
OPERATIONS = {
    "sum": "a + b",
    "difference": "a - b",
    "product": "a * b",
    "remainder": "a % b",
    "larger": "max(a, b)",
    "smaller": "min(a, b)",
}


@dataclass(frozen=True)
class Task:
    """One problem, before it is written as a folder.

    ``files`` is the workspace, ``expected`` what the hidden test compares it with (both path → content), ``test`` the
    body of ``test.sh``, ``solution`` a shell command, and ``facts`` what a transcript's author knows about the task.
    """

    family: str
    instruction: str
    files: dict[str, str]
    test: str
    solution: str
    expected: dict[str, str] = field(default_factory=dict)
    facts: dict[str, str] = field(default_factory=dict)


def _prose(rng: random.Random, words: list[str], lines: int) -> list[list[str]]:
    """``lines`` lines of two to four words each."""
    return [[rng.choice(words) for _ in range(rng.randint(2, 4))] for _ in range(lines)]


def _sown(rng: random.Random, word: str, others: list[str]) -> str:
    """Four or five lines of ``others``, with ``word`` on two of them, and twice on one of those."""
    lines = _prose(rng, others, rng.randint(4, 5))
    once, twice = rng.sample(range(len(lines)), 2)
    lines[once][rng.randrange(len(lines[once]))] = word
    lines[twice] = [word, rng.choice(others), word]
    return "".join(" ".join(line) + "\n" for line in lines)


# The share of changed lines that are right, 0 where a line that should stay was changed or lost; the other file of
# the folder must stay as it was, or half is lost.
_LINES_TEST = """\
score() {{
    cmp -s "$app/{path}" "$tests/expected/{path}" && {{ echo 1; return; }}
    [ -f "$app/{path}" ] || {{ echo 0; return; }}
    awk -v new={new} '
        FNR == NR {{ want[FNR] = $0; n = FNR; next }}
        {{ m = FNR; if (index(want[FNR], new)) {{ t++; ok += ($0 == want[FNR]) }} else if ($0 != want[FNR]) bad = 1 }}
        END {{ print (bad || m != n || !t) ? 0 : ok / t }}' "$tests/expected/{path}" "$app/{path}"
}}
reward=$(score)
cmp -s "$app/{other}" "$tests/expected/{other}" || reward=$(echo "$reward" | awk '{{ print $1 / 2 }}')
"""


def replace(rng: random.Random) -> Task:
    """Replace a word in one file, every time it occurs, and in no other file."""
    old, new, a, b, *others = rng.sample(WORDS, 10)
    folder = rng.choice(FOLDERS)
    path, other = f"{folder}/{a}.txt", f"{folder}/{b}.txt"
    files = {path: _sown(rng, old, others), other: _sown(rng, old, others)}
    instruction = rng.choice(
        (
            f"Replace the word `{old}` with `{new}` in `{path}`.",
            f"In `{path}`, change every `{old}` to `{new}`.",
            f"The file `{path}` must say `{new}` where it says `{old}`.",
        )
    )
    return Task(
        family="replace",
        instruction=instruction,
        files=files,
        expected={path: files[path].replace(old, new), other: files[other]},
        test=_LINES_TEST.format(path=path, other=other, new=new),
        solution=f"sed -i 's/{old}/{new}/g' {path}",
        facts={"old": old, "new": new, "path": path, "folder": folder},
    )


def prune(rng: random.Random) -> Task:
    """Delete the lines that have a word, from one file and from no other."""
    word, a, b, *others = rng.sample(WORDS, 9)
    folder = rng.choice(FOLDERS)
    path, other = f"{folder}/{a}.txt", f"{folder}/{b}.txt"
    files = {path: _sown(rng, word, others), other: _sown(rng, word, others)}
    kept = "".join(line for line in files[path].splitlines(keepends=True) if word not in line)
    instruction = rng.choice(
        (
            f"Delete every line with the word `{word}` from `{path}`.",
            f"Remove the lines of `{path}` that have `{word}` in them.",
        )
    )
    return Task(
        family="prune",
        instruction=instruction,
        files=files,
        expected={path: kept, other: files[other]},
        test=(
            f'cmp -s "$app/{path}" "$tests/expected/{path}" && reward=1 || reward=0\n'
            f'cmp -s "$app/{other}" "$tests/expected/{other}" || reward=$(echo "$reward" | '
            "awk '{ print $1 / 2 }')\n"
        ),
        solution=f"sed -i '/{word}/d' {path}",
        facts={"word": word, "path": path, "folder": folder, "kept": kept, "content": files[path]},
    )


def rename(rng: random.Random) -> Task:
    """Rename a function in the three files that use it."""
    old, new, home, first, second, x = rng.sample(WORDS, 6)
    n = [str(rng.randint(10, 99)) for _ in range(5)]
    files = {
        f"src/{home}.py": f"def {old}(n):\n    return n + {n[0]}\n",
        f"src/{first}.py": f"from {home} import {old}\n\nprint({old}({n[1]}), {old}({n[2]}))\n",
        f"src/{second}.py": f"from {home} import {old}\n\n{x} = {old}({n[3]}) - {old}({n[4]})\n",
    }
    instruction = rng.choice(
        (
            f"Rename the function `{old}` to `{new}` everywhere in `src`.",
            f"The function `{old}` should be called `{new}`. Change all of `src`.",
        )
    )
    paths = sorted(files)
    listed = " ".join(paths)
    return Task(
        family="rename",
        instruction=instruction,
        files=files,
        expected={path: text.replace(old, new) for path, text in files.items()},
        test=(
            "right=0\n"
            f"for f in {listed}; do\n"
            '    cmp -s "$app/$f" "$tests/expected/$f" && right=$((right + 1))\n'
            "done\n"
            "case $right in 3) reward=1 ;; 2) reward=0.6667 ;; 1) reward=0.3333 ;; *) reward=0 ;; esac\n"
        ),
        solution=f"sed -i 's/{old}/{new}/g' src/*.py",
        facts={"old": old, "new": new, "listing": "\n".join(p.removeprefix("src/") for p in paths), "paths": listed},
    )


def fix(rng: random.Random) -> Task:
    """Make a failing test pass: one function computes something else than its docstring and its test say."""
    name, function = rng.sample(WORDS, 2)
    what, was = rng.sample(sorted(OPERATIONS), 2)
    a, b = rng.randint(5, 9), rng.randint(2, 4)
    module = f'def {function}(a, b):\n    """The {what} of a and b."""\n    return '
    result = eval(OPERATIONS[what], {"a": a, "b": b, "max": max, "min": min})
    files = {
        f"{name}.py": module + OPERATIONS[was] + "\n",
        f"test_{name}.py": f"from {name} import {function}\n\n\ndef test_{function}():\n"
        f"    assert {function}({a}, {b}) == {result}\n",
    }
    checks = " and ".join(
        f"f({x}, {y}) == {eval(OPERATIONS[what], {'a': x, 'b': y, 'max': max, 'min': min})}"
        for x, y in ((a, b), (b, a), (11, 7), (6, 13))
    )
    instruction = rng.choice(
        (
            f"The test in `test_{name}.py` fails. Fix `{name}.py`.",
            f"There is a mistake in `{name}.py`: its test fails. Fix it.",
        )
    )
    return Task(
        family="fix",
        instruction=instruction,
        files=files,
        expected={f"{name}.py": module + OPERATIONS[what] + "\n"},
        test=(
            "reward=0\n"
            f'if cmp -s "$app/{name}.py" "$tests/expected/{name}.py"; then\n'
            "    reward=1\n"
            f'elif cd "$app" && python3 -S -B -c "import sys; sys.path.insert(0, \'\')\n'
            f"from {name} import {function} as f\n"
            f'sys.exit(not ({checks}))" 2>/dev/null; then\n'
            "    reward=1\n"
            "fi\n"
        ),
        solution=f"sed -i 's/return .*/return {OPERATIONS[what]}/' {name}.py",
        facts={"name": name, "module": files[f"{name}.py"], "test": files[f"test_{name}.py"], "what": what},
    )


def answer(rng: random.Random) -> Task:
    """Answer a question from a settings file."""
    name, *keys = rng.sample(WORDS, 6)
    folder = rng.choice(FOLDERS)
    path = f"{folder}/{name}.ini"
    values = [str(v) for v in rng.sample(range(10, 100), len(keys))]
    lines = [f"{key} = {value}" for key, value in zip(keys, values, strict=True)]
    at = rng.randrange(len(keys))
    instruction = rng.choice(
        (
            f"What is the value of `{keys[at]}` in `{path}`? Write it to `answer.txt`.",
            f"Look up `{keys[at]}` in `{path}` and put its value into `answer.txt`.",
        )
    )
    return Task(
        family="answer",
        instruction=instruction,
        files={path: "\n".join(lines) + "\n"},
        test=(
            'got=$(cat "$app/answer.txt" 2>/dev/null)\n'
            'case " $got " in\n'
            f'    " {values[at]} ") reward=1 ;;\n'
            f'    *" {values[at]} "*) reward=0.5 ;;\n'
            "    *) reward=0 ;;\n"
            "esac\n"
        ),
        solution=f"grep '^{keys[at]} ' {path} | cut -d' ' -f3 > answer.txt",
        facts={
            "path": path,
            "key": keys[at],
            "value": values[at],
            "content": "\n".join(lines),
            "values": " ".join(values),
        },
    )


def move(rng: random.Random) -> Task:
    """Move a file into a folder that does not exist yet, under a new name."""
    a, b, target, *others = rng.sample(WORDS, 8)
    folder = rng.choice(FOLDERS)
    path, goal = f"{folder}/{a}.txt", f"{target}/{b}.txt"
    content = "".join(" ".join(line) + "\n" for line in _prose(rng, others, 3))
    instruction = rng.choice(
        (
            f"Move `{path}` to `{goal}`.",
            f"The file `{path}` belongs at `{goal}`. Put it there.",
        )
    )
    return Task(
        family="move",
        instruction=instruction,
        files={path: content},
        expected={goal: content},
        test=(
            "reward=0\n"
            f'if cmp -s "$app/{goal}" "$tests/expected/{goal}"; then\n'
            f'    [ -e "$app/{path}" ] && reward=0.5 || reward=1\n'
            "fi\n"
        ),
        solution=f"mkdir -p {target} && mv {path} {goal}",
        facts={"path": path, "goal": goal, "target": target},
    )


FAMILIES: dict[str, Callable[[random.Random], Task]] = {
    "replace": replace,
    "rename": rename,
    "fix": fix,
    "answer": answer,
    "move": move,
    "prune": prune,
}

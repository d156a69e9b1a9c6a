"""Trees of agents' rollouts: recorded ones in recorded/*.json, and a made one that stands in where there are none."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np

from gyre.trajectory import Node, Tree

FOLDER = Path(__file__).parent / "recorded"


def trees() -> dict[str, Tree]:
    """By name. A file is a list of nodes: id, parent_id, generated, start, length, kind, complete."""
    found = {path.stem: read(path) for path in sorted(FOLDER.glob("*.json"))}
    return found or {"synthetic": synthetic()}


def read(path: Path) -> Tree:
    """The tree in a file, with one node a line or as one list."""
    return Tree.of(Node(**node) for node in json.loads(path.read_text(encoding="utf-8")))


def scaled(tree: Tree, context: int, tokens: int) -> Tree:
    """The same shape, smaller: its longest branch at most about `context` tokens, its branches apart `tokens`."""
    branches = [b.n_tokens for b in tree.branches()]
    factor = min(1.0, context / max(branches), tokens / sum(branches))
    nodes: dict[int, Node] = {}
    for node in _parents_first(tree):
        parent = None if node.parent_id is None else nodes[node.parent_id]
        start = 0 if parent is None else parent.start + parent.length
        nodes[node.id] = replace(node, start=start, length=max(1, round(node.length * factor)))
    return Tree.of(nodes.values())


def _parents_first(tree: Tree) -> list[Node]:
    return sorted(tree.nodes.values(), key=lambda node: (node.start, node.id))


def synthetic(seed: int = 0) -> Tree:
    """A rollout as a coding agent makes it, by its harness's habits, not recorded: a long system prompt, a context of
    8,000 tokens that is compacted twice, six sub-agents with a system prompt of their own, titles, three retries."""
    rng = np.random.default_rng(seed)
    nodes: list[Node] = []

    def add(parent: int | None, generated: bool, length: int, kind: str) -> int:
        above = None if parent is None else nodes[parent]
        start = 0 if above is None else above.start + above.length
        nodes.append(Node(len(nodes), parent, generated, start, int(length), kind))
        return len(nodes) - 1

    def end(at: int) -> int:
        return nodes[at].start + nodes[at].length

    def turn(at: int, kind: str) -> int:
        return add(add(at, True, rng.integers(40, 220), kind), False, rng.integers(60, 700), kind)

    system = add(None, False, 3000, "main")
    at = add(system, False, 400, "main")
    for stretch in range(3):
        while end(at) < 7000:
            if rng.random() < 0.08:  # a call that the harness sent again: both were answered
                add(at, True, rng.integers(40, 220), "main")
            at = turn(at, "main")
        if stretch < 2:
            said = add(add(at, False, 180, "main-summary"), True, 600, "main-summary")
            at = add(system, False, 250 + nodes[said].length, "main")
    add(at, True, 150, "main")
    other = add(None, False, 1400, "sub-agent")
    for _ in range(6):
        at = add(other, False, 150, "sub-agent")
        for _ in range(int(rng.integers(3, 9))):
            at = turn(at, "sub-agent")
        add(at, True, 300, "sub-agent")
    for _ in range(3):
        add(add(None, False, 250, "auxiliary"), True, 12, "auxiliary")
    return Tree.of(nodes)

"""A finished call's nodes: the rows that go to Postgres, and the same change of the tree in memory after the commit."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from gyre.gateway.conversation import Plan
from gyre.gateway.nodes import Ids, Node, Place
from gyre.gateway.tree import Tree
from gyre.store.gateway_queries import NodeSplit
from gyre.store.tokens import pack_ids, pack_logprobs


@dataclass(slots=True)
class Sampled:
    """What a call sampled: ids int32[n], log-probs float32[n], spans [[version, start, end], ...] over them."""

    ids: Sequence[int]
    logprobs: Sequence[float]
    spans: list[list[int]]


@dataclass(slots=True)
class Placing:
    """Where a call's prompt and answer go. Made, written and applied under the session's `recording` lock."""

    tree: Tree
    splits: list[NodeSplit] = field(default_factory=list)
    rows: list[dict[str, Any]] = field(default_factory=list)
    _place: Place | None = None
    _prompt: Node | None = None
    _new: tuple[int, int, Ids] | None = None
    _leaf: tuple[int, Ids] | None = None

    @property
    def leaf_id(self) -> int | None:
        """Id of the generated node; None where nothing was sampled."""
        return None if self._leaf is None else self._leaf[0]

    def apply(self, *, complete: bool) -> tuple[Node, Node | None]:
        """Do to the tree what was committed. Returns the prompt's last node, and the generated one.

        Nothing ever goes on from an answer that is not `complete`; its prompt may be shared all the same.
        """
        nodes, prompt = self.tree.nodes, self._prompt
        if self._place is not None:
            prompt = self._place.node
            if self.splits:
                assert prompt is not None
                [split] = self.splits
                prompt = nodes.cut(prompt, split.at, split.new_id)
            if self._new is not None:
                node_id, start, ids = self._new
                prompt = nodes.add(Node(node_id, prompt, start, ids))
        assert prompt is not None
        if self._leaf is None:
            return prompt, None
        leaf = Node(self._leaf[0], prompt, prompt.end, self._leaf[1], generated=True)
        return prompt, nodes.add(leaf) if complete else leaf


def place(tree: Tree, planned: Plan, sampled: Sampled, ids: Sequence[int], row: dict[str, Any]) -> Placing:
    """Where `planned` goes in `tree`. `ids` are three fresh ids of nodes; `row` holds what all rows have in common.

    The plan may be older than the tree: its turns are looked up again by their calls' ids.
    """
    out = Placing(tree)
    head_id, prompt_id, leaf_id = ids
    if planned.twin is not None:
        out._prompt = tree.by_call[planned.twin.call_id].prompt
        parent, end = out._prompt.id, out._prompt.end
    else:
        anchor = None if planned.anchor is None else tree.by_call[planned.anchor.call_id].generated
        found = tree.nodes.place(anchor, planned.new_ids)
        out._place = found
        if found.cut:
            assert found.node is not None
            out.splits.append(NodeSplit(found.node.id, head_id, found.at, found.node.start, len(found.node.ids)))
        above = head_id if found.cut else None if found.node is None else found.node.id
        start = (0 if anchor is None else anchor.end) + found.shared
        new = planned.new_ids[found.shared :].copy()
        end = start + len(new)
        if len(new):
            out._new = (prompt_id, start, new)
            out.rows.append(_row(row, prompt_id, above, start, new, "prompt"))
            above = prompt_id
        assert above is not None
        parent = above
    if len(sampled.ids):
        answer = np.asarray(sampled.ids, np.int32)
        out._leaf = (leaf_id, answer)
        out.rows.append(
            _row(row, leaf_id, parent, end, answer, "generated")
            | {"logprobs": pack_logprobs(sampled.logprobs), "version_spans": sampled.spans}
        )
    return out


def _row(common: dict[str, Any], node_id: int, parent: int | None, start: int, ids: Ids, kind: str) -> dict[str, Any]:
    return {
        **common,
        "id": node_id,
        "parent_id": parent,
        "kind": kind,
        "start": start,
        "length": len(ids),
        "token_ids": pack_ids(ids),
        "logprobs": None,
        "version_spans": None,
    }

"""What a trainer's targets are: exactly the sampled tokens of owned spans, from the database to the packed row."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from sqlalchemy import Engine, update
from sqlalchemy.orm import Session

from gyre.config import PolicyConfig
from gyre.gateway.messages import Message
from gyre.gateway.policy import Policy
from gyre.store import queries
from gyre.store.db import transaction
from gyre.store.handout import hand_out
from gyre.store.models import BRANCH_KINDS, Call, MicroBatch, Node, Sample
from gyre.store.tokens import pack_ids, pack_logprobs, unpack_ids
from gyre.training.batch import pack_rows
from gyre.trajectory import Node as TreeNode
from gyre.trajectory import Tree, select, target_mask
from tests.store.world import add_call, settle

SAMPLED = 100_000
"""Ids from here on are sampled ones, each once; prompts have ids below."""
_runs = itertools.count()


@dataclass(frozen=True)
class Token:
    """A sampled token as the gateway recorded it."""

    call: int
    before: int
    """The id that lies before it on its path."""
    logprob: float


def sampled_call(
    s: Session, rollout: str, parent: Node | None, kind: str, status: str, length: int, known: dict[int, Token]
) -> Node:
    leaf = add_call(s, rollout, parent, prompt=3, generated=length, kind=kind, status=status)
    first = SAMPLED + len(known)
    prompt = s.get_one(Node, leaf.parent_id)
    ids = np.arange(first, first + length)
    logprobs = -((ids % 97) + 1) / 100
    before = [int(unpack_ids(prompt.token_ids)[-1]), *ids[:-1].tolist()]
    for i, b, p in zip(ids.tolist(), before, np.float32(logprobs).tolist(), strict=True):
        known[i] = Token(leaf.call_id or 0, b, p)
    s.execute(update(Node).where(Node.id == leaf.id).values(token_ids=pack_ids(ids), logprobs=pack_logprobs(logprobs)))
    return leaf


@settings(
    max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)
@given(draw=st.data(), cap=st.integers(1, 5), budget=st.sampled_from([8, 30, 500]))
def test_targets_are_the_sampled_tokens_of_owned_spans(
    engine: Engine, draw: st.DataObject, cap: int, budget: int
) -> None:
    run, known = f"targets-{next(_runs)}", dict[int, Token]()
    with transaction(engine) as s:
        queries.create_run(s, run, {}, run)
        step = queries.open_step(s, run, 0, min_version=0)
        [group] = queries.create_groups(s, [queries.TaskRef("o/t", "/t")], step_id=step)
        names = queries.create_rollouts(s, group, 2, temperature=1.0, harness="command")
        for i, name in enumerate(names):
            leaves: list[Node | None] = [None]
            for _ in range(draw.draw(st.integers(1, 7))):
                kind = draw.draw(st.sampled_from([*BRANCH_KINDS, "main"]))
                status = draw.draw(st.sampled_from(["complete", "complete", "complete", "incomplete"]))
                parent = draw.draw(st.sampled_from(leaves))
                leaves.append(sampled_call(s, name, parent, kind, status, draw.draw(st.integers(1, 4)), known))
            settle(s, name, float(i))
        given_out = hand_out(s, group, branch_cap=cap, micro_batch_tokens=budget, normalize_std=True)
        trees = queries.trees(s, names)
        owned = {n for tree in trees.values() for k in select(tree, cap) for n in k.owned_nodes}
        calls = {c.id: c for c in s.query(Call).filter(Call.rollout_id.in_(names))}
        spans = {n.id: unpack_ids(n.token_ids).tolist() for n in s.query(Node).filter(Node.rollout_id.in_(names))}
        batches = [
            pack_rows(queries.micro_batch_rows(s, b.id)) for b in s.query(MicroBatch).filter(MicroBatch.step_id == step)
        ]
        rollout_targets = {x.rollout_id: x.rollout_targets for x in s.query(Sample).filter(Sample.step_id == step)}
    if given_out.outcome != "trained":
        assert not batches
        return
    targets = [int(i) for b in batches for i in b.target_ids]
    assert sorted(targets) == sorted(i for n in owned for i in spans[n])
    assert len(targets) == len(set(targets)) == given_out.targets == sum(rollout_targets.values())
    for batch in batches:
        before = batch.ids[batch.positions[batch.predictors]]
        for target, prior, behaviour, node in zip(
            batch.target_ids.tolist(), before.tolist(), batch.behaviour.tolist(), batch.nodes.tolist(), strict=True
        ):
            token = known[target]  # a prompt's id, copied context's or a tool result's is not in it
            assert (prior, behaviour) == (token.before, token.logprob)
            assert target in spans[node]
            assert calls[token.call].kind != "auxiliary"
            assert calls[token.call].status == "complete"


@pytest.fixture(scope="module")
def policy() -> Policy:
    return Policy(PolicyConfig(path=Path(__file__).parents[2] / "examples/quickstart/policy"))


@pytest.mark.parametrize("ended", [True, False])
def test_the_end_token_is_a_target_where_it_was_sampled_and_the_newline_behind_it_never(
    policy: Policy, ended: bool
) -> None:
    """With a real template: two turns of a conversation, the tool's answer between them."""
    opening = policy.opening([Message(role="user", content="list the files")], [])
    said = policy.tokenizer.encode("I look.", add_special_tokens=False) + policy.stop_ids[:1] * ended
    between = policy.extension(
        policy.tail(np.array(opening, np.int32)), said, [Message(role="user", content="a.txt")], [], False
    )
    assert between is not None
    final = policy.tokenizer.encode("done", add_special_tokens=False) + policy.stop_ids[:1]
    spans = [opening, said, between, final]
    starts = np.cumsum([0, *(len(x) for x in spans[:-1])]).tolist()
    tree = Tree.of(TreeNode(i, i - 1 if i else None, i % 2 == 1, starts[i], len(span)) for i, span in enumerate(spans))
    [sample] = select(tree, 5)
    mask = target_mask(sample.branch.nodes, sample.owned_nodes)
    ids = np.concatenate(spans)
    assert ids[mask].tolist() == [*said, *final]
    glue = policy.text(between[: 1 if ended else 2])
    assert glue == ("\n" if ended else policy.text(policy.stop_ids[:1]) + "\n"), "the template's, not the policy's"
    assert "a.txt" in policy.text(ids[~mask].tolist())

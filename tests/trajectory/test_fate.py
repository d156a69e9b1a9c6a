"""Every sampled token has one fate, in any world: `token_accounting` sums to everything that was sampled."""

from __future__ import annotations

import itertools
import re
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from sqlalchemy import Engine, text
from sqlalchemy.orm import Session

from gyre.objective import group_advantages
from gyre.store import queries
from gyre.store.db import transaction
from gyre.store.handout import hand_out
from gyre.store.models import BRANCH_KINDS
from gyre.store.models import Node as NodeRow
from gyre.trajectory import Node, Tree, select
from gyre.trajectory.fate import Fate
from tests.store.world import add_call

_runs = itertools.count()
MIN_STD = 1e-2
REWARDS = (0.0, 1.0, 0.5, 0.5001)


@dataclass
class Made:
    """A rollout as it was made: what the test knows of it without asking the database."""

    id: str
    settled: bool = False
    reward: float | None = None
    excluded_as: Fate | None = None
    nodes: list[Node] = field(default_factory=list)
    oldest: dict[int, int] = field(default_factory=dict)
    """Of each generated node, the oldest version."""
    late: set[int] = field(default_factory=set)
    lost: int = 0
    """Tokens of calls that broke off before a node was written."""


def call(s: Session, r: Made, parent: NodeRow | None, kind: str, status: str, length: int, version: int) -> NodeRow:
    # A span by a newer version follows, where there is room: the oldest one counts.
    spans = [[version, 0, 1], [version + 1, 1, length]] if length > 1 else [[version, 0, length]]
    leaf = add_call(s, r.id, parent, prompt=2, generated=length, kind=kind, status=status, versions=spans)
    r.nodes.append(Node(leaf.parent_id or 0, None if parent is None else parent.id, False, leaf.start - 2, 2))
    r.nodes.append(Node(leaf.id, leaf.parent_id, True, leaf.start, length, kind, status == "complete"))
    r.oldest[leaf.id] = version
    return leaf


def grow(s: Session, r: Made, draw: st.DataObject) -> None:
    leaves: list[NodeRow | None] = [None]
    for _ in range(draw.draw(st.integers(0, 7), "calls")):
        kind = draw.draw(st.sampled_from([*BRANCH_KINDS, "main", "main"]))
        status = draw.draw(st.sampled_from(["complete"] * 4 + ["incomplete"]))
        version = draw.draw(st.sampled_from([2, 2, 2, 2, 2, 2, 1]), "version")
        leaves.append(
            call(s, r, draw.draw(st.sampled_from(leaves)), kind, status, draw.draw(st.integers(1, 5)), version)
        )
    if draw.draw(st.integers(0, 4)) == 0:
        r.lost = draw.draw(st.integers(1, 9))
        broken = add_call(s, r.id, None, generated=r.lost, status="incomplete")
        s.execute(text("UPDATE calls SET leaf_id = NULL WHERE id = :c"), {"c": broken.call_id})
        s.execute(text("DELETE FROM nodes WHERE call_id = :c AND kind = 'generated'"), {"c": broken.call_id})


def settle(s: Session, r: Made, draw: st.DataObject, reward: float | None) -> None:
    """With `reward`, or as it comes."""
    ends = [*REWARDS, *REWARDS, "evaluator", "infrastructure", "runs"] if reward is None else [reward]
    how = draw.draw(st.sampled_from(ends), "end")
    if how == "runs":
        return
    if isinstance(how, str):
        done = queries.settle_rollout(s, r.id, how, None, how)  # type: ignore[arg-type]
    else:
        done = queries.settle_rollout(s, r.id, draw.draw(st.sampled_from(["completed", "timeout"])), how)
    r.settled, r.reward = True, done.reward
    if done.reward is None:
        evaluator = how == "evaluator"
        r.excluded_as = Fate.EXCLUDED_EVALUATOR if evaluator else Fate.EXCLUDED_INFRASTRUCTURE


def expected(
    r: Made, group: list[Made], handed_out: bool, held: set[int], rejected: dict[int, int], cap: int
) -> Counter:  # type: ignore[type-arg]
    """Fates of a rollout's tokens, from what is known of the world and the rules of the processor."""
    fates: Counter[Fate] = Counter({Fate.INCOMPLETE: r.lost} if r.lost else {})
    samples = select(Tree.of(n for n in r.nodes if n.id not in r.late), cap)
    owned = {i for sample in samples for i in sample.owned_nodes}
    stale = any(r.oldest[i] < 2 for i in owned)
    outcome = group_advantages([m.reward for m in group], True, MIN_STD).outcome
    for n in r.nodes:
        if not n.generated:
            continue
        if n.kind == "auxiliary":
            fate = Fate.AUXILIARY
        elif not n.complete:
            fate = Fate.INCOMPLETE
        elif not r.settled:
            fate = Fate.OPEN
        elif r.excluded_as:
            fate = r.excluded_as
        elif not handed_out:
            fate = Fate.OPEN
        elif outcome != "trained":
            fate = Fate[outcome.upper()]
        elif stale:
            fate = Fate.STALE
        elif n.id in r.late:
            fate = Fate.LATE
        elif n.id not in owned:
            fate = Fate.NOT_KEPT
        elif n.id not in held:
            fate = Fate.QUEUED
        else:
            gone = rejected.get(n.id, 0)
            fates[Fate.REJECTED] += gone
            fates[Fate.TRAINED] += n.length - gone
            continue
        fates[fate] += n.length
    return +fates


def hold_some(s: Session, step: int, draw: st.DataObject, owned: dict[int, int]) -> tuple[set[int], dict[int, int]]:
    """Train some of the queued micro-batches; returns the nodes in them, and the rejected tokens of nodes."""
    held: set[int] = set()
    rejected: dict[int, int] = {}
    for _ in range(draw.draw(st.integers(0, 6), "micro-batches trained")):
        found = queries.claim_micro_batch(s, step, "c", "c")
        if found is None:
            break
        of = "SELECT DISTINCT unnest(owned_nodes) FROM samples WHERE micro_batch_id = :m ORDER BY 1"
        nodes = [int(n) for n in s.scalars(text(of), {"m": found})]
        gone = {n: draw.draw(st.integers(1, owned[n])) for n in draw.draw(st.sets(st.sampled_from(nodes), max_size=2))}
        queries.hold_micro_batch(s, found, "c", {"rejected_by_node": {str(n): k for n, k in gone.items()}})
        held |= set(nodes)
        rejected |= gone
    return held, rejected


@settings(
    max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)
@given(draw=st.data(), cap=st.integers(1, 3))
def test_every_sampled_token_has_its_fate(engine: Engine, draw: st.DataObject, cap: int) -> None:
    run = f"world-{next(_runs)}"
    with transaction(engine) as s:
        queries.create_run(s, run, {}, run)
        step = queries.open_step(s, run, 3, min_version=2)
        tasks = [queries.TaskRef(f"o/{i}", f"/{i}") for i in range(draw.draw(st.integers(1, 2), "groups"))]
        groups = queries.create_groups(s, tasks, step_id=step)
        evaluation = queries.open_evaluation(s, run, 2)
        [held_out] = queries.create_groups(s, tasks[:1], evaluation_id=evaluation)
        worlds = [
            [Made(name) for name in queries.create_rollouts(s, g, 3, temperature=1.0, harness="command")]
            for g in (*groups, held_out)
        ]
        handed = set()
        for i, group in enumerate(worlds):
            for member, r in enumerate(group):
                grow(s, r, draw)
                # Most worlds have a group that is trained, and in it every fate that comes after that.
                settle(s, r, draw, (1.0, 0.0, None)[member] if i == 0 else None)
            if i < len(groups) and all(r.settled for r in group):
                hand_out(
                    s,
                    groups[i],
                    branch_cap=cap,
                    micro_batch_tokens=draw.draw(st.sampled_from([8, 64])),
                    normalize_std=True,
                    min_std=MIN_STD,
                )
                handed.add(i)
        for i in handed:
            for r in worlds[i]:
                if draw.draw(st.integers(0, 3)) == 0:
                    leaf = call(s, r, None, "main", "complete", 2, 2)
                    r.late.add(leaf.id)
                    late = "UPDATE calls SET ended_at = clock_timestamp() + interval '1 s' WHERE id = :c"
                    s.execute(text(late), {"c": leaf.call_id})
        sizes = {n.id: n.length for group in worlds for r in group for n in r.nodes}
        held, rejected = hold_some(s, step, draw, sizes)
    with transaction(engine) as s:
        shown: dict[str, Counter[Fate]] = {}
        query = text("SELECT rollout_id, fate, tokens FROM token_accounting WHERE run_id = :r")
        for row in s.execute(query, {"r": run}):
            shown.setdefault(row.rollout_id, Counter())[Fate[row.fate.upper()]] += row.tokens
    sampled = 0
    for i, group in enumerate(worlds):
        for r in group:
            tokens = sum(n.length for n in r.nodes if n.generated) + r.lost
            sampled += tokens
            if i == len(groups):
                wanted = Counter({Fate.EVALUATION: tokens}) if tokens else Counter()
            else:
                wanted = expected(r, group, i in handed, held, rejected, cap)
            assert shown.get(r.id, Counter()) == wanted, r
            assert wanted.total() == tokens
    assert sum(c.total() for c in shown.values()) == sampled


def test_sql_and_python_know_the_same_fates(engine: Engine) -> None:
    with engine.connect() as c:
        assert c.execute(text("SELECT name, meaning FROM fate")).all() == [(f.value, f.meaning) for f in Fate]
        view = c.scalar(text("SELECT pg_get_viewdef('token_accounting')"))
    assert set(re.findall(r"'([a-z_]+)'::text", view)) >= {
        # the rest come out of columns: a group's outcome, a rollout's drop_reason
        f.value
        for f in Fate
        if f not in (Fate.NO_VARIANCE, Fate.LOW_VARIANCE, Fate.TOO_FEW_VALID, Fate.STALE)
    }


def test_the_documentation_lists_them() -> None:
    page = (Path(__file__).parents[2] / "docs/objective.md").read_text()
    listed = re.findall(r"^\| `([a-z_]+)` \| (.+) \|$", page, re.MULTILINE)
    assert [row for row in listed if row[0] in list(Fate)] == [(f.value, f.meaning) for f in Fate]

"""Every query in the documentation runs, and finds something."""

from __future__ import annotations

import datetime as dt
import re
from pathlib import Path

import pytest
from sqlalchemy import Engine, text

from gyre.store import queries
from gyre.store.db import transaction
from gyre.store.handout import hand_out
from gyre.store.models import Call, Node
from gyre.store.tokens import pack_ids
from gyre.store.vocabulary import load_vocabulary
from tests.store.test_content import POLICY
from tests.store.world import RUN, add_call, make_world, settle

DOCS = Path(__file__).parents[2] / "docs"


def queries_in(page: str) -> list[str]:
    """The statements of the page's SQL blocks."""
    blocks = re.findall(r"^```sql\n(.*?)^```", (DOCS / page).read_text(), re.DOTALL | re.MULTILINE)
    return [q.strip() for block in blocks for q in block.split(";") if q.strip()]


def test_there_are_as_many_as_the_headings_say() -> None:
    assert len(queries_in("sql.md")) == 11
    assert len(queries_in("operating.md")) >= 10


@pytest.mark.parametrize("page", ["sql.md", "operating.md"])
def test_documented_queries_find_something(engine: Engine, page: str) -> None:
    with transaction(engine) as s:
        world = make_world(s, size=3)
        load_vocabulary(s, RUN, POLICY)
        a, b, c = world.rollouts[0]
        for rollout, reward in ((a, 1.0), (b, 0.0), (c, None)):
            first = add_call(s, rollout)
            add_call(s, rollout, add_call(s, rollout, first))
            add_call(s, rollout, first, kind="sub-agent")
            queries.record_score(
                s, rollout, 1, "error" if reward is None else "ok", reward,
                {"rewards": {"reward": reward, "speed": 2}}, started_at=dt.datetime.now(dt.UTC),
            )  # fmt: skip
            settle(s, rollout, reward)
        for node in s.query(Node):
            node.token_ids = pack_ids([100 + i for i in range(node.length)])
        tools = [{"id": "t", "name": "Bash", "arguments": "{}"}]
        for call in s.query(Call):
            call.response = {"content": "Traceback, I see", "reasoning": None, "tool_calls": tools}
            call.fork_reason = call.fork_reason or "sibling"
        hand_out(s, world.group_ids[0], branch_cap=5, micro_batch_tokens=64, normalize_std=True)
        change = queries.start_role_change(s, RUN, "sat", "rollout", "train", "backlog")
        queries.end_role_change(s, change, {"drain": 0.2})
        queries.take_cell(s, RUN, "sat", central=False, max_running=4)
        s.execute(text("UPDATE micro_batches SET attempts = 2"))
        s.flush()
        for query in queries_in(page):
            asked = query.replace("quickstart-s0/s3/02/05", a).replace("%", "%%")
            assert s.connection().exec_driver_sql(asked).all(), query

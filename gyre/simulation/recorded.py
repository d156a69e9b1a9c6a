"""A recorded run as a scenario: the work of its steps and a cost model fitted to its own rows.

What is taken from the rows, and how (docs/scheduling.md has the formulas):

- A rollout's launch is not recorded. The window is first in, first out, so it is the later of its row's creation and
  the moment at which the window had a place, given when those before it were settled. Which groups stood before it,
  their first workspaces tell: a step need not launch its groups by position (`rollouts.order`).
- On a cell it is from its first call to the end of its last one. Of that, decoding and waiting for a cell (the unions
  of its calls' spans) are the simulator's to say; what is left, prefill included, is tool time.
- An evaluation runs while no step is open, so no step's time holds any of it: it is left out, but the step after it
  opens only when none is open.
- What a surplus rollout (`rollouts.over_submit`) would have done, nobody knows. It goes on as it had begun, until its
  group does without it or its time is up; one that was never launched, or had not called, keeps a place and is silent.
"""

from __future__ import annotations

import heapq
import statistics
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from sqlalchemy import Engine, RowMapping, text

from gyre.config import RunConfig
from gyre.scheduling import Roomy, make_policy
from gyre.simulation.engine import simulate
from gyre.simulation.fit import concurrency, line, union_s
from gyre.simulation.model import CostModel, Floats, Scenario, StepWork
from gyre.simulation.outcome import Outcome

DECIDE_S = 1.0
"""Least seconds between two decisions: reports of rollouts that settle come no closer (workflows.observe)."""
OUTLASTING = 10.0
"""Time limits that a rollout would have run if its group had not done without it."""
UNLIMITED = 1e9
"""Tokens a second of what was too fast to be measured."""


class RecordingError(Exception):
    """A run that cannot be simulated; the message is one line."""


@dataclass(frozen=True)
class Recording:
    """A run as it was. `begins`, `settled` and `ends`: when each step opened, had its last rollout settled, and had its
    weights published, in seconds from the first step's opening."""

    config: RunConfig
    scenario: Scenario
    begins: tuple[float, ...]
    settled: tuple[float, ...]
    ends: tuple[float, ...]

    def replay(self, *, decide_s: float = DECIDE_S, timeline: bool = False) -> Outcome:
        """The simulator's run of the recorded work, as the run was configured."""
        config = self.config
        central = config.central.name
        order = [central, *(c.name for c in config.cells if c.name != central)]
        policy = make_policy(
            config.scheduling.policy,
            train_cells=[f"c{order.index(name)}" for name in config.scheduling.train_cells],
            min_backlog_tokens=config.scheduling.min_backlog_tokens,
        )
        rollouts = config.rollouts
        policy = Roomy(policy, config.scheduling.rollouts_per_slot, rollouts.max_concurrent)
        return simulate(
            self.scenario, policy, staleness=rollouts.max_staleness, quorum=rollouts.handed_out_at, decide_s=decide_s,
            timeline=timeline, rates_known=False,
        )  # fmt: skip


def read_recording(engine: Engine, run_id: str) -> Recording:
    """Read a run's finished steps. Raises RecordingError where there is nothing to simulate."""
    rows = {name: _ask(engine, sql, run_id) for name, sql in _QUERIES.items()}
    if not rows["run"]:
        raise RecordingError(f"no run {run_id!r} in this database; `gyre status` names the newest one")
    config = RunConfig.model_validate(rows["run"][0]["config"])
    steps = rows["steps"]
    if not steps:
        raise RecordingError(f"run {run_id}: no step has been published yet; simulate it when one is")
    rollouts, calls = rows["rollouts"], _calls_by_rollout(rows["calls"])
    launches = _launches(rollouts, config.rollouts.max_concurrent)
    trained = {row["rollout_id"]: float(row["tokens"]) for row in rows["trained"]}
    by_step: dict[int, list[RowMapping]] = defaultdict(list)
    for row in rollouts:
        if row["step"] is not None:
            by_step[row["step"]].append(row)
    limit = config.rollouts.time_limit_s
    works = [_step_work(by_step[s["index"]], calls, launches, trained, limit) for s in steps]
    began = steps[0]["began"]
    drained = frozenset(
        i for i in range(1, len(steps))
        if any(steps[i - 1]["began"] < e["began"] < steps[i]["began"] for e in rows["evaluations"])
    )  # fmt: skip
    cost = _cost(config, rows, drained)
    window, over_submit = config.rollouts.max_concurrent, config.rollouts.over_submit
    scenario = Scenario(run_id, len(config.cells), cost, works, limit, window, drained, over_submit)
    last = [max(r["settled"] for r in by_step[s["index"]]) - began for s in steps]
    return Recording(
        config,
        scenario,
        tuple(s["began"] - began for s in steps),
        tuple(last),
        tuple(s["ended"] - began for s in steps),
    )


# ---- the work -------------------------------------------------------------------------------------------------------


def _calls_by_rollout(calls: Sequence[RowMapping]) -> dict[str, list[RowMapping]]:
    by_rollout: dict[str, list[RowMapping]] = defaultdict(list)
    for call in calls:
        by_rollout[call["rollout_id"]].append(call)
    return by_rollout


def _launches(rollouts: Sequence[RowMapping], window: int) -> dict[str, float]:
    """When each rollout was launched, in the order of the rows, which is that of the window."""
    running: list[float] = []
    found: dict[str, float] = {}
    for row in rollouts:
        launch = row["created"]
        if _never_launched(row):
            found[row["id"]] = launch
            continue
        if len(running) >= window:
            launch = max(launch, heapq.heappop(running))
        heapq.heappush(running, row["settled"])
        found[row["id"]] = launch
    return found


_ARRAYS = ("tool_s", "tokens", "context", "trained", "before_s", "after_s", "rewarded")


def _step_work(
    rollouts: Sequence[RowMapping],
    calls: dict[str, list[RowMapping]],
    launches: dict[str, float],
    trained: dict[str, float],
    limit_s: float,
) -> StepWork:
    positions = list(dict.fromkeys(r["position"] for r in rollouts))  # in the order of their launch
    shape = (len(positions), max(r["member"] for r in rollouts) + 1)
    arrays = {name: np.zeros(shape) for name in _ARRAYS}
    for r in rollouts:
        at = positions.index(r["position"]), r["member"]
        facts = _rollout_work(r, calls.get(r["id"], []), launches[r["id"]], limit_s)
        counts = float(r["rewarded"] or r["surplus"])  # a surplus one would have had a reward, too
        for name, value in {**facts, "trained": trained.get(r["id"], 0.0), "rewarded": counts}.items():
            arrays[name][at] = value
    return StepWork(**arrays)


def _rollout_work(row: RowMapping, calls: Sequence[RowMapping], launch: float, limit_s: float) -> dict[str, float]:
    if not calls:
        unheard = {"before_s": 0.0 if _never_launched(row) else max(0.0, row["settled"] - launch)}
        return {**unheard, "tool_s": OUTLASTING * limit_s} if row["surplus"] else unheard
    first, last = min(c["began"] for c in calls), max(c["ended"] for c in calls)
    decoding = [(c["first"], c["ended"]) for c in calls if c["first"] is not None]
    waiting = [(c["began"], c["routed"] if c["routed"] is not None else c["ended"]) for c in calls]
    sampled = sum(max(0, (c["tokens"] or 0) - 1) for c in calls)
    one_by_one = sum(b - a for a, b in decoding)
    together = union_s(decoding) / one_by_one if one_by_one > 0 else 1.0  # calls of sub-agents run side by side
    tool_s = min(limit_s, max(0.0, last - first - union_s(decoding + waiting)))
    facts = {
        "before_s": max(0.0, first - launch),
        "tool_s": tool_s,
        "tokens": sampled * together,
        "context": statistics.fmean(c["prompt"] or 0 for c in calls),
        "after_s": max(0.0, row["settled"] - last),
    }
    if not row["surplus"]:
        return facts
    seconds = tool_s + union_s(decoding)
    if seconds == 0:
        return {**facts, "tool_s": OUTLASTING * limit_s, "after_s": 0.0}
    longer = OUTLASTING * limit_s / seconds
    return {**facts, "tool_s": tool_s * longer, "tokens": sampled * together * longer, "after_s": 0.0}


def _never_launched(row: RowMapping) -> bool:
    """Whether its group was complete before its turn (or while its workspace was made)."""
    return bool(row["surplus"] and not row["prepared"])


# ---- the cost model -------------------------------------------------------------------------------------------------


def _cost(config: RunConfig, rows: dict[str, Sequence[RowMapping]], drained: frozenset[int]) -> CostModel:
    decode_s, per_rollout = _fit_decode(rows["calls"])
    prefill = [c for c in rows["calls"] if c["first"] is not None and c["routed"] is not None and not c["moved"]]
    _, prefill_s = _fit(prefill, lambda c: (c["prompt"] or 0) - (c["cached"] or 0), lambda c: c["first"] - c["routed"])
    micro_batch_s, token_s = _fit(rows["batches"], lambda b: b["tokens"], lambda b: b["ended"] - b["began"])
    changes = {
        role: [c["ended"] - c["began"] for c in rows["changes"] if c["to_role"] == role]
        for role in ("train", "rollout")
    }
    steps, stale = rows["steps"], config.rollouts.max_staleness
    gaps = [
        max(0.0, steps[i]["began"] - steps[i - 1 - stale]["ended"])
        for i in range(1 + stale, len(steps)) if i not in drained
    ]  # fmt: skip
    return CostModel(
        slots=config.serving.max_running,
        decode_s=decode_s,
        decode_s_per_rollout=per_rollout,
        prefill_tokens_s=1 / prefill_s if prefill_s > 0 else UNLIMITED,
        train_tokens_s=1 / token_s if token_s > 0 else UNLIMITED,
        micro_batch_tokens=float(config.trainer.micro_batch_tokens),
        to_train_s=_mean(changes["train"]),
        to_rollout_s=_mean(changes["rollout"]),
        optimizer_s=_median([max(0.0, s["ended"] - max(s["computed"] or 0.0, s["handed_out"])) for s in steps]),
        micro_batch_s=micro_batch_s,
        handout_s=_median([max(0.0, g["handed_out"] - g["settled"]) for g in rows["groups"]]),
        open_s=_median(gaps),
    )


def _fit_decode(calls: Sequence[RowMapping]) -> tuple[float, float]:
    """Seconds a token of a call, against the calls that decoded beside it on its cell (itself included, on average over
    its decoding), weighed by its tokens."""
    x, y, weights = [], [], []
    for cell in {c["cell"] for c in calls}:
        mine = [c for c in calls if c["cell"] == cell and c["first"] is not None and c["ended"] > c["first"]]
        if not mine:
            continue
        began, ended = np.asarray([c["first"] for c in mine]), np.asarray([c["ended"] for c in mine])
        tokens = np.asarray([(c["tokens"] or 0) - 1.0 for c in mine])
        good = (tokens >= 1) & np.asarray([not c["moved"] for c in mine])
        x.append(concurrency(began, ended, began[good], ended[good]))
        y.append((ended - began)[good] / tokens[good])
        weights.append(tokens[good])
    if not x or not sum(len(part) for part in x):
        return 0.0, 0.0
    return line(np.concatenate(x), np.concatenate(y), np.concatenate(weights))


def _fit(rows: Sequence[RowMapping], x: Any, y: Any) -> tuple[float, float]:
    if not rows:
        return 0.0, 0.0
    xs: Floats = np.asarray([float(x(row)) for row in rows])
    ys: Floats = np.asarray([float(y(row)) for row in rows])
    return line(xs, ys, np.ones(len(rows)))


def _mean(values: Sequence[float]) -> float:
    return statistics.fmean(values) if values else 0.0


def _median(values: Sequence[float]) -> float:
    return statistics.median(values) if values else 0.0


# ---- the rows -------------------------------------------------------------------------------------------------------


def _ask(engine: Engine, sql: str, run_id: str) -> Sequence[RowMapping]:
    with engine.connect() as connection:
        return connection.execute(text(sql), {"run": run_id}).mappings().all()


def _s(column: str, name: str) -> str:
    return f"EXTRACT(epoch FROM {column})::float8 AS {name}"


_DONE = "s.run_id = :run AND s.published_at IS NOT NULL"
_QUERIES = {
    "run": "SELECT config FROM runs WHERE id = :run",
    # Step by step from the first one, without a gap.
    "steps": f"""
        SELECT s.index, {_s("s.started_at", "began")}, {_s("s.published_at", "ended")},
               (SELECT {_s("max(g.settled_at)", "t")} FROM groups g WHERE g.step_id = s.id) AS handed_out,
               (SELECT {_s("max(m.computed_at)", "t")} FROM micro_batches m WHERE m.step_id = s.id) AS computed
          FROM steps s WHERE {_DONE}
           AND NOT EXISTS (SELECT 1 FROM steps b WHERE b.run_id = :run AND b.index < s.index AND b.published_at IS NULL)
         ORDER BY s.index""",
    "evaluations": f"SELECT {_s('started_at', 'began')} FROM evaluations WHERE run_id = :run",
    # In the order of their launches: evaluations and steps as they open, each group by group.
    "rollouts": f"""
        SELECT r.id, s.index AS step, g.position, r.member, {_s("r.created_at", "created")},
               {_s("r.settled_at", "settled")}, r.reward IS NOT NULL AS rewarded, r.outcome = 'surplus' AS surplus,
               r.prepared_at IS NOT NULL AS prepared
          FROM rollouts r JOIN groups g ON g.id = r.group_id
          LEFT JOIN steps s ON s.id = g.step_id LEFT JOIN evaluations e ON e.id = g.evaluation_id
         WHERE r.run_id = :run AND r.settled_at IS NOT NULL
         ORDER BY coalesce(s.started_at, e.started_at), min(r.prepared_at) OVER (PARTITION BY g.id), g.position,
                  r.member""",
    "calls": f"""
        SELECT c.rollout_id, {_s("c.started_at", "began")}, {_s("c.routed_at", "routed")},
               {_s("c.first_token_at", "first")}, {_s("c.ended_at", "ended")}, c.completion_tokens AS tokens,
               c.prompt_tokens AS prompt, c.cached_tokens AS cached, cardinality(c.cells) > 1 AS moved,
               c.cells[cardinality(c.cells)] AS cell
          FROM calls c JOIN rollouts r ON r.id = c.rollout_id
         WHERE r.run_id = :run AND c.ended_at IS NOT NULL AND c.status <> 'refused' ORDER BY c.started_at""",
    # What a rollout's samples share with others in a micro-batch is theirs by their lengths.
    "trained": f"""
        SELECT t.rollout_id, sum(m.n_tokens * t.n_tokens::float8 / whole.tokens) AS tokens
          FROM samples t JOIN micro_batches m ON m.id = t.micro_batch_id JOIN steps s ON s.id = m.step_id
          JOIN (SELECT micro_batch_id, sum(n_tokens)::float8 AS tokens FROM samples GROUP BY 1) whole
            ON whole.micro_batch_id = m.id
         WHERE {_DONE} GROUP BY 1""",
    "batches": f"""
        SELECT m.n_tokens AS tokens, {_s("m.claimed_at", "began")}, {_s("m.computed_at", "ended")}
          FROM micro_batches m JOIN steps s ON s.id = m.step_id
         WHERE {_DONE} AND m.computed_at > m.claimed_at""",
    "changes": f"""
        SELECT to_role, {_s("started_at", "began")}, {_s("ended_at", "ended")}
          FROM role_changes WHERE run_id = :run AND ended_at IS NOT NULL""",
    "groups": f"""
        SELECT {_s("g.settled_at", "handed_out")}, {_s("max(r.settled_at)", "settled")}
          FROM groups g JOIN steps s ON s.id = g.step_id JOIN rollouts r ON r.group_id = g.id
         WHERE {_DONE} AND g.settled_at IS NOT NULL GROUP BY g.id""",
}

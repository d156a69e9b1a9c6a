"""Short database activities of runs, steps, groups and evaluations. Each is one idempotent transaction."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from sqlalchemy import Engine
from sqlalchemy.orm import Session
from temporalio import activity

from activities.beat import beating
from activities.context import RunBooks, tasks_in
from gyre.config import RunConfig
from gyre.scheduling import longest_first, step_tasks
from gyre.store import queries as q
from gyre.store.db import transaction
from gyre.store.handout import hand_out
from gyre.store.queries.cluster import cluster_facts
from gyre.store.queries.counts import call_counts
from gyre.store.queries.lengths import expected_seconds
from gyre.store.vocabulary import load_vocabulary
from gyre.tasks.harbor import Task
from workflows import messages as m


class ControlActivities:
    """`run` is the run file of this stack: `open_run` records it."""

    def __init__(self, engine: Engine, run: RunConfig) -> None:
        self._engine, self._run, self._books = engine, run, RunBooks(engine)

    def all(self) -> list[Callable[..., object]]:
        """Every activity, for a worker."""
        return [
            self.open_run, self.mark_run, self.end_run, self.open_step, self.hand_out_group, self.close_step,
            self.open_evaluation, self.finish_evaluation, self.settle, self.rollout_facts, self.read_cluster,
        ]  # fmt: skip

    @activity.defn
    def open_run(self, x: m.OpenRun) -> m.OpenedRun:
        """Record the run, check its tasks, and say how far an earlier workflow of it came."""
        with transaction(self._engine) as session:
            if x.run_id == self._run.run_id:
                q.create_run(
                    session, x.run_id, self._run.model_dump(mode="json"), activity.info().workflow_id or x.run_id
                )
                load_vocabulary(session, x.run_id, self._run.policy.path)
            config = RunConfig.model_validate(q.run_row(session, x.run_id).config)
            q.set_run_state(session, x.run_id, "running")
            newest = q.newest_version(session, x.run_id)
            version = newest.version if newest else 0
            evaluated = [e.version for e in q.evaluations(session, x.run_id) if e.ended_at is not None]
        heldout = len(tasks_in(config.tasks.heldout)) if config.tasks.heldout else 0
        # Step i makes version i + 1, so the newest version counts the steps that are done.
        return m.OpenedRun(len(tasks_in(config.tasks.train)), heldout, version, version, evaluated)

    @activity.defn
    def mark_run(self, x: m.MarkRun) -> None:
        """Set the run's state to running or paused."""
        with transaction(self._engine) as session:
            q.set_run_state(session, x.run_id, "paused" if x.state == "paused" else "running")

    @activity.defn
    def end_run(self, x: m.EndRun) -> None:
        """Set the state that ends the run."""
        if x.state not in ("done", "stopped", "failed"):
            raise ValueError(f"end_run: state {x.state!r} does not end a run")
        with transaction(self._engine) as session:
            q.set_run_state(session, x.run_id, x.state)  # type: ignore[arg-type]

    @activity.defn
    def open_step(self, x: m.OpenStep) -> m.OpenedStep:
        """The step with its groups and rollouts: tasks by the run's seeded order, returned in that of their launch."""
        config = self._books.config(x.run_id)
        tasks = tasks_in(config.tasks.train)
        chosen = step_tasks(len(tasks), config.seed, x.index, config.rollouts.groups_per_step)
        with transaction(self._engine) as session:
            min_version = max(0, x.index - config.rollouts.max_staleness)
            step_id = q.open_step(session, x.run_id, x.index, min_version)
            ids = q.create_groups(session, _refs(tasks, chosen), step_id=step_id)
            groups = _members(
                session,
                ids,
                [tasks[i] for i in chosen],
                config,
                config.rollouts.launched,
                config.sampling.temperature,
            )
            launched = _in_order(session, groups, config)
        return m.OpenedStep(step_id, min_version, launched)

    @activity.defn
    async def hand_out_group(self, x: m.HandOut) -> m.HandedOut:
        """Rewards to advantages, trees to samples, samples to queued micro-batches: one transaction."""
        async with beating():  # the trees of long rollouts take a while; a dead worker is noticed before that
            return await asyncio.to_thread(self._hand_out, x)

    def _hand_out(self, x: m.HandOut) -> m.HandedOut:
        config = self._books.config(x.run_id)
        with transaction(self._engine) as session:
            done = hand_out(
                session,
                x.group_id,
                branch_cap=config.rollouts.branch_cap,
                micro_batch_tokens=config.trainer.micro_batch_tokens,
                normalize_std=config.objective.normalize_std,
                min_std=config.objective.min_std,
                whole_rollouts=config.objective.whole_rollouts,
                quorum=config.rollouts.handed_out_at,
            )
            rewards = [r.reward for r in q.group_rewards(session, x.group_id) if r.reward is not None]
        reward = sum(rewards) / len(rewards) if rewards else None
        return m.HandedOut(
            done.outcome, done.n_valid, done.samples, done.micro_batches, done.tokens, done.targets, reward, done.closed
        )

    @activity.defn
    def close_step(self, x: m.CloseStep) -> None:
        """Every group is handed out: fix R."""
        denominator = self._books.config(x.run_id).objective.denominator
        with transaction(self._engine) as session:
            q.close_step(session, x.step_id, denominator)

    @activity.defn
    def open_evaluation(self, x: m.OpenEvaluation) -> m.OpenedEvaluation:
        """The evaluation with a group for every held-out task, returned in the order of their launch."""
        config = self._books.config(x.run_id)
        if config.tasks.heldout is None:
            raise ValueError("tasks.heldout: an evaluation needs a folder of held-out tasks")
        tasks = tasks_in(config.tasks.heldout)
        evaluation = config.evaluation
        with transaction(self._engine) as session:
            evaluation_id = q.open_evaluation(session, x.run_id, x.version)
            ids = q.create_groups(session, _refs(tasks, range(len(tasks))), evaluation_id=evaluation_id)
            groups = _members(session, ids, tasks, config, evaluation.samples, evaluation.temperature)
            launched = _in_order(session, groups, config)
        return m.OpenedEvaluation(evaluation_id, launched)

    @activity.defn
    def finish_evaluation(self, x: m.FinishEvaluation) -> m.EvaluationResult:
        """Success and mean reward over the valid rollouts."""
        with transaction(self._engine) as session:
            row = q.finish_evaluation(session, x.evaluation_id)
            return m.EvaluationResult(row.version, row.success, row.mean_reward, row.n_valid or 0)

    @activity.defn
    def settle(self, x: m.SettleRollout) -> m.RolloutResult:
        """End a rollout without a reward; one that is settled already keeps what it has."""
        with transaction(self._engine) as session:
            settled = q.settle_rollout(session, x.rollout_id, x.outcome, None, x.exclude_reason)  # type: ignore[arg-type]
            calls = call_counts(session, x.rollout_id).complete
        return m.RolloutResult(x.rollout_id, settled.outcome, settled.reward, settled.exclude_reason, calls)

    @activity.defn
    def rollout_facts(self, x: m.RolloutFactsRequest) -> m.RolloutFacts:
        """What was asked of the policy for a rollout so far."""
        with transaction(self._engine) as session:
            counts = call_counts(session, x.rollout_id)
        return m.RolloutFacts(counts.complete, counts.sampled)

    @activity.defn
    def read_cluster(self, x: m.ClusterRequest) -> m.ClusterFacts:
        """What the scheduler decides by: the backlog, measured rates, and what the cells hold."""
        with transaction(self._engine) as session:
            found = cluster_facts(session, x.run_id)
        cells = [m.CellFacts(c.name, c.serves, c.rollouts, c.context_tokens, c.kv_tokens) for c in found.cells]
        return m.ClusterFacts(
            found.backlog_tokens, found.train_tokens_s, found.to_train_s, found.to_rollout_s, found.oldest_age_s,
            found.context_tokens, cells, found.live_rollouts, found.running_rollouts,
        )  # fmt: skip


def _refs(tasks: Sequence[Task], chosen: Sequence[int]) -> list[q.TaskRef]:
    return [q.TaskRef(tasks[i].name, str(tasks[i].path), tasks[i].family) for i in chosen]


def _members(
    session: Session, ids: Sequence[int], tasks: Sequence[Task], config: RunConfig, size: int, temperature: float
) -> list[m.GroupRef]:
    groups = []
    for position, (group_id, task) in enumerate(zip(ids, tasks, strict=True)):
        rollouts = q.create_rollouts(session, group_id, size, temperature=temperature, harness=config.harness.name)
        groups.append(m.GroupRef(group_id, position, task.name, task.family, rollouts))
    return groups


def _in_order(session: Session, groups: Sequence[m.GroupRef], config: RunConfig) -> list[m.GroupRef]:
    """The groups in the order of their launch. Their positions, and so their rollouts' ids, do not depend on it."""
    if config.rollouts.order == "shuffled":
        return list(groups)
    known = expected_seconds(session, [group.group_id for group in groups])
    return [groups[i] for i in longest_first([known.get(group.group_id) for group in groups])]

"""The cluster as ElasticScheduler knows it: what steps and cells report and what was measured, as a policy's view."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import cast

from gyre.scheduling import CellView, ClusterView, Phase, Rates, expected_tail_s, with_room
from workflows import messages as m


def cluster_view(
    plan: m.RunPlan,
    sources: Collection[m.Observation],
    phases: Mapping[str, str],
    told: Mapping[str, str],
    facts: m.ClusterFacts,
) -> ClusterView:
    """What the policy decides by. `phases` and `told`: the role of each cell, as it says and as it was told.

    The water level is the lower one of what steps reported, which is up to a second old and counts who is being scored,
    and of what was counted, which may hold rollouts of a step that is over.
    """
    measured = _with_newcomers(facts)
    steps = [o for o in sources if o.source.startswith("step-")]
    age = facts.oldest_age_s
    reported = sum(o.queued + o.running for o in sources)
    view = ClusterView(
        cells=tuple(_cell(c, phase_of(phases[c.name], told[c.name]), measured.get(c.name)) for c in plan.cells),
        water_level=min(reported, reported if facts.live_rollouts is None else facts.live_rollouts),
        backlog_tokens=facts.backlog_tokens,
        open_groups=sum(o.open_groups for o in steps),
        steps_open=len(steps),
        steps_closed=sum(o.closed for o in steps),
        rates=rates_of(facts),
        tail_s=None if age is None else expected_tail_s(age, plan.time_limit_s),
        context_tokens=facts.context_tokens,
    )
    return with_room(view, plan.rollouts_per_slot, plan.max_concurrent)


def _with_newcomers(facts: m.ClusterFacts) -> dict[str, m.CellFacts]:
    """The cells by name. Rollouts that no cell has answered yet are dealt to those that serve, as the router will."""
    serving = [c.name for c in facts.cells if c.serves]
    newcomers = max(0, facts.running_rollouts - sum(c.rollouts for c in facts.cells))
    share, rest = divmod(newcomers, len(serving)) if serving else (0, 0)
    more = {name: share + (i < rest) for i, name in enumerate(serving)}
    return {c.name: replace(c, rollouts=c.rollouts + more.get(c.name, 0)) for c in facts.cells}


def rates_of(facts: m.ClusterFacts) -> Rates | None:
    """The measured rates; None until a micro-batch and a change of role have been measured in this run.

    A way that no cell has gone yet is taken to be as long as the other.
    """
    to_train, to_rollout = facts.to_train_s, facts.to_rollout_s
    if facts.train_tokens_s is None or (to_train is None and to_rollout is None):
        return None
    there = to_train if to_train is not None else to_rollout
    back = to_rollout if to_rollout is not None else to_train
    assert there is not None and back is not None
    return Rates(facts.train_tokens_s, there, back)


def phase_of(phase: str, told: str) -> Phase:
    """A cell that was told to change is on its way, even before it says so."""
    return cast(Phase, phase if phase == told else f"to_{told}")


def _cell(planned: m.PlanCell, phase: Phase, facts: m.CellFacts | None) -> CellView:
    if facts is None:  # its agent has not come yet
        return CellView(planned.name, planned.central, phase, planned.max_running)
    down = phase == "rollout" and not facts.serves
    return CellView(
        planned.name,
        planned.central,
        phase,
        0 if down else planned.max_running,
        facts.rollouts,
        0 if down else facts.kv_tokens,
    )


def describe(
    view: ClusterView, plan: m.RunPlan, reasons: Mapping[str, str], switches: int, look_s: float | None
) -> str:
    """Markdown for whoever opens the scheduler at night: what it sees, what it measured, why each cell has its role."""
    rates, serving = view.rates, [c for c in view.cells if c.role == "rollout"]
    slots = sum(c.max_running for c in serving)
    lines = [
        f"policy **{plan.policy}** · water level {view.water_level} · backlog {view.backlog_tokens} tokens"
        f" · {view.open_groups} groups open · {view.steps_closed} of {view.steps_open} steps closed"
        f" · {switches} role changes asked",
        "",
        "- measured: "
        + (
            f"a trainer does {rates.train_tokens_s:.0f} tokens/s; a change takes {rates.to_train_s:.2f} s to training,"
            f" {rates.to_rollout_s:.2f} s back"
            if rates
            else f"nothing yet: a trainer for every {plan.min_backlog_tokens} tokens of backlog"
        ),
        "- tail: "
        + (
            "no harness runs"
            if view.tail_s is None
            else f"the oldest rollout is expected to run {view.tail_s:.0f} s on"
        ),
        "- pace: "
        + (
            f"a step ends every {view.pace.step_s:.0f} s;"
            f" the longest rollout of the newest ran {view.pace.longest_s:.0f} s"
            if view.pace
            else "not two steps have ended"
        ),
        f"- room: {slots} slots for {view.water_level} rollouts"
        + f"; contexts of {view.context_tokens} tokens"
        + (
            f" for caches of {sum(c.kv_tokens or 0 for c in serving)}"
            if serving and all(c.kv_tokens is not None for c in serving)
            else ""
        ),
        "- looks again " + ("at the next report" if look_s is None else f"within {look_s:.0f} s"),
        "",
    ]
    for c in view.cells:
        down = " · **does not serve: its engine or agent is down**" if c.role == "rollout" and not c.max_running else ""
        lines.append(
            f"- **{c.name}**{' (central)' if c.central else ''}: {c.role} · {c.live} rollouts{down}"
            f" · {reasons.get(c.name) or 'as the run began'}"
        )
    return "\n".join(lines)

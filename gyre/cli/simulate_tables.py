"""What `gyre simulate` prints."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from rich.table import Table

from gyre.cli.output import console
from gyre.scheduling import AsyncPolicy
from gyre.simulation import CostModel, Outcome, Scenario
from gyre.simulation.compare import Result, Summary
from gyre.simulation.recorded import Recording


def print_policies(scenario: Scenario, results: Sequence[Result]) -> None:
    """Every policy beside the first one, and where the cells' time went."""
    best = results[0].outcome.seconds
    surplus = ["surplus"] if scenario.over_submit else []
    table = _table(
        f"{scenario.name}: {scenario.cells} cells, {len(scenario.steps)} steps",
        "policy", "s a step", "slower by", "of the bound", "serve", *surplus, "idle", "train", "idle", "optimizer",
        "change", "changes", "moved",
    )  # fmt: skip
    for r in results:
        share = {state: s / sum(r.outcome.cell_s.values()) for state, s in r.outcome.breakdown().items()}
        states = ("serve", *surplus, "serve idle", "train", "train idle", "optimizer")
        table.add_row(
            r.way.name,
            f"{r.outcome.seconds / len(scenario.steps):.{_digits(best)}f}",
            f"{r.outcome.seconds / best:.2f}x",
            f"{r.bound / r.outcome.seconds:.0%}",
            *(f"{share[state]:.0%}" for state in states),
            f"{share['to train'] + share['to rollout']:.0%}",
            str(r.outcome.switches),
            str(r.outcome.moved),
        )
    out = console()
    out.print(table)
    fixed = [r for r in results if isinstance(r.way.policy, AsyncPolicy)]
    if fixed:
        fastest = min(fixed, key=lambda r: r.outcome.seconds)
        middle = statistics.median(r.outcome.seconds for r in fixed)
        out.print(f"best fixed split: {fastest.way.name} ({fastest.outcome.seconds / best:.2f}x); "
                  f"median split {middle / best:.2f}x")  # fmt: skip


def print_summary(rows: Sequence[tuple[str, float, Summary]]) -> None:
    """(name, part of the work that is serving, its summary) of each preset, and the median and best of each ratio."""
    s = rows[0][2].staleness
    table = _table(
        f"elastic at staleness {s} is faster by",
        "preset", "work that serves", "s a step", "of the bound", "colocate", f"colocate, st. {s}", "async, even",
        "async, best split", "no more can be", "st. 0 to colocate", "st. 0 of its bound",
    )  # fmt: skip
    for name, serving, r in rows:
        table.add_row(
            name, f"{serving:.0%}", f"{r.elastic.outcome.seconds / len(r.scenario.steps):.0f}",
            f"{r.elastic.bound / r.elastic.outcome.seconds:.1%}", f"{r.colocate:.2f}x", f"{r.colocate_matched:.2f}x",
            f"{r.even:.2f}x", f"{r.best:.2f}x ({r.best_split} of {r.scenario.cells})", f"{r.even_bound:.2f}x",
            f"{r.colocate_on_policy:.2f}x", f"{r.on_policy.bound / r.on_policy.outcome.seconds:.1%}",
        )  # fmt: skip
    ratios = ("colocate", "colocate_matched", "even", "best", "even_bound", "colocate_on_policy")
    for name, of in (("median", statistics.median), ("best", max)):
        found = {ratio: f"{of([getattr(r, ratio) for _, _, r in rows]):.2f}x" for ratio in ratios}
        bounds = [of([x.bound / x.outcome.seconds for x in part]) for part in
                  ([r.elastic for _, _, r in rows], [r.on_policy for _, _, r in rows])]  # fmt: skip
        table.add_row(
            name, "", "", f"{bounds[0]:.1%}", found["colocate"], found["colocate_matched"], found["even"],
            found["best"], found["even_bound"], found["colocate_on_policy"], f"{bounds[1]:.1%}", style="bold",
        )  # fmt: skip
    console().print(table)


def print_recording(recording: Recording, run: Outcome) -> None:
    """The fitted cost model, and each step as it was measured and as it is simulated."""
    out = console()
    _print_cost(recording.scenario.cost)
    table = _table(
        f"{recording.scenario.name}: measured and simulated, seconds", "step", "measured", "simulated", "ratio",
        "rollouts measured", "simulated", "after them measured", "simulated",
    )  # fmt: skip
    rows = [
        (end - begin, simulated_end - simulated_begin, settled - begin, simulated_settled - simulated_begin)
        for begin, settled, end, simulated_begin, simulated_settled, simulated_end in zip(
            recording.begins, recording.settled, recording.ends, run.begins, run.settled, run.ends, strict=True
        )
    ]
    for i, (measured, simulated, rollouts, simulated_rollouts) in enumerate(rows):
        table.add_row(
            str(i + 1), f"{measured:.1f}", f"{simulated:.1f}", f"{simulated / measured:.3f}", f"{rollouts:.1f}",
            f"{simulated_rollouts:.1f}", f"{measured - rollouts:.1f}", f"{simulated - simulated_rollouts:.1f}",
        )  # fmt: skip
    measured, simulated = (sum(row[i] for row in rows) for i in (0, 1))
    table.add_row(
        "all", f"{measured:.1f}", f"{simulated:.1f}", f"{simulated / measured:.3f}",
        *(f"{x:.1f}" for x in (
            sum(r[2] for r in rows), sum(r[3] for r in rows), sum(r[0] - r[2] for r in rows),
            sum(r[1] - r[3] for r in rows),
        )), style="bold",
    )  # fmt: skip
    out.print(table)
    errors = [abs(row[1] / row[0] - 1) for row in rows]
    out.print(f"a step is off by {statistics.fmean(errors):.1%} on average, {max(errors):.1%} at most; all by "
              f"{simulated / measured - 1:+.1%}")  # fmt: skip


def _print_cost(cost: CostModel) -> None:
    console().print(
        f"fitted: a token takes {1e3 * cost.decode_s:.3g} + {1e3 * cost.decode_s_per_rollout:.3g} b ms in a batch of b"
        f" (at most {cost.slots}); prefill {cost.prefill_tokens_s:.3g} tokens/s; a micro-batch"
        f" {cost.micro_batch_s:.3g} s + {cost.train_tokens_s:.4g} tokens/s; a change {cost.to_train_s:.3g} s to"
        f" training, {cost.to_rollout_s:.3g} s back; hand-out {cost.handout_s:.3g} s, optimizer and publication"
        f" {cost.optimizer_s:.3g} s, the next step opens after {cost.open_s:.3g} s"
    )


def _digits(seconds: float) -> int:
    return 0 if seconds >= 1000 else 1


def _table(title: str, *columns: str) -> Table:
    table = Table(*columns, title=title)
    for column in table.columns[1:]:
        column.justify = "right"
    return table

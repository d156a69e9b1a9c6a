"""`gyre rollouts`: a table of rollouts, filtered."""

from __future__ import annotations

from typing import Annotated, Any

import typer
from rich.table import Table
from sqlalchemy import text

from gyre.cli.data import DataOption, RunOption, read_database
from gyre.cli.errors import CliError
from gyre.cli.output import console
from gyre.cli.snapshot import newest_run


def rollouts(
    run: RunOption = None,
    step: Annotated[int | None, typer.Option(min=1, help="Only this step, counted from 1.")] = None,
    task: Annotated[str | None, typer.Option(help="Only tasks whose name contains this.")] = None,
    family: Annotated[str | None, typer.Option(help="Only this family of tasks.")] = None,
    state: Annotated[str | None, typer.Option(help="pending, running, scoring or settled.")] = None,
    excluded: Annotated[bool, typer.Option("--excluded", help="Only those without a usable reward.")] = False,
    heldout: Annotated[bool, typer.Option("--heldout", help="Only those of evaluations.")] = False,
    limit: Annotated[int, typer.Option(min=1, help="At most so many rows, the newest first.")] = 40,
    data: DataOption = None,
) -> None:
    """List rollouts with what they cost and what came of them."""
    engine = read_database(data)
    run_id = run or newest_run(engine)
    if run_id is None:
        raise CliError("no run yet")
    filters: dict[str, tuple[str, Any]] = {
        "step": ("step = :step", None if step is None else step - 1),
        "task": ("task ILIKE '%' || :task || '%'", task),
        "family": ("family = :family", family),
        "state": ("state = :state", state),
        "excluded": ("exclude_reason IS NOT NULL", excluded or None),
        "heldout": ("evaluated_version IS NOT NULL", heldout or None),
    }
    chosen = {name: value for name, (_, value) in filters.items() if value is not None}
    where = " AND ".join(["run_id = :run", *(filters[name][0] for name in chosen)])
    query = f"""
        SELECT rollout_id, task, state, outcome, reward, exclude_reason, calls, forks, sampled_tokens, samples, targets,
               harness_s, total_s, count(*) OVER () AS matching
        FROM rollout_summary WHERE {where} ORDER BY created_at DESC, rollout_id LIMIT :limit
    """
    with engine.connect() as c:
        rows = c.execute(text(query), {**chosen, "run": run_id, "limit": limit}).all()
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
    for column in (
        "rollout",
        "task",
        "state",
        "reward",
        "calls",
        "forks",
        "sampled",
        "trained",
        "harness s",
        "total s",
    ):
        table.add_column(column, justify="left" if column in ("rollout", "task", "state") else "right", no_wrap=True)
    for r in rows:
        ended = f"{r.outcome}: {r.exclude_reason}" if r.exclude_reason else r.outcome or r.state
        table.add_row(
            r.rollout_id, r.task, ended, _number(r.reward, 2), str(r.calls), str(r.forks), str(r.sampled_tokens),
            str(r.targets), _number(r.harness_s, 1), _number(r.total_s, 1),
        )  # fmt: skip
    out = console()
    out.print(table)
    out.print(f"{len(rows)} of {rows[0].matching if rows else 0} rollouts of {run_id}")


def _number(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:.{digits}f}"

"""The last words of `gyre train`."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console
from sqlalchemy import Engine

from gyre.cli.live import clock, evaluation_text, percent
from gyre.cli.snapshot import RunSnapshot, StepLine
from gyre.cli.stackfile import StackState
from gyre.report import write_report


def print_summary(engine: Engine, snapshot: RunSnapshot, stack: StackState, data: Path, console: Console) -> None:
    """Write report.html and print what came of the run."""
    report = write_report(engine, snapshot.run_id, data / "runs" / snapshot.run_id / "report.html")
    done = [step for step in snapshot.steps if step.state == "done"]
    lines = [f"{snapshot.run_id}: {snapshot.state}, {len(done)} of {snapshot.steps_planned} steps"]
    lines[0] += f" in {clock(snapshot.seconds)}"
    lines += _held_out(snapshot)
    if (diff := mean_logprob_diff(done)) is not None:
        lines.append(f"mean |logprob sampler - trainer| on trained tokens  {diff:.2e}")
    lines.append(f"Temporal UI  {stack.ui_url}")
    lines.append(f"report       {report}")
    for line in lines:
        console.print(line, markup=False, highlight=False, soft_wrap=True)


def _held_out(snapshot: RunSnapshot) -> list[str]:
    measured = [e for e in snapshot.evaluations if e.success is not None]
    if not measured:
        return []
    first, last = measured[0], measured[-1]
    lines = [f"held-out before  v{first.version}: {evaluation_text(first)}"]
    if last is not first and first.success is not None and last.success is not None:
        points = 100 * (last.success - first.success)
        lines.append(f"held-out after   v{last.version}: {evaluation_text(last)}")
        lines.append(f"held-out success {percent(first.success)} -> {percent(last.success)} ({points:+.1f} points)")
    return lines


def mean_logprob_diff(steps: list[StepLine]) -> float | None:
    """Mean over trained tokens of all steps of |log-prob sampler - trainer|; None where nothing was trained."""
    weighed = [(s.logprob_diff, s.targets) for s in steps if s.logprob_diff is not None]
    total = sum(n for _, n in weighed)
    return sum(d * n for d, n in weighed) / total if total else None

"""The live view of a run: drawn from a RunSnapshot."""

from __future__ import annotations

from rich.console import Console, Group, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from gyre.cli.snapshot import EvaluationLine, RunSnapshot, StepLine
from gyre.cli.stackfile import StackState

_BARS = "▁▂▃▄▅▆▇█"


def spark(values: list[float], low: float = 0.0, high: float = 1.0) -> str:
    """One character a value, by its height between `low` and `high`."""
    top = len(_BARS) - 1
    return "".join(_BARS[max(0, min(top, round((v - low) / (high - low) * top)))] for v in values)


def draw(snapshot: RunSnapshot, stack: StackState | None) -> RenderableType:
    """The whole view."""
    parts: list[RenderableType] = [_head(snapshot), _curve(snapshot), _cells(snapshot)]
    ill = [p for p in stack.processes if p.state not in ("ready", "waiting")] if stack else []
    if ill:
        parts.append(Text("\n".join(f"{p.name}: {p.state} {p.detail}" for p in ill), style="red"))
    title = f"{snapshot.run_id} · {snapshot.state} · {clock(snapshot.seconds)}"
    footer = f"Temporal UI {stack.ui_url}" if stack else None
    return Panel(Group(*parts), title=title, subtitle=footer, title_align="left", subtitle_align="left")


def _head(s: RunSnapshot) -> Table:
    grid = Table.grid(padding=(0, 2))
    step = current_step(s)
    where = f"{step.index + 1} of {s.steps_planned}" if step else f"- of {s.steps_planned}"
    grid.add_row("step", where, slow_part(s))
    version = "-" if s.version is None else f"v{s.version}"
    grid.add_row("version", version, f"water level {s.queued + s.running} ({s.queued} queued, {s.running} running)")
    busiest = ", ".join(f"{who} {cores:.2f}" for who, cores in s.busiest)
    grid.add_row("tokens/s", f"{s.sampled_per_s:.0f} sampled", f"{s.trained_per_s:.0f} trained · cores: {busiest}")
    return grid


def _curve(s: RunSnapshot) -> Table:
    grid = Table.grid(padding=(0, 2))
    rated = [step for step in s.steps if step.reward is not None]
    rewards = [step.reward for step in rated if step.reward is not None]
    successes = [step.success for step in rated if step.success is not None]
    if rewards:
        grid.add_row("reward", f"{rewards[-1]:.3f}", Text(spark(rewards[-60:]), style="cyan"))
    if successes:
        grid.add_row("success", percent(successes[-1]), Text(spark(successes[-60:]), style="green"))
    for evaluation in s.evaluations:
        grid.add_row("held-out", f"v{evaluation.version}", evaluation_text(evaluation))
    return grid


def _cells(s: RunSnapshot) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    for column in ("cell", "role", "version", "calls", "heard"):
        table.add_column(column)
    colours = {"rollout": "green", "train": "magenta", "down": "red"}
    for cell in s.cells:
        name = f"{cell.name} (central)" if cell.central else cell.name
        if cell.role is None or cell.silent_s is None:
            table.add_row(name, Text("not seen yet", style="yellow"))
            continue
        version = "-" if cell.version is None else f"v{cell.version}"
        role = Text(cell.role, style=colours.get(cell.role, "yellow"))
        heard = Text(ago(cell.silent_s), style="red" if cell.missing else "")
        table.add_row(name, role, version, f"{cell.running_calls}/{cell.max_running}", heard)
    return table


def ago(seconds: float) -> str:
    """`3 s ago`, and above a minute `4:02 ago`."""
    return f"{seconds:.0f} s ago" if seconds < 60 else f"{clock(seconds)} ago"


def current_step(s: RunSnapshot) -> StepLine | None:
    """The oldest step that is not done, else the last one."""
    return next((step for step in s.steps if step.state != "done"), s.steps[-1] if s.steps else None)


def slow_part(s: RunSnapshot) -> str:
    """What the run waits for at this moment, in words."""
    roles = {cell.name: cell.role or "" for cell in s.cells}
    changing = [f"{name} {role.replace('_', ' ')}" for name, role in roles.items() if role.startswith("to_")]
    pending = next((e for e in s.evaluations if e.success is None and e.settled < e.rollouts), None)
    step = current_step(s)
    if pending is not None:
        text = f"evaluates v{pending.version}: {pending.settled}/{pending.rollouts} rollouts"
    elif step is None:
        text = "starts"
    elif step.settled < step.rollouts:
        text = f"rollouts {step.settled}/{step.rollouts}, micro-batches {step.computed}/{step.micro_batches}"
    elif step.computed < step.micro_batches:
        text = f"training: micro-batches {step.computed}/{step.micro_batches}"
    elif step.state != "done":
        text = "optimizer step and checkpoint"
    else:
        text = "next step"
    held = "paused, `gyre resume` goes on; " if s.state == "paused" else ""
    return held + text + (f"; {', '.join(changing)}" if changing else "")


def evaluation_text(e: EvaluationLine) -> str:
    """`success 41.7 % (reward 0.502, 96 rollouts)`, or how far it is."""
    if e.success is None:
        return f"{e.settled}/{e.rollouts} rollouts" if e.settled < e.rollouts else "no valid rollout"
    return f"success {percent(e.success)} (reward {e.reward or 0:.3f}, {e.n_valid} rollouts)"


def step_text(step: StepLine, planned: int) -> str:
    """One plain line of a finished step."""
    reward = "-" if step.reward is None else f"{step.reward:.3f}"
    success = "-" if step.success is None else percent(step.success)
    diff = "" if step.logprob_diff is None else f"  |Δlogprob| {step.logprob_diff:.1e}"
    excluded = f"  excluded {step.excluded}" if step.excluded else ""
    return (
        f"step {step.index + 1}/{planned}  reward {reward}  success {success}  rollouts {step.settled}"
        f"{excluded}  micro-batches {step.computed}{diff}  {step.seconds:.1f} s"
    )


def percent(share: float) -> str:
    """0.417 -> `41.7 %`."""
    return f"{100 * share:.1f} %"


def clock(seconds: float) -> str:
    """Seconds as m:ss or h:mm:ss."""
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


class PlainView:
    """For where no terminal is: a line a finished step or evaluation."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._steps: set[int] = set()
        self._evaluations: set[int] = set()

    def show(self, snapshot: RunSnapshot) -> None:
        """Print what has been finished since the last call."""
        for evaluation in snapshot.evaluations:
            if evaluation.success is not None and evaluation.version not in self._evaluations:
                self._evaluations.add(evaluation.version)
                self._say(f"held-out v{evaluation.version}: {evaluation_text(evaluation)}")
        for step in snapshot.steps:
            if step.state == "done" and step.index not in self._steps:
                self._steps.add(step.index)
                self._say(step_text(step, snapshot.steps_planned))

    def _say(self, line: str) -> None:
        self._console.print(line, markup=False, highlight=False, soft_wrap=True)

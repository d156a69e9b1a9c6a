"""The page: one HTML file with everything in it, so that it opens offline and can be mailed."""

from __future__ import annotations

import os
from collections.abc import Sequence
from html import escape
from pathlib import Path

from sqlalchemy import Engine

from gyre.report import svg, timeline
from gyre.report.data import LIFE, ORCHESTRATION, ReportData, read_close_up, read_report
from gyre.store.wall_time import IDLE

PART_COLOURS = {
    "decode": "#2f6db5",
    "prefill": "#73b3e0",
    "waiting for a cell": "#b9bec6",
    "harness and tools": "#d8a62a",
    "scoring": "#2a9d74",
    "training": "#b5559b",
    "optimizer step": "#7a3b78",
    "weights": "#4f2a5c",
    "role switch": "#d9622b",
    IDLE: "#4a4f57",
}
MEANING = {
    "decode": "a model call gets tokens",
    "prefill": "a model call was sent to an engine and has no token yet",
    "waiting for a cell": "a model call waits for a cell that may serve it",
    "harness and tools": "a harness runs and waits for no model call: it starts, thinks, or runs its tools",
    "scoring": "hidden tests run",
    "training": "a cell computes a micro-batch",
    "optimizer step": "all gradients are in: optimizer step and checkpoint",
    "weights": "the new version is being published",
    "role switch": "a cell changes its role",
    IDLE: "none of these: everybody waits for Temporal, Postgres or a worker",
}
CPU_COLOURS = ("#b5559b", "#2f6db5", "#2a9d74", "#d8a62a", "#73b3e0", "#d9622b", "#7a3b78", "#b9bec6", "#4a4f57")

_DRAWINGS = """svg text { font: 11.5px system-ui, sans-serif; fill: currentColor; }
svg .grid { stroke: currentColor; opacity: .15; }
svg .mark { stroke: currentColor; opacity: .3; stroke-dasharray: 2 3; }"""

_STYLE = """
:root { color-scheme: light dark; }
body { font: 15px/1.5 system-ui, sans-serif; max-width: 900px; margin: 2.5rem auto; padding: 0 1.2rem; }
h1 { margin-bottom: 0; } h2 { margin: 2.4rem 0 .4rem; } p.what { opacity: .75; margin: .2rem 0 .8rem; }
svg { max-width: 100%; height: auto; }
{drawings}
table { border-collapse: collapse; font-variant-numeric: tabular-nums; font-size: 13.5px; }
th, td { text-align: right; padding: .18rem .6rem; border-bottom: 1px solid #8884; }
th:first-child, td:first-child { text-align: left; } th { font-weight: 600; }
.wide { overflow-x: auto; } .big { display: flex; gap: 2.4rem; flex-wrap: wrap; margin: 1.2rem 0; }
.big div b { display: block; font-size: 1.7rem; line-height: 1.2; } .big div { opacity: .95; }
ul.legend { list-style: none; padding: 0; margin: .5rem 0; columns: 2; font-size: 13px; }
.key { display: inline-block; width: .8em; height: .8em; border-radius: 2px; margin-right: .5em; }
""".replace("{drawings}", _DRAWINGS)


def write_report(engine: Engine, run_id: str, path: Path, step: int | None = None) -> Path:
    """Write the report of a run to `path` and return it; `step` (from 0) is shown close up, else the most telling one.

    Raises ReportError where the run or the step does not exist.
    """
    return _write(path, render(read_report(engine, run_id, step)))


def write_close_up(engine: Engine, run_id: str, path: Path, step: int | None = None) -> str:
    """Write the drawing of a step's cells alone, as SVG, and return what it shows in words.

    Raises ReportError where the run or the step does not exist, or none is finished.
    """
    seen, roles = read_close_up(engine, run_id, step)
    _write(path, svg.alone(timeline.one_step(seen, roles), _DRAWINGS))
    return timeline.in_words(seen, roles)


def _write(path: Path, content: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")
    partial.write_text(content, encoding="utf-8")
    os.replace(partial, path)
    return path


def render(data: ReportData) -> str:
    """The page as HTML."""
    sections = [
        _numbers(data),
        _curve(data),
        _cells(data),
        _wall(data),
        _lives(data),
        _cpu(data),
        _tokens(data),
        _steps(data),
    ]
    title = f"Gyre run {escape(data.run_id)}"
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{title}</title>'
        f'<meta name="viewport" content="width=device-width"><style>{_STYLE}</style></head><body>'
        f"<h1>{title}</h1><p>{escape(_subtitle(data))}</p>{''.join(sections)}</body></html>\n"
    )


def _subtitle(d: ReportData) -> str:
    harness = d.config.get("harness", {}).get("name", "?")
    policy = d.config.get("scheduling", {}).get("policy", "?")
    done = sum(s.state == "done" for s in d.steps)
    return f"{d.state} · {done} optimizer steps in {d.seconds / 60:.1f} minutes · {harness} · {policy} cells"


def _numbers(d: ReportData) -> str:
    boxes = []
    overall = [e for e in d.evaluations if e.family is None and e.success is not None]
    if overall:
        boxes.append((_percent(overall[0].success), f"held-out success before (v{overall[0].version})"))
    if len(overall) > 1:
        boxes.append((_percent(overall[-1].success), f"held-out success after (v{overall[-1].version})"))
    weighed = [(s.logprob_diff, s.trained_targets) for s in d.steps if s.logprob_diff is not None]
    if total := sum(n for _, n in weighed):
        boxes.append((f"{sum(x * n for x, n in weighed) / total:.1e}", "mean |log-prob sampler - trainer|"))
    boxes.append((f"{sum(f.tokens for f in d.fates):,}", "tokens sampled"))
    boxes.append((f"{sum(s.trained_targets for s in d.steps):,}", "tokens trained"))
    boxes.append((_percent(d.orchestration_cpu), "orchestration, share of CPU"))
    boxes.append((_percent(d.orchestration_wall), "orchestration, share of wall time"))
    return '<div class="big">' + "".join(f"<div><b>{escape(v)}</b>{escape(n)}</div>" for v, n in boxes) + "</div>"


def _curve(d: ReportData) -> str:
    overall = [e for e in d.evaluations if e.family is None]
    rewards = [(s.step + 1.0, s.mean_reward) for s in d.steps if s.mean_reward is not None]
    success = [(s.step + 1.0, s.success) for s in d.steps if s.success is not None]
    held = [(float(e.version), e.success) for e in overall if e.success is not None]
    series = [
        svg.Series("reward", "#2f6db5", rewards),
        svg.Series("success", "#2a9d74", success),
        svg.Series("held-out success", "#d9622b", held),
    ]
    key = svg.legend(
        [
            ("reward", "#2f6db5", "mean over the valid rollouts of a training step"),
            ("success", "#2a9d74", "share of them with reward 1"),
            ("held-out success", "#d9622b", "the same share on held-out tasks, at the version of that many steps"),
        ]
    )
    rows = [
        [f"v{e.version}", e.family or "all tasks", _percent(e.success), _number(e.mean_reward), str(e.n_valid)]
        for e in d.evaluations
    ]
    table = _table(["held-out at", "tasks", "success", "mean reward", "valid rollouts"], rows)
    return _section("Reward", "Excluded rollouts count nowhere.", svg.line_chart(series, "step") + key + table)


def _cells(d: ReportData) -> str:
    what = (
        "The role of each cell over the run; dashed lines are the beginnings of steps. Point at a bar for its reason."
    )
    drawn = timeline.whole_run(d.roles, d.steps, d.began, d.seconds) + timeline.key()
    if d.close_up is not None:
        drawn += f'<p class="what">{escape(timeline.in_words(d.close_up, d.roles))}</p>'
        drawn += timeline.one_step(d.close_up, d.roles) + timeline.key_of_close_up()
    return _section("Cells", what, drawn)


def _wall(d: ReportData) -> str:
    names = sorted({name for t in d.times for name in t.parts}, key=lambda n: (n == IDLE, list(MEANING).index(n)
                   if n in MEANING else len(MEANING)))  # fmt: skip
    colours = {n: PART_COLOURS.get(n, "#888888") for n in names}
    rows = [(f"step {t.step + 1}", _stack([(n, t.parts.get(n, 0.0), colours[n]) for n in names])) for t in d.times]
    key = svg.legend([(n, colours[n], MEANING.get(n, "")) for n in names])
    totals = {n: sum(t.parts.get(n, 0.0) for t in d.times) for n in names}
    everything = sum(totals.values()) or 1.0
    table = _table(
        ["activity", "seconds", "share"], [[n, f"{s:.1f}", _percent(s / everything)] for n, s in totals.items()]
    )
    what = (
        "Wall time of each step, from its opening to the publication of its weights. Many things go on at once: an "
        "instant belongs in equal parts to the kinds of activity that go on in it, so the parts sum to the whole."
    )
    return _section("Where a step's wall time went", what, svg.stacks(rows) + key + table)


def _lives(d: ReportData) -> str:
    rows = [[w.name, *(f"{w.life[part]:.1f}" for part in LIFE)] for w in d.windows]
    what = (
        "Seconds in the lives of rollouts, summed over those of a step; they run side by side, so the sums exceed the "
        "wall time. Waiting: for a place in the launch window, and for the workspace. Queue, prefill, decode: of model "
        "calls. Harness and tools: the rest of the harness's life. Scoring: from the harness's end to the score."
    )
    head = [part.removesuffix("_s").replace("_", " ") for part in LIFE]
    return _section("Where a rollout's time went", what, _table(["seconds", *head], rows))


def _cpu(d: ReportData) -> str:
    names = list(dict.fromkeys(name for w in d.windows for name in w.cpu))
    colours = dict(zip(names, CPU_COLOURS * 3, strict=False))
    rows = [(w.name, _stack([(n, w.cpu.get(n, 0.0), colours[n]) for n in names])) for w in d.windows]
    key = svg.legend([(n, colours[n], "(orchestration)" if n in ORCHESTRATION else "") for n in names])
    wall = {f"step {t.step + 1}": t.parts.get(IDLE, 0.0) / t.seconds for t in d.times if t.seconds}
    shares = [
        [w.name, _percent(w.orchestration_cpu), _percent(wall.get(w.name)), f"{sum(w.cpu.values()):.1f}"]
        for w in d.windows
    ]
    what = (
        "CPU seconds of each component (sampled every 2 s from /proc, children included). Orchestration by CPU: "
        f"{', '.join(sorted(ORCHESTRATION))}, over all components. Orchestration by wall time: instants in which no "
        "other activity of the figure above goes on."
    )
    head = ["", "orchestration, share of CPU", "orchestration, share of wall time", "CPU seconds"]
    return _section("CPU and orchestration", what, svg.stacks(rows, "CPU s") + key + _table(head, shares))


def _tokens(d: ReportData) -> str:
    names = list(dict.fromkeys(f.fate for f in d.fates))
    table: dict[str, dict[str, int]] = {}
    for f in d.fates:
        source = f"step {f.step + 1}" if f.step is not None else f"held-out v{f.evaluated_version}"
        table.setdefault(source, {})[f.fate] = f.tokens
    rows = [[source, *(f"{by.get(n, 0):,}" for n in names), f"{sum(by.values()):,}"] for source, by in table.items()]
    sums = [sum(by.get(n, 0) for by in table.values()) for n in names]
    rows.append(["all", *(f"{n:,}" for n in sums), f"{sum(sums):,}"])
    what = "What became of every sampled token (view token_accounting); each counts in one column."
    prompt, cached = sum(s.prompt_tokens for s in d.steps), sum(s.cached_tokens for s in d.steps)
    calls = (
        f"<p>The {sum(s.calls for s in d.steps):,} model calls of the training steps read {prompt:,} prompt tokens, "
        f"of which the engines had {cached:,} in cache.</p>"
    )
    outcomes = _table(["how rollouts ended", "count"], [[name, f"{n:,}"] for name, n in d.outcomes])
    forks = _table(["calls that did not extend the one before", "count"], [[k, f"{n:,}"] for k, n in d.forks.items()])
    return _section("Tokens and rollouts", what, _table(["sampled in", *names, "sum"], rows) + calls + outcomes + forks)


def _steps(d: ReportData) -> str:
    rows = [
        [
            str(s.step + 1),
            s.state,
            _number(s.mean_reward),
            _percent(s.success),
            str(s.rollouts),
            str(s.excluded),
            f"{s.groups_trained}/{s.groups}",
            f"{s.trained_targets:,}",
            "-" if s.logprob_diff is None else f"{s.logprob_diff:.1e}",
            "-" if s.mismatch_kl is None else f"{s.mismatch_kl:.1e}",
            _percent(s.clip_fraction),
            _percent(s.rejected_fraction),
            "-" if s.total_s is None else f"{s.total_s:.1f}",
        ]
        for s in d.steps
    ]
    head = ["step", "state", "reward", "success", "rollouts", "excluded", "groups with gradient", "trained tokens"]
    what = "Groups whose rewards do not differ, or with under two valid ones, give no gradient."
    head += ["|log-prob difference|", "KL to sampler", "clipped", "rejected", "seconds"]
    return _section("Steps", what, _table(head, rows))


def _stack(parts: Sequence[tuple[str, float, str]]) -> list[svg.Bar]:
    bars: list[svg.Bar] = []
    at = 0.0
    for name, length, colour in parts:
        if length > 0:
            bars.append(svg.Bar(at, at + length, colour, f"{name}: {length:.2f}"))
            at += length
    return bars


def _section(title: str, what: str, body: str) -> str:
    return f'<h2>{escape(title)}</h2><p class="what">{escape(what)}</p>{body}'


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    th = "".join(f"<th>{escape(h)}</th>" for h in head)
    body = "".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    return f'<div class="wide"><table><thead><tr>{th}</tr></thead><tbody>{body}</tbody></table></div>'


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{100 * share:.1f} %"


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"

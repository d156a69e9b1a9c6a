"""How the cost of a packed tree and its peak memory grow with its size, fan-out and depth; a table and cost.svg."""

from __future__ import annotations

import ctypes
import gc
import re
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from gyre.training.hf_config import ModelShape
from gyre.training.logprobs import TargetQuery
from gyre.training.model import Policy, build_policy
from gyre.trajectory.packed import TreeRow

PLOT = Path(__file__).parent / "cost.svg"
SHAPE = ModelShape(
    family="qwen3", layers=4, hidden=256, ffn=768, heads=4, kv_heads=2, head_dim=64, vocab=2048, max_positions=16384,
    norm_eps=1e-6, rope_theta=1e4, tied=True,
)  # fmt: skip
TOKENS, ROUNDS = 2048, 2


@dataclass(frozen=True)
class Point:
    """One tree: its parameter, CPU seconds of forward and backward, and MiB that they took beyond weights."""

    x: int
    seconds: float
    mib: float


def forked(tokens: int, children: int) -> TreeRow:
    """Half of the tokens shared, the other half divided among `children`."""
    each = tokens // 2 // children
    return TreeRow.joined((tokens // 2, *(each,) * children), (-1, *(0,) * children))


def comb(tokens: int, forks: int) -> TreeRow:
    """A line of tokens that forks `forks` times; what leaves it is short."""
    side = max(1, tokens // 4 // forks)
    piece = (tokens - side * forks) // (forks + 1)
    lengths, parents, spine = [piece], [-1], 0
    for _ in range(forks):
        lengths += [side, piece]
        parents += [spine, spine]
        spine = len(lengths) - 1
    return TreeRow.joined(lengths, parents)


def main() -> None:
    policy = build_policy(SHAPE)
    _measure(policy, forked(256, 2))
    series = {
        "size (tokens, 4 children)": [(n, forked(n, 4)) for n in (512, 1024, 2048, 4096, 8192)],
        f"fan-out ({TOKENS} tokens)": [(k, forked(TOKENS, k)) for k in (1, 2, 4, 8, 16, 32, 64)],
        f"depth (forks on the way, {TOKENS} tokens)": [(k, comb(TOKENS, k)) for k in (1, 2, 4, 8, 16, 32, 64)],
    }
    measured: dict[str, list[Point]] = {}
    table = Table("tree", "value", "tokens", "segments", "CPU seconds", "tokens a second", "peak MiB")
    for name, rows in series.items():
        for x, row in rows:
            seconds, mib = min(_measure(policy, row) for _ in range(ROUNDS))
            measured.setdefault(name, []).append(Point(x, seconds, mib))
            table.add_row(
                name, str(x), str(row.tokens), str(len(row.lengths)), f"{seconds:.2f}",
                f"{row.tokens / seconds:.0f}", f"{mib:.0f}",
            )  # fmt: skip
    Console(width=120).print(table)
    PLOT.write_text(_svg(measured), encoding="utf-8")
    print(f"drawn in {PLOT}")


def _measure(policy: Policy, row: TreeRow) -> tuple[float, float]:
    ids = torch.randint(0, SHAPE.vocab, (row.tokens,), generator=torch.Generator().manual_seed(0))
    positions = torch.arange(0, row.tokens - 1, 4)
    query = TargetQuery(positions, torch.ones(len(positions)), torch.arange(len(positions)), ids[positions + 1])
    policy.ddp.zero_grad_buffer()
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)  # what glibc keeps of the tree before would hide the peak of this one
    before = _reset_peak()
    began = time.process_time()
    policy.target_logprobs(row, ids, query).logprobs.sum().backward()
    return time.process_time() - began, (_memory("VmHWM") - before) / 1024


def _reset_peak() -> float:
    """Forget the process's peak of resident memory (Linux); what is resident now, in KiB."""
    Path("/proc/self/clear_refs").write_text("5")
    return _memory("VmRSS")


def _memory(field: str) -> float:
    found = re.search(rf"{field}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return float(found[1])


WIDTH, HEIGHT, LEFT, TOP, PANEL = 340, 250, 50, 40, 200


def _svg(measured: dict[str, list[Point]]) -> str:
    """A panel for each series: seconds and MiB, each from zero to its largest, over a logarithmic x axis."""
    parts = ["<style>text{font:11px sans-serif}.s{stroke:#2563eb;fill:#2563eb}.m{stroke:#d97706;fill:#d97706}</style>"]
    for number, (name, points) in enumerate(measured.items()):
        left = number * WIDTH + LEFT
        parts.append(f'<text x="{left}" y="16" font-weight="bold">{name}</text>')
        parts.append(f'<path d="M{left} {TOP}v{PANEL - TOP}h{WIDTH - 80}" fill="none" stroke="#888"/>')
        xs = [left + 10 + i * (WIDTH - 100) / max(1, len(points) - 1) for i in range(len(points))]
        for x, point in zip(xs, points, strict=True):
            parts.append(f'<text x="{x:.0f}" y="{PANEL + 16}" text-anchor="middle">{point.x}</text>')
        parts += _line("s", xs, [p.seconds for p in points], "{:.2f} s", -6)
        parts += _line("m", xs, [p.mib for p in points], "{:.0f} MiB", 14)
    parts.append(f'<text x="{LEFT}" y="{HEIGHT - 8}" class="s" stroke="none">CPU seconds, forward and backward</text>')
    parts.append(f'<text x="{LEFT + 220}" y="{HEIGHT - 8}" fill="#d97706">peak memory beyond weights</text>')
    return f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {3 * WIDTH} {HEIGHT}">{"".join(parts)}</svg>\n'


def _line(style: str, xs: Sequence[float], values: Sequence[float], label: str, shift: int) -> list[str]:
    high = max(values)
    ys = [PANEL - value / high * (PANEL - TOP - 16) for value in values]
    path = " ".join(f"{x:.0f},{y:.0f}" for x, y in zip(xs, ys, strict=True))
    parts = [f'<g class="{style}"><polyline points="{path}" fill="none"/></g>']
    for i in (0, len(values) - 1):
        text = label.format(values[i])
        at = f'x="{xs[i]:.0f}" y="{ys[i] + shift:.0f}" text-anchor="middle"'
        parts.append(f'<g class="{style}"><text {at} stroke="none">{text}</text></g>')
    return parts

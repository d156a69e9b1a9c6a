"""Speeds from what was measured: small fits, each by a stated formula. Pure."""

from __future__ import annotations

import numpy as np

from gyre.simulation.model import Floats


def concurrency(began: Floats, ended: Floats, start: Floats, end: Floats) -> Floats:
    """How many of the intervals [began, ended) hold on average in each [start, end), start < end.

    With F(t) = integral of the number that hold up to t, this is (F(end) - F(start)) / (end - start).
    """
    edges = np.concatenate([began, ended])
    order = np.argsort(edges, kind="stable")
    at = edges[order]
    number = np.cumsum(np.where(order < len(began), 1.0, -1.0))
    area = np.concatenate([[0.0], np.cumsum(number[:-1] * np.diff(at))])

    def total(t: Floats) -> Floats:
        i = np.clip(np.searchsorted(at, t, side="right") - 1, 0, len(at) - 1)
        inside = np.maximum(t - at[i], 0.0)
        return np.where(t < at[0], 0.0, area[i] + number[i] * inside)

    return (total(end) - total(start)) / (end - start)


def line(x: Floats, y: Floats, weights: Floats) -> tuple[float, float]:
    """Weighted least squares of y = a + b x with a, b >= 0: of the fits with neither, one or both at zero, the best.

    Raises ValueError without points of weight.
    """
    total = float(weights.sum())
    if not total > 0:
        raise ValueError("a fit needs points")
    mx, my = float(weights @ x) / total, float(weights @ y) / total
    var = float(weights @ (x - mx) ** 2)
    slope = float(weights @ ((x - mx) * (y - my))) / var if var > 1e-12 * total * max(1.0, mx * mx) else 0.0
    square = float(weights @ (x * x))
    through = float(weights @ (x * y)) / square if square > 0 else 0.0
    fits = [(my - slope * mx, slope), (max(my, 0.0), 0.0), (0.0, max(through, 0.0))]
    allowed = [(a, b) for a, b in fits if a >= 0 and b >= 0]
    return min(allowed, key=lambda f: float(weights @ (y - f[0] - f[1] * x) ** 2))


def union_s(spans: list[tuple[float, float]]) -> float:
    """Seconds that at least one of the spans covers."""
    covered, upto = 0.0, -np.inf
    for a, b in sorted(spans):
        if b > upto:
            covered += b - max(a, upto)
            upto = b
    return float(covered)

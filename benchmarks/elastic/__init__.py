"""Elastic, colocate and async on the same work, live: docs/benchmarks.md says what is measured.

`python -m benchmarks.elastic paced`: the whole control plane over eight cells that keep a cost model's time instead of
computing. `python -m benchmarks.elastic real`: two cells that compute, each on a core of its own.
"""

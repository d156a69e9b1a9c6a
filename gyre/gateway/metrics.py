"""What the gateway counts, for Prometheus."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

SECONDS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30, 60, 300)


class Metrics:
    """One registry an app, so that several apps in one process (tests) do not share counts."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.calls = Counter("gyre_gateway_calls", "Calls by end", ["api", "status"], registry=self.registry)
        self.forks = Counter(
            "gyre_gateway_forks", "Calls that did not simply extend a branch", ["reason"], registry=self.registry
        )
        self.rerouted = Counter(
            "gyre_gateway_reroutes",
            "Generations that left a cell unfinished",
            ["cell", "reason"],
            registry=self.registry,
        )
        self.joined = Counter("gyre_gateway_joined", "Retries that joined their first call", registry=self.registry)
        self.tokens = Counter(
            "gyre_gateway_tokens",
            "Tokens: prompt, new (tokenised for the call), cached (by the engine), generated",
            ["what"],
            registry=self.registry,
        )
        self.seconds = Histogram(
            "gyre_gateway_seconds",
            "Seconds of a complete call: total, waiting (for a cell), engine, overhead (all else)",
            ["what"],
            buckets=SECONDS,
            registry=self.registry,
        )
        self.kinds = Counter(
            "gyre_gateway_kinds", "Calls by the kind of their branch as they began", ["kind"], registry=self.registry
        )
        self.relabelled = Counter(
            "gyre_gateway_relabelled", "Calls whose kind a later call made clear", ["kind"], registry=self.registry
        )
        self.splits = Counter(
            "gyre_gateway_splits", "Prompts that were cut so that another shares them", registry=self.registry
        )
        self.cell_tokens = Counter(
            "gyre_gateway_cell_tokens",
            "Tokens by cell: prompt (sent to it), cached (that it had), generated",
            ["cell", "what"],
            registry=self.registry,
        )
        self.cell_seconds = Histogram(
            "gyre_gateway_cell_seconds",
            "Seconds of one request to a cell's engine, whole or broken off",
            ["cell"],
            buckets=SECONDS,
            registry=self.registry,
        )
        self.write_retries = Counter(
            "gyre_gateway_write_retries", "Writes to Postgres that were tried again", registry=self.registry
        )
        self.running = Gauge("gyre_gateway_running", "Calls that are being answered", registry=self.registry)
        self.waiting = Gauge("gyre_gateway_waiting", "Calls that wait for a cell", registry=self.registry)
        self.live = Gauge("gyre_gateway_rollouts", "Rollouts whose trees are in memory", registry=self.registry)
        self.cell_running = Gauge(
            "gyre_gateway_cell_running", "Calls that a cell runs", ["cell"], registry=self.registry
        )
        self.cell_filled = Gauge(
            "gyre_gateway_cell_kv_tokens",
            "Tokens that a cell's calls may come to, prompts and longest answers",
            ["cell"],
            registry=self.registry,
        )
        self.cell_routable = Gauge(
            "gyre_gateway_cell_routable", "1 where calls may go to a cell", ["cell"], registry=self.registry
        )

    def see(self, cells: Iterable[Mapping[str, Any]], waiting: int, rollouts: int) -> None:
        """Take over how things stand now; `cells` as `Router.view` gives them. Cells that left are forgotten."""
        self.waiting.set(waiting)
        self.live.set(rollouts)
        for gauge in (self.cell_running, self.cell_filled, self.cell_routable):
            gauge.clear()
        for cell in cells:
            self.cell_running.labels(cell["name"]).set(cell["running"])
            self.cell_filled.labels(cell["name"]).set(cell["tokens"])
            self.cell_routable.labels(cell["name"]).set(bool(cell["routable"]))

    def text(self) -> bytes:
        """The exposition format."""
        return generate_latest(self.registry)

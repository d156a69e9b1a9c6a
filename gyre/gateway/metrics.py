"""What the gateway counts, for Prometheus."""

from __future__ import annotations

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
            "Seconds of a call: total, engine, overhead (total without engine and waiting for a cell)",
            ["what"],
            buckets=SECONDS,
            registry=self.registry,
        )
        self.write_retries = Counter(
            "gyre_gateway_write_retries", "Writes to Postgres that were tried again", registry=self.registry
        )
        self.running = Gauge("gyre_gateway_running", "Calls that are being answered", registry=self.registry)
        self.waiting = Gauge("gyre_gateway_waiting", "Calls that wait for a cell", registry=self.registry)

    def text(self) -> bytes:
        """The exposition format."""
        return generate_latest(self.registry)

"""Temporal's server as the stack starts it: it takes the settings that bound its memory. Unknown ones it ignores."""

from __future__ import annotations

import asyncio
import os
import re
import subprocess
import time
from collections.abc import Iterator

import httpx
import pytest

from workers.stack.child import ChildSpec
from workers.stack.ports import choose_ports
from workers.stack.services import TEMPORAL_SETTINGS, StackPlan, make_folders, store_stages

LIMIT_S = 120.0
"""What has not come about by then never will."""


@pytest.fixture(scope="module")
def plan(tmp_path_factory: pytest.TempPathFactory) -> StackPlan:
    data = tmp_path_factory.mktemp("stack")
    make_folders(data)
    ports, _ = choose_ports({}, {})
    return StackPlan(data, ports, None, None)


@pytest.fixture(scope="module")
def spec(plan: StackPlan) -> ChildSpec:
    return next(spec for spec in store_stages(plan)[0] if spec.name == "temporal")


@pytest.fixture(scope="module")
def metrics(plan: StackPlan, spec: ChildSpec) -> Iterator[str]:
    """Address of a running server's metrics."""
    log = plan.data / "temporal.log"
    with log.open("wb") as out:
        server = subprocess.Popen(spec.argv, env={**os.environ, **spec.env}, stdout=out, stderr=out)
    try:
        give_up = time.monotonic() + LIMIT_S
        while waits := asyncio.run(spec.ready(0.0)):
            assert server.poll() is None and time.monotonic() < give_up, (waits, log.read_text())
            time.sleep(0.1)
        yield f"http://127.0.0.1:{plan.ports['temporal_metrics']}/metrics"
    finally:
        server.terminate()
        server.wait(timeout=20)


def test_the_cache_of_workflows_has_the_size_that_is_set(metrics: str) -> None:
    said = next(s for s in TEMPORAL_SETTINGS if s.startswith("history.hostLevelCacheMaxSize="))
    gauge = re.compile(r'^cache_size\{cache_type="mutablestate",.*\} ([1-9]\d*)$', re.MULTILINE)
    give_up = time.monotonic() + LIMIT_S
    while (found := gauge.search(httpx.get(metrics, trust_env=False).text)) is None:
        # It is 0 until it is reported, a moment after the start.
        assert time.monotonic() < give_up
        time.sleep(0.1)
    assert found[1] == said.partition("=")[2]


def test_a_lazy_collector_has_a_limit(spec: ChildSpec) -> None:
    """Beyond Go's default of 100 the heap's size is a multiple of what lives in it, and nothing else bounds it."""
    assert int(spec.env["GOGC"]) <= 100 or spec.env["GOMEMLIMIT"].endswith("MiB")

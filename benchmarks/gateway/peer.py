"""Calls a second at 64 concurrent short rollouts, beside rllm-model-gateway (PyPI), in turns within one run.

Both stand before an engine that takes the same constant time and gives the same answer, ours SGLang's, theirs vLLM's.
Theirs proxies and keeps each call's request and response in SQLite; it neither matches nor tokenises, nor does a call
wait for its record unless `sync_traces` says so: both ways are measured. It runs under uvloop and httptools, which are
optional to it. `make bench` puts it into .venvs/rllm; where that is missing, this part says so and ends.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from pathlib import Path

import psutil
import uvloop
from rich.console import Console
from rich.table import Table

from benchmarks.gateway.engine import Engine, sglang, vllm
from benchmarks.gateway.world import Agent, cpu, lines, postgres_cpu, until_up, world
from benchmarks.table import show
from gyre.ports import free_port

PYTHON = Path(".venvs/rllm/bin/python")
CONCURRENT, TURNS, ROUNDS = 64, 8, 5
ENGINE_S = 0.02
SYSTEM, TASK = lines(20, 0), "Find out why the test fails, and mend it."


def main() -> None:
    if not PYTHON.exists():
        sys.exit(f"{PYTHON} is not there; `make bench` installs rllm-model-gateway into it")
    results, cpus = uvloop.run(compare())
    show(
        f"{CONCURRENT} rollouts at once, {TURNS} turns each, an engine of {1e3 * ENGINE_S:.0f} ms",
        "calls/s", results, "gyre", more_is_better=True,
    )  # fmt: skip
    table = Table("process", "CPU ms a call")
    for name, value in cpus.items():
        table.add_row(name, f"{1e3 * value:.2f}")
    Console().print(table)


async def compare() -> tuple[dict[str, list[float]], dict[str, float]]:
    """Calls a second of each way in each round, and CPU seconds a call."""
    async with contextlib.AsyncExitStack() as stack:
        made, _ = await stack.enter_async_context(world(lambda t: sglang(t, ENGINE_S), CONCURRENT * (ROUNDS + 1)))
        engine = vllm(made.tokenizer, ENGINE_S)
        await engine.start()
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        fast = await stack.enter_async_context(peer(engine, folder, sync=False))
        durable = await stack.enter_async_context(peer(engine, folder, sync=True))
        ways = {"rllm-model-gateway": fast, "… with sync_traces": durable}
        results: dict[str, list[float]] = {name: [] for name in ("gyre", *ways)}
        cpus = dict.fromkeys(("gyre", "gyre's Postgres", *ways), 0.0)
        for round_ in range(-1, ROUNDS):  # the first warms up
            before = cpu(made.process), postgres_cpu(made.postgres)
            rate = await calls_a_second([made.base() for _ in range(CONCURRENT)])
            spent = cpu(made.process) - before[0], postgres_cpu(made.postgres) - before[1]
            if round_ >= 0:
                results["gyre"].append(rate)
                cpus["gyre"] += spent[0]
                cpus["gyre's Postgres"] += spent[1]
            for name, (url, process) in ways.items():
                began = cpu(process)
                rate = await calls_a_second([f"{url}/sessions/{round_}-{i}/v1" for i in range(CONCURRENT)])
                if round_ >= 0:
                    results[name].append(rate)
                    cpus[name] += cpu(process) - began
        await engine.stop()
        return results, {name: value / (CONCURRENT * TURNS * ROUNDS) for name, value in cpus.items()}


async def calls_a_second(bases: list[str]) -> float:
    async def rollout(base: str, number: int) -> None:
        agent = Agent(base, SYSTEM, TASK)
        for turn in range(TURNS):
            agent.prepare()
            await agent.turn(lines(10, number * TURNS + turn))

    began = time.perf_counter()
    await asyncio.gather(*(rollout(base, i) for i, base in enumerate(bases)))
    return len(bases) * TURNS / (time.perf_counter() - began)


@contextlib.asynccontextmanager
async def peer(engine: Engine, folder: Path, *, sync: bool) -> AsyncIterator[tuple[str, psutil.Process]]:
    """rllm-model-gateway's own process before `engine`."""
    port = free_port()
    config = {
        "host": "127.0.0.1",
        "port": port,
        "db_path": str(folder / f"traces-{sync}.db"),
        "workers": [{"url": f"{engine.url}/v1", "model_name": "policy"}],
        "log_level": "WARNING",
        "sync_traces": sync,
    }
    file = folder / f"gateway-{sync}.yaml"
    file.write_text(json.dumps(config))  # JSON is YAML
    process = subprocess.Popen(  # noqa: ASYNC220 - returns at once
        [str(PYTHON), "-m", "rllm_model_gateway", "--config", str(file)],
        env={**os.environ, "PYTHONPATH": ""},
    )
    try:
        await until_up(process, f"http://127.0.0.1:{port}/health")
        yield f"http://127.0.0.1:{port}", psutil.Process(process.pid)
    finally:
        process.terminate()
        process.wait()

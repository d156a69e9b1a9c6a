"""A turn on a 200,000-token history, and each of 1,000 turns: what it costs beside the engine's own time."""

from __future__ import annotations

import contextlib
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import numpy as np
import uvloop
from rich.console import Console
from rich.table import Table

from benchmarks.gateway.chart import write_chart
from benchmarks.gateway.engine import Engine, sglang
from benchmarks.gateway.world import Agent, Client, World, config, lines, until_up, world
from gyre.gateway.messages import Message, ToolCall
from gyre.gateway.policy import Policy
from gyre.ports import free_port
from tests.scripted.policy import write_policy

HISTORY, DELTA = 200_000, 500
LONG_TURNS = 1_000
MEASURED = 100
MORE = 4
"""Rollouts by which memory is measured."""
PLOT = Path(".gyre/benchmarks/gateway-turns.html")


def main() -> None:
    console = Console()
    table = Table("what", "measured", "goal", title=f"one more turn of {DELTA} tokens after {HISTORY:,} tokens")
    ours, full = tokenising()
    table.add_row("tokenise the delta, and render all of it anew", f"{1e3 * ours:.2f} ms, {1e3 * full:.0f} ms", "")
    table.add_row("… which is more by", f"{full / ours:.0f}x", "50x or more")
    overhead, reading, tokens, memory = uvloop.run(long_history())
    p50, p95 = np.percentile(overhead, [50, 95])
    table.add_row("gateway, all but the engine, median", f"{1e3 * p50:.2f} ms", "< 5 ms")
    table.add_row("… 95th percentile", f"{1e3 * p95:.2f} ms", "< 20 ms")
    table.add_row("… of it, to receive and parse the bytes, median", f"{1e3 * statistics.median(reading):.2f} ms", "")
    table.add_row("memory of one live rollout", f"{memory / 1e6:.2f} MB", "< 10 MB")
    console.print(table)
    load = os.getloadavg()[0]
    console.print(f"{len(overhead)} turns, from {HISTORY:,} to {tokens:,} tokens; load of the machine {load:.1f}\n")

    costs, bytes_only = uvloop.run(many_turns())
    late, early = costs[-MEASURED:], costs[MEASURED : 2 * MEASURED]
    table = Table("turns", "overhead", "reading the bytes", "all else", title=f"a rollout of {LONG_TURNS:,} turns")
    for name, part in (("100 to 200", slice(MEASURED, 2 * MEASURED)), ("the last 100", slice(-MEASURED, None))):
        a, b = statistics.median(costs[part]), statistics.median(bytes_only[part])
        table.add_row(name, f"{1e3 * a:.2f} ms", f"{1e3 * b:.2f} ms", f"{1e3 * (a - b):.2f} ms")
    console.print(table)
    PLOT.parent.mkdir(parents=True, exist_ok=True)
    write_chart(PLOT, costs, bytes_only)
    console.print(f"medians; growth {1e3 * (statistics.median(late) - statistics.median(early)):+.2f} ms; {PLOT}\n")


def tokenising() -> tuple[float, float]:
    """Seconds to tokenise what a turn adds, as the gateway does, and to render the whole conversation anew."""
    with tempfile.TemporaryDirectory() as name:
        policy = Policy(config(write_policy(Path(name)), Path(name)).policy)
        tools: list[dict[str, object]] = []
        result = lines(18, 1)
        call = ToolCall("call_1", "bash", '{"command": "sed -n 1,80p src/module.py"}')
        said = Message("assistant", "Let me look at it.", tool_calls=(call,))
        history = [Message("system", lines(20, 0)), Message("user", "Do it.")]
        while len(policy.opening(history, tools)) < HISTORY:
            grown = [m for i in range(50) for m in (said, Message("tool", lines(18, len(history) + i), None, (), "c"))]
            history += grown
        prompt = np.asarray(policy.opening(history, tools), np.int32)
        completion = policy.foreign(said, tools)
        delta = [Message("tool", result, tool_call_id="call_1")]

        def extend() -> None:
            new = policy.extension(policy.tail(prompt), completion, delta, tools, False)
            assert new is not None and abs(len(new) - DELTA) < 0.2 * DELTA, new and len(new)

        full = [*history, said, *delta]
        return _median(extend, 50), _median(lambda: policy.opening(full, tools), 5)


def _median(work: Callable[[], object], rounds: int) -> float:
    work()
    times = []
    for _ in range(rounds):
        began = time.perf_counter()
        work()
        times.append(time.perf_counter() - began)
    return statistics.median(times)


async def _turn(agent: Agent, engine: Engine, result: str) -> float:
    """Seconds that a turn took beyond the engine's own."""
    agent.prepare()
    began = time.perf_counter()
    await agent.turn(result)
    took = time.perf_counter() - began
    served = engine.served[-1]
    return took - (served.sent - served.arrived)


async def long_history() -> tuple[list[float], list[float], int, float]:
    """Overhead of turns after the history is there, what reading their bytes takes, tokens at the end, and the bytes of
    memory that a rollout takes."""
    async with world(lambda t: sglang(t, 0.0), 1 + MORE) as (made, engine), reader() as url:
        agent = await _grown(made, engine)
        result = lines(18, 2)
        overhead, reading, only = [], [], Client()
        for _ in range(MEASURED):
            overhead.append(await _turn(agent, engine, result))
            reading.append(await _read(only, url, agent))
        before = made.process.memory_full_info().uss
        for _ in range(MORE):
            await _grown(made, engine)
        return overhead, reading, _tokens(made, agent), (made.process.memory_full_info().uss - before) / MORE


async def _read(only: Client, url: str, agent: Agent) -> float:
    """Seconds that the agent's last request takes to a server that only reads it."""
    began = time.perf_counter()
    await only.post(url, agent.body)
    return time.perf_counter() - began


async def _grown(made: World, engine: Engine) -> Agent:
    """An agent with a long history, made of turns of the usual length."""
    agent = Agent(made.base(), lines(20, 0), "Do it.")
    while len(agent.messages) < 100 or _tokens(made, agent) < HISTORY:
        await _turn(agent, engine, lines(18, len(agent.messages)))
    return agent


def _tokens(made: World, agent: Agent) -> int:
    """Tokens of the contents alone; all of an agent's tool results are about as long."""
    some = agent.messages[:40]
    return sum(len(made.tokenizer.encode(m["content"] or "").ids) for m in some) * len(agent.messages) // len(some)


async def many_turns() -> tuple[list[float], list[float]]:
    """Overhead of each of many turns, and the time that the same bytes take to a server that only reads them."""
    async with world(lambda t: sglang(t, 0.0), 1) as (made, engine), reader() as url:
        only = Client()
        agent = Agent(made.base(), lines(20, 0), "Do it.")
        result = lines(6, 3)
        overhead, reading = [], []
        for _ in range(LONG_TURNS):
            overhead.append(await _turn(agent, engine, result))
            reading.append(await _read(only, url, agent))
        return overhead, reading


@contextlib.asynccontextmanager
async def reader() -> AsyncIterator[str]:
    """URL of a server under the gateway's own HTTP stack that reads JSON and does nothing with it."""
    port = free_port()
    process = subprocess.Popen([sys.executable, "-m", "benchmarks.gateway.reader", str(port)])  # noqa: ASYNC220
    try:
        await until_up(process, f"http://127.0.0.1:{port}/health")
        yield f"http://127.0.0.1:{port}/"
    finally:
        process.terminate()
        process.wait()

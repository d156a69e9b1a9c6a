"""The supervisor: starts the stages in order, restarts what dies, and ends everything in reverse order."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from gyre.cli.stackfile import StackPhase, StackState
from workers.settings import REPLACED
from workers.stack.child import Child, ChildSpec, adopt_orphans
from workers.stack.cpu import CpuMeter, Owner
from workers.stack.cpu_log import CpuLog
from workers.stack.processes import descendants, snapshot
from workers.stack.sweep import sweep

log = logging.getLogger("gyre.stack")

FIRST_BACKOFF_S = 0.2
LONGEST_BACKOFF_S = 10.0
LIVED_S = 30.0
"""A process that was well for so long starts again at once, and its earlier ends are forgotten."""
ENDS_IN_A_ROW = 8
"""So many ends without a life of LIVED_S between them are a failure of the stack."""
BAD_SETTINGS = 2
"""Exit code by which a worker says that its settings are wrong: starting it again would not help."""


class Supervisor:
    """Owns the processes of one data folder. `stages` start one after the other, the processes of a stage together."""

    def __init__(
        self, data: Path, state: StackState, stages: list[list[ChildSpec]], cpu_log: CpuLog | None = None
    ) -> None:
        self.data = data
        self._state = state
        self._stages = [[Child(s, data / "logs" / f"{s.name}.log") for s in stage] for stage in stages]
        self._children = [child for stage in self._stages for child in stage]
        self._cpu_log = cpu_log
        self._exits: dict[int, asyncio.Future[int]] = {}
        self._keepers: list[asyncio.Task[None]] = []
        self._stop = asyncio.Event()
        self._hurry = False
        self._failure: str | None = None
        self._meter = CpuMeter(os.getpid())
        self._janitor: subprocess.Popen[bytes] | None = None

    async def run(self) -> int:
        """Until a signal (0) or a failure (1). Afterwards no process of the stack is left."""
        loop = asyncio.get_running_loop()
        adopt_orphans()
        for left in sweep(self.data, grace_s=3.0):
            log.info("ended process %d that an earlier stack had left behind", left)
        loop.add_signal_handler(signal.SIGCHLD, self._reap)
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            loop.add_signal_handler(number, self._asked_to_stop, signal.Signals(number).name)
        self._start_janitor()
        cpu = asyncio.create_task(self._count_cpu())
        try:
            await self._start()
            await self._stop.wait()
        finally:
            await self._end_all()
            cpu.cancel()
            self._dismiss_janitor()
        self._write("failed" if self._failure else "stopped")
        return 1 if self._failure else 0

    # ---- starting and watching -----------------------------------------------------------------------------------

    async def _start(self) -> None:
        self._write("starting")
        for stage in self._stages:
            ready = [asyncio.Event() for _ in stage]
            self._keepers += [asyncio.create_task(self._keep(c, e)) for c, e in zip(stage, ready, strict=True)]
            for keeper in self._keepers[-len(stage) :]:
                keeper.add_done_callback(self._keeper_ended)
            for event in ready:
                await self._either(event)
            if self._stop.is_set():
                return
        self._write("ready")
        log.info("ready")

    async def _keep(self, child: Child, ready: asyncio.Event) -> None:
        """Run the child, and run it again whenever it ends, until the stack stops."""
        ends = 0
        while not self._stop.is_set():
            ended = self._start_child(child)
            watch = asyncio.create_task(self._watch(child, ready))
            code = await asyncio.shield(ended)  # cancelling this task must not cancel what `_end` waits for
            watch.cancel()
            if self._stop.is_set():
                return
            if child.spec.once and code == 0:
                child.set_phase("ready", "done")
                ready.set()
                return
            ends = 1 if time.time() - child.started_at > LIVED_S else ends + 1
            how = child.how_it_ended()
            log.warning("%s (pid %s) %s", child.spec.name, child.pid, how)
            if code == REPLACED:  # what it did goes on elsewhere, and so does this stack
                child.set_phase("stopped", how)
                self._write()
                ready.set()
                return
            if ends >= ENDS_IN_A_ROW or code == BAD_SETTINGS:
                times = f" {ends} times in a row" if code != BAD_SETTINGS else ""
                child.set_phase("failed", how)
                self._fail(f"{child.spec.name}{times} {how} (log: {child.log})")
                return
            child.restarts += 1
            pause = min(LONGEST_BACKOFF_S, FIRST_BACKOFF_S * 2 ** (ends - 1))
            child.set_phase("restarting", f"{how}; again in {pause:.1f} s")
            self._write()
            await self._sleep(pause)

    def _keeper_ended(self, keeper: asyncio.Task[None]) -> None:
        if not keeper.cancelled() and (error := keeper.exception()) is not None:
            self._fail(f"a process cannot be started: {error}")

    def _start_child(self, child: Child) -> asyncio.Future[int]:
        child.start()
        assert child.pid is not None
        ended: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._exits[child.pid] = ended
        log.info("%s started (pid %d)", child.spec.name, child.pid)
        self._write()
        return ended

    async def _watch(self, child: Child, ready: asyncio.Event) -> None:
        """Note when the child is ready; end one that does not become so in time (its keeper starts it again)."""
        pause = 0.1
        while (waiting := await self._still_waits(child)) is not None:
            if time.time() - child.started_at > child.spec.ready_within_s:
                log.warning(
                    "%s is not ready after %g s (%s); ended", child.spec.name, child.spec.ready_within_s, waiting
                )
                self._kill_tree(child)
                return
            if waiting != child.detail:
                child.set_phase("starting", waiting)
                self._write()
            await asyncio.sleep(pause)
            pause = min(1.0, pause * 1.2)  # who needs long need not be asked often
        child.set_phase("ready")
        log.info("%s ready after %.1f s", child.spec.name, time.time() - child.started_at)
        ready.set()
        self._write()

    async def _still_waits(self, child: Child) -> str | None:
        if child.spec.once:
            return "works"
        try:
            return await child.spec.ready(child.started_at)
        except Exception as error:  # an answer that no check expects must not end the watch: it is shown, and asked for
            return f"its check fails: {type(error).__name__}: {error}"  # again, until the child's time is over

    # ---- the ends of processes -----------------------------------------------------------------------------------

    def _reap(self) -> None:
        """Wait for every child that has ended: ours, and the orphans that this process has adopted."""
        while True:
            try:
                pid, status, usage = os.wait4(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            child = next((c for c in self._children if c.pid == pid and c.exit_code is None), None)
            owner = Owner(child.spec.component, child.spec.cell) if child else None
            if self._janitor and pid == self._janitor.pid:
                self._janitor.returncode = os.waitstatus_to_exitcode(status)
                owner = Owner("supervisor")
                if not self._stop.is_set():
                    self._start_janitor()
            self._meter.reaped(pid, usage.ru_utime + usage.ru_stime, owner)
            if child:
                child.reaped(os.waitstatus_to_exitcode(status))
                if ended := self._exits.pop(pid, None):
                    ended.set_result(os.waitstatus_to_exitcode(status))

    def _asked_to_stop(self, name: str) -> None:
        if self._stop.is_set():
            self._hurry = True  # asked twice: no more patience
            log.info("%s again: ending everything at once", name)
        else:
            log.info("%s: stopping", name)
            self._stop.set()

    def _fail(self, why: str) -> None:
        log.error("%s", why)
        self._failure = self._failure or why
        self._stop.set()

    async def _end_all(self) -> None:
        """End the stages in reverse order; before what rollouts need ends, the harnesses do."""
        self._stop.set()
        self._write("stopping")
        for task in self._keepers:
            task.cancel()
        groups = [
            [c for c in stage if c.spec.leans_on_others is leans] for stage in self._stages for leans in (False, True)
        ]
        for group in reversed(groups):
            await asyncio.gather(*(self._end(child) for child in group))
            # Harnesses are detached on purpose: they end here, after their host and before what they talk to.
            await self._sweep()

    async def _sweep(self) -> None:
        try:
            met = await asyncio.to_thread(
                sweep, self.data, 0.0 if self._hurry else 2.0, spare=self._spared, below=[os.getpid()]
            )
        except TimeoutError as error:
            self._failure = self._failure or str(error)
            log.error("%s", error)
        else:
            if met:
                log.info("ended %d detached processes", len(met))

    async def _end(self, child: Child) -> None:
        if not child.running or child.pid is None:
            child.set_phase("stopped" if child.phase != "failed" else "failed", child.detail)
            return
        child.set_phase("stopping")
        self._write()
        ended = self._exits.get(child.pid)
        child.send(child.spec.stop_signal)
        give_up = time.time() + child.spec.stop_within_s
        killed = False
        while ended is not None and not ended.done():
            if not killed and (self._hurry or time.time() > give_up):
                log.warning("%s does not end within %g s; killed", child.spec.name, child.spec.stop_within_s)
                self._kill_tree(child)
                killed = True
            await asyncio.sleep(0.02)
        child.set_phase("stopped")
        self._write()

    def _kill_tree(self, child: Child) -> None:
        if child.pid is None or not child.running:
            return
        for pid in (child.pid, *descendants(snapshot(), [child.pid])):
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue  # ended meanwhile

    def _spared(self) -> set[int]:
        """Processes that a sweep leaves alone: the janitor, and children that run with all below them."""
        running = {child.pid for child in self._children if child.running and child.pid}
        keep = running | descendants(snapshot(), running)
        return keep | {self._janitor.pid} if self._janitor else keep

    async def _either(self, event: asyncio.Event) -> None:
        """Wait for the event, but not longer than until the stack stops."""
        waits = [asyncio.create_task(event.wait()), asyncio.create_task(self._stop.wait())]
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        for wait in waits:
            wait.cancel()

    async def _sleep(self, seconds: float) -> None:
        """Sleep, but not longer than until the stack stops."""
        try:
            await asyncio.wait_for(self._stop.wait(), seconds)
        except TimeoutError:
            return

    # ---- the janitor, the state file and the clock ---------------------------------------------------------------

    def _start_janitor(self) -> None:
        self._janitor = subprocess.Popen(
            [sys.executable, "-m", "workers.stack.janitor", str(self.data), str(os.getpid())],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            env={**os.environ, "GYRE_DATA": str(self.data)},
            start_new_session=True,
        )

    def _dismiss_janitor(self) -> None:
        if self._janitor and self._janitor.stdin and self._janitor.returncode is None:
            self._janitor.stdin.write(b"bye")
            self._janitor.stdin.close()
            while self._janitor.returncode is None:
                self._reap()
                time.sleep(0.01)

    def _write(self, phase: StackPhase | None = None) -> None:
        self._state.state = phase or self._state.state
        self._state.message = self._failure or ""
        self._state.processes = [child.state() for child in self._children]
        self._state.write(self.data)

    async def _count_cpu(self) -> None:
        while self._cpu_log is not None:
            await asyncio.sleep(self._cpu_log.every_s)
            roots = {c.pid: Owner(c.spec.component, c.spec.cell) for c in self._children if c.running and c.pid}
            if self._janitor:
                roots[self._janitor.pid] = Owner("supervisor")
            await self._cpu_log.add(self._meter.sample(snapshot(), roots))

"""The client of a trainer process, for its cell's agent. Free of torch."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
from pathlib import Path
from typing import Any

from gyre.ports import notice_loss
from gyre.training.protocol import (
    LINE_LIMIT,
    WRONG_TOKEN,
    Endpoint,
    TrainerError,
    TrainerStatus,
    TrainerUnavailable,
    short_address,
)

CONNECT_S = 10.0
"""How long another machine may take to answer a connection."""


class TrainerClient:
    """Sends commands to the trainer at a unix socket, or at an endpoint on another machine.

    One connection a command, so that a restart needs no care.

    Every command raises TrainerError where the trainer refuses it, TrainerUnavailable where it does not answer; all
    may be sent again. A cancelled call leaves the command running in the trainer.
    """

    def __init__(self, at: Path | Endpoint) -> None:
        self.at = at
        self._ids = itertools.count()

    async def status(self, timeout_s: float = 5.0) -> TrainerStatus:
        """State of the process, at once."""
        try:
            return TrainerStatus.from_json(await asyncio.wait_for(self.call("status"), timeout_s))
        except TimeoutError as error:
            raise TrainerUnavailable(f"{self.at}: no status within {timeout_s} s") from error

    async def wait_ready(self, timeout_s: float = 120.0, pause_s: float = 0.1) -> TrainerStatus:
        """Wait until the process is up and has started. Raises TrainerUnavailable after `timeout_s`."""
        deadline = asyncio.get_running_loop().time() + timeout_s
        while True:
            with contextlib.suppress(TrainerUnavailable):
                status = await self.status()
                if status.busy != "start":
                    return status
            if asyncio.get_running_loop().time() > deadline:
                raise TrainerUnavailable(f"{self.at}: the trainer is not ready after {timeout_s} s; see its log")
            await asyncio.sleep(pause_s)

    async def load(self, version: int) -> None:
        """Have the weights of `version`. Idempotent."""
        await self.call("load", version=version)

    async def begin(self, step_id: int) -> None:
        """Accumulate for this step, from zero unless it does already. Idempotent."""
        await self.call("begin", step_id=step_id)

    async def micro_batch(self, micro_batch_id: int) -> dict[str, Any]:
        """Compute a micro-batch that this incarnation has claimed, and mark it held; its metrics. Idempotent."""
        return await self.call("micro_batch", micro_batch_id=micro_batch_id)

    async def prefetch(self, micro_batch_id: int) -> None:
        """Read and pack a micro-batch that comes next, at once, beside whatever computes. Idempotent."""
        await self.call("prefetch", micro_batch_id=micro_batch_id)

    async def push(self, step_id: int) -> dict[str, Any] | None:
        """Publish the accumulated gradient: a ticket for central's `absorb`; None if nothing is held. Idempotent.

        No micro-batch is taken until `reset`.
        """
        ticket: dict[str, Any] | None = (await self.call("push", step_id=step_id))["ticket"]
        return ticket

    async def absorb(self, step_id: int, ticket: dict[str, Any], from_incarnation: str) -> None:
        """Central: pull a pushed gradient, add it, and take over its micro-batches in the ledger. Idempotent."""
        await self.call("absorb", step_id=step_id, ticket=ticket, from_incarnation=from_incarnation)

    async def reset(self, step_id: int) -> None:
        """Satellite: central has absorbed the push; start from zero. Idempotent."""
        await self.call("reset", step_id=step_id)

    async def optimizer_step(self, step_id: int) -> dict[str, Any]:
        """Central: step, save the checkpoint, commit the version; {version, checkpoint, metrics}. Idempotent."""
        return await self.call("optimizer_step", step_id=step_id)

    async def publish(self, version: int) -> dict[str, Any]:
        """Central: make the weights of `version` pullable; the transfer ticket (also in `weight_versions`)."""
        ticket: dict[str, Any] = (await self.call("publish", version=version))["ticket"]
        return ticket

    async def sleep(self) -> None:
        """Give memory back while the cell serves. Idempotent."""
        await self.call("sleep")

    async def wake(self) -> None:
        """The opposite of `sleep`. Idempotent."""
        await self.call("wake")

    async def call(self, command: str, **arguments: Any) -> dict[str, Any]:
        """Any command by name."""
        number = next(self._ids)
        request = {"id": number, "command": command, "arguments": arguments}
        if isinstance(self.at, Endpoint):
            request["token"] = self.at.token
        reader, writer = await self._connect()
        try:
            writer.write(json.dumps(request).encode() + b"\n")
            await writer.drain()
            answer = await reader.readline()
        except OSError as error:
            raise TrainerUnavailable(f"{self.at}: lost the trainer during {command}: {error}") from error
        except ValueError as error:  # a line without end
            raise TrainerUnavailable(f"{self.at}: what listens is no trainer: {error}") from error
        finally:
            writer.close()
        if not answer.endswith(b"\n"):
            raise TrainerUnavailable(f"{self.at}: the trainer went away during {command}")
        try:
            data = json.loads(answer)
            failed = data.get("error")
            result: dict[str, Any] = {} if failed else data["result"]
        except (ValueError, KeyError, AttributeError) as error:
            raise TrainerUnavailable(f"{self.at}: what listens is no trainer: it says {answer[:80]!r}") from error
        if failed and failed["type"] == WRONG_TOKEN:
            raise TrainerUnavailable(f"{self.at}: another trainer listens there now: {failed['message']}")
        if failed:
            raise TrainerError(failed["type"], failed["message"])
        return result

    async def _connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        try:
            if isinstance(self.at, Endpoint):
                host, _, port = self.at.address.rpartition(":")
                async with asyncio.timeout(CONNECT_S):
                    reader, writer = await asyncio.open_connection(host, int(port), limit=LINE_LIMIT)
                notice_loss(writer.get_extra_info("socket"))
                return reader, writer
            with short_address(self.at) as address:
                return await asyncio.open_unix_connection(address, limit=LINE_LIMIT)
        except OSError as error:  # TimeoutError is one
            hint = (
                "; does this machine reach that address, its agent's GYRE_HOST?"
                if isinstance(self.at, Endpoint)
                else ""
            )
            why = str(error) or f"no answer within {CONNECT_S:g} s"
            raise TrainerUnavailable(f"{self.at}: no trainer listens: {why}{hint}") from error

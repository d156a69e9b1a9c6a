"""The trainer process, made to be killed at a named point: `python -m tests.cells.deadly …` as `workers.trainer`.

Orders lie as files beside its socket, so that a trainer which runs already can be given one: `order-CELL.json` holds
{"point", "victim", "signal"}. The trainer that reaches the point takes the order away and sends the signal (SIGKILL as
a rule) to `victim`'s, which is mostly itself.
"""

from __future__ import annotations

import functools
import importlib
import json
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, NamedTuple

import gyre.store.db
import gyre.transfer.sockets
from tests.transfer.cutting import Cut, through


class Point(NamedTuple):
    """Before or after a call of `name` in `module`."""

    module: str
    name: str
    when: Literal["before", "after"]


REPLICA, QUERIES = "gyre.training.replica", "gyre.store.queries"
POINTS = {
    "micro-batch received": Point(REPLICA, "Replica.micro_batch", "before"),
    "gradient half computed": Point("gyre.training.streaming", "StreamingStep.micro_batches", "after"),
    "gradient computed": Point(QUERIES, "hold_micro_batch", "before"),
    "gradient written, not committed": Point(QUERIES, "hold_micro_batch", "after"),
    "gradient committed": Point(REPLICA, "Replica.micro_batch", "after"),
    "push published": Point(REPLICA, "Replica.push", "after"),
    "pull of the push begins": Point(REPLICA, "open_puller", "before"),
    "pull of the push done": Point(QUERIES, "move_held", "before"),
    "absorb written, not committed": Point(QUERIES, "move_held", "after"),
    "absorb committed": Point("gyre.training.trainer", "Trainer.absorb", "before"),
    "absorb done": Point(REPLICA, "Replica.take_push", "after"),
    "push to be forgotten": Point(REPLICA, "Replica.reset", "before"),
    "push forgotten": Point(REPLICA, "Replica.reset", "after"),
    "step to be taken": Point("gyre.training.trainer", "Trainer.optimizer_step", "before"),
    "step taken": Point("gyre.training.trainer", "Trainer.optimizer_step", "after"),
    "checkpoint half written": Point("gyre.training.checkpoint", "write_hf_weights", "after"),
    "checkpoint renamed": Point("gyre.training.trainer", "save_checkpoint", "after"),
    "version to be written": Point(QUERIES, "finish_step", "before"),
    "version written, not committed": Point(QUERIES, "finish_step", "after"),
    "version committed": Point(REPLICA, "Replica._delete_old_checkpoints", "before"),
    "weights to be published": Point(REPLICA, "Replica.publish", "before"),
    "ticket written, not committed": Point(QUERIES, "set_ticket", "after"),
    "weights to be loaded": Point(REPLICA, "Replica._pull_weights", "before"),
}


def order(
    sockets: Path, cell: str, point: str, victim: str | None = None, number: signal.Signals = signal.SIGKILL
) -> Path:
    """Have the trainer of `cell`, when it reaches `point`, send a signal to `victim`'s (its own); the file is gone
    when it did."""
    path = sockets / f"order-{cell}.json"
    path.with_suffix(".new").write_text(json.dumps({"point": point, "victim": victim or cell, "signal": number}))
    path.with_suffix(".new").rename(path)
    return path


def order_cut(sockets: Path, cell: str, cut: Cut) -> Path:
    """Have the next pull of the trainer of `cell` go through a connection that is `cut`."""
    path = sockets / f"cut-{cell}.json"
    path.with_suffix(".new").write_text(json.dumps(cut._asdict()))
    path.with_suffix(".new").rename(path)
    return path


def slow(sockets: Path, seconds: float) -> None:
    """Have each micro-batch take so much longer from now on."""
    (sockets / "slow").write_text(str(seconds))


def main() -> None:
    socket = Path(sys.argv[sys.argv.index("--socket") + 1])
    cell = sys.argv[sys.argv.index("--cell") + 1]
    socket.parent.mkdir(parents=True, exist_ok=True)
    (socket.parent / f"{cell}.pid").write_text(str(os.getpid()))
    for name, point in POINTS.items():
        patch(point, functools.partial(reached, socket.parent, cell, name))
    patch(Point("gyre.training.trainer", "Trainer.micro_batch", "before"), functools.partial(doze, socket.parent))
    cut_pulls(socket.parent / f"cut-{cell}.json")
    gyre.transfer.sockets.TIMEOUT_S = 1.0  # silence need not be long,
    gyre.store.db.STOPPED_S = 2.0  # nor a stop
    from workers.trainer import main

    main()


def patch(point: Point, act: Callable[[], None]) -> None:
    owner: Any = importlib.import_module(point.module)
    *path, last = point.name.split(".")
    for part in path:
        owner = getattr(owner, part)
    function = getattr(owner, last)

    @functools.wraps(function)
    def patched(*args: Any, **kwargs: Any) -> Any:
        if point.when == "before":
            act()
        result = function(*args, **kwargs)
        if point.when == "after":
            act()
        return result

    setattr(owner, last, patched)


def reached(sockets: Path, cell: str, point: str) -> None:
    path = sockets / f"order-{cell}.json"
    try:
        found = json.loads(path.read_text())
    except FileNotFoundError:
        return
    if found["point"] != point:
        return
    path.unlink()
    os.kill(int((sockets / f"{found['victim']}.pid").read_text()), found["signal"])


def doze(sockets: Path) -> None:
    path = sockets / "slow"
    if path.exists():
        time.sleep(float(path.read_text()))


def cut_pulls(orders: Path) -> None:
    module = importlib.import_module(REPLICA)
    direct, kept = module.open_puller, module.Replica._puller

    def open_puller(ticket: Any, host: str) -> Any:
        if not orders.exists():
            return direct(ticket, host)
        cut = Cut(**json.loads(orders.read_text()))
        orders.unlink()
        return direct(through(ticket, cut), host)

    def puller(replica: Any, ticket: Any) -> Any:
        if orders.exists():  # the connection that it keeps is not the one to be cut
            replica._close_puller()
        return kept(replica, ticket)

    module.open_puller, module.Replica._puller = open_puller, puller


if __name__ == "__main__":
    main()

"""The trainer process, made to kill itself at a database call: `python -m tests.training.dying_trainer CALL …`."""

from __future__ import annotations

import os
import signal
import sys

from gyre.store import queries
from workers.trainer import main


def die(*_: object, **__: object) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    call = sys.argv.pop(1)
    if not hasattr(queries, call):
        raise SystemExit(f"no query {call}")
    setattr(queries, call, die)
    main()

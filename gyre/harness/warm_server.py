"""The warm fork-server: a process that has imported a harness and forks one detached run of it a request.

A stand-alone script: it runs under the harness's own python, knows nothing of Gyre, and imports only the standard
library, shepherd.py beside it, and the harness. It answers on a unix socket, one JSON line a request and a reply, and
ends when its standard input does (that is: when whoever started it has died). The runs do not end with it.

usage: warm_server.py '{"socket": path, "entry": "module:function", "modules": [...], "rehearsal": path or null}'
"""

from __future__ import annotations

import atexit
import gc
import importlib
import importlib.util
import json
import os
import select
import signal
import socket
import sys
import threading
import time
import traceback
from typing import Any, NoReturn

_REHEARSAL_LIMIT_S = 300  # it takes half a second of CPU, which a busy machine may be slow to give


def _load(path: str) -> Any:
    name = os.path.splitext(os.path.basename(path))[0]
    spec = importlib.util.spec_from_file_location(f"gyre_{name}", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


shepherd = _load(os.path.join(os.path.dirname(os.path.abspath(__file__)), "shepherd.py"))


def run_entry(entry: str, argv: list[str], env: dict[str, str]) -> NoReturn:
    """Do in this forked process what the harness's console script does in a fresh one, and end as it would."""
    os.environ.clear()
    os.environ.update(env)
    time.tzset()
    gc.enable()
    sys.argv = argv
    module, _, function = entry.partition(":")
    code: Any = 0
    try:
        code = getattr(sys.modules[module], function)()
    except SystemExit as error:
        code = error.code
    except BaseException:
        sys.excepthook(*sys.exc_info())
        code = 1
    if code is not None and not isinstance(code, int):
        print(code, file=sys.stderr)
        code = 1
    # The end of an interpreter, without its slow last part, the taking apart of three thousand modules.
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit((code or 0) & 0xFF)


def learn(entry: str, rehearsal: str) -> tuple[list[str], list[list[str]]]:
    """Run the harness once in a forked child, as the rehearsal script says: (modules, pydantic classes) that it
    brought in or completed beyond what this process has. Nothing else of that run comes back here: no client, no
    connection, no state of a random generator."""
    before, ready = set(sys.modules), _complete_models()
    out, into = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.close(out)
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
            module = _load(rehearsal)

            def report() -> None:
                models = [[c.__module__, c.__qualname__] for c in _complete_models() - ready]
                value = [[m for m in sys.modules if m not in before], models]
                with os.fdopen(into, "w", encoding="utf-8") as pipe:
                    json.dump(value, pipe)

            signal.alarm(_REHEARSAL_LIMIT_S)
            argv, env = module.stage()
            atexit.register(report)
            run_entry(entry, argv, env)
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(1)
    os.close(into)
    with os.fdopen(out, encoding="utf-8") as result:
        text = result.read()
    _, status = os.waitpid(pid, 0)
    if not text or status:
        print(f"rehearsal failed (wait status {status}); going on without it", file=sys.stderr, flush=True)
        return [], []
    modules, models = json.loads(text)
    return modules, models


def _complete_models() -> set[Any]:
    pydantic = sys.modules.get("pydantic")
    if pydantic is None:
        return set()
    found: set[Any] = set()
    todo = [pydantic.BaseModel]
    while todo:
        for cls in todo.pop().__subclasses__():
            if cls not in found:
                found.add(cls)
                todo.append(cls)
    return {cls for cls in found if cls.__pydantic_complete__}


def apply(modules: list[str], models: list[list[str]]) -> int:
    """Import and complete here what a rehearsal needed; returns how many of them would not."""
    failed = 0
    for name in modules:
        try:
            importlib.import_module(name)
        except Exception:  # made on the fly, or optional: the harness will do without, or do it itself
            failed += 1
    for module, qualname in models:
        try:
            cls: Any = sys.modules[module]
            for part in qualname.split("."):
                cls = getattr(cls, part)
            cls.model_rebuild()
        except Exception:  # a class made inside a function, a generic's instance
            failed += 1
    return failed


def serve(listener: socket.socket, lifeline: int, entry: str) -> None:
    """Fork for one request after the other until the lifeline ends."""

    def run(spec: dict[str, Any]) -> NoReturn:
        run_entry(entry, spec["argv"], spec["env"])

    while True:
        ready, _, _ = select.select([listener.fileno(), lifeline], [], [])
        if lifeline in ready and not os.read(lifeline, 4096):
            return
        if listener.fileno() not in ready:
            continue
        connection, _ = listener.accept()
        with connection:
            connection.settimeout(10.0)
            try:
                with connection.makefile("rb") as stream:
                    spec = json.loads(stream.readline())
            except (OSError, ValueError):
                continue  # the asker died, or wrote half a line
            reply = connection.detach()
            shepherd.detach(spec, reply, run, close=(listener.fileno(), lifeline))
            os.close(reply)


def main() -> None:
    config = json.loads(sys.argv[1])
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for whoever started this
    lifeline, answer = os.dup(0), os.dup(1)
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)
    os.dup2(2, 1)
    started = time.monotonic()
    # The console script would put its own folder first; never the current one, which is the agent's workspace.
    sys.path.insert(0, os.path.dirname(sys.executable))
    for name in config["modules"]:
        importlib.import_module(name)
    learned: tuple[list[str], list[list[str]]] = ([], [])
    if config["rehearsal"]:
        learned = learn(config["entry"], config["rehearsal"])
    failed = apply(*learned)
    threads = len(os.listdir("/proc/self/task"))
    if threads != 1:
        raise SystemExit(f"{threads} threads run after the imports; forking a process with threads is not safe")

    folder, name = os.path.split(config["socket"])
    directory = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    path = f"/proc/self/fd/{directory}/{name}"  # sun_path holds 107 bytes, a data folder's path may be longer
    if os.path.lexists(path):
        os.unlink(path)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind(path)
    listener.listen(256)
    os.close(directory)
    gc.collect()
    gc.disable()
    gc.freeze()  # a collection in a child would touch, and so copy, every page
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    ready = {
        "seconds": round(time.monotonic() - started, 2),
        "cpu_s": round(time.process_time(), 2),
        "modules": len(sys.modules),
        "learned": len(learned[0]) + len(learned[1]),
        "failed": failed,
    }
    os.write(answer, json.dumps(ready).encode() + b"\n")
    os.close(answer)
    serve(listener, lifeline, config["entry"])


if __name__ == "__main__":
    main()

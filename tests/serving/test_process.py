"""Which cores a cell gets."""

from __future__ import annotations

import subprocess
import sys

from gyre.serving.process import family, rss_mb, usable_cores


def test_a_cell_gets_the_cores_that_the_run_names() -> None:
    assert usable_cores([1], [0, 1], {0, 1, 2}) == [1]
    assert usable_cores([3, 2], [0, 1, 2, 3], set(range(8))) == [3, 2]
    assert usable_cores([], [], {4}) == []


def test_where_the_machine_grants_other_cores_cells_still_keep_apart() -> None:
    for allowed in ({4, 5}, {1, 4}, {0, 2}, {2, 9, 11}):
        first, second = (usable_cores([c], [0, 1], allowed) for c in (0, 1))
        assert first != second and set(first) | set(second) <= allowed


def test_one_core_is_shared() -> None:
    assert usable_cores([0], [0, 1], {0}) == usable_cores([1], [0, 1], {0}) == [0]
    assert usable_cores([0, 1], [0, 1], {7}) == [7]


def test_memory_is_that_of_a_process_and_its_descendants() -> None:
    child = "import sys; x = bytearray(b'x' * 80_000_000); print('here', flush=True); sys.stdin.read()"
    parent = (
        "import subprocess, sys\n"
        "x = bytearray(b'x' * 50_000_000)\n"
        f"child = subprocess.Popen([sys.executable, '-c', {child!r}], stdin=subprocess.PIPE, stdout=subprocess.PIPE)\n"
        "child.stdout.readline(); print('here', flush=True); sys.stdin.readline()\n"
        "child.kill(); child.wait(); print('alone', flush=True); sys.stdin.readline()\n"
    )
    argv = [sys.executable, "-c", parent]
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1) as process:
        assert process.stdin is not None and process.stdout is not None
        process.stdout.readline()
        pids = family(process.pid)
        both = rss_mb(pids)
        process.stdin.write("\n")
        process.stdout.readline()
        alone = rss_mb(pids)
        process.stdin.write("\n")
    assert len(pids) == 2 and family(None) == [] and family(process.pid) == [process.pid]
    assert 130 < both < 230 and 50 < alone < 110
    assert rss_mb(pids) == rss_mb([]) == 0.0

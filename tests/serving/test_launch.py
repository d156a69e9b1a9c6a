"""The command lines, and the process's life."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from gyre.config import CellConfig, ServingConfig
from gyre.serving.kv import KvPlan
from gyre.serving.kv_cost import FetchCost, PrefillCost
from gyre.serving.launch import CONTEXT_SLACK, EngineProcess, EngineStartError, sglang_command

SERVING = ServingConfig(max_running=12, kv_tokens=4096)


def value(argv: list[str], flag: str) -> str:
    assert argv.count(flag) == 1, f"{flag} is there {argv.count(flag)} times"
    return argv[argv.index(flag) + 1]


def test_cpu_command(policy: Path) -> None:
    cell = CellConfig(name="c1", cpus=[2, 3])
    argv, env = sglang_command(policy, 4711, SERVING, cell, version=7, context=1000)
    assert value(argv, "--model-path") == str(policy)
    assert value(argv, "--port") == "4711"
    assert value(argv, "--device") == "cpu"
    assert value(argv, "--attention-backend") == "torch_native"
    assert value(argv, "--dtype") == "float32"
    assert value(argv, "--max-running-requests") == "12"
    assert value(argv, "--max-total-tokens") == "4096"
    assert value(argv, "--weight-version") == "7"
    assert value(argv, "--context-length") == str(1000 + CONTEXT_SLACK)
    assert "--tp-size" not in argv
    assert "--enable-hierarchical-cache" not in argv and "GYRE_SGLANG_KV" not in env
    assert env["OMP_NUM_THREADS"] == "2"
    assert env["CUDA_VISIBLE_DEVICES"] == ""
    disabled = env["SGLANG_DISABLED_MODEL_ARCHS"].split(",")
    assert "deepseek_v2" in disabled and not {"qwen3", "qwen2", "llama"} & set(disabled)


def test_a_cpu_cell_without_cores_computes_on_one_thread(policy: Path) -> None:
    _, env = sglang_command(policy, 1, SERVING, CellConfig(name="c1"))
    assert env["OMP_NUM_THREADS"] == "1"


def test_cuda_command(policy: Path) -> None:
    cell = CellConfig(name="c1", devices=[4, 5])
    argv, env = sglang_command(policy, 1, ServingConfig(dtype="bfloat16"), cell)
    assert value(argv, "--device") == "cuda"
    assert value(argv, "--tp-size") == "2"
    assert value(argv, "--dtype") == "bfloat16"
    assert "--enable-memory-saver" in argv  # or a training cell could not have the server's memory
    assert "--attention-backend" not in argv  # SGLang knows its best
    assert env["CUDA_VISIBLE_DEVICES"] == "4,5"
    assert "GYRE_SGLANG_FORK" not in env and "OMP_NUM_THREADS" not in env


def test_every_flag_is_known_to_the_installed_sglang(policy: Path) -> None:
    flags = set()
    prefill, fetch = PrefillCost(0.0, 1e-3, 0.0, whole=True, source="a guess"), FetchCost(0.0, 0.0)
    kv = KvPlan(policy / "pages", 1 << 20, 64, 1.0, prefill, fetch)
    for cell in (CellConfig(name="c1", cpus=[0]), CellConfig(name="c1", devices=[0])):
        argv, env = sglang_command(policy, 1, SERVING, cell, context=64, kv=kv)
        assert env["GYRE_SGLANG_KV"] == "1"
        flags |= {a for a in argv if a.startswith("--")}
    fields = "\n".join(
        f.read_text(encoding="utf-8") for f in (Path(_sglang_folder()) / "srt" / "arg_groups" / "fields").glob("*.py")
    )
    missing = [f for f in flags if f"{f[2:].replace('-', '_')}: A[" not in fields and f != "--max-running-requests"]
    assert not missing
    assert "max_running_requests: A[" in fields


def _sglang_folder() -> str:
    from importlib.util import find_spec

    spec = find_spec("sglang")
    assert spec is not None and spec.submodule_search_locations is not None
    return spec.submodule_search_locations[0]


def test_a_context_beyond_the_models_own_is_refused(policy: Path, tmp_path: Path) -> None:
    with pytest.raises(EngineStartError, match=r"policy\.context: 5000 exceeds max_position_embeddings = 4096"):
        sglang_command(policy, 1, SERVING, CellConfig(name="c1"), context=5000)
    short = tmp_path / "config.json"
    short.write_text(json.dumps({"max_position_embeddings": 128}), encoding="utf-8")
    argv, _ = sglang_command(tmp_path, 1, SERVING, CellConfig(name="c1"), context=125)
    assert value(argv, "--context-length") == "128"


async def test_a_server_that_cannot_start_says_why(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    process = EngineProcess(SERVING, CellConfig(name="c1"), tmp_path / "engine.log")
    process.start(tmp_path / "model")
    with pytest.raises(EngineStartError, match=r"(?s)SGLang ended with code \d+; end of .*engine\.log:.*model"):
        await process.wait_ready(600)
    process.stop()


PARENT = """
import sys, time
from gyre.serving.process import child_setup
import subprocess
child = subprocess.Popen(["sleep", "60"], preexec_fn=child_setup([{core}]), start_new_session=True)
print(child.pid, flush=True)
time.sleep(60)
"""


def test_a_child_dies_with_its_parent_and_stays_on_its_core() -> None:
    core = min(os.sched_getaffinity(0))
    parent = subprocess.Popen([sys.executable, "-c", PARENT.format(core=core)], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    child = int(parent.stdout.readline())
    assert os.sched_getaffinity(child) == {core}
    parent.send_signal(signal.SIGKILL)
    parent.wait()
    deadline = time.monotonic() + 60
    while _alive(child):
        assert time.monotonic() < deadline, "the child outlived its parent"
        time.sleep(0.02)


def _alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] not in "ZX"
    except FileNotFoundError:
        return False

"""`gyre cells`: one line a process and machine, as a shell takes it."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

from tests.cli.conftest import Gyre

RUN = """
name = "wide"
steps = 1
[policy]
path = "policy"
[tasks]
train = "."
[[cells]]
name = "big"
central = true
nodes = ["gpu-1", "gpu-2"]
devices = [0, 1]
layout = { tensor_parallel = 4 }
[[cells]]
name = "small"
cpus = [3]
"""


def test_every_process_of_every_machine(gyre: Gyre, tmp_path: Path) -> None:
    (tmp_path / "policy").mkdir()
    (tmp_path / "policy" / "config.json").write_text(json.dumps({"max_position_embeddings": 4096}))
    (tmp_path / "run.toml").write_text(RUN)
    code, out, err = gyre("cells", tmp_path / "run.toml", "--port", "4711", "--data", tmp_path)
    assert code == 0, err
    lines = out.splitlines()
    assert lines[::3] == [
        "# big (central), gpu-1, CUDA 0, 1",
        "# big (central), gpu-2, CUDA 0, 1",
        "# small, this machine, CPU 3",
    ]
    servers, trainers = [shlex.split(line) for line in lines[1::3]], [shlex.split(line) for line in lines[2::3]]
    for node in (0, 1):
        assert servers[node][-6:] == ["--nnodes", "2", "--node-rank", str(node), "--dist-init-addr", "gpu-1:29501"]
        assert "CUDA_VISIBLE_DEVICES=0,1" in servers[node] and servers[node].count("4711") == 1
        assert trainers[node][trainers[node].index("--node-rank") + 1] == str(node)
    assert "cpu" in servers[2] and trainers[2][1:3] == ["-m", "workers.trainer"]


def test_a_run_file_that_is_wrong_is_one_line(gyre: Gyre, tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text(RUN.replace("[0, 1]", "[0]"))
    code, _, err = gyre("cells", tmp_path / "run.toml")
    assert code == 2 and err.count("\n") == 1 and "the layout's 4 ranks need as many" in err

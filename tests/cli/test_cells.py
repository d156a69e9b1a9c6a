"""`gyre cells`: one line a process and machine, as a shell takes it."""

from __future__ import annotations

import json
import os
import shlex
from pathlib import Path

import pytest

from gyre.cli.stackfile import StackState, start_ticks
from gyre.config import load_run_config
from tests.cli.conftest import Gyre
from workers.settings import WorkerSettings

QUICKSTART = Path(__file__).parents[2] / "examples" / "quickstart"
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


def write_policy(folder: Path, key_value_heads: int) -> None:
    config = json.loads((QUICKSTART / "policy" / "config.json").read_text())
    (folder / "policy").mkdir()
    (folder / "policy" / "config.json").write_text(json.dumps({**config, "num_key_value_heads": key_value_heads}))


def test_every_process_of_every_machine(gyre: Gyre, tmp_path: Path) -> None:
    write_policy(tmp_path, key_value_heads=4)
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


@pytest.mark.parametrize("command", ["cells", "train", "up"])
def test_a_layout_that_does_not_fit_the_policy_is_refused_before_anything_starts(
    gyre: Gyre, tmp_path: Path, command: str
) -> None:
    write_policy(tmp_path, key_value_heads=2)
    file = tmp_path / "run.toml"
    file.write_text(RUN)
    code, out, err = gyre(command, file, "--data", tmp_path)
    why = "layout.tensor_parallel = 4: must divide the policy's num_key_value_heads, 2"
    assert (code, out, err) == (2, "", f"gyre: {file}: cell big: {why}\n")


def test_a_server_on_cpu_has_no_stages(gyre: Gyre, tmp_path: Path) -> None:
    write_policy(tmp_path, key_value_heads=4)
    (tmp_path / "run.toml").write_text(RUN + "serving = { pipeline_parallel = 2 }\n")
    code, _, err = gyre("cells", tmp_path / "run.toml")
    assert code == 2 and err.endswith("serving.pipeline_parallel: a cell without devices is served by one process\n")


QWEN3_4B = {
    "model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "hidden_act": "silu", "hidden_size": 2560,
    "intermediate_size": 9728, "num_hidden_layers": 36, "num_attention_heads": 32, "num_key_value_heads": 8,
    "head_dim": 128, "vocab_size": 151936, "max_position_embeddings": 40960, "rms_norm_eps": 1e-6,
    "rope_theta": 1000000, "tie_word_embeddings": True,
}  # fmt: skip


def test_the_example_of_one_gpu_machine(gyre: Gyre, tmp_path: Path) -> None:
    """Its file with a model's shape and folders of tasks beside it, as who uses it puts them there."""
    file = tmp_path / "run.toml"
    file.write_text((QUICKSTART.parent / "gpu" / "run.toml").read_text())
    for folder in ("policy", "tasks/train", "tasks/heldout"):
        (tmp_path / folder).mkdir(parents=True)
    (tmp_path / "policy" / "config.json").write_text(json.dumps(QWEN3_4B))
    code, out, err = gyre("cells", file, "--data", tmp_path)
    assert code == 0, err
    lines = out.splitlines()
    assert lines[::3] == [
        "# central (central), this machine, CUDA 0, 1, 2, 3",
        "# satellite-a, this machine, CUDA 4, 5",
        "# satellite-b, this machine, CUDA 6, 7",
    ]
    for ranks, devices, server, trainer in zip(
        (4, 2, 2), ("0,1,2,3", "4,5", "6,7"), lines[1::3], lines[2::3], strict=True
    ):
        argv = shlex.split(server)
        assert f"CUDA_VISIBLE_DEVICES={devices}" in argv and f"CUDA_VISIBLE_DEVICES={devices}" in shlex.split(trainer)
        given = {name: argv[argv.index(name) + 1] for name in ("--device", "--tp-size", "--pp-size", "--dtype")}
        assert given == {"--device": "cuda", "--tp-size": str(ranks), "--pp-size": "1", "--dtype": "bfloat16"}
        assert argv[argv.index("--context-length") + 1] == "32776" and "--enable-memory-saver" in argv
        assert shlex.split(trainer)[-8:-6] == ["-m", "workers.trainer"], trainer


REMOTE = RUN + '[stack]\nlisten = "10.0.0.1"\nremote_cells = ["small"]\n'


def test_the_agent_of_a_cell_elsewhere(gyre: Gyre, tmp_path: Path) -> None:
    write_policy(tmp_path, key_value_heads=4)
    (tmp_path / "run.toml").write_text(REMOTE)
    code, out, err = gyre("cells", tmp_path / "run.toml", "--data", tmp_path)
    assert code == 0, err
    assert out.splitlines()[-1].startswith("# its variables are known once the stack of wide-s0 is up")
    known = WorkerSettings(
        database_url="postgresql+psycopg://gyre:secret@10.0.0.1:5/gyre", temporal_address="10.0.0.1:7",
        gateway_url="http://127.0.0.1:8", data=tmp_path, run_config=tmp_path / "config.json", host="10.0.0.1",
    )  # fmt: skip
    me = os.getpid()
    state = StackState(
        state="ready", pid=me, pid_start=start_ticks(me) or 0, run_id="wide-s0", environment=known.to_env()
    )
    state.write(tmp_path)
    code, out, err = gyre("cells", tmp_path / "run.toml", "--data", tmp_path)
    assert code == 0, err
    assert gyre("cells", "--data", tmp_path)[0] == 1, "it is up without a run"
    known.run_config.write_text(load_run_config(tmp_path / "run.toml").model_dump_json())
    state.model_copy(update={"run_config": str(known.run_config)}).write(tmp_path)
    assert gyre("cells", "--data", tmp_path) == (0, out, "")
    assert [line for line in out.splitlines() if line.startswith("#")][:-1] == [
        "# big (central), gpu-1, CUDA 0, 1", "# big (central), gpu-2, CUDA 0, 1"
    ]  # fmt: skip
    comment, command = out.splitlines()[-2:]
    assert comment.startswith("# agent of small: on its machine")
    env, *rest = shlex.split(command)
    variables = dict(word.split("=", 1) for word in rest[:-5])
    assert env == "env" and rest[-5:] == [".venv/bin/python", "-m", "workers.cell_agent", "--cell", "small"]
    other = "# its variables are known once the stack of wide-s3 is up (gyre train, gyre up); now one is up for wide-s0"
    for seed, found in (("3", other), ("0", command)):
        code, out, err = gyre("cells", tmp_path / "run.toml", "--data", tmp_path, "--seed", seed)
        assert code == 0 and out.splitlines()[-1].startswith(found), err
    there = WorkerSettings.from_env({**variables, "GYRE_HOST": "10.0.0.2"})
    assert there == known.model_copy(update={"host": "10.0.0.2"})


@pytest.mark.parametrize(
    ("stack", "line"),
    [
        (
            'remote_cells = ["small"]',
            "remote_cells: other machines do not reach this one at 127.0.0.1; give stack.listen",
        ),
        ('listen = "0.0.0.0"', "listen: other machines use this address, too: give one of this machine, not 0.0.0.0"),
        ('listen = "gpu-1"', "listen: 'gpu-1' is no IPv4 address, like 10.0.0.1"),
        ('listen = "10.0.0.1"\nremote_cells = ["none"]', "stack.remote_cells: no cell is named 'none'"),
    ],
)
def test_what_cannot_be_of_cells_elsewhere(gyre: Gyre, tmp_path: Path, stack: str, line: str) -> None:
    write_policy(tmp_path, key_value_heads=4)
    (tmp_path / "run.toml").write_text(f"{RUN}[stack]\n{stack}\n")
    code, _, err = gyre("cells", tmp_path / "run.toml")
    assert code == 2 and err.count("\n") == 1 and line in err

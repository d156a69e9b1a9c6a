"""Starting SGLang for one cell: the command line, and the process."""

from __future__ import annotations

import asyncio
import json
import os
import pkgutil
import shutil
import subprocess
import sys
import time
import uuid
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import httpx

from gyre.config import CellConfig, ServingConfig
from gyre.ports import LOOPBACK, free_port
from gyre.serving.kv import KvPlan
from gyre.serving.kv_hooks import VARIABLE as KV_VARIABLE
from gyre.serving.process import child_setup, end_group

STREAM_INTERVAL = 16
"""Tokens of one streamed chunk (a request may override it: `sampling_params.stream_interval`). Each chunk costs the
server a message to its front and the gateway a parse; on one core that is dearer than the tokens themselves."""

CONTEXT_SLACK = 8
"""SGLang keeps a few positions of its context for itself; the policy's `context` is prompt + completion in full."""

_CPU_ARCHITECTURES = frozenset({"llama", "qwen2", "qwen3", "registry", "utils"})


class EngineStartError(RuntimeError):
    """The server did not become ready; the message ends with the tail of its log."""


def sglang_command(
    policy_path: Path,
    port: int,
    serving: ServingConfig,
    cell: CellConfig,
    *,
    version: int = 0,
    context: int | None = None,
    host: str = LOOPBACK,
    kv: KvPlan | None = None,
    node: int = 0,
) -> tuple[list[str], dict[str, str]]:
    """The argv and the additional environment of the server of `cell`, on its machine number `node`.

    `policy_path`: Hugging Face folder, weights of policy version `version`. `context`: longest prompt + completion in
    tokens; None: the model's own. A cell without devices is served on CPU, else by stages that are each
    tensor-parallel over an equal share of its devices; requests go to its first machine.
    Log-probs that the server returns are those of the softmax at the request's temperature. It takes and gives token
    ids only: it loads no tokenizer, so stop strings do not work and stop token ids do. `kv`: how keys and values move
    to and from other cells; None: they do not.
    """
    argv = [
        sys.executable, "-m", "sglang.launch_server",
        "--model-path", str(policy_path),
        "--host", host,
        "--port", str(port),
        "--dtype", serving.dtype,
        "--max-running-requests", str(serving.max_running),
        "--max-total-tokens", str(serving.kv_tokens),
        "--weight-version", str(version),
        "--skip-tokenizer-init",
        "--skip-server-warmup",
        "--sleep-on-idle",  # else the scheduler spins, and the trainer on the same cores starves
        "--stream-interval", str(STREAM_INTERVAL),
        "--incremental-streaming-output",
        "--enable-metrics",
        "--enable-cache-report",
        "--log-level", "warning",
    ]  # fmt: skip
    if context is not None:
        argv += ["--context-length", str(_context_length(policy_path, context))]
    env = {
        # /health says that the front is up, without generating: a generated probe would wait behind a pause.
        "SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION": "0",
        "SGLANG_RETURN_ORIGINAL_LOGPROB": "0",
        "TOKENIZERS_PARALLELISM": "false",
        "HF_HUB_OFFLINE": "1",
    }
    if kv is not None:
        argv += kv.arguments()
        env[KV_VARIABLE] = "1"
    if cell.devices:
        argv += _cuda_arguments(cell, node)
        env["CUDA_VISIBLE_DEVICES"] = ",".join(str(d) for d in cell.devices)
    else:
        argv += ["--device", "cpu", "--attention-backend", "torch_native"]
        threads = str(len(cell.cpus) or 1)
        env |= {
            "OMP_NUM_THREADS": threads,
            "MKL_NUM_THREADS": threads,
            "CUDA_VISIBLE_DEVICES": "",
            "GYRE_SGLANG_FORK": "1",
            "SGLANG_DISABLED_MODEL_ARCHS": ",".join(_unused_architectures()),
        }
    return argv, env


def _cuda_arguments(cell: CellConfig, node: int) -> list[str]:
    nodes, stages = max(1, len(cell.nodes)), cell.serving.pipeline_parallel
    argv = [
        "--device", "cuda",
        "--tp-size", str(len(cell.devices) * nodes // stages),
        "--pp-size", str(stages),
        "--enable-memory-saver",  # else the trainer on the same devices could not have the server's memory
    ]  # fmt: skip
    if cell.serving.memory_fraction is not None:
        argv += ["--mem-fraction-static", str(cell.serving.memory_fraction)]
    if nodes > 1:
        argv += [
            "--nnodes", str(nodes),
            "--node-rank", str(node),
            "--dist-init-addr", f"{cell.nodes[0]}:{cell.rendezvous_port + 1}",
        ]  # fmt: skip
    return argv


def _context_length(policy_path: Path, context: int) -> int:
    config = policy_path / "config.json"
    longest = json.loads(config.read_text(encoding="utf-8")).get("max_position_embeddings")
    if longest is None:
        return context
    if context > longest:
        raise EngineStartError(
            f"policy.context: {context} exceeds max_position_embeddings = {longest} of {config}; lower it"
        )
    return min(context + CONTEXT_SLACK, int(longest))


@cache
def _unused_architectures() -> tuple[str, ...]:
    """Model modules of the installed SGLang that a CPU cell does not need: importing them all costs seconds."""
    spec = find_spec("sglang")
    if spec is None or not spec.submodule_search_locations:
        raise EngineStartError("sglang is not installed in this environment; see `gyre doctor`")
    models = Path(spec.submodule_search_locations[0]) / "srt" / "models"
    return tuple(sorted(m.name for m in pkgutil.iter_modules([str(models)]) if m.name not in _CPU_ARCHITECTURES))


class EngineProcess:
    """The SGLang server of one cell. Not thread-safe; start it from the main thread (see `child_setup`)."""

    def __init__(
        self,
        serving: ServingConfig,
        cell: CellConfig,
        log_path: Path,
        *,
        context: int | None = None,
        host: str = LOOPBACK,
    ) -> None:
        self._serving, self._cell, self._log_path = serving, cell, log_path
        self._context, self._host = context, host
        self.kv: KvPlan | None = None
        """How keys and values move to and from other cells, from the next start on; None: they do not."""
        self.metrics = log_path.with_suffix(".metrics")
        """Where its processes leave their Prometheus counters; emptied at every start."""
        self._process: subprocess.Popen[bytes] | None = None
        self.incarnation = ""
        """Hex uuid, new with every start."""
        self.url = ""
        self.started_at = 0.0
        """time.monotonic() of the last start."""

    @property
    def pid(self) -> int | None:
        """Process id of the server's front, or None before the first start."""
        return None if self._process is None else self._process.pid

    @property
    def alive(self) -> bool:
        """Whether the server process exists (not whether it answers)."""
        return self._process is not None and self._process.poll() is None

    @property
    def exit_code(self) -> int | None:
        """Exit code of the last server; negative: a signal; None: it runs, or never did."""
        return None if self._process is None else self._process.poll()

    def start(self, policy_path: Path, version: int = 0) -> None:
        """Start a new server on a free port with the weights in `policy_path`. Ends the one before, if any."""
        self.stop()
        port = free_port(self._host)
        argv, env = self.command(policy_path, port, version)
        self._log_path.parent.mkdir(parents=True, exist_ok=True)
        # Told nothing, SGLang makes a folder in /tmp at every start, which stays there when the server is killed.
        shutil.rmtree(self.metrics, ignore_errors=True)
        self.metrics.mkdir()
        env["PROMETHEUS_MULTIPROC_DIR"] = str(self.metrics)
        with self._log_path.open("ab") as log:
            self._process = subprocess.Popen(
                argv,
                env={**os.environ, **env},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # a group of its own: Ctrl-C is ours to pass on, and stop() ends all of it
                preexec_fn=child_setup(self._cell.cpus),
            )
        self.incarnation, self.url = uuid.uuid4().hex, f"http://{self._host}:{port}"
        self.started_at = time.monotonic()

    def command(self, policy_path: Path, port: int, version: int) -> tuple[list[str], dict[str, str]]:
        """What is run: argv and additional environment."""
        return sglang_command(
            policy_path, port, self._serving, self._cell,
            version=version, context=self._context, host=self._host, kv=self.kv,
        )  # fmt: skip

    async def wait_ready(self, timeout_s: float = 300.0) -> None:
        """Return when the server answers. Raises EngineStartError: it died, or `timeout_s` seconds passed."""
        deadline = time.monotonic() + timeout_s
        async with httpx.AsyncClient(base_url=self.url, timeout=5.0) as http:
            while True:
                if not self.alive:
                    raise EngineStartError(f"SGLang ended with code {self.exit_code}; {self._log_tail()}")
                try:
                    if (await http.get("/health")).status_code == 200:
                        return
                except httpx.TransportError:
                    pass  # not listening yet
                if time.monotonic() > deadline:
                    raise EngineStartError(f"SGLang is not ready after {timeout_s:.0f} s; {self._log_tail()}")
                await asyncio.sleep(0.1)

    def stop(self, grace_s: float = 3.0) -> None:
        """End the server and all its children; safe to call at any time, twice, and from two threads."""
        process, self._process = self._process, None
        if process is not None:
            end_group(process, grace_s)

    def _log_tail(self, lines: int = 15) -> str:
        text = self._log_path.read_text(encoding="utf-8", errors="replace") if self._log_path.exists() else ""
        return f"end of {self._log_path}:\n" + "\n".join(text.splitlines()[-lines:])

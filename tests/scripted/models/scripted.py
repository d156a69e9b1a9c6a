"""A model that reads its whole prompt from the KV cache and answers by script. Real SGLang does everything else."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import torch
from sglang.srt.layers.logits_processor import LogitsProcessorOutput
from sglang.srt.model_executor.forward_context import get_req_to_token_pool, get_token_to_kv_pool
from tokenizers import Tokenizer
from torch import nn

from tests.scripted.script import History, Plan, Policy, Vocabulary

LOGIT = 50.0  # of a scripted token; all others have 0, so that it comes with a probability of 1 - 1e-17
BASE = 128  # a token id is two digits of this base, which any floating point type of a KV cache holds exactly


class ScriptedForCausalLM(nn.Module):
    """Keys hold token ids. So an answer is right only if every KV slot that the engine says is the request's is."""

    def __init__(self, config: Any, quant_config: Any = None, prefix: str = "") -> None:
        super().__init__()
        self.nothing = nn.Parameter(torch.zeros(1), requires_grad=False)
        self._vocab = config.vocab_size
        folder = Path(os.environ["GYRE_SCRIPTED_POLICY"])
        vocabulary = Vocabulary(Tokenizer.from_file(str(folder / "tokenizer.json")))
        self._vocabulary = vocabulary
        self._policy = Policy(Path(os.environ["GYRE_SCRIPTS"]), vocabulary)
        self._running: dict[int, tuple[int, int, Plan | None]] = {}
        """By row of the request table: length after the last step, length of the prompt without answer, plan."""
        _record(Path(os.environ["GYRE_SCRIPTED_LOG"]))

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        for name, value in weights:
            dict(self.named_parameters())[name].data.copy_(value)

    @torch.no_grad()
    def forward(
        self, input_ids: torch.Tensor, positions: torch.Tensor, forward_batch: Any, *_: Any, **__: Any
    ) -> LogitsProcessorOutput:
        keys = get_token_to_kv_pool().get_key_buffer(0)
        slots = forward_batch.out_cache_loc
        keys[slots, 0, 0] = (input_ids // BASE).to(keys.dtype)
        keys[slots, 0, 1] = (input_ids % BASE).to(keys.dtype)
        rows, lengths = forward_batch.req_pool_indices.tolist(), forward_batch.seq_lens.tolist()
        logits = torch.zeros(len(rows), self._vocab)
        pause = 0.0
        for i, (row, length) in enumerate(zip(rows, lengths, strict=True)):
            before, begin, plan = self._running.get(row, (-1, 0, None))
            if not (forward_batch.forward_mode.is_decode() and before == length - 1):
                begin, plan = self._read(keys, row, length)
            elif plan is not None and before == begin:
                self._policy.begin(plan)
            self._running[row] = (length, begin, plan)
            if plan is not None:
                logits[i, list(plan.at(length - begin))] = LOGIT
                pause = max(pause, plan.token_s)
        if pause:
            time.sleep(pause)
        output = LogitsProcessorOutput(next_token_logits=logits)
        if (asked := forward_batch.extend_input_logprob_token_ids_gpu) is not None:  # of a request that was retracted
            output.input_token_logprobs = torch.zeros(len(asked))
        return output

    def _read(self, keys: torch.Tensor, row: int, length: int) -> tuple[int, Plan | None]:
        """The request's history out of the cache, and the plan of its answer."""
        slots = get_req_to_token_pool().req_to_token[row, :length]
        digits = keys[slots.long(), 0, :2].double().numpy()
        ids = (digits[:, 0] * BASE + digits[:, 1]).astype(np.int64)
        history = History.parse(ids, self._vocabulary)
        if history is None:
            return 0, None
        return length - len(history.answered), self._policy.plan(history)


def _record(path: Path) -> None:
    """Write what the scheduler got and gave, before it is sent: a line {rid, prompt}, then {rid, at, ids, finish}."""
    from sglang.srt.managers.scheduler_components.output_streamer import SchedulerOutputStreamer as Streamer

    log = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    written: dict[str, int] = {}
    original = Streamer.stream_output

    def stream_output(self: Any, reqs: Any, *args: Any, **kwargs: Any) -> Any:
        lines: list[bytes] = []
        for req in reqs:
            if req.finished() and req.finished_output:
                continue
            ids = list(req.output_ids_through_stop if req.finished() else req.output_ids)
            if req.rid not in written:
                lines.append(orjson.dumps({"rid": req.rid, "prompt": list(req.origin_input_ids)}))
            at = written.get(req.rid, 0)
            finish = req.finished_reason.to_json()["type"] if req.finished() else None
            if ids[at:] or finish:
                lines.append(orjson.dumps({"rid": req.rid, "at": at, "ids": ids[at:], "finish": finish}))
            written[req.rid] = len(ids)
            if finish:
                del written[req.rid]
        if lines:
            os.write(log, b"\n".join(lines) + b"\n")
        return original(self, reqs, *args, **kwargs)

    Streamer.stream_output = stream_output


EntryClass = ScriptedForCausalLM

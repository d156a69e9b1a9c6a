"""Chunked log-probs equal the unchunked ones, forward and backward, and never hold more logits than a chunk."""

from __future__ import annotations

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from gyre.training import logprobs as logprobs_module
from gyre.training.logprobs import TargetQuery, token_logprobs
from gyre.training.model import load_policy
from gyre.trajectory.packed import TreeRow


def plain(hidden, weight, ids):
    log = torch.log_softmax(hidden @ weight.t(), -1)
    return log.gather(1, ids[:, None]).squeeze(1), -(log.exp() * log).sum(-1)


@pytest.mark.parametrize("kept_rows", [0, 5, 1000])
@pytest.mark.parametrize("chunk", [1, 3, 7, 20, 1000])
def test_chunks_change_nothing_whether_kept_for_the_backward_pass_or_not(chunk, kept_rows, monkeypatch):
    monkeypatch.setattr(logprobs_module, "_KEPT_BYTES", kept_rows * 50 * 8)
    torch.manual_seed(0)
    hidden = torch.randn(20, 8, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(50, 8, dtype=torch.float64, requires_grad=True)
    ids, grad = torch.randint(0, 50, (20,)), torch.randn(20, dtype=torch.float64)
    logprobs, entropies = token_logprobs(hidden, weight, ids, chunk)
    expected, entropy = plain(hidden, weight, ids)
    torch.testing.assert_close(logprobs, expected, atol=1e-12, rtol=0)
    torch.testing.assert_close(entropies, entropy.detach(), atol=1e-12, rtol=0)
    mine = torch.autograd.grad(logprobs, (hidden, weight), grad)
    for a, b in zip(mine, torch.autograd.grad(expected, (hidden, weight), grad), strict=True):
        torch.testing.assert_close(a, b, atol=1e-12, rtol=0)


class Largest(TorchDispatchMode):
    """Remembers the largest tensor that any operation made."""

    size = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, tuple | list) else [out]:
            if isinstance(tensor, torch.Tensor):
                self.size = max(self.size, tensor.numel())
        return out


@pytest.mark.parametrize("chunk", [32, 100])
def test_a_large_vocabulary_exists_for_one_chunk_of_positions_at_a_time(chunk):
    torch.manual_seed(0)
    positions, vocabulary, size = 300, 248_000, 8
    hidden = torch.randn(positions, size, requires_grad=True)
    weight = torch.randn(vocabulary, size, requires_grad=True)
    ids = torch.randint(0, vocabulary, (positions,))
    with Largest() as largest:
        loss = token_logprobs(hidden, weight, ids, chunk).logprobs.sum()
        loss.backward()
    assert largest.size <= chunk * vocabulary
    expected = plain(hidden, weight, ids)[0].sum()
    torch.testing.assert_close(loss, expected, rtol=1e-5, atol=0)


def test_logits_far_from_zero_do_not_overflow():
    hidden = torch.full((2, 4), 100.0)
    weight = torch.tensor([[10.0] * 4, [-10.0] * 4, [9.99] * 4])
    logprobs, entropies = token_logprobs(hidden, weight, torch.tensor([0, 1]), 1)
    expected, _ = plain(hidden.double(), weight.double(), torch.tensor([0, 1]))
    torch.testing.assert_close(logprobs.double(), expected, rtol=1e-5, atol=1e-4)
    assert entropies.isfinite().all()


@pytest.mark.parametrize("temperature", [0.3, 1.0, 2.5])
def test_logprobs_are_those_of_sampling_at_the_temperature(tiny_policy, temperature):
    policy = load_policy(tiny_policy)
    ids = torch.randint(0, 96, (30,), generator=torch.Generator().manual_seed(3))
    lengths, targets = (12, 18), torch.tensor([1, 5, 11, 13, 29])
    row = TreeRow.sequences(lengths)
    query = TargetQuery(targets - 1, torch.full((5,), temperature), torch.arange(5), ids[targets], chunk=2)
    found = policy.target_logprobs(row, ids, query).logprobs
    logits = policy.logits(row, ids)[targets - 1]
    expected = torch.log_softmax(logits / temperature, -1).gather(1, ids[targets, None]).squeeze(1)
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=0)

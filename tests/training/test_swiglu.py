"""The gated activation against its formula."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from gyre.training import swiglu


@pytest.mark.parametrize("shape", [(1, 2), (7, 1, 6), (300, 1, 24)])
@pytest.mark.parametrize("cached", [1, 100, 1 << 16])
def test_it_equals_the_formula(monkeypatch, shape, cached):
    monkeypatch.setattr(swiglu, "_CACHED", cached)
    torch.manual_seed(0)
    x = torch.randn(shape, dtype=torch.float64, requires_grad=True)
    gate, up = x.chunk(2, -1)
    found, expected = swiglu.SwiGlu(None)(x), F.silu(gate) * up
    torch.testing.assert_close(found, expected, atol=1e-12, rtol=0)
    grad = torch.randn_like(expected)
    pair = [torch.autograd.grad(y, x, grad)[0] for y in (found, expected)]
    torch.testing.assert_close(*pair, atol=1e-12, rtol=0)

"""The CPU's own RMSNorm against torch's, forward and backward."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from paceline.model.norm import rms_norm


@pytest.mark.parametrize("shape", [(3, 5, 16), (2, 4, 3, 8)])
def test_rms_norm_and_its_gradients(shape: tuple[int, ...]) -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(shape, dtype=torch.float64, generator=generator, requires_grad=True)
    weight = torch.randn(shape[-1], dtype=torch.float64, generator=generator, requires_grad=True)
    expected = F.rms_norm(x, weight.shape, weight, 1e-5)
    assert torch.allclose(rms_norm(x, weight, 1e-5), expected, atol=1e-14)
    assert torch.autograd.gradcheck(lambda a, b: rms_norm(a, b, 1e-5), (x, weight))


def test_the_backward_under_autocast_stays_in_fp32() -> None:
    x = torch.randn(64, 256, generator=torch.Generator().manual_seed(0), requires_grad=True)
    weight = torch.ones(256, requires_grad=True)
    direction = torch.randn(64, 256, generator=torch.Generator().manual_seed(1))
    expected = torch.autograd.grad(F.rms_norm(x, (256,), weight, 1e-5), [x, weight], direction)
    with torch.autocast("cpu", torch.bfloat16):
        found = torch.autograd.grad(rms_norm(x, weight, 1e-5), [x, weight], direction)
    assert all(torch.allclose(a, b, atol=1e-4, rtol=1e-5) for a, b in zip(found, expected, strict=True))


def test_a_row_of_zeros_has_a_finite_gradient() -> None:
    x = torch.zeros(2, 8, requires_grad=True)
    rms_norm(x, torch.ones(8), 1e-5).sum().backward()
    assert x.grad is not None and bool(x.grad.isfinite().all())

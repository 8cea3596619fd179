"""Rotary frequencies against the formulas of their papers in plain Python, and against the angles they promise."""

from __future__ import annotations

import math

import pytest
import torch

from paceline.model.config import RopeScaling
from paceline.model.rotary import frequencies_of, rotary_table, rotate
from tests.model.models import small_spec

CPU = torch.device("cpu")


def test_without_scaling() -> None:
    spec = small_spec("llama", head_dim=16, rope_theta=500.0)
    found, factor = frequencies_of(spec, CPU, torch.float64)
    assert factor == 1.0 and found.tolist() == pytest.approx([500.0 ** (-2 * i / 16) for i in range(8)], rel=1e-14)


def test_linear_scaling_is_a_division_of_the_position() -> None:
    spec = small_spec("llama", rope_scaling=RopeScaling(type="linear", factor=4.0))
    plain = small_spec("llama")
    stretched, _ = rotary_table(spec, torch.arange(0, 64, 4), torch.float64)
    dense, _ = rotary_table(plain, torch.arange(16), torch.float64)
    assert torch.allclose(stretched, dense, atol=1e-14, rtol=0)


def test_llama3_scaling_is_that_of_the_published_rule() -> None:
    """Wavelengths below 8192 / 4 stay, above 8192 / 1 are 8 times longer, in between a blend."""
    scaling = RopeScaling(
        type="llama3",
        factor=8.0,
        original_max_sequence_length=8192,
        low_frequency_factor=1.0,
        high_frequency_factor=4.0,
    )
    spec = small_spec("llama", head_dim=128, rope_theta=500_000.0, rope_scaling=scaling)
    found, factor = frequencies_of(spec, CPU, torch.float64)
    expected = []
    for i in range(64):
        frequency = 500_000.0 ** (-2 * i / 128)
        wavelength = 2 * math.pi / frequency
        if wavelength > 8192 / 1.0:
            frequency /= 8.0
        elif wavelength > 8192 / 4.0:
            smooth = (8192 / wavelength - 1.0) / (4.0 - 1.0)
            frequency = (1 - smooth) * frequency / 8.0 + smooth * frequency
        expected.append(frequency)
    assert factor == 1.0 and found.tolist() == pytest.approx(expected, rel=1e-12)
    assert found[0] == 1.0 and found[-1].item() == pytest.approx(500_000.0 ** (-126 / 128) / 8.0, rel=1e-12)


def test_yarn_keeps_fast_pairs_and_stretches_slow_ones() -> None:
    scaling = RopeScaling(type="yarn", factor=4.0, original_max_sequence_length=32_768)
    spec = small_spec("llama", head_dim=128, rope_theta=1e6, rope_scaling=scaling)
    found, factor = frequencies_of(spec, CPU, torch.float64)
    plain, _ = frequencies_of(small_spec("llama", head_dim=128, rope_theta=1e6), CPU, torch.float64)
    ratio = (plain / found).tolist()
    assert factor == pytest.approx(0.1 * math.log(4.0) + 1)
    for i, stretch in enumerate(ratio):
        turns = 32_768 * plain[i].item() / (2 * math.pi)
        # The published rule rounds the ends of its ramp outwards to whole pairs: one pair either side.
        if turns > 32 * 1e6 ** (2 / 128):
            assert stretch == pytest.approx(1.0)
        elif turns < 1 / 1e6 ** (2 / 128):
            assert stretch == pytest.approx(4.0)
        else:
            assert 1.0 <= stretch <= 4.0
    assert ratio == sorted(ratio) and ratio[0] == 1.0 and ratio[-1] == pytest.approx(4.0)


def test_angles_are_taken_in_fp32_or_better_and_applied_in_it() -> None:
    spec = small_spec("llama", head_dim=32)
    positions = torch.arange(60_000, 60_008).unsqueeze(0)
    cos, sin = rotary_table(spec, positions, torch.bfloat16)
    assert cos.dtype == torch.float32
    exact, _ = rotary_table(spec, positions, torch.float64)
    # fp32 angles near 60,000 are right to 2^-9 radians; bf16 ones would be off by 256.
    assert (cos - exact).abs().max() < 0.005
    x = torch.randn(1, 8, 2, 32, generator=torch.Generator().manual_seed(0)).bfloat16()
    turned = rotate(x, cos, sin)
    assert turned.dtype == torch.bfloat16
    assert torch.equal(turned, rotate(x.float(), cos, sin).bfloat16())


def test_gradient_is_the_rotation_back() -> None:
    spec = small_spec("llama", head_dim=8)
    cos, sin = rotary_table(spec, torch.arange(5).unsqueeze(0), torch.float64)
    x = torch.randn(2, 5, 3, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0), requires_grad=True)
    assert torch.autograd.gradcheck(lambda y: rotate(y, cos, sin), (x,))
    assert torch.allclose(rotate(x, cos, sin).norm(dim=-1), x.norm(dim=-1))

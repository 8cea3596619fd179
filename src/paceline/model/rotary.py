"""Rotary positions: each pair of numbers of a head is turned by an angle proportional to the position.

Su et al. 2021, arXiv 2104.09864, with the two halves of a head as the pairs (number i and number i + K/2 turn
together), as Llama and Qwen checkpoints have it. The tables are computed once a forward and are no state of the module.

Shapes: B sequences, L positions, H heads, K head width.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from paceline.model.config import RopeScaling
from paceline.model.spec import ModelSpec


def rotary_table(spec: ModelSpec, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Cosines and sines, each (..., L, 1, K), of positions (..., L), ready for tensors of shape (B, L, H, K).

    Computed in float64 for a float64 model and in float32 for every other one.
    """
    dtype = torch.float64 if dtype == torch.float64 else torch.float32
    frequencies, factor = frequencies_of(spec, positions.device, dtype)
    angles = positions.to(dtype).unsqueeze(-1) * frequencies
    angles = torch.cat((angles, angles), dim=-1).unsqueeze(-2)
    cos, sin = angles.cos(), angles.sin()
    return (cos, sin) if factor == 1.0 else (cos * factor, sin * factor)


def frequencies_of(spec: ModelSpec, device: torch.device, dtype: torch.dtype) -> tuple[Tensor, float]:
    """Radians per position of each of the K/2 pairs, scaled, and a factor on the tables (not 1 for yarn only)."""
    pairs = torch.arange(0, spec.head_dim, 2, device=device, dtype=dtype) / spec.head_dim
    frequencies = spec.rope_theta**-pairs
    scaling = spec.rope_scaling
    if scaling is None:
        return frequencies, 1.0
    if scaling.type == "linear":
        return frequencies / scaling.factor, 1.0
    if scaling.type == "llama3":
        return _llama3(frequencies, scaling), 1.0
    given = scaling.attention_factor
    return _yarn(frequencies, scaling, spec), 0.1 * math.log(scaling.factor) + 1.0 if given is None else given


def rotate(x_BLHK: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x turned by the tables' angles, computed in the tables' precision, in x's own type and layout."""
    wide = x_BLHK.to(cos.dtype)
    if torch.compiler.is_compiling() or type(wide) is not Tensor:
        first, second = wide.chunk(2, dim=-1)
        turned = wide * cos + torch.cat((-second, first), dim=-1) * sin
    else:
        turned = _Rotate.apply(wide, cos, sin)  # type: ignore[no-untyped-call]
    return turned.to(x_BLHK.dtype)


class _Rotate(torch.autograd.Function):
    """The rotation in three passes over memory instead of seven; its backward turns the other way."""

    @staticmethod
    def forward(ctx: Any, x_BLHK: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return _turn(x_BLHK, cos, sin, 1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_BLHK: Tensor) -> tuple[Tensor, None, None]:
        cos, sin = ctx.saved_tensors
        return _turn(grad_BLHK, cos, sin, -1), None, None


def _turn(x_BLHK: Tensor, cos: Tensor, sin: Tensor, sign: int) -> Tensor:
    half = x_BLHK.shape[-1] // 2
    turned = x_BLHK * cos
    turned[..., :half].addcmul_(x_BLHK[..., half:], sin[..., :half], value=-sign)
    turned[..., half:].addcmul_(x_BLHK[..., :half], sin[..., half:], value=sign)
    return turned


def _llama3(frequencies: Tensor, scaling: RopeScaling) -> Tensor:
    """Low frequencies / factor, high ones as they are, linear in between (Llama 3.1's reference implementation)."""
    low, high = scaling.low_frequency_factor or 1.0, scaling.high_frequency_factor or 4.0
    turns = frequencies * ((scaling.original_max_sequence_length or 0) / (2 * math.pi))
    kept = ((turns - low) / (high - low)).clamp(0, 1)
    return frequencies * (kept + (1 - kept) / scaling.factor)


def _yarn(frequencies: Tensor, scaling: RopeScaling, spec: ModelSpec) -> Tensor:
    """Pairs that turn often kept, pairs that turn seldom / factor, a ramp over the pair's index in between.

    Peng et al. 2023, arXiv 2309.00071, section 3.2 and its reference implementation (ramp ends rounded to whole pairs).
    """
    length, pairs = scaling.original_max_sequence_length or 0, frequencies.shape[0]

    def pair_turning(times: float) -> float:
        return spec.head_dim * math.log(length / (times * 2 * math.pi)) / (2 * math.log(spec.rope_theta))

    first = max(math.floor(pair_turning(scaling.beta_fast or 32.0)), 0)
    last = min(math.ceil(pair_turning(scaling.beta_slow or 1.0)), spec.head_dim - 1)
    index = torch.arange(pairs, device=frequencies.device, dtype=frequencies.dtype)
    stretched = ((index - first) / max(last - first, 1e-3)).clamp(0, 1)
    return frequencies * (1 - stretched + stretched / scaling.factor)

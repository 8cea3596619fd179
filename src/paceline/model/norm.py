"""Normalisation over the last dim. RMSNorm has a backward of its own where torch has no fused one.

Shapes: N tokens (all leading dims flattened), D width. `x_D` has any leading dims.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from paceline.model.spec import ModelSpec


class RMSNorm(nn.Module):
    """x / sqrt(mean(x^2) + eps) * weight (Zhang and Sennrich 2019, arXiv 1910.07467), without a mean or a bias."""

    def __init__(self, dim: int, eps: float, device: torch.device | str | None = None) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(dim, device=device))

    def forward(self, x_D: Tensor) -> Tensor:
        return rms_norm(x_D, self.weight, self.eps)


class LayerNorm(nn.Module):
    """(x - mean) / sqrt(variance + eps) * weight + bias (Ba et al. 2016, arXiv 1607.06450)."""

    def __init__(self, dim: int, eps: float, bias: bool, device: torch.device | str | None = None) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(dim, device=device))
        self.bias = nn.Parameter(torch.zeros(dim, device=device)) if bias else None

    def forward(self, x_D: Tensor) -> Tensor:
        x_D, weight_D = alike(x_D, self.weight)
        bias_D = None if self.bias is None else self.bias.to(weight_D.dtype)
        return F.layer_norm(x_D, weight_D.shape, weight_D, bias_D, self.eps)


def make_norm(spec: ModelSpec, device: torch.device | str | None) -> RMSNorm | LayerNorm:
    """The spec's normalisation over the residual stream."""
    if spec.norm == "layernorm":
        return LayerNorm(spec.dim, spec.norm_eps, spec.bias, device)
    return RMSNorm(spec.dim, spec.norm_eps, device)


def rms_norm(x_D: Tensor, weight_D: Tensor, eps: float) -> Tensor:
    """RMSNorm in the wider precision of the two: weights that were gathered in bf16 leave an fp32 stream as it is.

    Eager on a CPU, `F.rms_norm` would take three times as long forward and backward.
    """
    x_D, weight_D = alike(x_D, weight_D)
    if torch.compiler.is_compiling() or not _suits_cpu(x_D, weight_D):
        return F.rms_norm(x_D, weight_D.shape, weight_D, eps)
    return _CpuRMSNorm.apply(x_D, weight_D, eps)  # type: ignore[no-any-return, no-untyped-call]


def alike(x_D: Tensor, weight_D: Tensor) -> tuple[Tensor, Tensor]:
    """Both in the wider of their two types."""
    wide = torch.promote_types(x_D.dtype, weight_D.dtype)
    return x_D.to(wide), weight_D.to(wide)


def _suits_cpu(x_D: Tensor, weight_D: Tensor) -> bool:
    """Whether both are plain tensors (no DTensor) on a CPU."""
    plain = type(x_D) in (Tensor, nn.Parameter) and type(weight_D) in (Tensor, nn.Parameter)
    return plain and x_D.device.type == "cpu" and x_D.dtype in (torch.bfloat16, torch.float32, torch.float64)


class _CpuRMSNorm(torch.autograd.Function):
    """Keeps x and one factor per token (in float32 or wider); the backward is layer norm's kernel with its mean set to 0.

    With r = 1/rms, n = x r and u = g w, RMSNorm's gradient is r (u - n mean(u n)). Layer norm's kernel, given mean 0,
    returns r (u - mean(u) - n mean(u n)): r mean(u) has to be added back.
    """

    @staticmethod
    def forward(ctx: Any, x_D: Tensor, weight_D: Tensor, eps: float) -> Tensor:
        wide = torch.promote_types(x_D.dtype, torch.float32)
        mean_square = torch.linalg.vector_norm(x_D, dim=-1, keepdim=True, dtype=wide).square_().mul_(1 / x_D.shape[-1])
        r_1 = mean_square.add_(eps).rsqrt_()
        ctx.save_for_backward(x_D, r_1, weight_D)
        y_D: Tensor = (x_D * r_1).mul_(weight_D).to(x_D.dtype)
        return y_D

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_D: Tensor) -> tuple[Tensor, Tensor, None]:
        x_D, r_1, weight_D = ctx.saved_tensors
        narrow = x_D.dtype
        x_D, weight_D, grad_D = (t.to(r_1.dtype) for t in (x_D, weight_D, grad_D))
        dim = x_D.shape[-1]
        grad_ND, r_N1 = grad_D.reshape(-1, dim), r_1.reshape(-1, 1)
        zero_N1 = torch.zeros_like(r_N1)
        grad_x_ND, grad_weight_D, _ = torch.ops.aten.native_layer_norm_backward(
            grad_ND, x_D.reshape(-1, dim), [dim], zero_N1, r_N1, weight_D, None, [True, True, False]
        )
        with torch.autocast("cpu", enabled=False):
            mean_N = torch.mv(grad_ND, weight_D).mul_(1 / dim)
        grad_x_ND.add_(mean_N.unsqueeze(1).mul_(r_N1))
        return grad_x_ND.view(x_D.shape).to(narrow), grad_weight_D.to(narrow), None

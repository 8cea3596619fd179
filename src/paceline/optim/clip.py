"""The global gradient norm, and the factor that clipping puts on the gradient."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def gradient_norm(gradients: Sequence[Tensor]) -> Tensor:
    """2-norm over all gradients as one scalar, in float32 or wider. An empty list gives 0."""
    if not gradients:
        return torch.zeros(())
    norms = torch._foreach_norm(list(gradients), 2, dtype=_norm_dtype(gradients[0]))
    norm: Tensor = torch.linalg.vector_norm(torch.stack([n.to(norms[0].device) for n in norms]))
    return norm


def clip_factor(norm: Tensor, clip_norm: float) -> Tensor:
    """min(1, clip_norm / norm); 1 where `clip_norm` is 0 (off)."""
    if clip_norm == 0:
        return torch.ones_like(norm)
    return torch.clamp(clip_norm / (norm + 1e-12), max=1.0)


def gradient_dtype(parameter: Tensor) -> torch.dtype:
    """The type in which a parameter's gradients accumulate: its own, unless it says another one (`grad_dtype`)."""
    return parameter.grad_dtype or parameter.dtype


def _norm_dtype(gradient: Tensor) -> torch.dtype:
    return torch.float64 if gradient.dtype == torch.float64 else torch.float32

"""Cross-entropy of next tokens as a sum and a weight.

Never a mean: only the step knows how many labels all micro-batches and ranks have together.

Shapes: B sequences, L positions, V vocabulary, N = B x L tokens.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

CHUNK_BYTES = {"cpu": 2**20}
"""Float32 logits worked on at a time: on a CPU what its second-level cache holds, elsewhere `OTHER_CHUNK_BYTES`."""

OTHER_CHUNK_BYTES = 2**28


def token_cross_entropy(logits_BLV: Tensor, labels_BL: Tensor, ignore: int = -100) -> tuple[Tensor, Tensor]:
    """Sum over tokens of -log softmax(logits)[label], in nats, and the number of labels that are not `ignore`.

    The softmax is taken in float32 (float64 for float64 logits). A batch without a label gives (0, 0), and its
    gradients are 0. Large logits are taken in chunks and their softmax anew in the backward, so that beside the logits
    and their gradient only a chunk is in memory.
    """
    logits_NV, labels_N = logits_BLV.flatten(0, -2), labels_BL.flatten()
    rows = rows_at_a_time(logits_NV)
    if rows >= logits_NV.shape[0] or torch.compiler.is_compiling():
        loss_sum = F.cross_entropy(wide(logits_NV), labels_N, ignore_index=ignore, reduction="sum")
    else:
        loss_sum = _ChunkedCrossEntropy.apply(logits_NV, labels_N, ignore, rows)  # type: ignore[no-untyped-call]
    return loss_sum, (labels_N != ignore).sum()


class _ChunkedCrossEntropy(torch.autograd.Function):
    """Saves the logits as they came; the gradient is (softmax - one at the label) x the gradient of the sum."""

    @staticmethod
    def forward(ctx: Any, logits_NV: Tensor, labels_N: Tensor, ignore: int, rows: int) -> Tensor:
        kept_N1 = (labels_N != ignore).unsqueeze(1)
        labels_N1 = labels_N.unsqueeze(1).where(kept_N1, 0)
        log_likelihoods = [
            F.log_softmax(wide(logits), dim=-1).gather(1, labels)
            for logits, labels in zip(torch.split(logits_NV, rows), torch.split(labels_N1, rows), strict=True)
        ]
        ctx.save_for_backward(logits_NV, labels_N1, kept_N1)
        ctx.rows = rows
        return -torch.cat(log_likelihoods).where(kept_N1, 0).sum()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        logits_NV, labels_N1, kept_N1 = ctx.saved_tensors
        grad_NV = torch.empty_like(logits_NV)
        scales_N1 = kept_N1 * grad
        for first in range(0, len(grad_NV), ctx.rows):
            rows = slice(first, first + ctx.rows)
            scale = scales_N1[rows]
            softmax = F.softmax(wide(logits_NV[rows]), dim=-1).mul_(scale)
            grad_NV[rows] = softmax.scatter_add_(1, labels_N1[rows], -scale)
        return grad_NV, None, None, None


def rows_at_a_time(logits_NV: Tensor) -> int:
    """Tokens whose logits are worked on together."""
    chunk_bytes = CHUNK_BYTES.get(logits_NV.device.type, OTHER_CHUNK_BYTES)
    return max(1, chunk_bytes // (logits_NV.shape[-1] * 4))


def wide(logits: Tensor) -> Tensor:
    """In float32, or float64 as they are."""
    return logits if logits.dtype == torch.float64 else logits.float()

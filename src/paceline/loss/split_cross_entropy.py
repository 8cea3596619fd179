"""Cross-entropy of next tokens whose logits are split by vocabulary over ranks; they are never gathered.

With m the largest logit of a token over all ranks, s = sum exp(z - m) and l = m + log s, the loss is l - z[label], and its
gradient on a rank's columns is exp(z - l), less one in the label's column. Kept for the backward are the logits as they
came and l.

Shapes: N tokens, V columns of this rank.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from paceline.loss.cross_entropy import rows_at_a_time, wide
from paceline.loss.vocabulary import VocabularyPart


def split_cross_entropy(logits_BLV: Tensor, labels_BL: Tensor, part: VocabularyPart, ignore: int = -100) -> Tensor:
    """Sum over tokens of -log softmax(logits)[label] in nats, equal on all ranks of the part's group.

    Args:
        logits_BLV: this rank's columns for the same tokens on every rank.
        labels_BL: numbers of the whole vocabulary, or `ignore`; a batch without a label gives 0 and gradients of 0.

    The softmax is taken in float32 (float64 for float64 logits). Two collectives of one and two numbers per token.
    """
    loss_sum: Tensor = _SplitCrossEntropy.apply(logits_BLV.flatten(0, -2), labels_BL.flatten(), part, ignore)  # type: ignore[no-untyped-call]
    return loss_sum


class _SplitCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits_NV: Tensor, labels_N: Tensor, part: VocabularyPart, ignore: int) -> Tensor:
        columns_N, here_N, counted_N = part.find(labels_N, logits_NV.shape[1], ignore)
        step = rows_at_a_time(logits_NV)
        pieces = zip(torch.split(logits_NV, step), torch.split(columns_N, step), strict=True)
        found = zip(*(_of_rows(logits, columns) for logits, columns in pieces), strict=True)
        own_max_N, own_sum_N, label_N = (torch.cat(numbers) for numbers in found)
        max_N = part.largest(own_max_N.clone())
        own_sum_N *= (own_max_N - max_N).exp()
        sum_N, label_N = part.summed(torch.stack([own_sum_N, (label_N - max_N).where(here_N, 0)]))
        log_N = sum_N.log()
        ctx.save_for_backward(logits_NV, columns_N, here_N, counted_N, max_N + log_N)
        loss_sum: Tensor = (log_N - label_N).where(counted_N, 0).sum()
        return loss_sum

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        logits_NV, columns_N, here_N, counted_N, log_sum_N = ctx.saved_tensors
        grad_NV = torch.empty_like(logits_NV)
        step = rows_at_a_time(logits_NV)
        for first in range(0, len(grad_NV), step):
            rows = slice(first, first + step)
            probability = wide(logits_NV[rows]).sub(log_sum_N[rows, None]).exp_()
            probability.mul_((counted_N[rows] * grad)[:, None])
            one = -(here_N[rows] * grad)[:, None].to(probability.dtype)
            grad_NV[rows] = probability.scatter_add_(1, columns_N[rows, None], one)
        return grad_NV, None, None, None


def _of_rows(logits_NV: Tensor, columns_N: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Of some tokens: the largest logit, the sum of exp(z - largest), and the logit in the label's column."""
    wide_NV = wide(logits_NV)
    max_N = wide_NV.amax(dim=1)
    label_N = wide_NV.gather(1, columns_N[:, None]).squeeze(1)
    return max_N, (wide_NV - max_N[:, None]).exp_().sum(dim=1), label_N

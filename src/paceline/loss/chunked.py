"""Output head and cross-entropy in one, over chunks of tokens: the logits of a micro-batch never stand whole.

With logits z = h W^T, labels y and p = softmax(z), the gradient of the sum of -log p[y] is

    dz = p - onehot(y),   dh = dz W,   dW = dz^T h

which a chunk's logits give at once. So the forward makes the gradients as well, and keeps dh and dW instead of logits;
the backward multiplies them by the gradient of the sum. In float16 dz would underflow without the loss scale that only
the backward knows: there, h and W are kept and each chunk's logits are made anew.

Shapes: B sequences, L positions, N = B x L tokens, C tokens of a chunk, D width, V vocabulary.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from paceline.loss.vocabulary import WHOLE_VOCABULARY, VocabularyPart

SLAB_ROWS = 2**14
"""Rows of the weight whose 16-bit gradient is made at a time."""


def head_cross_entropy(
    h_BLD: Tensor,
    weight_VD: Tensor,
    labels_BL: Tensor,
    chunk_tokens: int,
    ignore: int = -100,
    part: VocabularyPart = WHOLE_VOCABULARY,
    split_backward: bool = False,
) -> Tensor:
    """Sum over tokens of -log softmax(h W^T)[label], in nats, where the label is not `ignore`.

    Products are taken in the type of `h_BLD` (the weight is cast to it), the softmax in float32 (float64 for float64),
    the weight's gradient is summed over chunks in float32 or wider. Without labels the sum and its gradients are 0.

    Args:
        chunk_tokens: tokens whose logits are in memory together.
        part: the rows of the vocabulary that `weight_VD` has. The sum is over all of them; the gradient of `h_BLD` is
            that of these rows, which whoever split the vocabulary sums over the ranks.
        split_backward: the backward pass comes in two halves, for the input and then for the weight, as in pipeline
            schedules without a bubble. Else a second one over the same graph is refused.
    """
    with torch.autocast(h_BLD.device.type, enabled=False):
        loss_sum: Tensor = _HeadCrossEntropy.apply(  # type: ignore[no-untyped-call]
            h_BLD.flatten(0, -2), weight_VD, labels_BL.flatten(), chunk_tokens, ignore, part, split_backward
        )
    return loss_sum


class _HeadCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        h_ND: Tensor,
        weight_VD: Tensor,
        labels_N: Tensor,
        chunk_tokens: int,
        ignore: int,
        part: VocabularyPart,
        split_backward: bool,
    ) -> Tensor:
        product_VD = weight_VD.to(h_ND.dtype)
        wanted = any(ctx.needs_input_grad[:2])
        ctx.anew, ctx.scaled, ctx.split_backward = h_ND.dtype == torch.float16, False, split_backward
        ctx.chunk_tokens, ctx.ignore, ctx.part = chunk_tokens, ignore, part
        grads = _Gradients(h_ND, weight_VD, ctx.needs_input_grad) if wanted and not ctx.anew else None
        losses = []
        for first in range(0, len(h_ND), chunk_tokens):
            rows = slice(first, first + chunk_tokens)
            losses.append(_chunk(h_ND[rows], product_VD, labels_N[rows], ignore, part, rows, grads))
        if ctx.anew:
            ctx.save_for_backward(h_ND, weight_VD, labels_N)
        elif grads is not None:
            ctx.save_for_backward(grads.h_ND, grads.weight_VD)
        return torch.stack(losses).sum() if losses else h_ND.new_zeros((), dtype=_wide(h_ND.dtype))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        if ctx.anew:
            return *_backward_anew(ctx, grad), None, None, None, None, None
        h_ND, weight_VD = ctx.saved_tensors
        # The weight's gradient is as large as the weight, so it is scaled in place, and once; torch refuses a second
        # backward after that, but one through `data` it does not see.
        if weight_VD is not None and not ctx.scaled:
            (weight_VD.data if ctx.split_backward else weight_VD).mul_(grad)
            ctx.scaled = True
        scaled_ND = None if h_ND is None else (h_ND.to(grad.dtype) * grad).to(h_ND.dtype)
        return scaled_ND, weight_VD, None, None, None, None, None


class _Gradients:
    """Gradients of one micro-batch under way: the input's in its own type, the weight's in float32 or wider."""

    def __init__(self, h_ND: Tensor, weight_VD: Tensor, needs: tuple[bool, ...]) -> None:
        self.h_ND = torch.empty_like(h_ND) if needs[0] else None
        self.weight_VD = torch.zeros_like(weight_VD, dtype=_wide(weight_VD.dtype)) if needs[1] else None

    def add(self, rows: slice, h_CD: Tensor, product_VD: Tensor, dz_CV: Tensor) -> None:
        if self.h_ND is not None:
            torch.mm(dz_CV, product_VD, out=self.h_ND[rows])
        if self.weight_VD is None:
            return
        if self.weight_VD.dtype == dz_CV.dtype:
            self.weight_VD.addmm_(dz_CV.T, h_CD)
            return
        # A 16-bit product is made before it is added: part by part, for it is as large as the weight.
        for first in range(0, len(self.weight_VD), SLAB_ROWS):
            part = slice(first, first + SLAB_ROWS)
            self.weight_VD[part].add_(dz_CV[:, part].T @ h_CD)


def _backward_anew(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None]:
    h_ND, weight_VD, labels_N = ctx.saved_tensors
    product_VD = weight_VD.to(h_ND.dtype)
    grads = _Gradients(h_ND, weight_VD, ctx.needs_input_grad)
    for first in range(0, len(h_ND), ctx.chunk_tokens):
        rows = slice(first, first + ctx.chunk_tokens)
        _chunk(h_ND[rows], product_VD, labels_N[rows], ctx.ignore, ctx.part, rows, grads, grad)
    return grads.h_ND, grads.weight_VD


def _chunk(
    h_CD: Tensor,
    product_VD: Tensor,
    labels_C: Tensor,
    ignore: int,
    part: VocabularyPart,
    rows: slice,
    grads: _Gradients | None,
    scale: Tensor | None = None,
) -> Tensor:
    """The loss sum of a chunk; adds its gradients (times `scale`) where they are wanted."""
    logits_CV = h_CD @ product_VD.T
    wide_CV = logits_CV.to(_wide(logits_CV.dtype))
    columns_C1, here_C1, kept_C1 = (t.unsqueeze(1) for t in part.find(labels_C, len(product_VD), ignore))
    wide_CV.sub_(part.largest(wide_CV.amax(dim=1, keepdim=True)))
    label_C1 = wide_CV.gather(1, columns_C1).where(here_C1, 0)
    total_C1 = wide_CV.exp_().sum(dim=1, keepdim=True)
    total_C1, label_C1 = part.summed(torch.stack([total_C1, label_C1]))
    loss: Tensor = (total_C1.log() - label_C1).where(kept_C1, 0).sum()
    if grads is None:
        return loss
    factor_C1 = kept_C1.to(wide_CV.dtype) if scale is None else kept_C1 * scale
    dz_CV = wide_CV.mul_(factor_C1 / total_C1).scatter_add_(1, columns_C1, -factor_C1.where(here_C1, 0))
    grads.add(rows, h_CD, product_VD, dz_CV if dz_CV.dtype == logits_CV.dtype else logits_CV.copy_(dz_CV))
    return loss


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)

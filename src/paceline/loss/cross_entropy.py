"""Cross-entropy of next tokens as a sum and a weight.

Never a mean: only the step knows how many labels all micro-batches and ranks have together.

Shapes: B sequences, L positions, V vocabulary, N = B x L.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def token_cross_entropy(logits_BLV: Tensor, labels_BL: Tensor, ignore: int = -100) -> tuple[Tensor, Tensor]:
    """Sum over tokens of -log softmax(logits)[label], in nats, and the number of labels that are not `ignore`.

    The softmax is taken in float32 (float64 for float64 logits). A batch without a label gives (0, 0), and its
    gradients are 0.
    """
    logits_NV = logits_BLV.flatten(0, -2)
    labels_N = labels_BL.flatten()
    if logits_NV.dtype != torch.float64:
        logits_NV = logits_NV.float()
    loss_sum = F.cross_entropy(logits_NV, labels_N, ignore_index=ignore, reduction="sum")
    return loss_sum, (labels_N != ignore).sum()

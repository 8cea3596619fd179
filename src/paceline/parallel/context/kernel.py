# ruff: noqa: N815 -- tensors carry their shape as a suffix, in tuples too
"""Attention of some queries to some keys, with what is needed to put several of them together.

The softmax over all keys is that over parts of them, weighted by each part's sum of exponentials: a forward returns the
logarithm of that sum beside its output, and `merge` adds two parts. Given the merged output and the merged logarithm, the
backward of a part alone yields its share of the gradients (Dao et al. 2022, arXiv 2205.14135, appendix B.4).

Shapes: B sequences, Q queries, S keys, H query heads, G key and value heads, K head width.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from paceline.model.attention_cpu import wants_wide_backward

ROWS = 256
"""Queries at a time where no fused kernel is there, so that their scores stay small."""

_aten: Any = torch.ops.aten


class Part(NamedTuple):
    """Keys that some queries see: all of them, or up to each query's own place (`causal`: as many queries as keys), or
    those where the bias (B, 1, Q, S) is not minus infinity."""

    keys: slice
    causal: bool = False
    bias_B1QS: Tensor | None = None


def forward(q_BHQK: Tensor, k_BGSK: Tensor, v_BGSK: Tensor, part: Part, scale: float) -> tuple[Tensor, Tensor]:
    """Output (B, H, Q, K) and logarithm of the sum of exponentials (B, H, Q), over the keys of a part."""
    k, v = k_BGSK[:, :, part.keys], v_BGSK[:, :, part.keys]
    output: Tensor
    logsumexp: Tensor
    if q_BHQK.device.type == "cpu":
        output, logsumexp = _aten._scaled_dot_product_flash_attention_for_cpu(
            q_BHQK, k, v, 0.0, part.causal, attn_mask=part.bias_B1QS, scale=scale
        )
    elif _has_flash(q_BHQK, part):
        output, logsumexp = _aten._scaled_dot_product_flash_attention(q_BHQK, k, v, 0.0, part.causal, scale=scale)[:2]
    else:
        output, logsumexp = written_out(q_BHQK, k, v, part, scale)
    return output, logsumexp


def backward(
    grad_BHQK: Tensor,
    q_BHQK: Tensor,
    k_BGSK: Tensor,
    v_BGSK: Tensor,
    part: Part,
    scale: float,
    output_BHQK: Tensor,
    logsumexp_BHQ: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """Shares of a part in the gradients of queries, and of its keys and values; output and logarithm are the merged ones."""
    k, v = k_BGSK[:, :, part.keys], v_BGSK[:, :, part.keys]
    grad, output, bias = grad_BHQK, output_BHQK, part.bias_B1QS
    if q_BHQK.device.type == "cpu":
        if wants_wide_backward(q_BHQK):
            grad, q_BHQK, k, v, output = (x.float() for x in (grad, q_BHQK, k, v, output))
            bias = None if bias is None else bias.float()
        d_q, d_k, d_v = _aten._scaled_dot_product_flash_attention_for_cpu_backward(
            grad, q_BHQK, k, v, output, logsumexp_BHQ, 0.0, part.causal, attn_mask=bias, scale=scale
        )
    elif _has_flash(q_BHQK, part):
        # Numbers of a generator that nothing draws from: nothing is dropped.
        unused = torch.zeros(2, dtype=torch.uint64, device=q_BHQK.device)
        d_q, d_k, d_v = _aten._scaled_dot_product_flash_attention_backward(
            grad, q_BHQK, k, v, output, logsumexp_BHQ, None, None, q_BHQK.shape[2], k.shape[2], 0.0, part.causal,
            unused, unused[:0], scale=scale,
        )  # fmt: skip
    else:
        d_q, d_k, d_v = written_out_backward(grad, q_BHQK, k, v, output, logsumexp_BHQ, part, scale)
    dtype = grad_BHQK.dtype
    return d_q.to(dtype), d_k.to(dtype), d_v.to(dtype)


def merge(first: tuple[Tensor, Tensor], second: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Output and logarithm over the keys of two parts that share none."""
    (output, logsumexp), (other, other_logsumexp) = first, second
    total = torch.logaddexp(logsumexp, other_logsumexp)
    weight, other_weight = ((x - total).exp().unsqueeze(-1) for x in (logsumexp, other_logsumexp))
    return (output * weight + other * other_weight).to(output.dtype), total


def written_out(q_BHQK: Tensor, k_BGSK: Tensor, v_BGSK: Tensor, part: Part, scale: float) -> tuple[Tensor, Tensor]:
    """The forward in plain operations, `ROWS` queries at a time: for devices and types without a fused kernel."""
    outputs, sums = [], []
    for rows in _blocks(q_BHQK.shape[2]):
        scores = _scores(q_BHQK, k_BGSK, part, scale, rows)
        total = scores.logsumexp(-1)
        weights = (scores - total.unsqueeze(-1)).exp()
        outputs.append((weights @ _wide(v_BGSK).unsqueeze(2)).flatten(1, 2))
        sums.append(total.flatten(1, 2))
    return torch.cat(outputs, dim=2).to(q_BHQK.dtype), torch.cat(sums, dim=2)


def written_out_backward(
    grad: Tensor, q_BHQK: Tensor, k_BGSK: Tensor, v_BGSK: Tensor, output: Tensor, logsumexp: Tensor, part: Part,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """The backward of `written_out`; gradients of keys and values are summed over the query heads that share them."""
    groups = k_BGSK.shape[1]
    k, v = _wide(k_BGSK).unsqueeze(2), _wide(v_BGSK).unsqueeze(2)
    d_k, d_v = torch.zeros_like(_wide(k_BGSK)), torch.zeros_like(_wide(v_BGSK))
    d_q = []
    for rows in _blocks(q_BHQK.shape[2]):
        scores = _scores(q_BHQK, k_BGSK, part, scale, rows)
        weights = (scores - _grouped(logsumexp, groups)[:, :, :, rows, None]).exp()
        up, out = (_wide(_grouped(x, groups)[:, :, :, rows]) for x in (grad, output))
        d_scores = weights * (up @ v.transpose(-1, -2) - (up * out).sum(-1, keepdim=True)) * scale
        d_q.append((d_scores @ k).flatten(1, 2))
        d_v += (weights.transpose(-1, -2) @ up).sum(2)
        d_k += (d_scores.transpose(-1, -2) @ _wide(_grouped(q_BHQK, groups)[:, :, :, rows])).sum(2)
    return torch.cat(d_q, dim=2), d_k, d_v


def _scores(q_BHQK: Tensor, k_BGSK: Tensor, part: Part, scale: float, rows: slice) -> Tensor:
    """Masked scores (B, G, H / G, rows, S) of some queries."""
    q = _wide(_grouped(q_BHQK, k_BGSK.shape[1])[:, :, :, rows])
    scores = (q * scale) @ _wide(k_BGSK).unsqueeze(2).transpose(-1, -2)
    if part.causal:
        places = torch.arange(q_BHQK.shape[2], device=q.device)
        scores = scores.masked_fill(places > places[rows, None], float("-inf"))
    if part.bias_B1QS is not None:
        scores = scores + part.bias_B1QS[:, :, rows].unsqueeze(1)
    return scores


def _grouped(x_BHQ: Tensor, groups: int) -> Tensor:
    return x_BHQ.view(x_BHQ.shape[0], groups, -1, *x_BHQ.shape[2:])


def _wide(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


def _blocks(length: int) -> list[slice]:
    return [slice(start, min(start + ROWS, length)) for start in range(0, length, ROWS)]


def _has_flash(q_BHQK: Tensor, part: Part) -> bool:
    """Whether torch's flash kernel of CUDA takes it: 16 bit, no bias, and a head width that needs no padding."""
    narrow = q_BHQK.dtype in (torch.float16, torch.bfloat16)
    width = q_BHQK.shape[-1]
    return q_BHQK.device.type == "cuda" and narrow and part.bias_B1QS is None and width % 8 == 0 and width <= 256

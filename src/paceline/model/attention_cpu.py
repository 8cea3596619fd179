"""bf16 attention on a CPU whose backward is taken in fp32.

torch's bf16 backward on CPUs is slower than its fp32 one where heads are narrow. Backward of 4 sequences of 256, 8
heads, 4 key and value heads, head width 32, one core with AMX, torch 2.13: 22.4 ms in bf16, 10.3 ms in fp32 with its
casts. At width 64 the two are equal; at 128 bf16 is twice as fast.

Shapes: B sequences, L positions, H query heads, G key and value heads, K head width.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

WIDEST_HEAD = 32


def wants_wide_backward(q_BHLK: Tensor) -> bool:
    """Whether the fp32 backward is the faster one."""
    return q_BHLK.device.type == "cpu" and q_BHLK.dtype == torch.bfloat16 and q_BHLK.shape[-1] <= WIDEST_HEAD


def wide_backward(q_BHLK: Tensor, k_BGLK: Tensor, v_BGLK: Tensor, bias_B1LL: Tensor | None, scale: float) -> Tensor:
    """Causal attention (no bias), or attention under an additive mask; bf16 in and out."""
    output: Tensor = _WideBackward.apply(q_BHLK, k_BGLK, v_BGLK, bias_B1LL, scale)  # type: ignore[no-untyped-call]
    return output


class _WideBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, scale: float) -> Tensor:
        output: Tensor
        output, logsumexp = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            q, k, v, 0.0, bias is None, attn_mask=bias, scale=scale
        )
        ctx.save_for_backward(q, k, v, bias, output, logsumexp)
        ctx.scale = scale
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, bias, output, logsumexp = ctx.saved_tensors
        wide = [x.float() for x in (grad, q, k, v, output)]
        grads = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            *wide, logsumexp, 0.0, bias is None, attn_mask=None if bias is None else bias.float(), scale=ctx.scale
        )
        return (*(x.to(q.dtype) for x in grads), None, None)

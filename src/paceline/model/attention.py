# ruff: noqa: N815 -- tensors carry their shape as a suffix, in tuples too
"""Attention as a callable that the decoder is given, so that a strategy can replace it.

Queries are as many as keys: `is_causal` of torch's kernel aligns the two at the upper left, which is right only then.

Shapes: B sequences, L positions, H query heads, G key and value heads, K head width, T = B x L tokens.
"""

from __future__ import annotations

import importlib
from typing import Any, NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from paceline.model.attention_cpu import wants_wide_backward, wide_backward
from paceline.model.dropout import AttentionDropout, drop_attention

varlen_attn: Any = None
"""torch's variable-length kernel. Only CUDA has it, and importing it loads the compiler, which takes seconds."""

if torch.cuda.is_available():
    varlen_attn = importlib.import_module("torch.nn.attention.varlen").varlen_attn


class Documents(NamedTuple):
    """Borders of the documents packed into a batch.

    cumulative: int32, from 0 to B x L, where each document begins in the flattened batch, and its end; a border at
        every sequence's end. Empty documents are allowed, so that the tensor may be padded to a fixed length.
    max_length: of one document, in tokens (an upper bound will do).
    bias_B1LL: 0 where a query (second last dim) sees a key, else minus infinity, in the type of the queries; filled in
        once a forward for kernels that need it.
    """

    cumulative: Tensor
    max_length: int
    bias_B1LL: Tensor | None = None

    def padded(self, length: int) -> Documents:
        """The same borders in a tensor whose length is one of few, by empty documents at the end.

        A kernel inside a compiled block is compiled anew for each length of `cumulative` and each `max_length`; this
        leaves powers of two, and `length` (the sequence's) as the bound.
        """
        count = self.cumulative.numel()
        wanted = 1 << (count - 1).bit_length()
        # By an expanded view: reading the last border would make the host wait for the device.
        return Documents(torch.cat([self.cumulative, self.cumulative[-1:].expand(wanted - count)]), length)


class Attention(Protocol):
    """Causal attention inside documents; returns o_BHLK. `dropout` is None where nothing is dropped.

    A callable that wants documents in another form has a method `prepare` like `sdpa_documents`, called once a forward.
    """

    def __call__(
        self,
        q_BHLK: Tensor,
        k_BGLK: Tensor,
        v_BGLK: Tensor,
        documents: Documents | None,
        *,
        scale: float,
        dropout: AttentionDropout | None,
    ) -> Tensor: ...


def sdpa(
    q_BHLK: Tensor,
    k_BGLK: Tensor,
    v_BGLK: Tensor,
    documents: Documents | None,
    *,
    scale: float,
    dropout: AttentionDropout | None,
) -> Tensor:
    """The default attention: torch's fused kernels, by device, type and whether documents are packed."""
    if dropout is not None:
        return plain(q_BHLK, k_BGLK, v_BGLK, documents, scale=scale, dropout=dropout)
    grouped = q_BHLK.shape[1] != k_BGLK.shape[1]
    if wants_wide_backward(q_BHLK):
        bias = None if documents is None else bias_of(documents, q_BHLK.shape[0], q_BHLK.shape[2], q_BHLK.dtype)
        return wide_backward(q_BHLK, k_BGLK, v_BGLK, bias, scale)
    if documents is None:
        return F.scaled_dot_product_attention(q_BHLK, k_BGLK, v_BGLK, is_causal=True, scale=scale, enable_gqa=grouped)
    if takes_lengths(q_BHLK.device, q_BHLK.dtype):
        return _varlen(q_BHLK, k_BGLK, v_BGLK, documents, scale, grouped)
    bias = bias_of(documents, q_BHLK.shape[0], q_BHLK.shape[2], q_BHLK.dtype)
    return F.scaled_dot_product_attention(q_BHLK, k_BGLK, v_BGLK, attn_mask=bias, scale=scale, enable_gqa=grouped)


def plain(
    q_BHLK: Tensor,
    k_BGLK: Tensor,
    v_BGLK: Tensor,
    documents: Documents | None,
    *,
    scale: float,
    dropout: AttentionDropout | None,
) -> Tensor:
    """Attention written out, with all L x L weights in memory: needed for dropout whose masks are known."""
    batch, heads, length, _ = q_BHLK.shape
    groups = heads // k_BGLK.shape[1]
    k_BHLK, v_BHLK = k_BGLK.repeat_interleave(groups, dim=1), v_BGLK.repeat_interleave(groups, dim=1)
    scores_BHLL = (q_BHLK * scale) @ k_BHLK.transpose(-1, -2)
    scores_BHLL = scores_BHLL.to(torch.promote_types(scores_BHLL.dtype, torch.float32))
    if documents is None:
        later_LL = torch.ones(length, length, dtype=torch.bool, device=q_BHLK.device).triu(1)
        scores_BHLL = scores_BHLL.masked_fill(later_LL, float("-inf"))
    else:
        scores_BHLL = scores_BHLL + bias_of(documents, batch, length, q_BHLK.dtype)
    weights_BHLL = scores_BHLL.softmax(dim=-1)
    if dropout is not None:
        weights_BHLL = drop_attention(weights_BHLL, dropout)
    return weights_BHLL.to(v_BHLK.dtype) @ v_BHLK


def takes_lengths(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether packed documents go to the variable-length kernel (CUDA, 16-bit), which needs no bias."""
    return device.type == "cuda" and dtype in (torch.float16, torch.bfloat16)


def sdpa_documents(documents: Documents, batch: int, length: int, dtype: torch.dtype, dropping: bool) -> Documents:
    """Documents with the bias that `sdpa` will want for batch x length queries of a type; without, where it takes lengths."""
    if takes_lengths(documents.cumulative.device, dtype) and not dropping:
        return documents
    return documents._replace(bias_B1LL=bias_of(documents, batch, length, dtype))


def bias_of(documents: Documents, batch: int, length: int, dtype: torch.dtype) -> Tensor:
    """The (B, 1, L, L) bias of packed documents: 0 where the key is of the same document and not later."""
    if documents.bias_B1LL is not None:
        return documents.bias_B1LL
    tokens_T = torch.arange(batch * length, device=documents.cumulative.device, dtype=documents.cumulative.dtype)
    document_BL = torch.searchsorted(documents.cumulative, tokens_T, right=True).view(batch, length)
    seen_BLL = (document_BL.unsqueeze(2) == document_BL.unsqueeze(1)).tril_()
    return torch.zeros_like(seen_BLL, dtype=dtype).masked_fill_(~seen_BLL, float("-inf")).unsqueeze(1)


def _varlen(
    q_BHLK: Tensor, k_BGLK: Tensor, v_BGLK: Tensor, documents: Documents, scale: float, grouped: bool
) -> Tensor:
    batch, heads, length, width = q_BHLK.shape
    q_THK, k_TGK, v_TGK = (x.transpose(1, 2).reshape(batch * length, -1, width) for x in (q_BHLK, k_BGLK, v_BGLK))
    o_THK = varlen_attn(
        q_THK,
        k_TGK,
        v_TGK,
        documents.cumulative,
        documents.cumulative,
        documents.max_length,
        documents.max_length,
        scale=scale,
        window_size=(-1, 0),
        enable_gqa=grouped,
    )
    assert isinstance(o_THK, Tensor)  # no auxiliary output was asked for
    return o_THK.view(batch, length, heads, width).transpose(1, 2)

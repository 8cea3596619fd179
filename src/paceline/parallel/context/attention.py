"""Causal attention where each rank holds two chunks of every sequence; results are those of one process.

Shapes: B sequences, L positions of the whole sequence, P = L / cp positions of a rank, C = P / 2 of a chunk, N = 2 cp
chunks, H query heads, G key and value heads, K head width.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from paceline.model.attention import Documents, plain, sdpa, sdpa_documents
from paceline.model.dropout import AttentionDropout
from paceline.parallel.collectives import all_gather, reduce_scatter
from paceline.parallel.context import kernel
from paceline.parallel.context.config import chunks_of, heads_at_once, natural_order
from paceline.parallel.context.kernel import Part
from paceline.parallel.context.split import own_positions


class SplitSequence:
    """How sequences are split over a group: this rank's place in it."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group
        self.degree = dist.get_world_size(group)
        self.rank = dist.get_rank(group)
        self.chunks = chunks_of(self.rank, self.degree)
        self.order = natural_order(self.degree)

    def positions(self, length: int, device: torch.device) -> Tensor:
        """Positions (P) of the whole sequence of `length` that this rank holds."""
        return own_positions(self.rank, self.degree, length, device)

    def gather(self, kv: Sequence[Tensor]) -> Tensor:
        """Tensors (B, G, P, K) of every rank as one: (kv, B, L, G, K), in the order of the whole sequence."""
        held = torch.stack([x.transpose(1, 2).unflatten(1, (2, -1)) for x in kv])  # type: ignore[no-untyped-call]
        own = held.permute(2, 0, 1, 3, 4, 5).contiguous()
        chunks = own.new_empty(2 * self.degree, *own.shape[1:])
        all_gather(chunks, own, self.group)
        return torch.stack([chunks[place] for place in self.order], dim=2).flatten(2, 3)

    def scatter(self, whole: Tensor) -> tuple[Tensor, ...]:
        """The transpose of `gather`: sums over the ranks, of which each gets its own positions."""
        natural = whole.unflatten(2, (2 * self.degree, -1)).unbind(2)  # type: ignore[no-untyped-call]
        held = torch.stack([natural[n] for rank in range(self.degree) for n in chunks_of(rank, self.degree)])
        own = held.new_empty(2, *held.shape[1:])
        reduce_scatter(own, held, self.group)
        return tuple(x.flatten(1, 2).transpose(1, 2) for x in own.permute(1, 2, 0, 3, 4, 5))


class SplitAttention(ABC):
    """Attention that the ranks of a group compute together.

    Args:
        group: the ranks that share a sequence.
        compiled: the blocks around it are compiled, and no graph may reorder its collectives.
    """

    def __init__(self, group: dist.ProcessGroup, *, compiled: bool = False) -> None:
        self.sequence = SplitSequence(group)
        # Where nothing is compiled torch's compiler is not loaded, which takes seconds.
        self._attend: Callable[..., Tensor] = torch.compiler.disable(self.attend) if compiled else self.attend  # type: ignore[no-untyped-call]

    def __call__(
        self,
        q_BHLK: Tensor,
        k_BGLK: Tensor,
        v_BGLK: Tensor,
        documents: Documents | None,
        *,
        scale: float,
        dropout: AttentionDropout | None,
    ) -> Tensor:
        """As `model.attention.Attention`, for this rank's positions."""
        return self._attend(q_BHLK, k_BGLK, v_BGLK, documents, scale=scale, dropout=dropout)

    @abstractmethod
    def attend(
        self,
        q_BHPK: Tensor,
        k_BGPK: Tensor,
        v_BGPK: Tensor,
        documents: Documents | None,
        *,
        scale: float,
        dropout: AttentionDropout | None,
    ) -> Tensor:
        """What a call does."""

    @abstractmethod
    def prepare(self, documents: Documents, batch: int, held: int, dtype: torch.dtype, dropping: bool) -> Documents:
        """Documents as the kernel wants them, made once a forward for all blocks; `held` positions are this rank's."""


class GatheredAttention(SplitAttention):
    """Queries stay; keys and values of the whole sequence are gathered, block after block.

    Only this rank's positions are kept for the backward pass, which gathers keys and values again: what is kept falls by
    the degree. Without documents a chunk sees the chunks before it wholly and itself causally, and no mask is made.
    """

    def attend(
        self,
        q_BHPK: Tensor,
        k_BGPK: Tensor,
        v_BGPK: Tensor,
        documents: Documents | None,
        *,
        scale: float,
        dropout: AttentionDropout | None,
    ) -> Tensor:
        if documents is not None and documents.bias_B1LL is None:
            documents = self.prepare(documents, q_BHPK.shape[0], q_BHPK.shape[2], q_BHPK.dtype, dropout is not None)
        bias = None if documents is None else documents.bias_B1LL
        if dropout is not None:
            return self._written_out(q_BHPK, k_BGPK, v_BGPK, bias, scale, dropout)
        output: Tensor = _Gathered.apply(q_BHPK, k_BGPK, v_BGPK, bias, scale, self.sequence)  # type: ignore[no-untyped-call]
        return output

    def prepare(self, documents: Documents, batch: int, held: int, dtype: torch.dtype, dropping: bool) -> Documents:
        """Documents with the bias (B, 1, P, L) of this rank's queries, made once for all blocks."""
        borders = documents.cumulative
        length = held * self.sequence.degree
        own_P = self.sequence.positions(length, borders.device)
        all_L = torch.arange(length, device=borders.device)
        tokens_T = torch.arange(batch * length, device=borders.device, dtype=borders.dtype)
        document_BL = torch.searchsorted(borders, tokens_T, right=True).view(batch, length)
        seen_BPL = document_BL[:, own_P].unsqueeze(2) == document_BL.unsqueeze(1)
        seen_BPL &= own_P.unsqueeze(1) >= all_L
        bias_BPL = torch.zeros_like(seen_BPL, dtype=dtype).masked_fill_(~seen_BPL, float("-inf"))
        return documents._replace(bias_B1LL=bias_BPL.unsqueeze(1))

    def _written_out(
        self, q_BHPK: Tensor, k_BGPK: Tensor, v_BGPK: Tensor, bias: Tensor | None, scale: float,
        dropout: AttentionDropout,
    ) -> Tensor:  # fmt: skip
        """With all weights of this rank's queries in memory, as dropout of known masks needs them."""
        whole: Tensor = _Gather.apply(k_BGPK, v_BGPK, self.sequence)  # type: ignore[no-untyped-call]
        k_BGLK, v_BGLK = whole.transpose(2, 3)
        length = k_BGLK.shape[2]
        all_L = torch.arange(length, device=q_BHPK.device)
        if bias is None:
            later_PL = self.sequence.positions(length, q_BHPK.device).unsqueeze(1) < all_L
            bias = torch.zeros_like(later_PL, dtype=q_BHPK.dtype).masked_fill_(later_PL, float("-inf"))
        dropout = dropout._replace(key_positions_BS=all_L.unsqueeze(0))
        masked = Documents(all_L, length, bias)
        return plain(q_BHPK, k_BGLK, v_BGLK, masked, scale=scale, dropout=dropout)


class _Gather(torch.autograd.Function):
    """Keys and values of the whole sequence, kept for the backward pass."""

    @staticmethod
    def forward(ctx: Any, k: Tensor, v: Tensor, sequence: SplitSequence) -> Tensor:
        ctx.sequence = sequence
        return sequence.gather((k, v))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return (*ctx.sequence.scatter(grad), None)


class _Gathered(torch.autograd.Function):
    """Attention of two chunks of queries to the gathered keys, some heads after the others, part by part."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, scale: float, sequence: SplitSequence
    ) -> Tensor:
        output, logsumexp = _like(q), q.new_empty(q.shape[:3], dtype=torch.promote_types(q.dtype, torch.float32))
        for heads, kv_heads in _heads(q, k, sequence.degree):
            whole_k, whole_v = sequence.gather((k[:, kv_heads], v[:, kv_heads])).transpose(2, 3)
            for rows, parts in _parts(sequence, q.shape[2], bias):
                found = [kernel.forward(q[:, heads, rows], whole_k, whole_v, part, scale) for part in parts]
                merged = found[0] if len(found) == 1 else kernel.merge(*found)
                output[:, heads, rows], logsumexp[:, heads, rows] = merged
        ctx.save_for_backward(q, k, v, bias, output, logsumexp)
        ctx.scale, ctx.sequence = scale, sequence
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, bias, output, logsumexp = ctx.saved_tensors
        grad_q, grad_k, grad_v = _like(q).zero_(), _like(k), _like(v)
        for heads, kv_heads in _heads(q, k, ctx.sequence.degree):
            whole = ctx.sequence.gather((k[:, kv_heads], v[:, kv_heads]))
            grads = torch.zeros_like(whole)
            (whole_k, whole_v), (share_k, share_v) = whole.transpose(2, 3), grads.transpose(2, 3)
            for rows, parts in _parts(ctx.sequence, q.shape[2], bias):
                for part in parts:
                    d_q, d_k, d_v = kernel.backward(
                        grad[:, heads, rows], q[:, heads, rows], whole_k, whole_v, part, ctx.scale,
                        output[:, heads, rows], logsumexp[:, heads, rows],
                    )  # fmt: skip
                    grad_q[:, heads, rows] += d_q
                    share_k[:, :, part.keys] += d_k
                    share_v[:, :, part.keys] += d_v
            grad_k[:, kv_heads], grad_v[:, kv_heads] = ctx.sequence.scatter(grads)
        return grad_q, grad_k, grad_v, None, None, None


def _like(x_BHPK: Tensor) -> Tensor:
    """An empty tensor of the same shape, positions before heads in memory, as the layers around attention have it."""
    batch, heads, held, width = x_BHPK.shape
    return x_BHPK.new_empty(batch, held, heads, width).transpose(1, 2)


def _heads(q_BHPK: Tensor, k_BGPK: Tensor, degree: int) -> list[tuple[slice, slice]]:
    """Query heads and the key and value heads that they share, group by group: those that are gathered at once."""
    batch, kv_heads, held, width = k_BGPK.shape
    each, queries = (
        heads_at_once(kv_heads, batch, held * degree, width, k_BGPK.element_size()),
        q_BHPK.shape[1] // kv_heads,
    )
    ends = [(begin, min(begin + each, kv_heads)) for begin in range(0, kv_heads, each)]
    return [(slice(begin * queries, end * queries), slice(begin, end)) for begin, end in ends]


def _parts(sequence: SplitSequence, held: int, bias_B1PL: Tensor | None) -> list[tuple[slice, list[Part]]]:
    """For each of the two chunks its rows among the held positions, and the parts of the keys that they see."""
    length = held // 2
    parts = []
    for half, chunk in enumerate(sequence.chunks):
        rows, begin, end = slice(half * length, (half + 1) * length), chunk * length, (chunk + 1) * length
        if bias_B1PL is not None:
            seen = [Part(slice(0, end), bias_B1QS=bias_B1PL[:, :, rows, :end])]
        else:
            seen = [Part(slice(begin, end), causal=True), *([Part(slice(0, begin))] if begin else [])]
        parts.append((rows, seen))
    return parts


class ExchangedAttention(SplitAttention):
    """Each rank exchanges its positions of all heads for all positions of its heads, attends, and exchanges back.

    Key and value heads fewer than ranks are repeated, so that each rank gets one; their gradients are summed.
    """

    def attend(
        self,
        q_BHPK: Tensor,
        k_BGPK: Tensor,
        v_BGPK: Tensor,
        documents: Documents | None,
        *,
        scale: float,
        dropout: AttentionDropout | None,
    ) -> Tensor:
        degree = self.sequence.degree
        copies = max(1, degree // k_BGPK.shape[1])
        kv = [x.repeat_interleave(copies, dim=1) if copies > 1 else x for x in (k_BGPK, v_BGPK)]
        by_rank = [x.unflatten(1, (degree, -1)) for x in (q_BHPK, *kv)]  # type: ignore[no-untyped-call]
        sizes = [x.shape[2] for x in by_rank]
        packed: Tensor = _ToHeads.apply(torch.cat(by_rank, dim=2), self.sequence)  # type: ignore[no-untyped-call]
        q, k, v = packed.split(sizes, dim=1)  # type: ignore[no-untyped-call]
        if dropout is not None:
            dropout = self._of_heads(dropout, sizes[0], q.shape[2])
        o = sdpa(q, k, v, documents, scale=scale, dropout=dropout)
        output: Tensor = _ToPositions.apply(o, self.sequence)  # type: ignore[no-untyped-call]
        # Positions before heads in memory, as the next layer reads it.
        return output.permute(0, 3, 1, 2, 4).flatten(2, 3).transpose(1, 2)

    def prepare(self, documents: Documents, batch: int, held: int, dtype: torch.dtype, dropping: bool) -> Documents:
        """Documents as the kernel behind the exchange wants them, which sees whole sequences."""
        return sdpa_documents(documents, batch, held * self.sequence.degree, dtype, dropping)

    def _of_heads(self, dropout: AttentionDropout, heads: int, length: int) -> AttentionDropout:
        first = self.sequence.rank * heads
        positions = torch.arange(length, device=dropout.positions_BL.device).unsqueeze(0)
        return dropout._replace(positions_BL=positions, heads_H=dropout.heads_H[first : first + heads])


class _ToHeads(torch.autograd.Function):
    """(B, cp, heads of a rank, P, K) to (B, heads, L, K)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, sequence: SplitSequence) -> Tensor:
        ctx.sequence = sequence
        return _to_heads(x, sequence)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _to_positions(grad, ctx.sequence), None


class _ToPositions(torch.autograd.Function):
    """(B, heads, L, K) to (B, cp, heads of a rank, P, K)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, sequence: SplitSequence) -> Tensor:
        ctx.sequence = sequence
        return _to_positions(x, sequence)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _to_heads(grad, ctx.sequence), None


def _to_heads(x_BRHPK: Tensor, sequence: SplitSequence) -> Tensor:
    sent = x_BRHPK.permute(1, 3, 0, 2, 4).contiguous()
    got = torch.empty_like(sent)
    dist.all_to_all_single(got, sent, group=sequence.group)
    chunks = got.flatten(0, 1).unflatten(0, (2 * sequence.degree, -1))  # type: ignore[no-untyped-call]
    return torch.stack([chunks[place] for place in sequence.order]).flatten(0, 1).permute(1, 2, 0, 3)


def _to_positions(x_BHLK: Tensor, sequence: SplitSequence) -> Tensor:
    natural = x_BHLK.permute(2, 0, 1, 3).unflatten(0, (2 * sequence.degree, -1)).unbind(0)  # type: ignore[no-untyped-call]
    degree = sequence.degree
    sent = torch.stack([natural[n] for rank in range(degree) for n in chunks_of(rank, degree)])
    sent = sent.flatten(0, 1).unflatten(0, (degree, -1))  # type: ignore[no-untyped-call]
    got = torch.empty_like(sent)
    dist.all_to_all_single(got, sent, group=sequence.group)
    return got.permute(2, 0, 3, 1, 4)

"""What ranks that hold slices of the same weights exchange inside a forward pass, each with its backward.

    forward                                     backward
    gather positions, of which each has a slice   sum the gradients of all positions, keep one's slice
    sum partial outputs, keep one's slice         gather the gradients of all positions
    nothing (every rank has all positions)        sum the gradients
    sum partial outputs                           nothing

A slice of positions in between costs no more bytes than whole ones: an all-reduce is a reduce-scatter and an all-gather.
(Korthikanti et al. 2022, arXiv 2205.05198, section 4.2.2.)

Shapes: B sequences, L positions, D width.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from paceline.parallel.collectives import all_gather, reduce_scatter

Group = dist.ProcessGroup


def gather_positions(x_BLD: Tensor, group: Group) -> Tensor:
    """All positions from every rank's slice of them, in rank order."""
    whole: Tensor = _GatherPositions.apply(x_BLD, group)  # type: ignore[no-untyped-call]
    return whole


def sum_to_slice(x_BLD: Tensor, group: Group) -> Tensor:
    """The sum over the ranks, of which each keeps its slice of the positions; their number divides by the ranks'."""
    own: Tensor = _SumToSlice.apply(x_BLD, group)  # type: ignore[no-untyped-call]
    return own


def sum_gradients(x: Tensor, group: Group) -> Tensor:
    """x itself; its gradient is summed over the ranks, each of which uses x for a slice of what it gives."""
    same: Tensor = _SumGradients.apply(x, group)  # type: ignore[no-untyped-call]
    return same


def sum_outputs(x: Tensor, group: Group) -> Tensor:
    """The sum over the ranks, on each of them; its gradient is the same on all and belongs to each rank's x."""
    total: Tensor = _SumOutputs.apply(x, group)  # type: ignore[no-untyped-call]
    return total


def gather_columns(x: Tensor, sizes: list[int], group: Group) -> Tensor:
    """The last dim whole, from slices of it of the given sizes. The ranks go on alike: each takes its slice's gradient."""
    whole: Tensor = _GatherColumns.apply(x, sizes, group)  # type: ignore[no-untyped-call]
    return whole


class _GatherPositions(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_BLD: Tensor, group: Group) -> Tensor:
        ctx.group = group
        return _gathered(x_BLD, group)

    @staticmethod
    def backward(ctx: Any, grad_BLD: Tensor) -> tuple[Tensor, None]:
        return _scattered(grad_BLD, ctx.group), None


class _SumToSlice(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_BLD: Tensor, group: Group) -> Tensor:
        ctx.group = group
        return _scattered(x_BLD, group)

    @staticmethod
    def backward(ctx: Any, grad_BLD: Tensor) -> tuple[Tensor, None]:
        return _gathered(grad_BLD, ctx.group), None


class _SumGradients(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _summed(grad, ctx.group), None


class _SumOutputs(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        return _summed(x, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


class _GatherColumns(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, sizes: list[int], group: Group) -> Tensor:
        rank = dist.get_rank(group)
        ctx.own = slice(sum(sizes[:rank]), sum(sizes[: rank + 1]))
        padded = x.new_zeros(*x.shape[:-1], max(sizes))
        padded[..., : x.shape[-1]] = x
        gathered = x.new_empty(len(sizes) * padded.numel())
        all_gather(gathered, padded.view(-1), group)
        parts = gathered.view(len(sizes), *padded.shape)
        return torch.cat([part[..., :size] for part, size in zip(parts, sizes, strict=True)], dim=-1)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return grad[..., ctx.own], None, None


def _gathered(x_BLD: Tensor, group: Group) -> Tensor:
    ranks = dist.get_world_size(group)
    batch, length, width = x_BLD.shape
    parts = x_BLD.new_empty(ranks * batch, length, width)
    all_gather(parts, x_BLD.contiguous(), group)
    return parts.view(ranks, batch, length, width).transpose(0, 1).reshape(batch, ranks * length, width)


def _scattered(x_BLD: Tensor, group: Group) -> Tensor:
    ranks = dist.get_world_size(group)
    batch, length, width = x_BLD.shape
    parts = x_BLD.view(batch, ranks, length // ranks, width).transpose(0, 1).contiguous()
    own = x_BLD.new_empty(batch, length // ranks, width)
    reduce_scatter(own, parts.view(ranks * batch, length // ranks, width), group)
    return own


def _summed(x: Tensor, group: Group) -> Tensor:
    total = x.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(total, group=group)
    return total

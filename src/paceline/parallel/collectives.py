"""Small agreements between ranks: sums of numbers, and decisions taken by all alike. A group of None is one rank."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

# Names since torch 2.13, which warns of the older ones.
_all_gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def all_gather(whole: Tensor, own: Tensor, group: dist.ProcessGroup) -> None:
    """Fill `whole` with every rank's `own`, in rank order; both contiguous."""
    _all_gather(whole, own, group=group)


def reduce_scatter(own: Tensor, whole: Tensor, group: dist.ProcessGroup) -> None:
    """Fill `own` with this rank's part of the sum of every rank's `whole`; both contiguous."""
    _reduce_scatter(own, whole, group=group)


class PendingSum:
    """A sum over all ranks under way; `result()` waits for it."""

    def __init__(self, values: Tensor, work: dist.Work | None) -> None:
        self._values = values
        self._work = work

    def result(self) -> Tensor:
        if self._work is not None:
            self._work.wait()
            self._work = None
        return self._values


def start_sum(values: Tensor, group: dist.ProcessGroup | None) -> PendingSum:
    """Start to sum a small float64 tensor over all ranks; every rank calls this at the same place."""
    if group is None:
        return PendingSum(values, None)
    return PendingSum(values, dist.all_reduce(values, op=dist.ReduceOp.SUM, group=group, async_op=True))


def sum_over_ranks(values: Sequence[float], group: dist.ProcessGroup | None, device: torch.device) -> list[float]:
    """Sum of each number over all ranks, in float64."""
    total = start_sum(torch.tensor(values, dtype=torch.float64, device=device), group).result()
    return [float(v) for v in total.tolist()]


def any_rank(flag: bool, group: dist.ProcessGroup | None, device: torch.device) -> bool:
    """Whether the flag is raised on any rank: one decision for all."""
    return sum_over_ranks([float(flag)], group, device)[0] > 0


def gather_objects(value: Any, group: dist.ProcessGroup | None) -> list[Any]:
    """The value of every rank, in rank order, on every rank. For start-up and windows, not for the hot path."""
    if group is None:
        return [value]
    gathered: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(gathered, value, group=group)
    return gathered

"""The collectives as torch has them, on values that depend on rank and element, and what each must give.

Letters: n ranks, c elements of a part, S elements of the whole.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from paceline.bench.sweep import Point
from paceline.parallel.collectives import all_gather, reduce_scatter
from paceline.parallel.strategy import CollectiveKind

TYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16, "fp64": torch.float64}
_EXACT = {torch.bfloat16: 2**8, torch.float16: 2**11, torch.float32: 2**24, torch.float64: 2**53}
"""Whole numbers up to here have exact sums."""

_PERIOD = 251
"""A prime: parts that change places, or arrive shifted, never look alike."""

_CHUNK = 1 << 20


def values(rank: int, begin: int, count: int, ranks: int, dtype: torch.dtype) -> Tensor:
    """Elements `begin` to `begin + count` of what `rank` of `ranks` sends, in float64: small whole numbers.

    They are so small that the sum over all ranks is exact in `dtype`, up to 128 ranks in bf16.
    """
    largest = max(2, min(_PERIOD, _EXACT[dtype] // ranks))
    index = torch.arange(begin, begin + count, dtype=torch.int64)
    return ((index % _PERIOD * (rank + 1) + 7 * rank) % largest).to(torch.float64)


class Exchange:
    """One collective with buffers for its largest size; `at(point)` makes the call of a size.

    Args:
        members: the ranks of `group`, in its order, as the world counts them.
    """

    def __init__(
        self,
        kind: CollectiveKind,
        largest: Point,
        members: list[int],
        group: dist.ProcessGroup,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.kind = kind
        self.members = members
        self.group = group
        self.dtype = dtype
        self.rank = members.index(dist.get_rank())
        sent, received = self._lengths(largest)
        self._received = torch.zeros(received, dtype=dtype, device=device)
        # torch reduces and broadcasts in place.
        self._sent = self._received if self._in_place else torch.zeros(sent, dtype=dtype, device=device)

    @property
    def _in_place(self) -> bool:
        return self.kind in ("all_reduce", "broadcast")

    def _lengths(self, point: Point) -> tuple[int, int]:
        """Elements that a rank gives and gets."""
        whole = point.count * len(self.members)
        if self.kind == "all_gather":
            return point.count, whole
        if self.kind == "reduce_scatter":
            return whole, point.count
        return (whole, whole) if self.kind == "all_to_all" else (point.count, point.count)

    def at(self, point: Point) -> Callable[[], None]:
        """The call of a size, on buffers of zeros, so that sums of sums stay what they are."""
        sent_count, received_count = self._lengths(point)
        sent, received, group = self._sent[:sent_count], self._received[:received_count], self.group
        sent.zero_()
        if self.kind == "all_reduce":
            return lambda: _done(dist.all_reduce(received, group=group))
        if self.kind == "broadcast":
            return lambda: _done(dist.broadcast(received, src=self.members[0], group=group))
        if self.kind == "all_gather":
            return lambda: all_gather(received, sent, group)
        if self.kind == "reduce_scatter":
            return lambda: reduce_scatter(received, sent, group)
        if self.kind == "all_to_all":
            return lambda: _done(dist.all_to_all_single(received, sent, group=group))
        return lambda: self._shift(sent, received)

    def wrong(self, point: Point) -> int:
        """Elements of this rank that are not what they must be after one call on real values."""
        call = self.at(point)
        sent_count, received_count = self._lengths(point)
        if not self._in_place:
            self._received[:received_count].fill_(-1)
        for begin in range(0, sent_count, _CHUNK):
            count = min(_CHUNK, sent_count - begin)
            given = values(self.rank, begin, count, len(self.members), self.dtype)
            self._sent[begin : begin + count].copy_(given.to(self.dtype))
        call()
        wrong = 0
        for begin in range(0, received_count, _CHUNK):
            count = min(_CHUNK, received_count - begin)
            got = self._received[begin : begin + count].to("cpu", torch.float64)
            wrong += int((~self._matches(got, self.expected(point, begin, count))).sum())
        return wrong

    def expected(self, point: Point, begin: int, count: int) -> Tensor:
        """What this rank must have in elements `begin` to `begin + count` of its result, in float64."""
        n, c = len(self.members), point.count
        if self.kind in ("all_reduce", "reduce_scatter"):
            offset = begin + (self.rank * c if self.kind == "reduce_scatter" else 0)
            return torch.stack([values(r, offset, count, n, self.dtype) for r in range(n)]).sum(dim=0)
        if self.kind == "broadcast":
            return values(0, begin, count, n, self.dtype)
        if self.kind == "send_recv":
            return values((self.rank - 1) % n, begin, count, n, self.dtype)
        parts = []
        while count:
            source, within = divmod(begin, c)
            length = min(count, c - within)
            offset = within + (self.rank * c if self.kind == "all_to_all" else 0)
            parts.append(values(source, offset, length, n, self.dtype))
            begin, count = begin + length, count - length
        return torch.cat(parts)

    def _matches(self, got: Tensor, wanted: Tensor) -> Tensor:
        """Equal; where even the smallest values have no exact sums, to the rounding of that many additions."""
        n = len(self.members)
        if 2 * n <= _EXACT[self.dtype]:
            return got == wanted
        return (got - wanted).abs() <= n * torch.finfo(self.dtype).eps * wanted.abs()

    def _shift(self, sent: Tensor, received: Tensor) -> None:
        """Every rank sends to the next one and receives from the one before, at once, as nccl-tests' sendrecv does."""
        following, before = (self.members[(self.rank + step) % len(self.members)] for step in (1, -1))
        # Over Gloo the receive must be asked for first: else both directions may take turns on a slow link (docs/log.md).
        works = dist.batch_isend_irecv(
            [dist.P2POp(dist.irecv, received, before, self.group), dist.P2POp(dist.isend, sent, following, self.group)]
        )
        for work in works:
            work.wait()


def _done(_: Any) -> None:
    """A call's result that nobody needs."""

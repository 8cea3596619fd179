"""Gradient reduction for data parallelism: a SUM over ranks, in fixed buckets, once per optimizer step.

The buckets are ours and not those of `DistributedDataParallel` for four reasons (docs/decisions/0003-own-buckets.md): DDP
rebuilds its buckets after the first step, so that a resumed run sums in another order than an uninterrupted one; it
divides by the world size, where a sum divided once by the global weight is wanted; a parameter that a rank did not use
hangs or fails it a step later; and its waiting time cannot be read. The reduction itself is torch.distributed's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor

from paceline.optim.clip import gradient_dtype, gradient_norm
from paceline.parallel.ddp.config import DdpConfig
from paceline.parallel.ddp.cost import partition
from paceline.parallel.strategy import ParameterSize


@dataclass
class _Bucket:
    """Gradients that travel together: one flat buffer, and a view of it per parameter."""

    parameters: list[torch.nn.Parameter]
    flat: Tensor
    views: list[Tensor]
    wire: Tensor
    waiting: int = 0
    work: dist.Work | None = None
    touched: set[int] = field(default_factory=set)


class BucketReducer:
    """Sums the gradients of `parameters` over `group` in place.

    A window is all micro-batches of one optimizer step: `begin(last=False)` before each forward pass but the last,
    `begin(last=True)` before the last, then `finish()` after its backward. Gradients live in the buckets from their first
    accumulation on, so that nothing is kept twice.

    Args:
        parameters: trainable parameters in the module's order, equal on all ranks.
        group: the data-parallel process group.
        config: bucket size, overlap, element type on the wire.
    """

    def __init__(
        self, parameters: Iterable[torch.nn.Parameter], group: dist.ProcessGroup | None, config: DdpConfig
    ) -> None:
        self.group = group
        self.config = config
        self._last = False
        self._next_launch = 0
        owned = [p for p in parameters if p.requires_grad]
        sizes = [ParameterSize(str(i), p.numel(), gradient_dtype(p).itemsize) for i, p in enumerate(owned)]
        self._buckets = [self._make_bucket([owned[i] for i in ids]) for ids in partition(sizes, config.bucket_bytes)]
        self._hooks = [
            parameter.register_post_accumulate_grad_hook(self._hook(bucket, slot))  # type: ignore[no-untyped-call]
            for bucket in self._buckets
            for slot, parameter in enumerate(bucket.parameters)
        ]

    def begin(self, *, last: bool, first: bool) -> None:
        """Before the forward pass of a micro-batch; `first` and `last` of its window."""
        self._last = last
        if first:
            for bucket in self._buckets:
                bucket.touched.clear()
                for parameter in bucket.parameters:
                    parameter.grad = None
        if last:
            self._next_launch = 0
            for bucket in self._buckets:
                bucket.waiting = len(bucket.parameters)

    def finish(self) -> None:
        """Wait until every bucket holds the sum over all ranks. Parameters that no rank used hold zeros."""
        for bucket in self._buckets[self._next_launch :]:
            self._launch(bucket)
        self._next_launch = len(self._buckets)
        for bucket in self._buckets:
            if bucket.work is not None:
                bucket.work.wait()
                bucket.work = None
            if bucket.wire is not bucket.flat:
                bucket.flat.copy_(bucket.wire)

    def gradient_norm(self) -> Tensor:
        """2-norm over all gradients; replicas hold equal ones."""
        return gradient_norm([p.grad for b in self._buckets for p in b.parameters if p.grad is not None])

    def untouched(self) -> list[torch.nn.Parameter]:
        """Parameters that got no gradient on this rank in the window so far."""
        return [
            parameter
            for bucket in self._buckets
            for slot, parameter in enumerate(bucket.parameters)
            if slot not in bucket.touched
        ]

    def close(self) -> None:
        """Remove the hooks; the gradients stay."""
        for hook in self._hooks:
            hook.remove()

    def state_bytes(self) -> tuple[int, int]:
        """Bytes of the gradients and of the wire buffers beside them."""
        gradients = sum(b.flat.numel() * b.flat.element_size() for b in self._buckets)
        wires = sum(b.wire.numel() * b.wire.element_size() for b in self._buckets if b.wire is not b.flat)
        return gradients, wires

    def _make_bucket(self, parameters: list[torch.nn.Parameter]) -> _Bucket:
        first = parameters[0]
        flat = torch.zeros(sum(p.numel() for p in parameters), dtype=gradient_dtype(first), device=first.device)
        views, offset = [], 0
        for parameter in parameters:
            views.append(flat[offset : offset + parameter.numel()].view(parameter.shape))
            offset += parameter.numel()
        wire = torch.empty_like(flat, dtype=torch.bfloat16) if self.config.reduce_bf16 else flat
        return _Bucket(parameters, flat, views, wire)

    def _hook(self, bucket: _Bucket, slot: int) -> Callable[[Tensor], None]:
        view = bucket.views[slot]

        def accumulated(parameter: Tensor) -> None:
            if slot not in bucket.touched:
                # The first gradient of a window is autograd's own tensor: move it here once, add in place from then on.
                bucket.touched.add(slot)
                if parameter.grad is not None and parameter.grad is not view:
                    view.copy_(parameter.grad)
                    parameter.grad = view
            if self._last:
                bucket.waiting -= 1
                if bucket.waiting == 0 and self.config.overlap:
                    self._launch_ready()

        return accumulated

    def _launch_ready(self) -> None:
        """Start full buckets in their fixed order, so that all ranks start the same collective at the same place."""
        while self._next_launch < len(self._buckets) and self._buckets[self._next_launch].waiting == 0:
            self._launch(self._buckets[self._next_launch])
            self._next_launch += 1

    def _launch(self, bucket: _Bucket) -> None:
        for slot, parameter in enumerate(bucket.parameters):
            if slot not in bucket.touched:
                # Nothing came through autograd's hook: no gradient, or one that a split backward put there itself.
                if parameter.grad is None:
                    bucket.views[slot].zero_()
                else:
                    bucket.views[slot].copy_(parameter.grad)
                parameter.grad = bucket.views[slot]
        if bucket.wire is not bucket.flat:
            bucket.wire.copy_(bucket.flat)
        bucket.work = dist.all_reduce(bucket.wire, op=dist.ReduceOp.SUM, group=self.group, async_op=True)


class LocalReducer:
    """The same interface on one rank: nothing travels, gradients are autograd's own."""

    def __init__(self, parameters: Iterable[torch.nn.Parameter]) -> None:
        self._parameters = [p for p in parameters if p.requires_grad]

    def begin(self, *, last: bool, first: bool) -> None:
        if first:
            for parameter in self._parameters:
                parameter.grad = None

    def finish(self) -> None:
        for parameter in self._parameters:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter, dtype=gradient_dtype(parameter))

    def gradient_norm(self) -> Tensor:
        return gradient_norm([p.grad for p in self._parameters if p.grad is not None])

    def untouched(self) -> list[torch.nn.Parameter]:
        return [p for p in self._parameters if p.grad is None]

    def close(self) -> None:
        """Nothing to remove."""

    def state_bytes(self) -> tuple[int, int]:
        return sum(p.numel() * gradient_dtype(p).itemsize for p in self._parameters), 0

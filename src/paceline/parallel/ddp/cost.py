"""What data parallelism keeps and sends. Pure arithmetic; `apply.py` builds its buckets with `partition` below."""

from __future__ import annotations

from collections.abc import Sequence

from paceline.parallel.ddp.config import DdpConfig
from paceline.parallel.layout import REPLICAS, Layout, axes_name
from paceline.parallel.strategy import Collective, Cost, ParameterSize, StateBytes, total_bytes


def partition(parameters: Sequence[ParameterSize], bucket_bytes: int) -> list[list[int]]:
    """Indices of the parameters in each bucket, in the order of reduction.

    Buckets fill from the last parameter to the first, which is about the order in which the backward pass finishes them,
    and close once they hold `bucket_bytes`. One bucket holds one element type.
    """
    buckets: list[list[int]] = []
    filled = 0
    for index in reversed(range(len(parameters))):
        parameter = parameters[index]
        same_type = bool(buckets) and parameters[buckets[-1][0]].element_bytes == parameter.element_bytes
        if not buckets or not same_type or filled >= bucket_bytes:
            buckets.append([])
            filled = 0
        buckets[-1].append(index)
        filled += parameter.size_bytes
    return buckets


def cost(parameters: Sequence[ParameterSize], moments_bytes: int, layout: Layout, config: DdpConfig) -> Cost:
    """State and collectives of one optimizer step on each rank.

    Without replicas nothing is reduced. With `reduce_bf16` each bucket is copied into a bf16 buffer that is kept.
    """
    size = total_bytes(parameters)
    if layout.replicas == 1:
        return Cost(StateBytes(parameters=size, gradients=size, moments=moments_bytes), ())
    elements = sum(p.elements for p in parameters)
    on_wire = elements * 2 if config.reduce_bf16 else size
    return Cost(
        StateBytes(
            parameters=size, gradients=size, moments=moments_bytes, buffers=elements * 2 if config.reduce_bf16 else 0
        ),
        (
            Collective(
                kind="all_reduce",
                axis=axes_name(layout, REPLICAS),
                count=len(partition(parameters, config.bucket_bytes)),
                size_bytes=on_wire,
                overlaps="backward" if config.overlap else "nothing",
                purpose="gradients",
            ),
        ),
    )

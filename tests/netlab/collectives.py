"""Collectives between hosts of a lab, timed as plainly as can be; run by the lab's crew."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch
import torch.distributed as dist

SIZE_BYTES = 4 << 20
REPEATS = 3


def bus_bandwidths(rank: int, world_size: int) -> dict[str, float]:
    """Bytes per second over the busiest link of each collective of 4 MiB: the size by nccl-tests' factors over the time."""
    whole = torch.ones(SIZE_BYTES // 4)
    count = SIZE_BYTES // 4 // world_size
    parts = list(torch.ones(world_size, count))
    part = torch.ones(count)
    ring = (world_size - 1) / world_size
    calls: dict[str, tuple[float, Callable[[], object]]] = {
        "all_reduce": (2 * ring, lambda: dist.all_reduce(whole)),
        "all_gather": (ring, lambda: dist.all_gather(parts, part)),
        "broadcast": (1.0, lambda: dist.broadcast(whole, 0)),
        "send_recv": (1.0, lambda: dist.send(whole, 1) if rank == 0 else dist.recv(whole, 0) if rank == 1 else None),
    }
    return {name: factor * SIZE_BYTES / _seconds(call) for name, (factor, call) in calls.items()}


def _seconds(call: Callable[[], object]) -> float:
    """The median time until all ranks are through; a first call, which opens connections, is not counted."""
    taken = []
    for _ in range(REPEATS + 1):
        dist.all_reduce(torch.zeros(1))
        began = time.monotonic()
        call()
        slowest = torch.tensor([time.monotonic() - began])
        dist.all_reduce(slowest, dist.ReduceOp.MAX)
        taken.append(slowest.item())
    return statistics.median(taken[1:])


def names(rank: int, world_size: int) -> tuple[str, float]:
    """This host's name, and a sum over all of them."""
    import socket

    value = torch.tensor([float(rank)])
    dist.all_reduce(value)
    return socket.gethostname(), value.item()

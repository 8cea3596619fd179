"""Collectives between hosts of a lab, timed as plainly as can be; run by the lab's crew."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist

from paceline.parallel.collectives import all_gather

SIZE_BYTES = 4 << 20
REPEATS = 5


def bus_bandwidths(rank: int, world_size: int, kinds: Sequence[str]) -> dict[str, float]:
    """Bytes per second over the busiest link of each collective of 4 MiB: the bytes there over the time.

    Gloo's broadcast is one send per rank out of the root.
    """
    whole = torch.ones(SIZE_BYTES // 4)
    count = SIZE_BYTES // 4 // world_size
    parts, part = torch.ones(count * world_size), torch.ones(count)
    ring = (world_size - 1) / world_size
    world = dist.group.WORLD
    assert world is not None
    calls: dict[str, tuple[float, Callable[[], object]]] = {
        "all_reduce": (2 * ring, lambda: dist.all_reduce(whole)),
        "all_gather": (ring, lambda: all_gather(parts, part, world)),
        "broadcast": (world_size - 1, lambda: dist.broadcast(whole, 0)),
        "send_recv": (1.0, lambda: _send_recv(whole, rank)),
    }
    return {name: factor * SIZE_BYTES / _seconds(call) for name, (factor, call) in calls.items() if name in kinds}


def _send_recv(whole: torch.Tensor, rank: int) -> None:
    if rank < 2:
        dist.send(whole, 1) if rank == 0 else dist.recv(whole, 0)


def _seconds(call: Callable[[], object]) -> float:
    """The best time until all ranks are through, since what else runs slows some; without the first, which connects."""
    taken = []
    for _ in range(REPEATS + 1):
        dist.all_reduce(torch.zeros(1))
        began = time.monotonic()
        call()
        slowest = torch.tensor([time.monotonic() - began])
        dist.all_reduce(slowest, dist.ReduceOp.MAX)
        taken.append(slowest.item())
    return min(taken[1:])


def names(rank: int, world_size: int) -> tuple[str, float]:
    """This host's name, and a sum over all of them."""
    value = torch.tensor([float(rank)])
    dist.all_reduce(value)
    return socket.gethostname(), value.item()

"""How many bytes a collective puts on the wire, and what nccl-tests call its bus bandwidth. Pure arithmetic, no torch."""

from __future__ import annotations

from paceline.parallel.strategy import CollectiveKind

GLOO = "gloo"
GLOO_REDUCE_SCATTER = (
    "Gloo's reduce_scatter sums the whole tensor on all ranks: it moves as many bytes as an all_reduce"
)


def bus_factor(kind: CollectiveKind, ranks: int) -> float:
    """Bus bandwidth over algorithm bandwidth (NVIDIA/nccl-tests, doc/PERFORMANCE.md).

    It makes figures of different numbers of ranks comparable with the rate of one link.
    """
    if kind == "all_reduce":
        return 2 * (ranks - 1) / ranks
    if kind in ("all_gather", "reduce_scatter", "all_to_all"):
        return (ranks - 1) / ranks
    return 1.0


def sent_bytes(kind: CollectiveKind, size_bytes: float, ranks: int, backend: str) -> float:
    """Bytes that the busiest rank sends in a ring, for a collective of `size_bytes` as `Collective` counts them.

    Gloo has no reduce-scatter of its own: `backend` says whether the bytes are an all-reduce's.
    """
    if ranks < 2:
        return 0.0
    if kind == "reduce_scatter" and backend == GLOO:
        return bus_factor("all_reduce", ranks) * size_bytes
    return bus_factor(kind, ranks) * size_bytes

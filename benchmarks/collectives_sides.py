"""Two ranks that time each collective twice in turn: with the bench's timer, and with a bare torch.distributed loop."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.pairs import first_goes_first
from paceline.bench.calls import Exchange
from paceline.bench.rank import Rank, Timer, joined
from paceline.bench.sweep import COLLECTIVES, points

CALLS = 20
all_gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def bare(kind: str, size_bytes: int) -> Callable[[], Any]:
    """The call as anyone writes it."""
    ranks, rank = dist.get_world_size(), dist.get_rank()
    whole, other = torch.zeros(size_bytes // 4), torch.zeros(size_bytes // 4)
    part = torch.zeros(size_bytes // 4 // ranks)
    calls: dict[str, Callable[[], Any]] = {
        "all_reduce": lambda: dist.all_reduce(whole),
        "broadcast": lambda: dist.broadcast(whole, 0),
        "all_gather": lambda: all_gather(whole, part),
        "reduce_scatter": lambda: reduce_scatter(part, whole),
        "all_to_all": lambda: dist.all_to_all_single(whole, other),
        "send_recv": lambda: exchange(whole, other, (rank + 1) % ranks),
    }
    return calls[kind]


def exchange(sent: torch.Tensor, received: torch.Tensor, peer: int) -> None:
    works = [dist.irecv(received, peer), dist.isend(sent, peer)]
    for work in works:
        if work is not None:
            work.wait()


def bare_seconds(call: Callable[[], Any], calls: int) -> float:
    """Seconds per call of the slowest rank: a barrier, a loop, a clock."""
    dist.barrier()
    began = time.perf_counter()
    for _ in range(calls):
        call()
    taken = torch.tensor([(time.perf_counter() - began) / calls], dtype=torch.float64)
    dist.all_reduce(taken, op=dist.ReduceOp.MAX)
    return float(taken.item())


def program(rank: Rank) -> None:
    group = dist.group.WORLD
    assert group is not None
    ranks = list(range(rank.world.world_size))
    for kind in COLLECTIVES:
        for size in rank.options["sizes"]:
            (point,) = points(kind, [size], len(ranks), 4)
            bench = Exchange(kind, point, ranks, group, torch.float32, rank.world.device).at(point)
            timer = Timer(bench, rank.world.device, warmup=5, iterations=CALLS, seconds=1.0)
            plain = bare(kind, point.size_bytes)
            bare_seconds(plain, 5)
            found: dict[str, list[float]] = {"bench": [], "bare": []}
            for pair in range(rank.options["pairs"]):
                for side in ("bench", "bare") if first_goes_first(pair) else ("bare", "bench"):
                    if side == "bench":
                        timer.rounds = []
                        timer.round()
                        found[side].append(sum(timer.samples) / len(timer.samples))
                    else:
                        found[side].append(bare_seconds(plain, max(CALLS, timer.calls)))
            rank.tell({"kind": "pair", "collective": kind, "size_bytes": point.size_bytes, **found})


def main() -> None:
    with joined() as rank:
        program(rank)


if __name__ == "__main__":
    main()

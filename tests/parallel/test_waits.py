"""What a rank waits for others is counted, wherever it waits: in torch.distributed's calls and in compiled graphs."""

from __future__ import annotations

import threading
import time

import pytest
import torch
import torch.distributed as dist

from paceline.parallel.waits import count_waits, waited_seconds
from tests.pool.pool import Pool

LATE_SECONDS = 0.5


def _sum_in_graph(tensor: torch.Tensor) -> torch.Tensor:
    """As the compiler writes what `dist.all_reduce` is in its graphs."""
    name = dist.group.WORLD.group_name  # type: ignore[union-attr]
    functional = torch.ops._c10d_functional
    return functional.wait_tensor(functional.all_reduce(tensor, "sum", name))


def _sum_in_place(tensor: torch.Tensor) -> torch.Tensor:
    dist.all_reduce(tensor)
    return tensor


def _sum_later(tensor: torch.Tensor) -> torch.Tensor:
    work = dist.all_reduce(tensor, async_op=True)
    work.wait()
    return tensor


WAYS = {"in place": _sum_in_place, "later": _sum_later, "in a graph": _sum_in_graph}


def wait_for_the_late(rank: int, world_size: int, way: str) -> tuple[float, list[float], int]:
    """Seconds waited while the last rank comes late, the sum, and how often another thread ran meanwhile."""
    count_waits()
    over, ticks = threading.Event(), 0

    def tick() -> None:
        nonlocal ticks
        while not over.wait(0.01):
            ticks += 1

    beside = threading.Thread(target=tick)
    beside.start()
    dist.barrier()
    before = waited_seconds()
    if rank == world_size - 1:
        time.sleep(LATE_SECONDS)
    ticked = ticks
    total = WAYS[way](torch.full((3,), float(rank)))
    ticked = ticks - ticked
    over.set()
    beside.join()
    return waited_seconds() - before, total.tolist(), ticked


@pytest.mark.parametrize("way", list(WAYS))
def test_the_early_rank_waits_and_the_late_one_does_not(pool: Pool, way: str) -> None:
    (early, total, ticks), (late, _, _) = pool.run(wait_for_the_late, 2, way)
    assert total == [1.0, 1.0, 1.0]
    assert early > LATE_SECONDS / 2 and late < LATE_SECONDS / 2, (early, late)
    # Gloo's own thread needs the interpreter to give tensors back: whoever kept it while it waits would wait for ever.
    assert ticks >= 5, "the interpreter was held"


def wait_in_another_thread(rank: int, world_size: int) -> float:
    count_waits()
    before = waited_seconds()
    if rank == world_size - 1:
        time.sleep(LATE_SECONDS)
    other = threading.Thread(target=dist.barrier)
    other.start()
    other.join()
    return waited_seconds() - before


def test_waits_of_other_threads_are_no_part_of_a_step(pool: Pool) -> None:
    assert pool.run(wait_in_another_thread, 2) == [0.0, 0.0]


def a_compiled_sum_is_counted(rank: int, world_size: int) -> float:
    def double(x: torch.Tensor) -> torch.Tensor:
        dist.all_reduce(x)
        return x * 2

    compiled = torch.compile(double, dynamic=False, fullgraph=True)
    count_waits()
    assert compiled(torch.ones(3)).tolist() == [2.0 * world_size] * 3
    dist.barrier()
    before = waited_seconds()
    if rank == world_size - 1:
        time.sleep(LATE_SECONDS)
    compiled(torch.ones(3))
    return waited_seconds() - before


@pytest.mark.limit(120)
def test_a_graph_of_the_compiler_waits_where_it_is_counted(pool: Pool) -> None:
    early, late = pool.run(a_compiled_sum_is_counted, 2)
    assert early > LATE_SECONDS / 2 and late < LATE_SECONDS / 2, (early, late)

"""Streams that end on one rank before another: the ranks stop together and say who ran out."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch.distributed as dist

from paceline.data.loader import IterableLoader
from paceline.parallel.collectives import gather_objects
from tests.pool.pool import Pool
from tests.train.toys import Slope, make_step


def stream(samples: int) -> Iterator[dict[str, Any]]:
    for index in range(samples):
        yield {"c": np.float64(index)}


def train_on_streams(rank: int, world: int, samples: list[int]) -> tuple[int, str]:
    step = make_step(Slope())
    loader = IterableLoader(
        stream(samples[rank]), global_batch=2 * world, microbatch=2, dp_rank=rank, dp_degree=world,
        agree=lambda has: gather_objects(has, dist.group.WORLD),
    )  # fmt: skip
    steps = 0
    for microbatches in loader:
        step(microbatches, 0.01)
        steps += 1
    return steps, loader.report()


def test_a_rank_with_one_batch_more_stops_with_the_others(pool: Pool) -> None:  # BL-19
    results = pool.run(train_on_streams, 2, [10, 8], timeout=20)
    assert [steps for steps, _ in results] == [4, 4]
    assert all("rank 1" in report for _, report in results)


def test_three_files_over_two_ranks_end_cleanly(pool: Pool) -> None:  # BL-19
    per_file = [6, 6, 6]
    shares = [per_file[0] + per_file[2], per_file[1]]
    assert [steps for steps, _ in pool.run(train_on_streams, 2, shares, timeout=20)] == [3, 3]

"""Evaluation over ranks: each sample once, one reduction, and ranks that drift."""

from __future__ import annotations

import datetime
import time
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from paceline.data.evaluation import eval_batches
from paceline.parallel.collectives import any_rank, gather_objects
from paceline.train.evaluate import Evaluation, evaluate
from paceline.workers.barrier import store_barrier
from tests.pool.pool import Pool, RankFailed

CPU = torch.device("cpu")


class Numbers:
    """Sample i has loss i."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"value": np.float64(index)}


def value_loss(output: Tensor, batch: dict[str, Any]) -> tuple[Tensor, Tensor]:
    return batch["value"].sum(), torch.tensor(float(len(batch["value"])))


def evaluate_numbers(rank: int, world: int, size: int, microbatch: int) -> Evaluation:
    model = nn.Linear(1, 1)
    return evaluate(
        model, lambda model, batch: batch, value_loss,
        eval_batches(Numbers(size), microbatch=microbatch, dp_rank=rank, dp_degree=world),
        group=dist.group.WORLD if world > 1 else None, device=CPU, autocast=nullcontext, wait_for_all=lambda: None,
    )  # fmt: skip


@pytest.mark.parametrize("microbatch", [1, 4, 8])
@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_each_sample_counts_once_for_any_number_of_ranks(pool: Pool, world: int, microbatch: int) -> None:  # BL-33
    for result in pool.run(evaluate_numbers, world, 21, microbatch):
        assert result.loss == 10.0 and result.weight == 21


def test_a_rank_without_samples_agrees_all_the_same(pool: Pool) -> None:  # BL-87
    for result in pool.run(evaluate_numbers, 3, 2, 1):
        assert result.loss == 0.5 and result.weight == 2


def evaluate_slowly(rank: int, world: int) -> Evaluation:
    """Rank 0 needs longer than a collective may wait."""
    group = dist.new_group(timeout=datetime.timedelta(seconds=1))
    store = dist.distributed_c10d._get_default_store()

    def batches() -> Any:
        if rank == 0:
            time.sleep(2.5)
        yield from eval_batches(Numbers(4), microbatch=1, dp_rank=rank, dp_degree=world)

    return evaluate(
        nn.Linear(1, 1), lambda model, batch: batch, value_loss, batches(), group=group, device=CPU,
        autocast=nullcontext, wait_for_all=lambda: store_barrier(store, "drift", rank, world, 20.0),
    )  # fmt: skip


def test_ranks_may_drift_by_more_than_a_collective_waits(pool: Pool) -> None:  # BL-87
    assert [r.loss for r in pool.run(evaluate_slowly, 2, timeout=20)] == [1.5, 1.5]


def drift_without_the_host_barrier(rank: int, world: int) -> None:
    group = dist.new_group(timeout=datetime.timedelta(seconds=1))
    if rank == 0:
        time.sleep(2.5)
    any_rank(False, group, CPU)


def test_without_the_host_barrier_the_drift_is_an_error(pool: Pool) -> None:
    with pytest.raises(RankFailed):
        pool.run(drift_without_the_host_barrier, 2, timeout=20)


def gather_lists(rank: int, world: int) -> list[int]:
    mine = [[], [7], [1, 2, 3, 4, 5]][rank]
    return [x for part in gather_objects(mine, dist.group.WORLD) for x in part]


def test_lists_of_any_length_are_gathered(pool: Pool) -> None:  # BL-87
    assert pool.run(gather_lists, 3) == [[7, 1, 2, 3, 4, 5]] * 3

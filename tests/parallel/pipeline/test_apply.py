"""Stages on several ranks against the same chain on one, and against what a schedule promises."""

from __future__ import annotations

import os
import signal
import time

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from paceline.errors import DataError
from paceline.parallel.pipeline.config import SCHEDULES, PipelineConfig
from paceline.parallel.pipeline.cost import transfers
from paceline.parallel.pipeline.rules import takes
from tests.parallel.pipeline.toys import ChainStep, numbered
from tests.pool.pool import Pool, RankDied, RankFailed

STAGES = {"gpipe": 1, "1f1b": 1, "interleaved-1f1b": 2, "zero-bubble": 1, "zbv": 2}


def config_of(schedule: str, ranks: int) -> PipelineConfig:
    per_rank = STAGES[schedule]
    return PipelineConfig(schedule, ranks, per_rank, (1,) * (ranks * per_rank))  # type: ignore[arg-type]


def every_count(rank: int, ranks: int, schedule: str) -> dict[int, tuple[list[float], dict[int, float]]]:
    """Losses and gradients by number of micro-batches, for every number that the schedule takes."""
    config = config_of(schedule, ranks)
    weights = [1.0 + 0.1 * n for n in range(config.num_stages)]
    step = ChainStep(config, weights)
    counts = [m for m in range(1, 6) if takes(config.schedule, ranks, config.stages_per_rank, m)]
    return {m: step(numbered(1, m, (2, 3))) for m in counts}


def alone(config: PipelineConfig, microbatches: int) -> tuple[list[float], dict[int, float]]:
    weights = [torch.tensor(1.0 + 0.1 * n, dtype=torch.float64, requires_grad=True) for n in range(config.num_stages)]
    losses = []
    for batch in numbered(1, microbatches, (2, 3)):
        x = batch["tokens"].double()
        for weight in weights:
            x = x * weight
        loss = (x - batch["labels"]).square().sum()
        loss.backward()
        losses.append(loss.item())
    return losses, {n: float(w.grad) for n, w in enumerate(weights) if w.grad is not None}


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_any_number_of_micro_batches_that_is_taken_gives_the_result_of_one_process(
    pool: Pool, schedule: str, ranks: int
) -> None:  # BL-58
    config = config_of(schedule, ranks)
    found = pool.run(every_count, ranks, schedule)
    assert found[0], "no number of micro-batches ran"
    for microbatches in found[0]:
        losses, gradients = alone(config, microbatches)
        ended = [rank[microbatches][0] for rank in found if rank[microbatches][0]]
        assert len(ended) == 1 and ended[0] == pytest.approx(losses, rel=1e-12)
        merged = {block: g for rank in found for block, g in rank[microbatches][1].items()}
        assert merged == pytest.approx(gradients, rel=1e-12)


def identity(rank: int, ranks: int, schedule: str) -> list[list[float]]:
    """Squared errors over 20 steps of 4 micro-batches and fewer, of changing shapes, through the identity."""
    config = config_of(schedule, 2)
    step = ChainStep(config, [1.0] * config.num_stages)
    counts = [m for m in (4, 2, 3, 1) if takes(config.schedule, 2, config.stages_per_rank, m)]
    shapes = [(1, 4), (2, 4), (2, 7), (1, 1), (3, 2)]
    return [step(numbered(100 * at, counts[at % len(counts)], shapes[at % len(shapes)]))[0] for at in range(20)]


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_labels_are_those_of_the_inputs_whatever_the_shapes(pool: Pool, schedule: str) -> None:  # BL-62
    losses = [rank for rank in pool.run(identity, 2, schedule) if any(rank)]
    assert len(losses) == 1
    assert all(len(step) > 0 for step in losses[0]) and all(loss == 0 for step in losses[0] for loss in step)


def uneven(rank: int, ranks: int) -> None:
    config = config_of("gpipe", 2)
    ChainStep(config, [1.0, 1.0])([*numbered(0, 1, (2, 4)), *numbered(1, 1, (2, 5))])


def test_micro_batches_of_several_shapes_in_one_step_are_refused(pool: Pool) -> None:
    with pytest.raises(RankFailed) as caught:
        pool.run(uneven, 2)
    assert isinstance(caught.value.exception, DataError) and "differ in shape" in str(caught.value.exception)


def under_delays(rank: int, ranks: int, schedule: str, numbers: int, steps: int) -> None:
    """Steps with passes that take up to 2 ms each, with tensors of so many float64 numbers."""
    config = config_of(schedule, 4)
    step = ChainStep(config, [1.0] * config.num_stages, seconds=0.002)
    for at in range(steps):
        losses, _ = step(numbered(at, 8, (1, numbers)))
        assert not any(losses)


@pytest.mark.parametrize("numbers", [1, 2**19], ids=["8 B", "4 MiB"])
@pytest.mark.parametrize("schedule", ["1f1b", "interleaved-1f1b", "zero-bubble", "zbv"])
def test_passes_that_drift_apart_do_not_block_each_other(pool: Pool, schedule: str, numbers: int) -> None:  # BL-60
    pool.run(under_delays, 4, schedule, numbers, 10 if numbers == 1 else 2)


def one_dies(rank: int, ranks: int) -> None:
    config = config_of("1f1b", 4)
    step = ChainStep(config, [1.0] * 4)
    step(numbered(0, 4, (1, 2)))
    if rank == 2:
        calls = iter(range(100))
        step.model.before = lambda: os.kill(os.getpid(), signal.SIGKILL) if next(calls) == 1 else None
    try:
        step(numbered(0, 4, (1, 2)))
    except RuntimeError as error:
        raise RuntimeError(f"says: {error}") from None


def test_a_rank_that_dies_leaves_the_others_with_stage_micro_batch_and_direction(pool: Pool) -> None:  # BL-60
    started = time.monotonic()
    with pytest.raises((RankDied, RankFailed)) as caught:
        pool.run(one_dies, 4)
    assert time.monotonic() - started < 60
    if isinstance(caught.value, RankFailed):
        text = str(caught.value.exception)
        assert "stage" in text and "micro-batch" in text and "recv" in text


def counted(rank: int, ranks: int, schedule: str) -> int:
    """Sends and receives of a step, after the first one, which agrees on how they go."""
    config = config_of(schedule, 4)
    step = ChainStep(config, [1.0] * config.num_stages)
    step(numbered(0, 8, (1, 2)))
    calls = 0

    class Counting(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            nonlocal calls
            calls += func.namespace == "c10d" and func._schema.name in ("c10d::send", "c10d::recv_")
            return func(*args, **(kwargs or {}))

    with Counting():
        step(numbered(0, 8, (1, 2)))
    return calls


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_each_border_carries_each_micro_batch_both_ways(pool: Pool, schedule: str) -> None:
    config = config_of(schedule, 4)
    assert pool.run(counted, 4, schedule) == [transfers(config, rank, 8, 16).count for rank in range(4)]

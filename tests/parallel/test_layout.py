"""Degrees and batches: what divides, and what the refusal says."""

from __future__ import annotations

import pytest

from paceline.errors import JobError
from paceline.parallel.batch import plan_batch
from paceline.parallel.config import BatchSection, ParallelSection
from paceline.parallel.layout import Layout, resolve_layout
from paceline.parallel.registry import strategies


def resolve(world_size: int, **degrees: int) -> Layout:
    return resolve_layout(ParallelSection(**degrees), world_size, lambda key: key.split(".")[1] in degrees)


def anything(per_rank: int) -> tuple[int, str]:
    return 5, "at most 5"


def test_the_default_replicates_over_all_ranks() -> None:
    assert resolve(4) == Layout(dp_replicate=4)
    assert resolve(8, dp_replicate=-1, tp=2) == Layout(dp_replicate=4, tp=2)


def test_a_degree_of_the_user_wins_over_the_default() -> None:
    assert resolve(8, dp_shard=-1) == Layout(dp_shard=8)


@pytest.mark.parametrize(
    ("world_size", "degrees", "text"),
    [
        (3, {"tp": 2}, "tp 2 = 2 does not divide the 3 ranks"),
        (4, {"dp_replicate": 2}, "dp_replicate 2 = 2 does not equal the 4 ranks"),
        (4, {"dp_replicate": -1, "dp_shard": -1}, "only one axis can be -1"),
        (4, {"pp": 0}, "a degree is 1 or more"),
    ],
)
def test_a_layout_that_does_not_meet_the_ranks_is_refused(world_size: int, degrees: dict[str, int], text: str) -> None:
    with pytest.raises(JobError) as error:
        resolve(world_size, **degrees)
    assert text in str(error.value)


def test_an_axis_without_a_strategy_is_refused_by_name() -> None:
    assert strategies(Layout(dp_replicate=2)) == ["ddp"]
    with pytest.raises(JobError, match="splits along pp; pp = 2 cannot run"):
        strategies(Layout(pp=2))


def test_accumulation_follows_from_the_global_batch() -> None:
    plan = plan_batch(BatchSection(global_batch=24), Layout(dp_replicate=2), anything)
    assert (plan.microbatch, plan.accumulation) == (4, 3)  # 4 is the largest divisor of 12 up to 5
    fixed = plan_batch(BatchSection(global_batch=24, microbatch=2), Layout(dp_replicate=4), anything)
    assert (fixed.microbatch, fixed.accumulation) == (2, 3)


def test_a_batch_that_does_not_divide_names_what_would() -> None:
    with pytest.raises(JobError) as error:
        plan_batch(BatchSection(global_batch=7), Layout(dp_replicate=2), anything)
    assert "7 sequences do not divide over 2 data ranks" in str(error.value)
    assert "6 or 8 would divide" in str(error.value) and "1 or 7 data ranks" in str(error.value)
    with pytest.raises(JobError, match="micro-batch of 5 does not divide the 12 sequences"):
        plan_batch(BatchSection(global_batch=24, microbatch=5), Layout(dp_replicate=2), anything)

"""Degrees and batches: what divides, and what the refusal says."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from paceline.errors import JobError
from paceline.parallel.batch import plan_batch
from paceline.parallel.config import BatchSection, ParallelSection
from paceline.parallel.layout import AXES, REPLICAS, SHARDS, TOKENS, Layout, axes_name, resolve_layout
from paceline.parallel.mesh import build_mesh, subgroup
from paceline.parallel.registry import STRATEGY_OF_AXIS, strategies
from tests.pool.pool import Pool


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


def test_an_axis_without_a_strategy_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    assert strategies(Layout(dp_replicate=2)) == ["ddp"]
    assert strategies(Layout(pp=2, dp_shard=2, cp=2, tp=2)) == ["pipeline", "fsdp", "context", "tensor"]
    monkeypatch.delitem(STRATEGY_OF_AXIS, "pp")
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


def test_ranks_of_one_model_read_the_same_slice_and_one_of_them_counts() -> None:
    # BL-12, BL-15, BL-22: by coordinate, never by rank.
    layout = Layout(pp=2, dp_replicate=2, dp_shard=3, cp=2, tp=2)
    at = [layout.coordinates(rank) for rank in range(layout.world_size)]
    assert len({tuple(c.items()) for c in at}) == layout.world_size == 48
    assert at[1] == {"pp": 0, "dp_replicate": 0, "dp_shard": 0, "cp": 0, "tp": 1}
    for rank, c in enumerate(at):
        assert layout.data_rank(rank) == c["dp_replicate"] * 3 + c["dp_shard"]
    counting = [c for rank, c in enumerate(at) if layout.counts_loss(rank)]
    # Each stage, since any of them may end in the loss; those that do not add nothing.
    assert len(counting) == layout.dp * layout.cp * layout.pp and all(c["tp"] == 0 for c in counting)
    speaking = [layout.data_rank(rank) for rank in range(48) if layout.counts_samples(rank)]
    assert sorted(speaking) == list(range(6))


def test_groups_are_named_after_what_they_split() -> None:
    layout = Layout(dp_replicate=2, dp_shard=2, tp=2)
    assert axes_name(layout) == "dp+tp" and axes_name(layout, SHARDS) == "dp_shard"
    assert axes_name(layout, TOKENS) == "dp" and axes_name(layout, ("cp",)) == ""
    assert axes_name(Layout(pp=2, dp_shard=2, cp=2), SHARDS) == "dp_shard+cp"
    assert (Layout(dp_replicate=2, cp=2).replicas, Layout(dp_replicate=2, cp=2).shards) == (4, 1)
    assert (Layout(dp_shard=2, cp=2).replicas, Layout(dp_shard=2, cp=2).shards) == (1, 4)


def groups_of(rank: int, ranks: int, layout: Layout, asked: list[tuple[str, ...]]) -> list[list[int]]:
    mesh = build_mesh(layout, torch.device("cpu"))
    found = [mesh.group(*axes) for axes in asked]
    members = [[rank] if group is None else dist.get_process_group_ranks(group) for group in found]
    pairs = subgroup(mesh, "tp", 2) if layout.tp > 1 else None
    return [*members, [rank] if pairs is None else dist.get_process_group_ranks(pairs)]


@pytest.mark.limit(120)
@pytest.mark.parametrize(
    "layout",
    [
        Layout(dp_replicate=2, dp_shard=2, cp=2),
        Layout(dp_shard=2, tp=4),
        Layout(dp_replicate=2, cp=2, tp=2),
        Layout(tp=8),
    ],
    ids=str,
)
def test_groups_hold_the_ranks_that_differ_in_their_axes_alone(pool: Pool, layout: Layout) -> None:
    asked: list[tuple[str, ...]] = [*((axis,) for axis in AXES), SHARDS, REPLICAS, TOKENS]
    if layout.dp_shard > 1:
        asked.remove(REPLICAS)
    if layout.dp_shard == 1:
        asked.remove(SHARDS)
    at = [layout.coordinates(rank) for rank in range(8)]
    found = pool.run(groups_of, 8, layout, asked, timeout=90)
    for rank, (*groups, pairs) in enumerate(found):
        for axes, group in zip(asked, groups, strict=True):
            alike = [r for r in range(8) if all(at[r][a] == at[rank][a] for a in AXES if a not in axes)]
            assert group == alike, (layout, axes)
        assert pairs == ([rank] if layout.tp == 1 else [rank // 2 * 2, rank // 2 * 2 + 1])

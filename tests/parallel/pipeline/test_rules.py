"""The count rules of each schedule against torch's own errors, and its orders against torch's."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from torch.distributed.pipelining.schedules import _simulate_comms_compute

from paceline.errors import JobError
from paceline.parallel.config import ParallelSection
from paceline.parallel.layout import Layout
from paceline.parallel.pipeline.config import SCHEDULES, PipelineConfig, ScheduleName
from paceline.parallel.pipeline.order import order
from paceline.parallel.pipeline.rules import check_microbatches, pipeline_config, takes
from tests.parallel.pipeline.engine import engine_order, engine_schedule

STAGES_PER_RANK = {"gpipe": (1,), "1f1b": (1,), "interleaved-1f1b": (2, 3), "zero-bubble": (1, 2, 3), "zbv": (2,)}
GRID = [
    PipelineConfig(schedule, ranks, per_rank)
    for schedule in SCHEDULES
    for ranks in (2, 3, 4, 8)
    for per_rank in STAGES_PER_RANK[schedule]
]
MICROBATCHES = {2: range(1, 13), 3: range(1, 16), 4: range(1, 18), 8: (1, 7, 8, 9, 15, 16, 17)}


def engine_takes(config: PipelineConfig, microbatches: int) -> bool:
    """Whether torch makes the schedule, and its list of actions with sends and receives comes to an end."""
    try:
        schedule = engine_schedule(config, microbatches)
    except ValueError:
        return False
    if config.schedule not in ("gpipe", "1f1b"):
        assert comes_to_an_end(schedule, config)
    return True


def comes_to_an_end(schedule: Any, config: PipelineConfig) -> bool:
    """torch's own dry run of passes, sends and receives; it raises where every rank waits."""
    listed = {
        rank: [a for a in actions if a.computation_type.value not in ("UNSHARD", "RESHARD", "REDUCE_GRAD")]
        for rank, actions in schedule.pipeline_order_with_comms.items()
    }
    return bool(_simulate_comms_compute(listed, config.rank_of, config.num_stages))


@pytest.mark.parametrize("config", GRID, ids=lambda c: f"{c.schedule} {c.ranks}x{c.stages_per_rank}")
def test_rules_and_orders_are_the_engines(config: PipelineConfig) -> None:  # BL-58
    for microbatches in MICROBATCHES[config.ranks]:
        taken = takes(config.schedule, config.ranks, config.stages_per_rank, microbatches)
        assert taken == engine_takes(config, microbatches), microbatches
        if taken:
            assert [[str(a) for a in actions] for actions in order(config, microbatches)] == engine_order(
                config, microbatches
            )


def test_stages_go_around_the_ranks_or_there_and_back_again() -> None:
    assert [PipelineConfig("interleaved-1f1b", 3, 2).stages_of(r) for r in range(3)] == [(0, 3), (1, 4), (2, 5)]
    assert [PipelineConfig("zbv", 3, 2).stages_of(r) for r in range(3)] == [(0, 5), (1, 4), (2, 3)]
    for config in GRID:
        assert config.num_stages == sum(len(config.stages_of(rank)) for rank in range(config.ranks))


def section(**keys: object) -> ParallelSection:
    return ParallelSection(**keys)  # type: ignore[arg-type]


def refused(pp: int = 4, blocks: int = 8, **keys: object) -> JobError:
    with pytest.raises(JobError) as caught:
        pipeline_config(
            section(pp=pp, **keys), Layout(pp=pp), [1.0] * blocks, lambda key: key.removeprefix("parallel.") in keys
        )
    return caught.value


def test_more_stages_than_blocks_are_refused_with_numbers() -> None:
    error = refused(pp=4, blocks=3)
    assert error.key == "parallel.pp" and "4 stages" in str(error) and "3 blocks" in str(error)
    assert "at most 3" in str(error.hint)
    assert "at most 2" in str(refused(pp=4, blocks=5, pp_schedule="interleaved-1f1b").hint)


@pytest.mark.parametrize(
    ("schedule", "per_rank"), [("gpipe", 2), ("1f1b", 2), ("interleaved-1f1b", 1), ("zbv", 1), ("zbv", 3)]
)
def test_stages_that_a_schedule_does_not_run_are_refused(schedule: ScheduleName, per_rank: int) -> None:
    error = refused(pp=2, pp_schedule=schedule, pp_stages_per_rank=per_rank)
    assert error.key == "parallel.pp_stages_per_rank" and schedule in str(error) and str(per_rank) in str(error)


@pytest.mark.parametrize("key", [("pp_schedule", "gpipe"), ("pp_stages_per_rank", 2), ("pp_layers", (1, 2))])
def test_keys_of_a_pipeline_have_no_effect_without_one(key: tuple[str, object]) -> None:
    keys: dict[str, Any] = dict([key])
    error = refused(pp=1, **keys)
    assert error.key == f"parallel.{key[0]}" and "no effect with pp = 1" in str(error)


@pytest.mark.parametrize("layers", [(4, 4), (3, 3, 1, 0), (2, 2, 2, 3)])
def test_given_stages_have_to_hold_all_blocks(layers: tuple[int, ...]) -> None:
    error = refused(pp=4, blocks=8, pp_layers=layers)
    assert error.key == "parallel.pp_layers" and str(list(layers)) in str(error) and "8" in str(error)


def test_too_few_or_uneven_micro_batches_are_refused_with_those_that_would_do() -> None:  # BL-58, BL-59
    with pytest.raises(JobError, match="at least as many micro-batches as stages, 4, and there are 3") as caught:
        check_microbatches(PipelineConfig("1f1b", 4, 1, (1, 1, 1, 1)), 3, per_rank=12)
    assert caught.value.key == "batch.microbatch" and "1 or 2 or 3" in str(caught.value.hint)
    with pytest.raises(JobError, match="2 rounds") as caught:
        check_microbatches(PipelineConfig("zero-bubble", 4, 1, (1, 1, 1, 1)), 9, per_rank=9)
    assert caught.value.values["valid_microbatches"] == [1, 3]
    with pytest.raises(JobError) as caught:
        check_microbatches(PipelineConfig("1f1b", 4, 1, (1, 1, 1, 1)), 2, per_rank=2)
    assert "Raise batch.global_batch" in str(caught.value.hint)


def test_what_a_schedule_takes_passes() -> None:
    for schedule, microbatches in itertools.product(SCHEDULES, (4, 8, 12)):
        check_microbatches(PipelineConfig(schedule, 4, STAGES_PER_RANK[schedule][0]), microbatches, microbatches)

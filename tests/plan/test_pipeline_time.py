"""The closed form of each schedule against the schedule itself, played on a clock."""

from __future__ import annotations

import msgspec
import pytest

from paceline.parallel.layout import Layout
from paceline.parallel.pipeline.config import PipelineConfig, ScheduleName
from paceline.parallel.pipeline.player import StageSeconds, play
from paceline.plan.setting import Schedule
from paceline.plan.step_time import Stage, blocks_of, pipeline_seconds
from tests.plan.settings import gpt, setting

RANKS = 4


def closed_form(schedule: Schedule, stages: list[Stage], microbatches: int, per_rank: int = 1) -> float:
    layout = Layout(pp=len(stages))
    piped = setting(gpt(), layout, accumulation=microbatches, schedule=schedule, stages_per_rank=per_rank)
    return pipeline_seconds(piped, stages)


def played(
    schedule: ScheduleName, parts: list[tuple[float, float, float]], microbatches: int, per_rank: int = 1
) -> float:
    config = PipelineConfig(schedule, RANKS, per_rank, (1,) * RANKS * per_rank)
    stages = [StageSeconds(f / per_rank, b / per_rank, w / per_rank) for f, b, w in parts] * per_rank
    return play(config, microbatches, stages).step_seconds


@pytest.mark.parametrize("microbatches", [4, 8, 16])
@pytest.mark.parametrize(("schedule", "per_rank"), [("1f1b", 1), ("gpipe", 1), ("interleaved-1f1b", 2)])
def test_equal_stages_take_what_the_player_says(schedule: Schedule, per_rank: int, microbatches: int) -> None:
    form = closed_form(schedule, [Stage(1.0, 1.0, 1.0, 0.0)] * RANKS, microbatches, per_rank)
    assert form == pytest.approx(played(schedule, [(1.0, 1.0, 1.0)] * RANKS, microbatches, per_rank))  # type: ignore[arg-type]


@pytest.mark.parametrize("slow", range(RANKS))
def test_one_slow_stage_sets_the_pace(slow: int) -> None:
    parts = [(1.0, 1.0, 1.0)] * RANKS
    parts[slow] = (1.5, 1.5, 1.5)
    stages = [Stage(*part, 0.0) for part in parts]
    assert closed_form("1f1b", stages, 16) == pytest.approx(played("1f1b", parts, 16))


def test_a_split_backward_pass_fills_the_bubble() -> None:
    stages = [Stage(1.0, 1.0, 1.0, 0.0)] * RANKS
    split, whole = (closed_form(name, stages, 16) for name in ("zero-bubble", "1f1b"))
    # The closed form is of stages that are all alike; the engine's first stage does all of its backward pass at once.
    assert split == pytest.approx(played("zero-bubble", [(1.0, 1.0, 1.0)] * RANKS, 16), rel=0.03)
    assert split < whole


def test_blocks_are_dealt_out_as_evenly_as_they_go_and_fewer_where_said() -> None:
    uneven = setting(gpt(layers=70), Layout(pp=12), first_layers=1, last_layers=1)
    assert blocks_of(uneven) == [5, *[6] * 10, 5]
    even = msgspec.structs.replace(uneven, spec=gpt(layers=14), layout=Layout(pp=4), first_layers=0, last_layers=0)
    assert blocks_of(even) == [4, 4, 3, 3]

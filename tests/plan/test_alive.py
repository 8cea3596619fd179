"""What a pipeline keeps alive, by closed form, beside the schedules that our own engine plays."""

from __future__ import annotations

import pytest

from paceline.parallel.layout import Layout
from paceline.parallel.pipeline.config import PipelineConfig
from paceline.parallel.pipeline.player import peak_kept
from paceline.plan.alive import alive, stage_layers, stages_of
from paceline.plan.setting import Setting
from tests.plan.settings import gpt, setting


def piped(schedule: str, ranks: int, per_rank: int, microbatches: int, layers: int = 24, **changes: object) -> Setting:
    return setting(gpt(layers=layers), Layout(pp=ranks), schedule=schedule, stages_per_rank=per_rank,
                   accumulation=microbatches, **changes)  # fmt: skip


@pytest.mark.parametrize(
    ("schedule", "ranks", "per_rank", "microbatches"),
    [
        ("gpipe", 4, 1, 7), ("1f1b", 4, 1, 8), ("1f1b", 8, 1, 8), ("1f1b", 4, 1, 32), ("interleaved-1f1b", 4, 2, 8),
        ("interleaved-1f1b", 4, 3, 16), ("interleaved-1f1b", 8, 3, 24), ("zero-bubble", 4, 1, 16),
    ],
)  # fmt: skip
def test_blocks_alive_are_those_of_the_played_schedule(
    schedule: str, ranks: int, per_rank: int, microbatches: int
) -> None:
    found = piped(schedule, ranks, per_rank, microbatches)
    layers = stage_layers(found)
    config = PipelineConfig(schedule, ranks, per_rank, layers)  # type: ignore[arg-type]
    for rank in range(ranks):
        counts = alive(found, rank)
        blocks = sum(count * layers[stage] for count, stage in zip(counts, stages_of(found, rank), strict=True))
        assert blocks == peak_kept(config, microbatches, rank, layers), f"rank {rank}"


def test_the_v_keeps_as_many_on_every_rank() -> None:
    found = piped("zbv", 4, 2, 16)
    config = PipelineConfig("zbv", 4, 2, stage_layers(found))
    assert max(peak_kept(config, 16, rank, [1] * 8) for rank in range(4)) == sum(alive(found, 0)) == 8
    assert stages_of(found, 1) == config.stages_of(1)


def test_twice_the_limit_keeps_nearly_twice_as_many() -> None:
    assert alive(piped("zero-bubble-2p", 8, 1, 64), 0) == (15,)
    assert alive(piped("zero-bubble-2p", 8, 1, 4), 0) == (4,)


def test_first_and_last_stages_short_of_a_block() -> None:
    assert stage_layers(piped("1f1b", 8, 1, 8, layers=22, first_layers=1, last_layers=1)) == (2, 3, 3, 3, 3, 3, 3, 2)


def test_what_does_not_divide_goes_to_the_first_stages() -> None:
    assert stage_layers(piped("1f1b", 4, 1, 8, layers=10)) == (3, 3, 2, 2)


def test_blocks_as_given_are_taken() -> None:
    assert stage_layers(setting(gpt(layers=10), Layout(pp=2), layers=(7, 3))) == (7, 3)

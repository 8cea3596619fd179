"""Pipeline parallelism: the axis it brings, its schedules and the stages of each rank. Imports no torch."""

from __future__ import annotations

from typing import Literal, get_args

import msgspec

AXIS = "pp"

ScheduleName = Literal["gpipe", "1f1b", "interleaved-1f1b", "zero-bubble", "zbv"]
SCHEDULES: tuple[ScheduleName, ...] = get_args(ScheduleName)

DEFAULT_SCHEDULE: ScheduleName = "1f1b"

SPLIT_BACKWARD: tuple[ScheduleName, ...] = ("zero-bubble", "zbv")
"""Schedules that run a backward pass in two parts: gradients of a stage's input first, those of its weights later."""


class PipelineConfig(msgspec.Struct, frozen=True):
    """Settings of the pipeline strategy, resolved.

    schedule: the order in which each rank runs its forward and backward passes.
    ranks: the degree of the axis.
    stages_per_rank: parts of the model that each rank holds; the model is cut into `ranks` x `stages_per_rank`.
    layers: blocks of each stage, in the order of the model. The first stage also holds the embedding, the last one the
        last norm and the output head.
    """

    schedule: ScheduleName = DEFAULT_SCHEDULE
    ranks: int = 1
    stages_per_rank: int = 1
    layers: tuple[int, ...] = ()

    @property
    def num_stages(self) -> int:
        return self.ranks * self.stages_per_rank

    @property
    def splits_backward(self) -> bool:
        return self.schedule in SPLIT_BACKWARD

    def rank_of(self, stage: int) -> int:
        """The rank that holds a stage: stages go around the ranks, or there and back again in the shape of a V."""
        turn, place = divmod(stage, self.ranks)
        return self.ranks - 1 - place if self.schedule == "zbv" and turn % 2 else place

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """The stages that a rank holds, in the order of the model."""
        back = self.ranks - 1 - rank if self.schedule == "zbv" else rank
        return tuple(turn * self.ranks + (back if turn % 2 else rank) for turn in range(self.stages_per_rank))

    def blocks_of(self, stage: int) -> range:
        """The numbers of a stage's blocks."""
        first = sum(self.layers[:stage])
        return range(first, first + self.layers[stage])


NO_PIPELINE = PipelineConfig()

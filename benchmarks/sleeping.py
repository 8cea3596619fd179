"""Stages that sleep where others compute: forward, gradient of the input and gradient of the weight, each by itself."""

from __future__ import annotations

import time
from typing import Any

import torch
from torch import Tensor, nn

from paceline.model.transformer import Passage
from paceline.parallel.pipeline.config import PipelineConfig


class Alive:
    """Micro-batches of this process that await a part of their backward, and the most there were."""

    def __init__(self) -> None:
        self.now = self.most = 0

    def __call__(self, change: int) -> None:
        self.now += change
        self.most = max(self.most, self.now)


alive = Alive()


class Kept:
    """Counts as alive for as long as autograd's graph holds it."""

    def __init__(self) -> None:
        alive(1)

    def __del__(self) -> None:
        alive(-1)


class SleepForInput(torch.autograd.Function):
    """The forward, and the part of the backward that the stage before waits for."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, seconds: float) -> Tensor:
        time.sleep(seconds)
        ctx.seconds = seconds
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        time.sleep(ctx.seconds)
        return grad, None


class SleepForWeight(torch.autograd.Function):
    """The part of the backward that nobody waits for. What it keeps is what a stage keeps of a micro-batch."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, seconds: float) -> Tensor:
        ctx.seconds, ctx.kept = seconds, Kept()
        return weight.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        time.sleep(ctx.seconds)
        ctx.kept = None
        return grad, None


class SleepingBlock(nn.Module):
    """One block of a stage; sleeps `seconds` in each part."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.seconds = seconds
        self.weight = nn.Parameter(torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        weight: Tensor = SleepForWeight.apply(self.weight, self.seconds)  # type: ignore[no-untyped-call]
        y: Tensor = SleepForInput.apply(x, self.seconds)  # type: ignore[no-untyped-call]
        return y + weight


class SleepingStages(nn.Module):
    """What a pipeline runs on a rank: its blocks, one for each of its stages, behind an embedding on the first."""

    def __init__(self, config: PipelineConfig, rank: int, seconds: float) -> None:
        super().__init__()
        self.passage: Passage | None = None
        blocks = [block for stage in config.stages_of(rank) for block in config.blocks_of(stage)]
        self.blocks = nn.ModuleDict({str(block): SleepingBlock(seconds) for block in blocks})
        self.embedding = nn.Parameter(torch.zeros(1)) if 0 in blocks else None

    def residual_shape(self, tokens: Tensor) -> tuple[int, ...]:
        return (1,)

    def loss(self, batch: dict[str, Any]) -> Tensor:
        return self(batch).sum()  # type: ignore[no-any-return]

    def forward(self, batch: dict[str, Any]) -> Tensor:
        assert self.passage is not None
        x = self.embedding if self.passage.entering_BLD is None else self.passage.entering_BLD
        for number in self.passage.blocks:
            x = self.blocks[str(number)](x)
        assert x is not None
        return x

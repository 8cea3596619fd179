"""A model of named weights that runs in stages, and its step under a pipeline."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from paceline.model.transformer import Passage
from paceline.parallel.layout import Layout
from paceline.parallel.mesh import build_mesh
from paceline.parallel.pipeline.apply import Pipeline
from paceline.parallel.pipeline.config import PipelineConfig

Batch = dict[str, Any]
CPU = torch.device("cpu")


class Scale(nn.Module):
    """y = x * weight; `kept` counts what autograd holds for it."""

    def __init__(self, weight: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((1,), weight, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight


class Chain(nn.Module):
    """Blocks in a row over `batch["tokens"]`, those of one rank; the identity where all weights are 1."""

    def __init__(self, config: PipelineConfig, rank: int, weights: Sequence[float], before: Callable[[], None]) -> None:
        super().__init__()
        self.passage: Passage | None = None
        self.before = before
        own = [block for stage in config.stages_of(rank) for block in config.blocks_of(stage)]
        self.blocks = nn.ModuleDict({str(block): Scale(weights[block]) for block in own})

    def residual_shape(self, tokens: Tensor) -> tuple[int, ...]:
        return tuple(tokens.shape)

    def forward(self, batch: Batch) -> Tensor:
        assert self.passage is not None
        self.before()
        x = batch["tokens"].double() if self.passage.entering_BLD is None else self.passage.entering_BLD
        for number in self.passage.blocks:
            x = self.blocks[str(number)](x)
        return x


class ChainStep:
    """Losses and gradients of one step after the other on this rank."""

    def __init__(self, config: PipelineConfig, weights: Sequence[float], seconds: float = 0.0) -> None:
        self.rank = dist.get_rank()
        draw = random.Random(self.rank)
        self.model = Chain(
            config, self.rank, weights, lambda: time.sleep(draw.uniform(0, seconds)) if seconds else None
        )
        self.pipeline = Pipeline(self.model, config, build_mesh(Layout(pp=config.ranks), CPU), CPU)

    def __call__(self, batches: Sequence[Batch]) -> tuple[list[float], dict[int, float]]:
        """Squared errors of each micro-batch (where this rank has the last stage), and the gradient of each own block."""
        for parameter in self.model.parameters():
            parameter.grad = None
        losses: list[float] = []

        def last(batch: Batch) -> Tensor:
            loss: Tensor = (self.model(batch) - batch["labels"]).square().sum()
            losses.append(loss.item())
            return loss

        self.pipeline.run(batches, self.model, last, lambda part: None)
        gradients = {
            int(n): 0.0 if p.grad is None else p.grad.item()
            for n, b in self.model.blocks.items()
            for p in b.parameters()
        }
        return losses, gradients


def numbered(first: int, count: int, shape: tuple[int, ...]) -> list[Batch]:
    """Micro-batches of which each is filled with its own number, and labelled with it."""
    full = [torch.full(shape, float(first + n)) for n in range(count)]
    return [{"tokens": t, "labels": t.double()} for t in full]

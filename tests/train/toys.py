"""Small modules whose right answers are plain arithmetic, and a step built over them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from paceline.optim.config import OptimizerSection
from paceline.optim.optimizer import build_optimizer
from paceline.parallel.apply import Applied, apply_strategies
from paceline.parallel.ddp.apply import BucketReducer, LocalReducer
from paceline.parallel.ddp.config import DdpConfig
from paceline.parallel.fsdp.config import FsdpConfig, ZeroStage
from paceline.parallel.layout import Layout
from paceline.parallel.mesh import build_mesh
from paceline.train.step import Batch, TrainStep


class Slope(nn.Module):
    """The linear toy: one parameter w; a token with constant c has loss c x w, so its gradient is c.

    With a shape of (1,) it can be sharded: the first rank has all of it.
    """

    def __init__(self, dtype: torch.dtype = torch.float64, shape: tuple[int, ...] = ()) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.ones(shape, dtype=dtype))

    def forward(self, c: Tensor) -> Tensor:
        return c.to(self.w.dtype) * self.w


def slope_forward(model: nn.Module, batch: Batch) -> Tensor:
    out: Tensor = model(batch["c"])
    return out


def sum_and_count(output: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
    return output.sum(), torch.tensor(float(output.numel()))


def tokens(*constants: float) -> Batch:
    """One micro-batch: a token per constant."""
    return {"c": torch.tensor(constants, dtype=torch.float64)}


@dataclass(frozen=True)
class Sharding:
    """A way to shard a toy over the ranks of the default group."""

    stage: ZeroStage = 3
    replicas: int = 1
    every_microbatch: bool = True


def make_sharded_step(
    model: nn.Module,
    sharding: Sharding,
    forward: Any = slope_forward,
    loss: Any = sum_and_count,
    *,
    blocks: Sequence[nn.Module] = (),
    optimizer: OptimizerSection | None = None,
    prescale: float = 1.0,
    clip_norm: float = 0.0,
) -> tuple[TrainStep, Applied]:
    """`make_step` with the model's tensors sharded; weights are read through `Applied.whole_weights`."""
    cpu, world = torch.device("cpu"), dist.get_world_size()
    layout = Layout(dp_replicate=sharding.replicas, dp_shard=world // sharding.replicas)
    applied = apply_strategies(
        model, blocks, build_mesh(layout, cpu), ddp=DdpConfig(), device=cpu,
        fsdp=FsdpConfig(sharding.stage, reduce_every_microbatch=sharding.every_microbatch),
    )  # fmt: skip
    section = optimizer or OptimizerSection(name="sgd", weight_decay=0.0)
    step = TrainStep(
        model, forward, loss, build_optimizer(section, applied.parameters), applied.reducer,
        group=dist.group.WORLD, prescale=prescale, clip_norm=clip_norm, device=cpu,
    )  # fmt: skip
    return step, applied


def make_step(
    model: nn.Module,
    forward: Any = slope_forward,
    loss: Any = sum_and_count,
    *,
    optimizer: OptimizerSection | None = None,
    config: DdpConfig | None = None,
    prescale: float = 1.0,
    clip_norm: float = 0.0,
) -> TrainStep:
    """A step over the default group (one rank where there is none)."""
    section = optimizer or OptimizerSection(name="sgd", weight_decay=0.0)
    alone = not dist.is_initialized() or dist.get_world_size() == 1
    reducer = (
        LocalReducer(model.parameters())
        if alone
        else BucketReducer(model.parameters(), dist.group.WORLD, config or DdpConfig())
    )
    return TrainStep(
        model,
        forward,
        loss,
        build_optimizer(section, model.named_parameters()),
        reducer,
        group=None if alone else dist.group.WORLD,
        prescale=prescale,
        clip_norm=clip_norm,
        device=torch.device("cpu"),
    )

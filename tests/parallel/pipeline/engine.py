"""torch's schedules over stages that are there in name only: their orders and their own errors."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from torch import nn
from torch.distributed.pipelining import schedules

from paceline.parallel.pipeline.config import PipelineConfig

CLASSES = {
    "gpipe": schedules.ScheduleGPipe,
    "1f1b": schedules.Schedule1F1B,
    "interleaved-1f1b": schedules.ScheduleInterleaved1F1B,
    "zero-bubble": schedules.ScheduleInterleavedZeroBubble,
    "zbv": schedules.ScheduleZBVZeroBubble,
}


def engine_schedule(config: PipelineConfig, microbatches: int, rank: int = 0) -> Any:
    """torch's schedule of a configuration; raises what torch raises."""
    stages = [
        SimpleNamespace(
            stage_index=stage, num_stages=config.num_stages, group_size=config.ranks, group_rank=rank, submod=nn.Module(),
            is_first=stage == 0, is_last=stage == config.num_stages - 1,
        )
        for stage in config.stages_of(rank)
    ]  # fmt: skip
    make = CLASSES[config.schedule]
    if config.schedule in ("gpipe", "1f1b"):
        return make(stages[0], microbatches, loss_fn=_loss, scale_grads=False)
    return make(stages, microbatches, loss_fn=_loss, scale_grads=False)


def engine_order(config: PipelineConfig, microbatches: int) -> list[list[str]]:
    """The passes of each rank as torch lists them, communication left out.

    torch 2.13 writes the micro-batches of 1f1b's last stage one too high (and runs them as they should be).
    """
    listed = engine_schedule(config, microbatches).pipeline_order
    found = [
        [a for a in listed[rank] if a is not None and a.computation_type.value in "FBIW"] for rank in sorted(listed)
    ]
    if config.schedule == "1f1b" and found[-1][0].microbatch_index == 1:
        found[-1] = [
            a._replace(microbatch_index=a.microbatch_index - 1) if a.computation_type.value == "F" else a
            for a in found[-1]
        ]
    return [[str(a) for a in actions] for actions in found]


def _loss(output: Any, target: Any) -> Any:
    raise NotImplementedError("these stages do not run")

"""Memory of a setting of our own engine: `parallel.memory.rank_memory` behind the record of a plan. Imports no torch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

from paceline.job.resolve import Resolved
from paceline.parallel.batch import BatchPlan
from paceline.parallel.context.config import ContextConfig
from paceline.parallel.fsdp.config import FsdpConfig
from paceline.parallel.memory import RankMemory, rank_memory
from paceline.parallel.pipeline.balance import balanced_layers, layer_costs
from paceline.parallel.pipeline.config import NO_PIPELINE, PipelineConfig, ScheduleName
from paceline.parallel.tensor.config import NO_TENSOR, TensorConfig
from paceline.parallel.transforms import Transforms
from paceline.plan.setting import Setting, StageMemory
from paceline.plan.verdict import OWN_SIGMA, gathered_up


def own_stages(setting: Setting) -> tuple[StageMemory, ...]:
    """Each rank of the pipeline, as the engine keeps it."""
    pipeline = pipeline_of(setting)
    return stages_of_ranks([_rank_memory(setting, pipeline, rank) for rank in range(pipeline.ranks)])


def stages_of_ranks(memories: Sequence[RankMemory]) -> tuple[StageMemory, ...]:
    """The three figures of each rank of a pipeline."""
    return tuple(_stage(rank, memory) for rank, memory in enumerate(memories))


def pipeline_of(setting: Setting) -> PipelineConfig:
    """The pipeline as the engine cuts it, balanced by cost where the setting does not name the blocks of each stage."""
    if setting.layout.pp == 1:
        return NO_PIPELINE
    layers = setting.layers or balanced_layers(
        layer_costs(setting.spec, setting.sequence_length), setting.layout.pp * setting.stages_per_rank
    )
    return PipelineConfig(cast(ScheduleName, setting.schedule), setting.layout.pp, setting.stages_per_rank, layers)


def _rank_memory(setting: Setting, pipeline: PipelineConfig, pp_rank: int) -> RankMemory:
    layout = setting.layout
    batch = BatchPlan(setting.global_batch, layout.dp, setting.microbatch, setting.accumulation, "as set")
    fsdp = FsdpConfig(
        zero_stage=setting.zero_stage or 3,
        reduce_every_microbatch=setting.reduce_every_microbatch,
        gather_dtype=setting.precision if setting.precision in ("bf16", "fp16") else None,
        reduce_bf16=setting.ddp.reduce_bf16,
    )
    more: dict[str, Any] = {
        "tensor": TensorConfig(layout.tp, setting.sequence_parallel) if layout.tp > 1 else NO_TENSOR,
        "context": ContextConfig("gather" if setting.context_method == "ring" else setting.context_method),
        "transforms": Transforms(
            setting.parameter_dtype, setting.recompute, setting.offload, setting.loss_chunk_tokens
        ),
    }
    return rank_memory(
        setting.spec, layout, batch, setting.optimizer, setting.ddp, fsdp,
        sequence_length=setting.sequence_length, precision=setting.precision,
        device_kind="cpu" if setting.device.kind == "cpu" else "cuda", pipeline=pipeline, pp_rank=pp_rank, **more,
    )  # fmt: skip


def _stage(rank: int, memory: RankMemory) -> StageMemory:
    parts = {name.removesuffix("_bytes"): size for name, size in memory.to_record().items() if name != "total_bytes"}
    reserved = memory.total_bytes - memory.context_bytes
    return StageMemory(
        stage=rank,
        parts=parts,
        peak="loss",
        allocated_bytes=reserved - memory.reserve_bytes,
        reserved_bytes=reserved,
        device_bytes=memory.total_bytes,
    )


def three_figures(resolved: Resolved) -> dict[str, Any]:
    """What a plan says of a job beside its stages: allocated, reserved and device memory of the rank that needs most."""
    kind = resolved.host.device_kind
    memory = gathered_up(stages_of_ranks(resolved.stages), OWN_SIGMA[kind], resolved.memory_available_bytes)
    return {
        "allocated_bytes": memory.allocated_bytes,
        "reserved_bytes": memory.reserved_bytes,
        "device_bytes": memory.device_bytes,
        "device_p10_bytes": memory.device_p10_bytes,
        "device_p90_bytes": memory.device_p90_bytes,
        "oom_probability": memory.oom_probability,
    }

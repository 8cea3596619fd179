"""Sharded data parallelism: the axis it brings and its settings, resolved from `[parallel]`. Imports no torch."""

from __future__ import annotations

from typing import Literal

import msgspec

from paceline.parallel.config import ParallelSection

AXIS = "dp_shard"
REPLICA_AXIS = "dp_replicate"

ZeroStage = Literal[1, 2, 3]
DEFAULT_STAGE: ZeroStage = 3


class FsdpConfig(msgspec.Struct, frozen=True):
    """Settings of the sharded strategy.

    zero_stage: 3 gives gathered weights back after a forward pass, 2 after a backward pass, 1 after the last backward
        pass of an optimizer step.
    reduce_every_microbatch: gradients are reduced to this rank's shard after every micro-batch, or kept whole until the
        last one.
    gather_dtype: blocks are gathered in 16 bit (from fp32 shards); what is outside of blocks keeps its type.
    reduce_bf16: gradients travel in bf16; else in the type of the shards.
    """

    zero_stage: ZeroStage = DEFAULT_STAGE
    reduce_every_microbatch: bool = True
    gather_dtype: Literal["bf16", "fp16"] | None = None
    reduce_bf16: bool = False


def fsdp_config(parallel: ParallelSection, precision: str, *, pipelined: bool = False) -> FsdpConfig:
    """The settings that `[parallel]` asks for at a resolved precision.

    Args:
        pipelined: stages keep their weights gathered for the whole step, and reduce gradients at its end.
    """
    stage: ZeroStage = parallel.zero_stage or (1 if pipelined else DEFAULT_STAGE)
    every = "step" if pipelined else parallel.reduce_every
    return FsdpConfig(
        zero_stage=stage,
        reduce_every_microbatch=stage > 1 if every == "auto" else every == "microbatch",
        gather_dtype="bf16" if precision == "bf16" else "fp16" if precision == "fp16" else None,
        reduce_bf16=parallel.reduce_dtype == "bf16",
    )

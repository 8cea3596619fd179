"""Data parallelism: the axis it brings and its settings, resolved from `[parallel]`. Imports no torch."""

from __future__ import annotations

import msgspec

from paceline.parallel.config import ParallelSection
from paceline.units import MiB

AXIS = "dp_replicate"

DEFAULT_BUCKET_BYTES = 25 * MiB
"""PyTorch DDP's bucket size; large enough to reach a link's bandwidth, small enough to start before the backward ends."""


class DdpConfig(msgspec.Struct, frozen=True):
    """Settings of the gradient reduction. Without `reduce_bf16` gradients travel in their own type."""

    bucket_bytes: int = DEFAULT_BUCKET_BYTES
    overlap: bool = True
    reduce_bf16: bool = False


def ddp_config(parallel: ParallelSection) -> DdpConfig:
    """The settings that `[parallel]` asks for; auto values are the defaults above."""
    return DdpConfig(
        bucket_bytes=int(parallel.bucket_bytes or DEFAULT_BUCKET_BYTES),
        overlap=True if parallel.overlap is None else parallel.overlap,
        reduce_bf16=parallel.reduce_dtype == "bf16",
    )

"""What the checks weigh of a job: its derived numbers, or why it cannot be derived. Imports no torch."""

from __future__ import annotations

import msgspec

from paceline.errors import PacelineError


class JobFacts(msgspec.Struct, frozen=True, kw_only=True):
    """A job on a number of ranks. Sizes in bytes, times in seconds; `problem` where it contradicts itself or the host."""

    name: str = "job"
    problem: str = ""
    hint: str = ""
    key: str = ""
    world_size: int = 1
    local_ranks: int = 0
    global_batch: int = 0
    data_ranks: int = 1
    microbatch: int = 0
    accumulation: int = 1
    tokens_per_step: int = 0
    optimizer: str = "adamw"
    lr: float = 0.0
    lr_factor: float = 1.0
    lr_scaling: str = "none"
    lr_reference_batch: int | None = None
    warmup_steps: int = 0
    clip_norm: float = 1.0
    parameters: int = 0
    steps: int | None = None
    loader_workers: int = 0
    shared_memory: int = 0
    """What the loader of one rank needs of /dev/shm."""
    memory: int = 0
    memory_available: int = 0
    """Of the device of one rank."""
    on_cpu: bool = True
    checkpoint: int = 0
    checkpoint_place: str = ""
    keep: int = 0
    port: int | None = None
    collective_timeout: float = 600.0
    threads: int | None = None
    saved: float | None = None
    """Seconds that saves of earlier attempts took, from their records: the 99th percentile."""
    step_seconds: float = 0.0
    """Of their steps, likewise."""
    grace: float = 30.0
    """Seconds between the signal and the kill."""
    grace_source: str = "recovery.grace"


PREFETCH = 2
"""Steps ahead per loader process; the loader's own default."""

BYTES_PER_TOKEN = 16
"""A token and its label, 8 bytes each, as the loader hands them over."""


def broken(name: str, error: PacelineError) -> JobFacts:
    """The facts of a job that cannot be derived."""
    return JobFacts(name=name, problem=error.message, hint=error.hint or "", key=error.key or "")

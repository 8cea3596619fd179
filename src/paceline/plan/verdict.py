"""From the memory of each stage to a verdict: the heaviest stage, its range, the chance to run out. Imports no torch."""

from __future__ import annotations

import math

from paceline.plan.setting import DeviceMemory, Setting, StageMemory

OOM_THRESHOLD = 0.5
"""A run is said to fit where running out of memory is less likely than this."""

USABLE = 0.99
"""Share of a GPU's memory that programs get: an A100 of 80 GiB gives 81,251 MiB of 81,920, an H100 81,559."""

OWN_SIGMA = {"cpu": 0.05, "cuda": 0.05, "rocm": 0.05}
"""Standard deviation of ln(measured / predicted) of our own engine: its tensors are counted exactly, allocators and
what a process holds beside them are not."""

Z90 = 1.2815515655446004
"""90th percentile of the normal distribution."""


def gathered_up(stages: tuple[StageMemory, ...], sigma: float, usable: int) -> DeviceMemory:
    """The heaviest of several stages, with the range that `sigma` of ln(measured / predicted) gives.

    Args:
        usable: bytes of the device that programs get.
    """
    worst = max(stages, key=lambda stage: stage.device_bytes)
    low, high = math.exp(-Z90 * sigma), math.exp(Z90 * sigma)
    return DeviceMemory(
        allocated_bytes=worst.allocated_bytes,
        reserved_bytes=worst.reserved_bytes,
        device_bytes=worst.device_bytes,
        device_p10_bytes=round(worst.device_bytes * low),
        device_p90_bytes=round(worst.device_bytes * high),
        parts=worst.parts,
        stage=worst.stage,
        spread=(low, high),
        oom_probability=oom_probability(worst.device_bytes, usable, sigma),
        stages=stages,
    )


def usable_bytes(setting: Setting) -> int:
    """Memory of a device that programs get."""
    share = 1.0 if setting.device.kind == "cpu" else USABLE
    return round(setting.device.memory_bytes * share)


def oom_probability(device_bytes: float, usable: float, sigma: float) -> float:
    """Chance that the device needs more than it has, where ln(true / predicted) is normal with this deviation."""
    return 0.5 * math.erfc(math.log(usable / device_bytes) / (sigma * math.sqrt(2)))


def fits(memory: DeviceMemory, threshold: float = OOM_THRESHOLD) -> bool:
    """Whether running out of memory is less likely than `threshold`."""
    return memory.oom_probability < threshold

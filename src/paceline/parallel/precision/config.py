"""Which arithmetic a device can do, and the loss scale of fp16. Imports no torch."""

from __future__ import annotations

from paceline.cluster.probe import Host
from paceline.errors import JobError
from paceline.parallel.config import ParallelSection

ELEMENT_BYTES = {"fp64": 8, "fp32": 4, "bf16": 2, "fp16": 2}
"""Bytes of a number of each arithmetic."""

INITIAL_LOSS_SCALE = 2.0**16
"""Where the dynamic loss scale begins: as high as fp16's range, for it falls fast and rises slowly (torch.amp's default)."""

GROWTH_STEPS = 2000
"""Steps without an overflow after which the scale doubles (Micikevicius et al. 2018, arXiv 1710.03740, section 3.2)."""

MIN_LOSS_SCALE = 1.0
"""At this scale an overflow is the model's own fault, and the step a bad one."""


def check_precision(parallel: ParallelSection, precision: str, host: Host) -> None:
    """Refuse arithmetic that the device does not have.

    Raises:
        JobError: fp16 that was set, on a processor that would convert every number.
    """
    if precision == "fp16" and not host.fp16:
        raise JobError(
            f"{host.device_name} has no fp16 arithmetic: every product would be converted, slower than fp32 and less exact",
            key="parallel.precision",
            values={"precision": "fp16", "device": host.device_name},
            hint="Set parallel.precision=bf16" + (" (which it has)." if host.fast_bf16 else ", fp32 or auto."),
        )

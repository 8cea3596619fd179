"""Bytes that an optimizer keeps. Imports no torch; a test holds it to the real optimizer."""

from __future__ import annotations

from paceline.optim.config import OptimizerSection

STEP_BYTES = 4
"""AdamW keeps the step count of each tensor as one float32."""


def moments_bytes(optimizer: OptimizerSection, elements: int, tensors: int, element_bytes: int) -> int:
    """Bytes of moments for `elements` parameters in `tensors` tensors of `element_bytes` each."""
    if optimizer.name == "adamw":
        return 2 * elements * element_bytes + tensors * STEP_BYTES
    return elements * element_bytes if optimizer.momentum else 0

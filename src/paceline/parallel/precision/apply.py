"""The arithmetic of forward and loss: 16-bit by autocast over fp32 weights, or the weights' own type."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from paceline.parallel.precision.loss_scale import LossScale

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16, "fp64": torch.float64}


def autocast_of(
    precision: str, device: torch.device, parameter_dtype: str = "fp32"
) -> Callable[[], AbstractContextManager[Any]]:
    """The context of forward and loss: bf16 or fp16 autocast; nothing where weights are of the arithmetic's type."""
    if precision not in ("bf16", "fp16") or precision == parameter_dtype:
        return nullcontext
    return lambda: torch.autocast(device.type, dtype=DTYPES[precision])


def loss_scale_of(precision: str) -> LossScale | None:
    """The loss scale that the arithmetic needs: fp16's range is 2^-24 to 65504, all others' that of fp32 or wider."""
    return LossScale() if precision == "fp16" else None

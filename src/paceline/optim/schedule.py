"""The learning rate as a pure function of the optimizer step: independent of ranks, accumulation and restarts."""

from __future__ import annotations

import math

from paceline.optim.config import OptimizerSection

LINEAR_LIMIT = 1024
"""Sequences up to which `lr_scaling = "auto"` scales linearly; the square root holds beyond."""


def learning_rate(optimizer: OptimizerSection, step: int, steps: int, global_batch: int) -> float:
    """Learning rate of optimizer step `step` (0 is the first) in a run of `steps`; stays at its end value afterwards."""
    return optimizer.lr * batch_factor(optimizer, global_batch) * shape(optimizer, step, steps)


def shape(optimizer: OptimizerSection, step: int, steps: int) -> float:
    """The schedule as a share of the peak, in 0..1."""
    warmup = int(optimizer.warmup_steps)
    if step < warmup:
        return (step + 1) / warmup
    floor = optimizer.min_lr_ratio
    progress = min(1.0, (step - warmup) / max(1, steps - warmup))
    match optimizer.schedule:
        case "constant":
            return 1.0
        case "linear":
            return floor + (1 - floor) * (1 - progress)
        case "cosine":
            return floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * progress))
        case "wsd":
            decay = decay_steps(optimizer, steps)
            into_decay = min(1.0, max(0, step - (steps - decay)) / max(1, decay))
            return floor + (1 - floor) * (1 - into_decay)


def decay_steps(optimizer: OptimizerSection, steps: int) -> int:
    """Steps of wsd's final decay: as given, else a fifth of the run."""
    return int(optimizer.decay_steps) if optimizer.decay_steps is not None else max(1, steps // 5)


def batch_factor(optimizer: OptimizerSection, global_batch: int) -> float:
    """Factor on the learning rate from the global batch (sequences), never from the number of ranks.

    Linear: Goyal et al. 2017, arXiv 1706.02677. Square root: Krizhevsky 2014, arXiv 1404.5997.
    """
    reference = optimizer.lr_reference_batch
    if optimizer.lr_scaling == "none" or not reference:
        return 1.0
    match optimizer.lr_scaling:
        case "linear":
            return global_batch / reference
        case "sqrt":
            return math.sqrt(global_batch / reference)
        case "auto":
            linear = min(global_batch, LINEAR_LIMIT) / min(reference, LINEAR_LIMIT)
            return linear * math.sqrt(max(global_batch, LINEAR_LIMIT) / max(reference, LINEAR_LIMIT))


def describe(optimizer: OptimizerSection, global_batch: int) -> str:
    """The peak learning rate with its formula, for the printed derivations."""
    factor = batch_factor(optimizer, global_batch)
    peak = optimizer.lr * factor
    if optimizer.lr_scaling == "none":
        return f"{peak:g} (lr_scaling = none: follows neither ranks nor batch)"
    ratio = f"{global_batch} / {optimizer.lr_reference_batch}"
    formula = {
        "linear": f"{optimizer.lr:g} x {ratio}",
        "sqrt": f"{optimizer.lr:g} x sqrt({ratio})",
        "auto": f"{optimizer.lr:g} x {factor:g}, linear to {LINEAR_LIMIT} sequences and square root beyond, of {ratio}",
    }[optimizer.lr_scaling]
    return f"{peak:g} = {formula}"

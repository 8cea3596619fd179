"""What another global batch asks of the learning rate."""

from __future__ import annotations

import math

from paceline.optim.schedule import LINEAR_LIMIT, batch_factor
from paceline.plan.advice.facts import Facts
from paceline.plan.advice.line import Advice


def line(facts: Facts) -> Advice | None:
    """Where the learning rate was tuned at another batch, or the batch is one at which the linear rule ends."""
    optimizer, batch = facts.job.optimizer, int(facts.job.batch.global_batch)
    reference = int(optimizer.lr_reference_batch or 0)
    if reference and reference != batch and optimizer.lr_scaling != "none":
        factor = batch_factor(optimizer, batch)
        says = f"The learning rate becomes {optimizer.lr * factor:.3g} by optimizer.lr_scaling={optimizer.lr_scaling}."
        told = f"{optimizer.lr:g} at {reference} sequences x {factor:.3g} at {batch}"
        return _advice(says, told, batch, reference, optimizer.lr * factor)
    if batch <= LINEAR_LIMIT or reference == batch:
        return None
    half = batch // 2
    return _advice(
        f"With {batch} sequences a step the learning rate follows the square root of the batch: set "
        "optimizer.lr_reference_batch to the batch at which lr was tuned, and optimizer.lr_scaling=auto.",
        f"lr = {optimizer.lr:g} if it was tuned at {batch} sequences; tuned at {half}, it becomes "
        f"{optimizer.lr * math.sqrt(2):.3g} (x sqrt(2)), not {2 * optimizer.lr:.3g}. The number of devices changes nothing: "
        "the global batch is fixed",
        batch, reference, optimizer.lr,
    )  # fmt: skip


def _advice(says: str, told: str, batch: int, reference: int, lr: float) -> Advice:
    return Advice(
        "learning_rate", says, f"{told}.", {"global_batch": batch, "lr_reference_batch": reference or None, "lr": lr},
        "Goyal et al. 2017, arXiv 1706.02677 (linear); Krizhevsky 2014, arXiv 1404.5997 (square root)",
    )  # fmt: skip

"""From the global batch, the quantity people set, to micro-batch and accumulation. Imports no torch."""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from paceline.errors import JobError
from paceline.parallel.config import BatchSection
from paceline.parallel.layout import Layout


class BatchPlan(msgspec.Struct, frozen=True):
    """Sequences per optimizer step: `global_batch` = `dp` x `microbatch` x `accumulation`."""

    global_batch: int
    dp: int
    microbatch: int
    accumulation: int
    reason: str

    @property
    def per_rank(self) -> int:
        """Sequences per data rank and optimizer step."""
        return self.microbatch * self.accumulation


def plan_batch(
    batch: BatchSection,
    layout: Layout,
    largest_microbatch: Callable[[int], tuple[int, str]],
    takes: Callable[[int], bool] = lambda accumulation: True,
) -> BatchPlan:
    """Derive the micro-batch and the accumulation.

    Args:
        batch: the section.
        layout: resolved degrees.
        largest_microbatch: given the sequences per rank, the largest micro-batch wanted and why.
        takes: which accumulations the layout runs; a derived one is among them where any is.

    Raises:
        JobError: the numbers do not divide; the text says which would.
    """
    global_batch, dp = int(batch.global_batch), layout.dp
    if global_batch % dp:
        below, above = global_batch // dp * dp, (global_batch // dp + 1) * dp
        batches = f"{below} or {above}" if below else f"{above}"
        raise JobError(
            f"{global_batch} sequences do not divide over {dp} data ranks",
            key="batch.global_batch",
            values={"global_batch": global_batch, "dp": dp, "dp_that_divide": _divisors(global_batch)},
            hint=f"Take batch.global_batch={batches.split(' or ')[-1]} ({batches} would divide), "
            f"or {_listed(_divisors(global_batch))} data ranks.",
        )
    per_rank = global_batch // dp
    if batch.microbatch is None:
        wanted, reason = largest_microbatch(per_rank)
        taken = [d for d in _divisors(per_rank) if takes(per_rank // d)] or _divisors(per_rank)
        microbatch = max([d for d in taken if d <= max(1, wanted)], default=taken[0])
        reason += "" if microbatch <= max(1, wanted) else f"; the schedule takes none below {microbatch}"
    else:
        microbatch, reason = int(batch.microbatch), "set"
    if per_rank % microbatch:
        raise JobError(
            f"a micro-batch of {microbatch} does not divide the {per_rank} sequences per rank "
            f"(global_batch {global_batch} / {dp} data ranks)",
            key="batch.microbatch",
            values={"microbatch": microbatch, "per_rank": per_rank},
            hint=f"Micro-batches that divide: {_listed(_divisors(per_rank))}.",
        )
    return BatchPlan(global_batch, dp, microbatch, per_rank // microbatch, reason)


def _divisors(number: int) -> list[int]:
    return [d for d in range(1, number + 1) if number % d == 0]


def _listed(numbers: list[int]) -> str:
    shown = [str(n) for n in (numbers if len(numbers) <= 8 else [*numbers[:4], *numbers[-4:]])]
    return " or ".join(shown)

"""Which checkpoints may go. Pure: what is removed, and in which order, is the writer's."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence

import msgspec


class Kept(msgspec.Struct, frozen=True):
    """A committed checkpoint. eval_loss: the loss, over all ranks, of an evaluation at this step; None without one.

    verified: every byte of it was read back after it was committed.
    """

    step: int
    eval_loss: float | None = None
    verified: bool = True


def to_remove(steps: Sequence[Kept], keep: int, keep_best: int = 0, protected: Collection[int] = ()) -> list[int]:
    """Steps that no rule keeps, oldest first.

    Kept are the newest `keep` verified ones, the `keep_best` verified ones with the lowest finite evaluation loss (of
    equal ones the newer), everything newer than the newest verified one, and what is protected. Without a verified one
    everything is kept.

    Args:
        steps: all committed checkpoints, in any order.
        keep: at least 1.
        keep_best: 0 for none.
        protected: steps that must stay, such as the one that this attempt resumed from.
    """
    if keep < 1:
        raise ValueError(f"keep = {keep} would remove the newest checkpoint")
    verified = sorted((kept for kept in steps if kept.verified), key=lambda kept: -kept.step)
    if not verified:
        return []
    ranked = sorted((_loss(kept), -kept.step) for kept in verified if math.isfinite(_loss(kept)))
    stay = {kept.step for kept in verified[:keep]} | {-step for _, step in ranked[:keep_best]} | set(protected)
    return sorted({kept.step for kept in steps if kept.step not in stay and kept.step < verified[0].step})


def _loss(kept: Kept) -> float:
    return math.inf if kept.eval_loss is None else kept.eval_loss

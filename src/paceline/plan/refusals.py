"""A job that no layout can run: one message with the rules that forbid it and the nearest thing that would work."""

from __future__ import annotations

from paceline.errors import JobError
from paceline.job.load import Job
from paceline.plan.rejections import Rejections

SHOWN = 3
"""Rules that the message names, the most frequent first."""


def nothing_runs(job: Job, world: int, rejections: Rejections) -> JobError:
    """The error for a job all of whose layouts on `world` ranks are refused."""
    reasons = [r for r in rejections.listed() if r.of == "layouts"]
    told = "; ".join(f"{r.reason} ({r.count} layouts, such as {r.example})" for r in reasons[:SHOWN])
    batch = int(job.batch.global_batch)
    split = any("sequences do not divide" in r.reason for r in reasons)
    below, above = batch // world * world, -(-batch // world) * world
    near = f"{below} or {above}" if below and below != above else str(above)
    return JobError(
        f"no layout of {world} ranks can run it: {told}",
        key="batch.global_batch" if split else "parallel",
        values={"ranks": world, "global_batch": batch, "reasons": {r.reason: r.count for r in reasons}},
        hint=f"Take batch.global_batch={near}, which divides over {world} data ranks."
        if split
        else "Remove what the job sets in [parallel] or batch.microbatch, or take another number of devices.",
    )

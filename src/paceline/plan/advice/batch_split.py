"""A global batch that does not divide over the devices leaves only layouts that split the model."""

from __future__ import annotations

from paceline.plan.advice.facts import Facts
from paceline.plan.advice.line import Advice

FAR = 0.5
"""Share of the batch by which the nearest one that divides may differ to be worth a line."""


def line(facts: Facts) -> Advice | None:
    batch, devices = int(facts.job.batch.global_batch), facts.devices
    below, above = batch // devices * devices, -(-batch // devices) * devices
    near = [b for b in (below, above) if b and b != batch and abs(b - batch) <= FAR * batch]
    if batch % devices == 0 or not near:
        return None
    degrees = max(d for d in range(1, devices + 1) if devices % d == 0 and batch % d == 0)
    return Advice(
        "batch_split",
        f"The batch does not divide over the devices: take batch.global_batch={' or '.join(map(str, near))}, so that each "
        "may read samples of its own.",
        f"{batch} = {batch // devices} x {devices} + {batch % devices}: at most {degrees} of {devices} ranks can read "
        "samples of their own, the others must split the model or its sequences.",
        {"global_batch": batch, "devices": devices, "most_data_ranks": degrees, "near": near},
        "global_batch = data ranks x micro-batch x accumulation",
    )

"""Under half of what the devices could do: stop, and mend what takes the rest."""

from __future__ import annotations

from paceline.plan.advice.facts import Facts
from paceline.plan.advice.line import Advice
from paceline.units import format_percent, format_seconds

LEAST = 0.5
"""Efficiency under which more devices are no answer."""

WORK = ("forward", "backward", "optimizer")
"""Parts of a step that one device alone would have too."""

MEND = {
    "reduce_exposed": "a faster fabric, fewer and larger exchanges (a larger batch per device, parallel.reduce_every=step), "
    "or more of the model inside a node",
    "bubble": "more micro-batches (a larger batch.global_batch, a smaller batch.microbatch) or fewer stages",
    "data_wait": "a faster source or more data.workers",
    "telemetry": "less telemetry",
    "other": "larger micro-batches, so that launches and waits weigh less",
}


def line(facts: Facts) -> Advice | None:
    """Efficiency over one device where the job fits on one, else the share of a step that is work."""
    if facts.devices == 1:
        return None
    parts = facts.best.step.parts
    work = sum(parts.get(name, 0.0) for name in WORK)
    if facts.alone is not None:
        efficiency = facts.alone.seconds / (facts.devices * facts.best.seconds)
        told = (
            f"one device takes {format_seconds(facts.alone.seconds)} a step, {facts.devices} take "
            f"{format_seconds(facts.best.seconds)}: a speed-up of {facts.alone.seconds / facts.best.seconds:.1f} of "
            f"{facts.devices}"
        )
    else:
        efficiency = work / facts.best.seconds
        step = format_seconds(facts.best.seconds)
        told = f"{format_seconds(work)} of {step} a step are work that one device would have too"
    if efficiency >= LEAST:
        return None
    lost = {name: seconds for name, seconds in parts.items() if name not in WORK and seconds}
    worst = max(lost, key=lambda name: lost[name], default="other")
    return Advice(
        "efficiency",
        f"Stop and mend this before adding devices: efficiency is {format_percent(efficiency)}, under half. "
        f"Most is lost to {worst.replace('_', ' ')}: {MEND.get(worst, MEND['other'])}.",
        f"{told}; {', '.join(f'{name} {format_seconds(s)}' for name, s in sorted(lost.items(), key=lambda i: -i[1]))}.",
        {"efficiency": efficiency, "least": LEAST, "lost_seconds": lost},
        "the planner's step time; efficiency = speed-up / devices",
    )

"""A queue for many devices may last longer than they save over the few that are free now."""

from __future__ import annotations

from paceline.plan.advice.facts import Facts
from paceline.plan.advice.line import Advice
from paceline.units import format_seconds


def line(facts: Facts) -> Advice | None:
    run, steps = facts.run_seconds, facts.best.resolved.steps
    if run is None or steps is None or facts.devices == 1:
        return None
    if facts.alone is not None:
        few, longer = 1, steps * facts.alone.seconds
        told = f"one device needs {format_seconds(longer)}"
    else:
        few, longer = facts.devices // 2, 2 * run
        told = f"half of the devices need at most twice as long, {format_seconds(longer)}"
    if longer <= run:
        return None
    return Advice(
        "queueing",
        f"In a shared cluster take {few} now rather than wait over {format_seconds(longer - run)} for {facts.devices}.",
        f"{facts.devices} devices need {format_seconds(run)}, {told}: a queue that lasts longer than the difference, "
        f"{format_seconds(longer - run)}, loses.",
        {"break_even_seconds": longer - run, "seconds": run, "fewer_devices": few, "seconds_on_fewer": longer},
        "waiting + run on many = run on few",
    )

"""Two devices first: nearly all that fails on many fails on two, in minutes and for cents."""

from __future__ import annotations

from paceline.plan.advice.facts import Facts
from paceline.plan.advice.line import Advice

MINUTES = 10
"""What a start, twenty steps and the reading of their report take."""


def line(facts: Facts) -> Advice | None:
    if facts.devices <= 2:
        return None
    many, two = facts.devices * MINUTES / 60, 2 * MINUTES / 60
    small = "" if facts.alone is not None else " with a smaller model (model.num_layers)"
    return Advice(
        "smoke_test",
        f"Run 20 steps on two devices first{small}: paceline train JOB.toml run.steps=20 --procs 2; then paceline doctor "
        "on the nodes.",
        f"A start that fails costs {facts.devices} devices x {MINUTES} minutes = {many:,.1f} device hours, on two {two:.2f}.",
        {"device_hours": many, "device_hours_on_two": two},
        "devices x time",
    )

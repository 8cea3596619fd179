"""Across regions a reduction every step cannot be hidden; only updates that stay local for many steps can."""

from __future__ import annotations

from paceline.plan.advice.facts import Facts
from paceline.plan.advice.line import Advice
from paceline.units import format_bytes, format_seconds

REGION_BYTES_PER_SECOND = 10e9 / 8
"""A line of 10 Gbit/s between two regions, as a cloud's virtual networks give it; another line scales the figure."""

LOCAL_STEPS = 500
"""Steps between two exchanges under local updates (DiLoCo: Douillard et al. 2023, arXiv 2311.08105)."""


def line(facts: Facts) -> Advice | None:
    if facts.cluster.nodes == 1:
        return None
    gradients = 4 * facts.parameters
    exchange = 2 * gradients / REGION_BYTES_PER_SECOND
    step = facts.best.seconds
    return Advice(
        "regions",
        "Keep all nodes in one region; across regions only with local updates, which this version does not have.",
        f"Gradients of {format_bytes(gradients)}, sent and received once a step over 10 Gbit/s, take "
        f"{format_seconds(exchange)} beside a step of {format_seconds(step)}: {exchange / step:,.0f}x. Exchanged every "
        f"{LOCAL_STEPS} steps they cost {format_seconds(exchange / LOCAL_STEPS)} a step.",
        {"gradient_bytes": gradients, "exchange_seconds": exchange, "step_seconds": step, "local_steps": LOCAL_STEPS},
        "Douillard et al. 2023, arXiv 2311.08105",
    )

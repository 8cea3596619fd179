"""The document of `plan/economics.py` as text of at most 100 columns. No torch."""

from __future__ import annotations

from typing import Any

from paceline.plan.money import HOUR, HOURS_PER_MONTH
from paceline.plan.text import wrapped
from paceline.units import format_money, format_percent, format_seconds

TOLD_GAIN = 0.002
"""Share of the time that a change must gain to be told."""


def describe(document: dict[str, Any]) -> str:
    """The document's section of the plan as text."""
    cost, goodput = document["cost"], document["goodput"]
    head = f"goodput {format_percent(goodput['goodput'])}: {format_seconds(document['run_seconds'])} with failures and saves"
    if cost is not None:
        head += f", {format_money(cost['total'], cost['currency'])}"
        if cost["high"] > cost["low"]:
            head += (
                f" ({format_money(cost['low'], cost['currency'])} to {format_money(cost['high'], cost['currency'])})"
            )
    lines = [head, *(part for line in document["derivation"] for part in wrapped(line))]
    for kind, found in document["cost_by_kind"].items():
        if cost is not None and kind != cost["price_kind"]:
            told = f"{kind}: {format_money(found['total'], cost['currency'])} in {format_seconds(found['run_seconds'])}"
            lines += wrapped(told)
    lines += [part for told in _more(document) for part in wrapped(told)]
    if document["cost_reason"]:
        lines += wrapped(f"no cost: {document['cost_reason']}")
    return "\n".join([*lines, "assumed", *(part for line in document["assumptions"] for part in wrapped(line))])


def _more(document: dict[str, Any]) -> list[str]:
    """What would gain something, and whether to buy."""
    told = []
    for gain in document["gains"]:
        if gain["gain"] >= TOLD_GAIN:
            worth = (
                f", {format_money(gain['money'], document['cost']['currency'])}" if gain["money"] is not None else ""
            )
            told.append(f"{gain['change']}: goodput {format_percent(gain['goodput'])}{worth} saved")
    bought = document["rent_or_buy"]
    if bought is not None:
        used = f"used {format_percent(bought['utilisation'])} of the time"
        months = document["run_seconds"] / HOUR / HOURS_PER_MONTH
        told.append(f"bought instead, {used}: {bought['derivation'][3]}; this run takes {months:.1f}")
    return told

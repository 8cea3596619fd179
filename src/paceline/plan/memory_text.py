"""Errors of predicted memory as text for a terminal. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

NAMES = {
    "memory_allocated_bytes": "allocated",
    "memory_reserved_bytes": "reserved",
    "memory_device_bytes": "device",
}


def memory_lines(summary: Mapping[str, Any]) -> list[str]:
    """A table of errors by figure and source, and how the verdicts came out."""
    columns = f"{'rows':>5} {'median':>7} {'P90':>7} {'bias':>7} {'in range':>8} | {'fitted median':>13} {'P90':>7}"
    lines = [f"{'memory':<34} {columns}"]
    for quantity, name in NAMES.items():
        found = summary[quantity]
        if found["overall"]["rows"]:
            lines.append(_line(name, found["overall"]))
            lines += [_line(f"  {source}", errors) for source, errors in found["by_source"].items()]
    return [*lines, "", _verdicts(summary["fits"])]


def _line(name: str, errors: Mapping[str, Any]) -> str:
    fitted = errors["calibrated"]
    figures = (errors["median_absolute_relative_error"], errors["p90_absolute_relative_error"], errors["bias"])
    more = (fitted["median_absolute_relative_error"], fitted["p90_absolute_relative_error"])
    return (
        f"{name:<34} {errors['rows']:>5} " + " ".join(f"{share:>7.1%}" for share in figures)
        + f" {errors['inside_range']:>8.1%} | {more[0]:>13.1%} {more[1]:>7.1%}"
    )  # fmt: skip


def _verdicts(fits: Mapping[str, Any]) -> str:
    modelled = fits["rows"] - fits["not_modelled"]
    said = modelled - fits["not_said"]
    named = f": {', '.join(fits['wrong'])}" if fits["wrong"] else ""
    return (
        f"whether a run fits is said of {said} of {modelled} modelled runs, wrongly of {len(fits['wrong'])}{named}; "
        f"out of memory and said to fit: {fits['false_fits']}"
    )

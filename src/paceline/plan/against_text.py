"""The scoreboard as text for a terminal."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from paceline.plan.memory_text import memory_lines

ROW_HEADER = f"{'run':<60} {'measured':>9} {'predicted':>9} {'P10 to P90':>19} {'error':>7} {'fitted':>7}"
HEADER = (
    f"{'':<34} {'rows':>5} {'median':>7} {'P90':>7} {'bias':>7} {'in range':>8} {'guess':>7} {'skill':>6}"
    f" | {'fitted median':>13} {'P90':>7} | {'without own source':>18} {'P90':>7}"
)
MOST_REASONS = 12


def describe_against(document: Mapping[str, Any]) -> str:
    """Each predicted step with its error; tables of errors by source, device, quality, strategy and software, ranking, and
    what is not modelled."""
    summary = document["summary"]
    steps = [row for row in document["rows"] if row["quantity"] == "step_seconds" and row["relative_error"] is not None]
    lines = ["seconds of a step", "", ROW_HEADER, *map(_row, steps), ""]
    lines += ["errors of predicted step times; guess: the median TFLOP/s of the other runs on that device", "", HEADER]
    lines.append(_line("overall", summary["overall"]))
    for key in ("source", "device", "quality", "strategy", "software"):
        lines += ["", f"by {key}"]
        lines += [_line(name or "-", errors) for name, errors in summary[f"by_{key}"].items()]
    lines += ["", _ranking(document["groups"]), "", *memory_lines(summary["memory"])]
    if summary["far_off"]:
        lines += ["", f"more than 25% off: {', '.join(summary['far_off'])}"]
    reasons = list(summary["not_modelled"].items())
    if reasons:
        lines += ["", "not modelled"]
        lines += [f"{count:>5}  {reason}" for reason, count in reasons[:MOST_REASONS]]
        lines += [f"       and {len(reasons) - MOST_REASONS} other reasons (--json)"] if reasons[MOST_REASONS:] else []
    return "\n".join(lines)


def _row(row: Mapping[str, Any]) -> str:
    between = f"{row['p10']:.4g} to {row['p90']:.4g}"
    return (
        f"{row['id']:<60} {row['measured']:>9.4g} {row['predicted']:>9.4g} {between:>19} {row['relative_error']:>+7.1%}"
        f" {row['predicted_calibrated'] / row['measured'] - 1:>+7.1%}"
    )


def _line(name: str, errors: Mapping[str, Any]) -> str:
    fitted, others = errors["calibrated"], errors["calibrated_without_source"]
    return (
        f"{name:<34} {errors['rows']:>5} {_percent(errors['median_absolute_relative_error']):>7}"
        f" {_percent(errors['p90_absolute_relative_error']):>7} {_percent(errors['bias']):>7}"
        f" {_percent(errors['inside_range']):>8} {_percent(errors['guess_median_absolute_relative_error']):>7}"
        f" {_percent(errors['skill']):>6} | {_percent(fitted['median_absolute_relative_error']):>13}"
        f" {_percent(fitted['p90_absolute_relative_error']):>7}"
        f" | {_percent(others['median_absolute_relative_error']):>18} {_percent(others['p90_absolute_relative_error']):>7}"
    )


def _ranking(groups: Mapping[str, Any]) -> str:
    if not groups["groups"]:
        return "no groups of runs that differ only in their layout"
    return (
        f"{groups['groups']} groups of {groups['layouts_from']} and more layouts: rank correlation"
        f" {groups['median_rank_correlation']:.2f} (median); the planner's first costs"
        f" {_percent(groups['top1_regret_mean'])} on average and {_percent(groups['top1_regret_max'])} at worst over the"
        f" best, the best of its first three {_percent(groups['top3_regret_mean'])}"
    )


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{share:.1%}"

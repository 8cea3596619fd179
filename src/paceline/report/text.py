"""The report for a terminal: one run in a few lines, several side by side."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from paceline.report.ledger import LEDGER_PARTS
from paceline.units import format_bytes, format_count, format_flop_rate, format_percent, format_seconds

_Row = tuple[str, Callable[[Mapping[str, Any]], str]]
_BAR = 24


def describe(run: Mapping[str, Any]) -> str:
    """One run: verdict, figures, ledger, plan against measurement."""
    reason = f": {run['reason']}" if run["reason"] else ""
    blocks = [f"{run['name']}  {run['state']}{reason}", _figures(run), _ledger(run)]
    if run["predicted_measured"]:
        blocks.append(_planned(run))
    if run["faults"]:
        blocks.append("\n".join(["faults", *(_fault(fault) for fault in run["faults"])]))
    if run["stragglers"]:
        blocks.append("\n".join(["slow ranks", *(_straggler(one) for one in run["stragglers"])]))
    if run["torn_records"]:
        blocks.append("\n".join(["damaged records", *(f"  {line}" for line in run["torn_records"])]))
    return "\n\n".join(blocks)


def comparison_rows(runs: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """`label` and one text per run, for the tables of several runs; rows that are the same empty value are left out."""
    rows = [{"label": label, "texts": [form(run) for run in runs]} for label, form in _COMPARED]
    keys = sorted({key for run in runs for key in run["job"]})
    for key in keys:
        values = [run["job"].get(key) for run in runs]
        if any(value != values[0] for value in values) and key != "run.name":
            rows.append({"label": key, "texts": ["-" if value is None else str(value) for value in values]})
    return [row for row in rows if any(text != "-" for text in row["texts"])]


def compare(runs: Sequence[Mapping[str, Any]]) -> str:
    """Several runs side by side; the keys of their jobs that differ stand at the end."""
    rows = [{"label": "", "texts": [run["name"] for run in runs]}, *comparison_rows(runs)]
    wide = [max(len(row["texts"][i]) for row in rows) for i in range(len(runs))]
    label = max(len(row["label"]) for row in rows)
    return "\n".join(
        f"{row['label']:<{label}}  " + "  ".join(f"{text:>{wide[i]}}" for i, text in enumerate(row["texts"]))
        for row in rows
    )


def _figures(run: Mapping[str, Any]) -> str:
    lines = [(label, form(run)) for label, form in _COMPARED]
    return "\n".join(f"  {label:<20}{text}" for label, text in lines if text != "-")


def _ledger(run: Mapping[str, Any]) -> str:
    rows, total = run["ledger"], run["ledger"]["rank_seconds"]
    lines = [f"where the time went ({_seconds(total)} = wall time x ranks)"]
    for part in LEDGER_PARTS:
        seconds = rows[f"{part}_seconds"]
        if seconds and total:
            share = seconds / total
            bar = "#" * max(0, round(_BAR * share))
            lines.append(f"  {part:<16}{_seconds(seconds):>10} {format_percent(share):>7}  {bar}".rstrip())
    return "\n".join(lines)


def _planned(run: Mapping[str, Any]) -> str:
    lines = ["planned and measured"]
    for row in run["predicted_measured"]:
        form = {"bytes": format_bytes, "seconds": format_seconds, "share": format_percent}.get(row["unit"], _rate)
        planned, measured = ("-" if row[key] is None else form(row[key]) for key in ("predicted", "measured"))
        error = "" if row["relative_error"] is None else f"{row['relative_error'] * 100:+.1f}%"
        name = f"  {row['quantity']}" if row["part_of"] else row["quantity"]
        lines.append(f"  {name:<30}{planned:>12}{measured:>12}  {error}".rstrip())
    return "\n".join(lines)


def _fault(fault: Mapping[str, Any]) -> str:
    return (
        f"  step {fault['step']}  rank {fault['rank']} on {fault['host']}  {fault['kind_of_fault']}: {fault['message']}"
    )


def _straggler(one: Mapping[str, Any]) -> str:
    who = "the network" if one["rank"] is None else f"rank {one['rank']} on {one['host']}"
    return f"  step {one['step']}  {who}  {one['cause']}, {one['ratio']:.2f} times: {one['evidence']}"


def _seconds(value: float | None) -> str:
    if value is None:
        return "-"
    return format_seconds(value) if value >= 0 else f"-{format_seconds(-value)}"


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.4f}"


def _rate(value: float | None) -> str:
    return "-" if value is None else f"{value:,.0f}"


def _mfu(run: Mapping[str, Any]) -> str:
    if run["mfu"] is None:
        return "-"
    peak = run["environment"]["peak_flop_per_second"]
    return format_percent(run["mfu"]) + (f" of {format_flop_rate(peak)} a rank" if peak else "")


def _layout(run: Mapping[str, Any]) -> str:
    split = [f"{axis} {degree}" for axis, degree in run["layout"].items() if degree not in (1, "1")]
    return ", ".join(split) or ("one rank" if run["layout"] else "-")


def _memory(run: Mapping[str, Any]) -> str:
    return format_bytes(max(run["peak_memory_bytes"])) + " a rank" if run["peak_memory_bytes"] else "-"


_COMPARED: tuple[_Row, ...] = (
    ("state", lambda run: run["state"]),
    ("steps", lambda run: f"{run['steps']:,}"),
    ("tokens", lambda run: format_count(run["tokens"])),
    ("loss", lambda run: _number(run["loss"])),
    ("evaluation loss", lambda run: _number(run["eval_loss"])),
    ("bigram model", lambda run: _number(run["bigram_eval_loss"])),
    ("tokens/s", lambda run: _rate(run["tokens_per_second"])),
    ("MFU", _mfu),
    ("wall time", lambda run: _seconds(run["wall_seconds"])),
    ("goodput", lambda run: "-" if run["goodput"] is None else format_percent(run["goodput"])),
    ("attempts", lambda run: str(len(run["attempts"]))),
    ("steps done again", lambda run: str(len(run["redone_steps"])) if run["redone_steps"] else "-"),
    ("ranks", lambda run: str(run["environment"]["world_size"] or "-")),
    ("layout", _layout),
    ("precision", lambda run: run["environment"]["precision"] or "-"),
    ("peak memory", _memory),
)

"""A search's result as text of at most 100 columns. Plain lines: `rich` costs a command more than its search. No torch."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from paceline.units import format_bytes, format_money, format_percent, format_seconds

WIDTH = 100


def table(rows: Sequence[Sequence[str]], right: Iterable[int] = ()) -> list[str]:
    """Rows with their columns aligned, the first being the header; columns of `right` end together."""
    ends = set(right)
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = []
    for row in rows:
        cells = [c.rjust(w) if i in ends else c.ljust(w) for i, (c, w) in enumerate(zip(row, widths, strict=True))]
        lines.append("  ".join(cells).rstrip())
    return lines


def wrapped(text: str, indent: str = "  ", first: str = "- ", width: int = WIDTH) -> list[str]:
    """A sentence in lines of at most `width` columns, the first behind `first`, the others behind `indent`."""
    lines, line = [], first
    start = len(line)
    for word in text.split():
        if len(line) > start and len(line) + len(word) + 1 > width:
            lines.append(line)
            line, start = indent, len(indent)
        line += word if len(line) == start else f" {word}"
    return [*lines, line]


def describe_found(document: Mapping[str, Any]) -> str:
    """The plan as text."""
    lines = [*clusters(document.get("clusters", ())), f"cluster {document['cluster']}"]
    chosen = document["chosen"]
    if chosen is None:
        lines += nothing_fits(document)
    else:
        lines += ["", *headline(chosen), "", *layout_table([chosen, *document["alternatives"]])]
        lines += [*ties(document["tied"]), "", *parts(chosen), "", *memory(chosen), *front(document["front"])]
    lines += ["", *rejected(document["rejected"])]
    for title in ("advice", "assumptions"):
        told = [_line(entry) for entry in document[title]]
        if told:
            lines += ["", title, *(line for entry in told for line in wrapped(entry))]
    return "\n".join(lines)


def headline(chosen: Mapping[str, Any]) -> list[str]:
    """The chosen layout in a few lines."""
    run = chosen["run_seconds"]
    rate = f"{chosen['tokens_per_second_per_device']:,.0f} tokens/s a device, mfu {format_percent(chosen['mfu'])}"
    low, high = (format_seconds(chosen[f"step_{p}_seconds"]) for p in ("p10", "p90"))
    told = [
        f"chosen: {layout_words(chosen['layout'])}",
        f"  {format_seconds(chosen['step_seconds'])} a step, {low} to {high} with a probability of 80%; {rate}",
    ]
    if run is not None:
        told.append(f"  the run: {format_seconds(run)} of training" + money(chosen["cost"]))
    return told


def clusters(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """The best layout of each cluster beside those of the others; nothing where there is one."""
    if not rows:
        return []
    told = [["cluster", "layout", "step", "run", "cost", ""]]
    for row in rows:
        if not row["fits"]:
            told.append([row["cluster"], "nothing fits", "-", "-", "-", ""])
            continue
        run, cost = row["run_seconds"], row["cost"]
        told.append([
            row["cluster"], short_words(row["layout"]), format_seconds(row["step_seconds"]),
            "-" if run is None else format_seconds(run), "-" if not cost else money(cost)[2:].removesuffix(" with failures"),
            "slower and dearer than another" if row["beaten_by"] else "",
        ])  # fmt: skip
    return [*table(told, right=(2, 3, 4)), ""]


def money(cost: Any) -> str:
    return f", {format_money(cost['total'], cost['currency'])} with failures" if isinstance(cost, Mapping) else ""


def layout_words(layout: Mapping[str, Any]) -> str:
    """A layout's record in words."""
    degrees = [f"{a}={layout[a]}" for a in ("pp", "dp_replicate", "dp_shard", "cp", "tp") if layout[a] > 1]
    told = [" ".join(degrees) or "one device"]
    if layout.get("pp_schedule"):
        per_rank = layout["pp_stages_per_rank"]
        told.append(layout["pp_schedule"] + (f" x{per_rank}" if per_rank > 1 else ""))
    elif layout.get("zero_stage"):
        told.append(f"zero {layout['zero_stage']}")
    if "microbatch" in layout:
        told.append(f"microbatch {layout['microbatch']}")
    if layout.get("recompute", "none") != "none":
        told.append(f"recompute {layout['recompute']}")
    return ", ".join(told)


def layout_table(layouts: Sequence[Mapping[str, Any]]) -> list[str]:
    """One line a layout: step, its range, rate, memory."""
    rows = [["layout", "step", "P10 to P90", "tokens/s", "mfu", "memory", "free"]]
    for entry in layouts:
        stage = entry["memory"]["stages"][entry["memory"]["heaviest"]]
        needed = stage["total_bytes"]
        rows.append([
            short_words(entry["layout"]), format_seconds(entry["step_seconds"]),
            f"{format_seconds(entry['step_p10_seconds'])} to {format_seconds(entry['step_p90_seconds'])}",
            f"{entry['tokens_per_second_per_device']:,.0f}", format_percent(entry["mfu"]), format_bytes(needed),
            format_percent(1 - needed / entry["memory_available_bytes"]),
        ])  # fmt: skip
    return table(rows, right=(1, 3, 4, 5, 6))


def short_words(layout: Mapping[str, Any]) -> str:
    """A layout's record as short as it can be told."""
    names = {"pp": "pp", "dp_replicate": "rep", "dp_shard": "shard", "cp": "cp", "tp": "tp"}
    degrees = [f"{short}{layout[axis]}" for axis, short in names.items() if layout[axis] > 1]
    shorts = {"interleaved-1f1b": "il", "zero-bubble": "zb"}
    if layout.get("pp_schedule"):
        name, per_rank = layout["pp_schedule"], layout["pp_stages_per_rank"]
        degrees.append(shorts.get(name, name) + (str(per_rank) if per_rank > 1 else ""))
    elif layout.get("zero_stage"):
        degrees.append(f"z{layout['zero_stage']}")
    degrees.append(f"mb{layout['microbatch']}")
    again = {"none": "", "selective": "sel", "full": "full"}[layout["recompute"]]
    return " ".join([*degrees, again] if again else degrees)


def ties(tied: Mapping[str, Any] | None) -> list[str]:
    if tied is None:
        return []
    count = len(tied["layouts"])
    told = f"not ranked among each other: the first {count}, whose ranges overlap. A short trial tells them apart:"
    return ["", *wrapped(told, indent="", first=""), *(line for trial in tied["trials"] for line in command(trial))]


def command(text: str) -> list[str]:
    """A command over several lines, as a shell reads it."""
    lines = wrapped(text, indent="      ", first="  ", width=WIDTH - 2)
    return [f"{line} \\" for line in lines[:-1]] + lines[-1:]


def parts(chosen: Mapping[str, Any]) -> list[str]:
    """Where the seconds of a step go."""
    whole = chosen["step_seconds"]
    rows = [["a step", "", ""]]
    rows += [[f"  {n}", format_seconds(s), format_percent(s / whole)] for n, s in chosen["step_parts"].items() if s]
    return table(rows, right=(1, 2))


def memory(chosen: Mapping[str, Any]) -> list[str]:
    """Bytes by kind on the rank that needs most."""
    stages, heaviest = chosen["memory"]["stages"], chosen["memory"]["heaviest"]
    where = f", rank {heaviest} of pp" if len(stages) > 1 else ""
    available = format_bytes(chosen["memory_available_bytes"])
    told = [f"{k.removesuffix('_bytes')} {format_bytes(v)}" for k, v in stages[heaviest].items() if v]
    chance = chosen["memory"].get("oom_probability")
    risk = "" if chance is None else f"; it runs out with a chance of {format_percent(chance)}"
    return wrapped(f"memory of a rank{where}, of {available}: {', '.join(told)}{risk}", first="", indent="")


def front(points: Sequence[Mapping[str, Any]]) -> list[str]:
    """The trade of time for free memory, where there is one."""
    if len(points) < 2:
        return []
    rows = [["more memory free, for time", "step", "free"]]
    rows += [
        [short_words(p["layout"]), format_seconds(p["step_seconds"]), format_bytes(p["headroom_bytes"])] for p in points
    ]
    return ["", *table(rows, right=(1, 2))]


def rejected(reasons: Sequence[Mapping[str, Any]]) -> list[str]:
    """Each reason with its count and an example."""
    lines = ["rejected"]
    for entry in reasons:
        told = f"{entry['count']} {entry['of']}: {entry['reason']}; for example {entry['example']}"
        lines += wrapped(told)
    return lines


def nothing_fits(document: Mapping[str, Any]) -> list[str]:
    nearest = document["nearest"]
    if nearest is None:
        return ["", "no layout can run this job on these devices"]
    lines = ["", "no layout fits", *wrapped(f"the nearest is {layout_words(nearest['layout'])}: {nearest['reason']}")]
    return lines + [line for way in document.get("would_fit", []) for line in wrapped(way)]


def _line(entry: Any) -> str:
    return entry if isinstance(entry, str) else f"{entry['says']} {entry['arithmetic']}"

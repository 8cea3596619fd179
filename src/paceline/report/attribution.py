"""What a step is made of, on which rank it takes longest, and whether the plan was right."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from typing import Any

from paceline.report.attempts import Attempt, Entry, Run, median
from paceline.run.records import PARTS
from paceline.telemetry.stragglers import WAITS

_WARM_UP_STEPS = 2


def steady_steps(attempts: list[Attempt]) -> list[Entry]:
    """The steps that count, without the first two of an attempt (compilation, bucket building); all if no others."""
    steady = [step for a in attempts for step in a.kept if step["step"] not in _first(a, _WARM_UP_STEPS)]
    return steady or [step for attempt in attempts for step in attempt.kept]


def step_parts(steps: list[Entry]) -> dict[str, dict[str, float]]:
    """Median, 90th percentile and share of each part over the steps, and of the whole `step`."""
    timed = [step for step in steps if step.get("parts")]
    if not timed:
        return {}
    names = [part for part in PARTS if any(part in step["parts"] for step in timed)]
    names += sorted({part for step in timed for part in step["parts"]} - set(names))
    total = sum(step["seconds"] for step in timed)
    rows = {name: _spread([step["parts"].get(name, 0.0) for step in timed], total) for name in names}
    return {**rows, "step": _spread([step["seconds"] for step in timed], total)}


def rank_parts(attempts: list[Attempt]) -> list[dict[str, Any]]:
    """Per part: mean seconds a step of the slowest rank, which it is, the median over ranks, and its worst step.

    What a rank waits for others within a part is no work of its own and does not count, but for the parts that are waits.
    """
    sums: dict[str, dict[int, list[float]]] = defaultdict(lambda: defaultdict(lambda: [0.0, 0.0]))
    worst: dict[tuple[str, int], Mapping[str, Any]] = {}
    for window in (record for attempt in attempts[-1:] for record in attempt.of("window")):
        own = window.get("own") or {}
        for part, whole in window["parts"].items():
            summary = whole if part in WAITS else own.get(part, whole)
            total = sums[part][window["rank"]]
            total[0] += summary["sum"]
            total[1] += summary["count"]
            held = worst.get((part, window["rank"]))
            if held is None or summary["max"] > held["max"]:
                worst[part, window["rank"]] = summary
    rows = []
    for part, by_rank in sums.items():
        means = {rank: total / count for rank, (total, count) in by_rank.items() if count}
        if len(means) < 2:
            continue
        slowest = max(means, key=lambda rank: means[rank])
        peak = worst[part, slowest]
        rows.append(
            {
                "part": part,
                "rank": slowest,
                "mean_seconds": means[slowest],
                "median_rank_seconds": median(means.values()),
                "worst_step": peak["worst_step"],
                "worst_seconds": peak["max"],
            }
        )
    return rows


def predicted_measured(run: Run, plan: Mapping[str, Any] | None) -> list[dict[str, Any]]:
    """What was planned beside what was seen: rows of `quantity`, `unit`, `predicted`, `measured`, `relative_error`.

    `relative_error` = (predicted - measured) / measured. Parts of the memory have no measurement of their own; they
    stand below their total with `measured` null.
    """
    memory = _planned_memory(run, plan)
    total = memory.pop("total_bytes", None)
    peaks = (run.finished or {}).get("peak_memory_bytes") or []
    rows = []
    if memory or total is not None or peaks:
        planned = sum(memory.values()) if total is None and memory else total
        rows.append(_row("peak_memory", "bytes", planned, max(peaks, default=None)))
        rows += [_row(name.removesuffix("_bytes"), "bytes", size, None, "peak_memory") for name, size in memory.items()]
    chosen = (plan or {}).get("chosen") or {}
    steps = steady_steps(run.attempts)
    ranks = run.started["world_size"] if run.started else 1
    measured = {
        "step_seconds": median(step["seconds"] for step in steps) if steps else None,
        "tokens_per_second_per_device": median(step["tokens_per_second"] for step in steps) / ranks if steps else None,
        "mfu": _median_known([step.get("mfu") for step in steps]),
    }
    units = {"step_seconds": "seconds", "tokens_per_second_per_device": "tokens per second", "mfu": "share"}
    for name, seen in measured.items():
        if isinstance(chosen.get(name), (int, float)):
            rows.append(_row(name, units[name], float(chosen[name]), seen))
            rows += _step_rows(chosen, steps) if name == "step_seconds" else []
    return rows


def _step_rows(chosen: Mapping[str, Any], steps: list[Entry]) -> list[dict[str, Any]]:
    """The parts of a step as predicted, each beside its median over the measured steps."""
    seen = step_parts(steps)
    planned = {name: s for name, s in (chosen.get("step_parts") or {}).items() if isinstance(s, (int, float))}
    names = [name for name in PARTS if name in planned or name in seen]
    return [
        _row(name, "seconds", planned.get(name), seen[name]["median_seconds"] if name in seen else None, "step_seconds")
        for name in names
        if planned.get(name) or (name in seen and seen[name]["median_seconds"])
    ]


def _planned_memory(run: Run, plan: Mapping[str, Any] | None) -> dict[str, float]:
    """Planned bytes by part on the heaviest rank: of the run's own record, else of its plan."""
    parts: Mapping[str, Any] = (run.started or {}).get("planned_memory") or {}
    if not parts:
        memory = ((plan or {}).get("chosen") or {}).get("memory") or {}
        stages = memory.get("stages") or [{}]
        parts = stages[min(int(memory.get("heaviest") or 0), len(stages) - 1)]
    return {name: size for name, size in parts.items() if isinstance(size, (int, float)) and not isinstance(size, bool)}


def _row(
    quantity: str, unit: str, predicted: float | None, measured: float | None, part_of: str | None = None
) -> dict[str, Any]:
    error = None if predicted is None or not measured else (predicted - measured) / measured
    return {
        "quantity": quantity, "unit": unit, "predicted": predicted, "measured": measured, "relative_error": error,
        "part_of": part_of,
    }  # fmt: skip


def _spread(values: list[float], total_seconds: float) -> dict[str, float]:
    ordered = sorted(values)
    return {
        "median_seconds": median(ordered),
        "p90_seconds": ordered[min(len(ordered) - 1, int(0.9 * len(ordered)))],
        "share": sum(ordered) / total_seconds if total_seconds else 0.0,
    }


def _first(attempt: Attempt, count: int) -> set[int]:
    return {step["step"] for step in attempt.of("step")[:count]}


def _median_known(values: list[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return median(known) if known else None

"""The ledger: every rank-second of a run, over all attempts, in one part. The parts add up; the rest is `other`.

    rank_seconds  = sum over attempts of (wall time x ranks)
                  + sum over pauses between attempts of (seconds x ranks of the attempt that follows)
    startup         from the command to the first step, restore of a checkpoint included
    compile         what the first steps took over the usual, where the job compiles
    compute         forward and backward of the steps that count
    bubble          waiting for other stages of a pipeline
    reduce_exposed  waiting for the gradient reduction that no computation hides
    data_wait       waiting for the next batch
    optimizer       clipping and update
    evaluation      evaluations
    checkpoint      saves, as far as training stood still
    telemetry       records, live line, exporters
    idle            pauses after an attempt that ended with a verdict
    restart         from the last sign of a broken attempt to the start of the next
    redone          steps that were lost and done again, whole

A step's parts are taken per rank where every rank left a window over the step, else the writer's stand for all.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Any

from paceline.report.attempts import Attempt, Entry, median

LEDGER_PARTS = (
    "compute", "bubble", "reduce_exposed", "optimizer", "data_wait", "evaluation", "checkpoint", "telemetry", "startup",
    "compile", "restart", "idle", "redone", "other",
)  # fmt: skip
USEFUL_PARTS = ("compute", "reduce_exposed", "optimizer")
GOODPUT_DEFINITION = (
    "share of all rank-seconds spent in forward, backward, exposed reduction and optimizer of the steps that count"
)
_LEDGER_PART = {"forward": "compute", "backward": "compute"}
_COMPILE_STEPS = 3


def ledger(attempts: list[Attempt]) -> dict[str, float]:
    """`<part>_seconds` of `LEDGER_PARTS` and `rank_seconds`, in rank-seconds; the former sum to the latter."""
    spent: dict[str, float] = defaultdict(float)
    rank_seconds = 0.0
    before: Attempt | None = None
    for attempt in attempts:
        if before is not None:
            pause = (attempt.start - before.end) * attempt.ranks
            spent["idle" if before.finished else "restart"] += pause
            rank_seconds += pause
        rank_seconds += attempt.seconds * attempt.ranks
        _add_attempt(spent, attempt)
        before = attempt
    rows = {f"{part}_seconds": spent[part] for part in LEDGER_PARTS if part != "other"}
    return {**rows, "other_seconds": rank_seconds - sum(rows.values()), "rank_seconds": rank_seconds}


SAVE_STATES = ("requested", "staged", "durable", "failed")
"""States of a save, in their order."""


def goodput(rows: dict[str, float]) -> float | None:
    """`GOODPUT_DEFINITION`; None for a run without time."""
    if rows["rank_seconds"] <= 0:
        return None
    return sum(rows[f"{part}_seconds"] for part in USEFUL_PARTS) / rows["rank_seconds"]


def blocked_seconds(saves: list[Entry]) -> float:
    """Seconds for which one checkpoint held training up, of its records requested, staged and durable."""
    known = [save["blocked_seconds"] for save in saves if save.get("blocked_seconds") is not None]
    if known:
        return float(sum(known))
    by_state = {save["state"]: save["seconds"] for save in saves}
    return float(by_state.get("staged", by_state.get("durable", 0.0)))


def saves_of(records: list[Entry]) -> list[list[Entry]]:
    """The records of saves, those of one save together; what became of a checkpoint later is not among them."""
    saves: dict[tuple[int, int], list[Entry]] = {}
    for record in records:
        if record["state"] in SAVE_STATES:
            saves.setdefault((record["attempt"], record["step"]), []).append(record)
    return list(saves.values())


def _add_attempt(spent: dict[str, float], attempt: Attempt) -> None:
    ranks = attempt.ranks
    first = attempt.first_step_start
    spent["startup"] += ((attempt.end if first is None else first) - attempt.start) * ranks
    spent["evaluation"] += sum(record["seconds"] for record in attempt.of("eval")) * ranks
    spent["checkpoint"] += sum(blocked_seconds(save) for save in saves_of(attempt.of("checkpoint"))) * ranks
    spent["redone"] += sum(step["seconds"] for step in attempt.redone) * ranks
    for part, seconds in _step_rank_seconds(attempt).items():
        spent[part] += seconds
    extra = _compile_seconds(attempt) * ranks
    spent["compile"] += extra
    spent["compute"] -= extra


def _step_rank_seconds(attempt: Attempt) -> dict[str, float]:
    """Rank-seconds by ledger part over the steps that count; what no part claims is left to `other`."""
    windows = _full_windows(attempt)
    spent: dict[str, float] = defaultdict(float)
    timed_seconds = untimed_seconds = 0.0
    for step in attempt.kept:
        parts = windows.get(step["step"]) or {k: v * attempt.ranks for k, v in step.get("parts", {}).items()}
        if not parts:
            untimed_seconds += step["seconds"]
            continue
        timed_seconds += step["seconds"]
        for part, seconds in parts.items():
            spent[_LEDGER_PART.get(part, part)] += seconds
    spent.pop("other", None)
    scale = (timed_seconds + untimed_seconds) / timed_seconds if timed_seconds else 1.0
    return {part: seconds * scale for part, seconds in spent.items() if part in LEDGER_PARTS}


def _full_windows(attempt: Attempt) -> dict[int, dict[str, float]]:
    """Mean rank-seconds of each part per step, for the steps that windows of all ranks cover in full."""
    by_span: dict[tuple[int, int], dict[int, dict[str, Any]]] = {}
    for window in attempt.of("window"):
        by_span.setdefault((window["first_step"], window["step"]), {})[window["rank"]] = window["parts"]
    per_step: dict[int, dict[str, float]] = {}
    for (first, last), ranks in by_span.items():
        steps = last - first + 1
        if len(ranks) < attempt.ranks or any(p["count"] != steps for parts in ranks.values() for p in parts.values()):
            continue
        mean: dict[str, float] = defaultdict(float)
        for parts in ranks.values():
            for part, summary in parts.items():
                mean[part] += summary["sum"] / steps
        per_step |= dict.fromkeys(range(first, last + 1), mean)
    return per_step


def _compile_seconds(attempt: Attempt) -> float:
    """What the first steps of a compiled job took over the median of the later ones, on one rank."""
    if not attempt.started or not attempt.started.get("compile"):
        return 0.0
    first = {step["step"] for step in attempt.of("step")[:_COMPILE_STEPS]}
    usual = [_compute(step) for step in attempt.kept if step["step"] not in first]
    if not usual:
        return 0.0
    typical = median(usual)
    return float(sum(max(0.0, _compute(step) - typical) for step in attempt.kept if step["step"] in first))


def _compute(step: Entry) -> float:
    parts = step.get("parts") or {}
    return float(parts.get("forward", 0.0) + parts.get("backward", 0.0))

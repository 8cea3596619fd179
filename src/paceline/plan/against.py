"""The scoreboard: predicts published runs from their configuration alone and says how far off it is. Imports no torch.

Every line of the file keeps its place: predicted, or with the reason why it is not. The errors stand by source, device,
quality and strategy, beside those of a guess that knows nothing but the device: the median TFLOP/s of its other runs.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

from paceline.model.flop import Convention, training_flop_per_token
from paceline.model.spec import ModelSpec
from paceline.plan.memory_rows import memory_records, memory_summary
from paceline.plan.ranking import group_records
from paceline.plan.rows import PublishedRun, read_runs
from paceline.plan.setting import Setting
from paceline.plan.software import software
from paceline.plan.step_time import predict_step, step_with

Row = dict[str, Any]

STEP = "step_seconds"
CONVENTION: Convention = "causal"
"""How operations are counted for the guess that knows only the device; which does not matter, as it is the same for all."""

FIGURES = ("measured", "predicted", "predicted_calibrated", "predicted_without_source", "relative_error", "p10", "p90",
           "guess")  # fmt: skip
"""Of a row, where it has them."""

FAR_OFF = 0.25
"""Rows with a larger error are listed."""

WIDTHS = {"fp8": "8 bit", "fp4": "4 bit"}


def against(path: Path) -> dict[str, Any]:
    """The document of `plan --against`: `rows`, `summary`, `groups`; of a directory, those of the run in it.

    Raises:
        UsageError: it is neither a file of published runs nor the directory of a run of this host.
    """
    if path.is_dir():
        from paceline.plan.own_run import own_run  # it resolves a job, which published runs have no use for

        return scoreboard([own_run(path)])
    return scoreboard(read_runs(path))


def scoreboard(runs: Sequence[PublishedRun]) -> dict[str, Any]:
    """The document for runs that were read."""
    guesses = _guesses(runs)
    rows = [row for run in runs for row in _rows(run, guesses.get(id(run)))]
    steps = [row for row in rows if row["quantity"] == STEP and row["relative_error"] is not None]
    return {
        "rows": rows,
        "summary": {
            "overall": summary(steps),
            **{f"by_{key}": _by(key, steps) for key in ("source", "device", "quality", "strategy", "software")},
            "memory": memory_summary(rows),
            "not_modelled": _reasons([row for row in rows if row["predicted"] is None and row["quantity"] == STEP]),
            "far_off": [row["id"] for row in steps if abs(row["relative_error"]) > FAR_OFF],
        },
        "groups": group_records([(run.group, run.id) for run in runs], {row["id"]: row for row in steps}),
    }


def summary(rows: Sequence[Row]) -> dict[str, Any]:
    """Errors of predicted rows: of the priors, of the fitted constants, and of the guess from the device alone.

    bias: the median of the signed errors. skill: 1 - the median error over the guess's. inside_range: share of rows
    between the predicted P10 and P90. calibrated_without_source: with constants fitted without the row's own source.
    """
    errors = [row["relative_error"] for row in rows]
    guessed = [abs(row["guess"] / row["measured"] - 1) for row in rows if row["guess"]]
    fitted, others = (
        [row[key] / row["measured"] - 1 for row in rows if row[key]]
        for key in ("predicted_calibrated", "predicted_without_source")
    )
    found = {**_errors(errors), "inside_range": _share(rows, "p10", "p90")}
    guess = statistics.median(guessed) if guessed else None
    median = found["median_absolute_relative_error"]
    found |= {
        "guess_median_absolute_relative_error": guess,
        "skill": 1 - median / guess if guess and median is not None else None,
        "calibrated": _errors(fitted),
        "calibrated_without_source": _errors(others),
    }
    return found


def quantile(values: Iterable[float], share: float) -> float:
    """The value below which that share of them lies, between neighbours in proportion."""
    ordered = sorted(values)
    at = share * (len(ordered) - 1)
    low = int(at)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (at - low)


def _errors(errors: Sequence[float]) -> dict[str, Any]:
    absolute = [abs(error) for error in errors]
    return {
        "rows": len(errors),
        "median_absolute_relative_error": statistics.median(absolute) if absolute else None,
        "p90_absolute_relative_error": quantile(absolute, 0.9) if absolute else None,
        "bias": statistics.median(errors) if errors else None,
    }


def _share(rows: Sequence[Row], low: str, high: str) -> float | None:
    return sum(row[low] <= row["measured"] <= row[high] for row in rows) / len(rows) if rows else None


def _rows(run: PublishedRun, guess: float | None) -> list[Row]:
    about = {"id": run.id, "source": run.source, "device": run.device, "quality": run.quality, "strategy": run.strategy,
             "software": run.setting.software if run.setting else ""}  # fmt: skip
    nothing = dict.fromkeys(FIGURES)
    if run.setting is None:
        unsaid: Row = {**about, **nothing, "reason": run.reason, "assumed": []}
        return [{**unsaid, "quantity": q, "measured": run.measured.get(q)} for q in run.measured or (STEP,)]
    try:
        predicted = [row for predict in PREDICTORS for row in predict(run, run.setting)]
    except (ArithmeticError, ValueError) as error:
        predicted = [{"quantity": q, "measured": run.measured.get(q), "reason": f"its figures contradict each other: {error}"}
                     for q in run.measured or (STEP,)]  # fmt: skip
    if not predicted:
        return [
            {**about, "quantity": STEP, **nothing, "reason": "nothing was measured that is predicted", "assumed": []}
        ]
    assumed = list(run.setting.assumed)
    return [
        {
            **about,
            **nothing,
            "reason": None,
            **row,
            "guess": guess if row["quantity"] == STEP else None,
            "assumed": assumed,
        }
        for row in predicted
    ]


def _step_row(run: PublishedRun, setting: Setting) -> list[Row]:
    measured = run.measured.get(STEP)
    if not measured:
        return []
    prior, fitted = predict_step(setting), predict_step(setting, calibrated=True)
    constants = software(setting.software).fitted_to(setting.device.key)
    others = constants.without.get(run.source) if constants and run.source in constants.sources else None
    own_source = constants is not None and run.source in constants.sources
    left_out = step_with(setting, others) if own_source else fitted
    return [
        {
            "quantity": STEP,
            "measured": measured,
            "predicted": prior.seconds,
            "predicted_calibrated": fitted.seconds,
            "predicted_without_source": left_out.seconds,
            "relative_error": prior.seconds / measured - 1,
            "p10": prior.p10,
            "p90": prior.p90,
            "parts": prior.parts,
        }
    ]


def _memory_rows(run: PublishedRun, setting: Setting) -> list[Row]:
    return memory_records(run.measured, setting)


PREDICTORS: list[Callable[[PublishedRun, Setting], list[Row]]] = [_step_row, _memory_rows]
"""What is predicted of a run: each gives the rows of its quantities."""


def _guesses(runs: Sequence[PublishedRun]) -> dict[int, float]:
    """Seconds of a step at the median rate of the other runs on the same device with products of the same width."""
    rates: dict[tuple[str, str], list[tuple[int, float]]] = defaultdict(list)
    flop = {}
    for run in runs:
        seconds = run.measured.get(STEP)
        if run.setting is None or not seconds:
            continue
        setting = run.setting
        tokens = setting.tokens_per_step / setting.layout.world_size
        flop[id(run)] = tokens * _flop_per_token(setting.spec, setting.sequence_length)
        rates[_kind(run)].append((id(run), flop[id(run)] / seconds))
    found = {}
    for run in runs:
        others = [rate for other, rate in rates[_kind(run)] if other != id(run)] if id(run) in flop else []
        if others:
            found[id(run)] = flop[id(run)] / statistics.median(others)
    return found


@lru_cache(maxsize=1024)
def _flop_per_token(spec: ModelSpec, sequence_length: int) -> float:
    return training_flop_per_token(spec, sequence_length, CONVENTION)


def _kind(run: PublishedRun) -> tuple[str, str]:
    return run.device, WIDTHS.get(run.setting.precision, "16 bit") if run.setting else ""


def _by(key: str, rows: Sequence[Row]) -> dict[str, Any]:
    parts: dict[str, list[Row]] = defaultdict(list)
    for row in rows:
        parts[row[key]].append(row)
    return {name: summary(parts[name]) for name in sorted(parts)}


def _reasons(rows: Sequence[Row]) -> dict[str, int]:
    found: dict[str, int] = defaultdict(int)
    for row in rows:
        if row["reason"]:
            found[row["reason"]] += 1
    return dict(sorted(found.items(), key=lambda item: -item[1]))

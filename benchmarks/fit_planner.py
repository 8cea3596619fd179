"""Fits the planner's constants to the published runs of tests/golden: python -m benchmarks.fit_planner [--write].

A constant is a factor on the seconds of a term (products, memory, launches, exchanges) for a device and a software
generation: at most one for `ROWS_EACH` runs, and none for fewer. Each is fitted once to all runs of its device and
generation and once without each of their sources, which gives the error beside the fitted one.
"""

from __future__ import annotations

import argparse
import statistics
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

import msgspec
import numpy as np

from paceline.plan.rows import PublishedRun, read_runs
from paceline.plan.software import FOLDER, Factors, Fitted
from paceline.plan.step_time import step_with

GOLDEN = Path(__file__).parents[1] / "tests" / "golden" / "published_runs.jsonl"
ROWS_EACH = 15
QUALITIES = ("A", "B")
ROUNDS = 4
STEP = 0.05
PRIOR_SPREAD = 0.15
"""How far a factor is from 1 before any run is seen: the fit is drawn towards 1 by as much as this says."""

ROW_SPREAD = 0.04
BOUNDS = (0.6, 1.6)
FITTED_MARK = "\n# Fitted by benchmarks/fit_planner.py to the runs of tests/golden.\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--write", action="store_true", help="write the constants into src/paceline/plan/software")
    args = parser.parse_args()
    found = constants(usable(read_runs(GOLDEN)))
    for key, fits in sorted(found.items()):
        for fit in fits:
            print(f"{key:<26} {fit.device:<14} {fit.rows:>4} runs  {_words(fit.factors)}")
    if args.write:
        write(found)


def usable(runs: Sequence[PublishedRun]) -> list[PublishedRun]:
    """Runs with a measured step, of the qualities that constants are fitted to."""
    return [r for r in runs if r.setting is not None and r.quality in QUALITIES and r.measured.get("step_seconds")]


def constants(runs: Sequence[PublishedRun]) -> dict[str, list[Fitted]]:
    """What is fitted, by software generation."""
    groups: dict[tuple[str, str], list[PublishedRun]] = defaultdict(list)
    for run in runs:
        if run.setting is not None:
            groups[run.setting.software, run.setting.device.key].append(run)
    found: dict[str, list[Fitted]] = defaultdict(list)
    for (software, device), members in sorted(groups.items()):
        if len(members) >= ROWS_EACH:
            sources = tuple(sorted({run.source for run in members}))
            without = {}
            for source in sources:
                others = [run for run in members if run.source != source]
                if len(others) >= ROWS_EACH:
                    without[source] = fit(others)
            found[software].append(Fitted(device, len(members), sources, fit(members), without))
    return found


def fit(runs: Sequence[PublishedRun]) -> Factors:
    """The factors that matter most, as many as the runs allow; chosen one after the other by what each still explains."""
    chosen: list[str] = []
    best, least = Factors(), _loss(runs, Factors())
    for _ in range(min(len(runs) // ROWS_EACH, len(Factors.__struct_fields__))):
        tried = [
            (_loss(runs, factors), [*chosen, term], factors)
            for term in Factors.__struct_fields__
            if term not in chosen
            for factors in [_fit_terms(runs, [*chosen, term])]
        ]
        loss, terms, factors = min(tried, key=lambda entry: entry[0])
        if loss > 0.97 * least:
            break
        chosen, best, least = terms, factors, loss
    return msgspec.structs.replace(best, **{term: round(getattr(best, term), 3) for term in chosen})


def _fit_terms(runs: Sequence[PublishedRun], terms: Sequence[str]) -> Factors:
    """Least squares of relative errors by Gauss-Newton, runs far off counted less, factors drawn towards 1."""
    factors = Factors()
    weights = np.ones(len(runs))
    for _ in range(ROUNDS):
        errors = _errors(runs, factors)
        slopes = np.array([_errors(runs, _moved(factors, term, STEP)) - errors for term in terms]).T / STEP
        now = np.array([getattr(factors, term) for term in terms])
        pull = (ROW_SPREAD / PRIOR_SPREAD) ** 2 * np.eye(len(terms))
        left = slopes.T @ (weights[:, None] * slopes) + pull
        right = slopes.T @ (weights * (slopes @ now - errors)) + pull @ np.ones(len(terms))
        solved = np.clip(np.linalg.solve(left, right), *BOUNDS)
        factors = msgspec.structs.replace(factors, **dict(zip(terms, map(float, solved), strict=True)))
        weights = 1 / np.maximum(np.abs(_errors(runs, factors)) / ROW_SPREAD, 1.0)
    return factors


def _moved(factors: Factors, term: str, step: float) -> Factors:
    return msgspec.structs.replace(factors, **{term: getattr(factors, term) + step})


def _errors(runs: Sequence[PublishedRun], factors: Factors) -> np.ndarray:
    return np.array([step_with(r.setting, factors).seconds / r.measured["step_seconds"] - 1 for r in runs if r.setting])


def _loss(runs: Sequence[PublishedRun], factors: Factors) -> float:
    return statistics.fmean(min(abs(error), 0.25) for error in _errors(runs, factors))


def write(found: dict[str, list[Fitted]]) -> None:
    """Replace the constants at the end of each generation's file."""
    for path in sorted(FOLDER.glob("*.toml")):
        habits = path.read_text(encoding="utf-8").split(FITTED_MARK)[0].rstrip("\n") + "\n"
        tables = "".join(_table(entry) for entry in found.get(path.stem, []))
        path.write_text(habits + (FITTED_MARK + tables if tables else ""), encoding="utf-8")


def _table(entry: Fitted) -> str:
    sources = ", ".join(f'"{source}"' for source in entry.sources)
    lines = ["[[fitted]]", f'device = "{entry.device}"', f"rows = {entry.rows}", f"sources = [{sources}]"]
    lines.append(f"factors = {_inline(entry.factors)}")
    if entry.without:
        each = ", ".join(f'"{source}" = {_inline(factors)}' for source, factors in sorted(entry.without.items()))
        lines.append(f"without = {{ {each} }}")
    return "\n".join(lines) + "\n\n"


def _inline(factors: Factors) -> str:
    changed = {term: value for term, value in msgspec.structs.asdict(factors).items() if value != 1.0}
    return f"{{ {', '.join(f'{term} = {value:g}' for term, value in changed.items())} }}" if changed else "{}"


def _words(factors: Factors) -> str:
    changed = [f"{term} x {value:g}" for term, value in msgspec.structs.asdict(factors).items() if value != 1.0]
    return ", ".join(changed) or "nothing better than the priors"


if __name__ == "__main__":
    main()

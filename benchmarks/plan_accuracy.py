"""How far the planner's step times are off on published runs: python -m benchmarks.plan_accuracy [--write].

Prints the tables, or writes them into docs/plan-accuracy.md, which a test holds to what this program prints.
"""

from __future__ import annotations

import argparse
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from benchmarks.fit_planner import GOLDEN, QUALITIES, ROWS_EACH
from paceline.plan.against import FAR_OFF, STEP, against, summary
from paceline.plan.software import Factors, software, software_names

ROOT = Path(__file__).parents[1]
DOCUMENT = ROOT / "docs" / "plan-accuracy.md"
CAUSES = ROOT / "tests" / "golden" / "published_runs.causes.toml"
COLUMNS = ("", "runs", "median", "P90", "bias", "in range", "guess", "skill", "fitted: median", "P90",
           "without own source: median", "P90")  # fmt: skip
HEADER = f"| {' | '.join(COLUMNS)} |"
RULE = "|---|" + "---:|" * 11


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--write", action="store_true", help=f"write {DOCUMENT.name}")
    args = parser.parse_args()
    text = render(against(GOLDEN))
    if args.write:
        DOCUMENT.write_text(text, encoding="utf-8")
    else:
        print(text)


def render(document: Mapping[str, Any]) -> str:
    """The whole page."""
    steps = [row for row in document["rows"] if row["quantity"] == STEP and row["relative_error"] is not None]
    good = [row for row in steps if row["quality"] in QUALITIES]
    parts = [
        _introduction(document, steps, good),
        "## All runs\n\n" + _table({"quality A and B": summary(good), "all qualities": summary(steps)}),
    ]
    for key in ("source", "device", "strategy", "software"):
        names = sorted({row[key] for row in good})
        parts.append(f"## By {key}\n\n" + _table({n: summary([r for r in good if r[key] == n]) for n in names}))
    parts += [_ranking(document["groups"]), _constants(), _far_off(steps), _contradictions(), _not_modelled(document)]
    return "\n\n".join(parts) + "\n"


def _introduction(document: Mapping[str, Any], steps: Sequence[Any], good: Sequence[Any]) -> str:
    skipped = sum(document["summary"]["not_modelled"].values())
    return f"""# How far the planner is off

Written by `python -m benchmarks.plan_accuracy --write`; a test holds this page to what the program prints.

Each published run of `tests/golden/published_runs.jsonl` is predicted from its configuration alone, as
`paceline plan --against tests/golden/published_runs.jsonl` does. {len(steps)} runs are predicted, {len(good)} of them of
quality A or B (complete, or with small gaps); {skipped} lines are not, with the reasons at the end. All tables below are of
quality A and B except where they say so.

Errors are of the seconds of a step: (predicted - measured) / measured, from catalogue priors alone. Median and P90 are of its
absolute value, bias is the median with its sign. In range: the share of runs between the predicted P10 and P90. Guess: the
median error of a guess that knows only the device, the median TFLOP/s of its other runs of as many bits; skill is 1 less the
quotient of both. Fitted: with the constants of the device and software generation, at most one for {ROWS_EACH} runs; beside
it with the constants fitted without the run's own source, which fall back on the priors where there is no other source.

The habits of software generations (`src/paceline/plan/software`) and what devices sustain (`src/paceline/cluster/catalog`)
were set with these runs in sight. What they say of runs that were not seen has to be judged on other ones."""


def _table(rows: Mapping[str, Mapping[str, Any]]) -> str:
    return "\n".join([HEADER, RULE, *(_line(name, errors) for name, errors in rows.items())])


def _line(name: str, errors: Mapping[str, Any]) -> str:
    fitted, others = errors["calibrated"], errors["calibrated_without_source"]
    shares = (
        errors["median_absolute_relative_error"], errors["p90_absolute_relative_error"], errors["bias"],
        errors["inside_range"], errors["guess_median_absolute_relative_error"], errors["skill"],
        fitted["median_absolute_relative_error"], fitted["p90_absolute_relative_error"],
        others["median_absolute_relative_error"], others["p90_absolute_relative_error"],
    )  # fmt: skip
    return f"| {name} | {errors['rows']} | " + " | ".join(_percent(share) for share in shares) + " |"


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{share * 100:.1f}%"


def _ranking(groups: Mapping[str, Any]) -> str:
    lines = [
        "## Runs that differ only in their layout",
        "",
        f"{groups['groups']} groups of {groups['layouts_from']} layouts and more. Median rank correlation"
        f" {groups['median_rank_correlation']:.2f}, mean {groups['mean_rank_correlation']:.2f}. The planner's first costs"
        f" {_percent(groups['top1_regret_mean'])} on average and {_percent(groups['top1_regret_max'])} at worst over the"
        f" measured best; the best of its first three {_percent(groups['top3_regret_mean'])} on average and"
        f" {_percent(groups['top3_regret_max'])} at worst.",
    ]
    return "\n".join(lines)


def _constants() -> str:
    lines = [
        "## Fitted constants",
        "",
        "Factors on the seconds of a term, by `python -m benchmarks.fit_planner --write`.",
        "",
    ]
    lines += ["| software | device | runs | factors |", "|---|---|---:|---|"]
    for key in software_names():
        lines += [f"| {key} | {f.device} | {f.rows} | {_words(f.factors)} |" for f in software(key).fitted]
    return "\n".join(lines)


def _words(factors: Factors) -> str:
    changed = [f"{term} x {value:g}" for term, value in msgspec.structs.asdict(factors).items() if value != 1.0]
    return ", ".join(changed) or "none better than the priors"


def _far_off(steps: Iterable[Mapping[str, Any]]) -> str:
    causes = tomllib.loads(CAUSES.read_text(encoding="utf-8"))["far_off"]
    lines = [
        f"## More than {FAR_OFF:.0%} off, of all qualities",
        "",
        "| run | quality | error | cause |",
        "|---|---|---:|---|",
    ]
    far = sorted((row for row in steps if abs(row["relative_error"]) > FAR_OFF), key=lambda row: row["relative_error"])
    lines += [
        f"| {row['id']} | {row['quality']} | {row['relative_error']:+.1%} | {causes.get(row['id'], 'not known')} |"
        for row in far
    ]
    return "\n".join(lines)


def _contradictions() -> str:
    found = tomllib.loads(CAUSES.read_text(encoding="utf-8"))["contradicts_itself"]
    return "\n".join(
        ["## Sources that contradict themselves", "", *(f"- {name}: {why}" for name, why in found.items())]
    )


def _not_modelled(document: Mapping[str, Any]) -> str:
    reasons = document["summary"]["not_modelled"]
    return "\n".join(["## Not predicted", "", *(f"- {count}: {reason}" for reason, count in reasons.items())])


if __name__ == "__main__":
    main()

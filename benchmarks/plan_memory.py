"""How far predicted memory is from what published runs say: by source and quantity, and whether it fits.

    python benchmarks/plan_memory.py RUNS.jsonl [--rows]

The line format is that of `paceline plan --against` (docs/guide/plan-against.md). Figures come from the habits of each
run's software and the configuration alone.
"""

from __future__ import annotations

import argparse
import math
from collections import defaultdict
from pathlib import Path
from typing import NamedTuple

from paceline.plan.memory_rows import predicted_memory
from paceline.plan.rows import PublishedRun, read_runs
from paceline.units import GiB

BYTES = ("memory_allocated_bytes", "memory_reserved_bytes", "memory_device_bytes")


class Weighed(NamedTuple):
    """One figure of one run."""

    run: PublishedRun
    quantity: str
    measured: float
    predicted: float | None
    prior: float | None
    sigma: float
    reason: str

    @property
    def error(self) -> float:
        """Predicted less measured, over measured."""
        return (self.predicted or 0.0) / self.measured - 1


def weighed(runs: list[PublishedRun]) -> list[Weighed]:
    """All memory figures of the runs that are modelled."""
    found = []
    for run in runs:
        if run.setting is None or not any(q in run.measured for q in (*BYTES, "fits")):
            continue
        predicted, prior = predicted_memory(run.setting), predicted_memory(run.setting, calibrated=False)
        sigma = math.log(predicted.memory.spread[1])
        for quantity in (*BYTES, "fits"):
            if quantity in run.measured:
                value = predicted.quantities[quantity]
                before = prior.quantities[quantity]
                found.append(
                    Weighed(run, quantity, run.measured[quantity], value, before, sigma, predicted.reason or "")
                )
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", type=Path)
    parser.add_argument("--rows", action="store_true", help="print every row")
    args = parser.parse_args()
    found = weighed(read_runs(args.runs))
    if args.rows:
        for one in found:
            if one.quantity in BYTES and one.predicted is not None:
                print(f"{one.run.id:60} {one.quantity[7:-6]:9} {one.measured / GiB:7.1f} GiB "
                      f"{one.predicted / GiB:7.1f} GiB {one.error:+7.1%}")  # fmt: skip
    print_errors(found)
    print_fits(found, args.rows)


def print_errors(found: list[Weighed]) -> None:
    """By source and quantity: rows, median and P90 of the absolute error, bias, and how often the range held."""
    groups: dict[tuple[str, str], list[Weighed]] = defaultdict(list)
    for one in found:
        if one.quantity in BYTES and one.predicted is not None:
            groups[one.run.source, one.quantity].append(one)
            groups["all", one.quantity].append(one)
    names = f"{'median':>8} {'P90':>8} {'bias':>8} {'in P10-P90':>11} {'prior median':>13} {'P90':>7}"
    print(f"{'source':18} {'quantity':10} {'rows':>5} {names}")
    for (source, quantity), rows in sorted(groups.items(), key=lambda item: (item[0][1], item[0][0] == "all")):
        errors = sorted(abs(row.error) for row in rows)
        priors = sorted(abs((row.prior or 0.0) / row.measured - 1) for row in rows)
        inside = sum(abs(math.log(1 + row.error)) <= row.sigma for row in rows) / len(rows)
        print(f"{source:18} {quantity[7:-6]:10} {len(rows):5} {_at(errors, 0.5):8.1%} {_at(errors, 0.9):8.1%} "
              f"{_at(sorted(row.error for row in rows), 0.5):+8.1%} {inside:11.0%} "
              f"{_at(priors, 0.5):13.1%} {_at(priors, 0.9):7.1%}")  # fmt: skip


def print_fits(found: list[Weighed], every: bool) -> None:
    """How the verdicts came out: said to fit, said not to, and not said."""
    rows = [one for one in found if one.quantity == "fits"]
    ran = [one for one in rows if one.measured]
    out = [one for one in rows if not one.measured]
    said = [one for one in rows if one.predicted is not None]
    wrong = [one for one in said if one.predicted != one.measured]
    print(f"fits: {len(rows)} rows, {len(rows) - len(said)} not said; wrong {len(wrong)} of {len(said)} "
          f"({len(wrong) / max(1, len(said)):.1%})")  # fmt: skip
    print(f"  ran: {len(ran)}, said not to fit: {sum(one.predicted == 0 for one in ran)}")
    print(f"  out of memory: {len(out)}, said to fit: {sum(one.predicted == 1 for one in out)}")
    for one in wrong if every else []:
        print(f"  wrong: {one.run.id} ({one.run.source}), measured {one.measured:g}")


def _at(ordered: list[float], share: float) -> float:
    """A percentile of sorted numbers, between the two nearest."""
    place = share * (len(ordered) - 1)
    low = math.floor(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (place - low) * (ordered[high] - ordered[low])


if __name__ == "__main__":
    main()

"""`paceline bench collectives` against a bare torch.distributed loop, and its fits against held-out sizes and repeats.

    python -m benchmarks.bench_collectives [--quick]

Times: the same two processes run the timer of the bench and a bare loop in turn, on the same sizes. Fits: the command is
given several times, as a user gives it; the fit of one run, made from every second size, is held against the sizes that it
was not given and against all sizes of the other runs.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from typing import Any

from benchmarks.launch import environment
from benchmarks.pairs import bootstrap_median
from benchmarks.program import finish, parser
from benchmarks.record import ROOT, Figure, say
from paceline.bench.fit import fits_of
from paceline.bench.ranks import run_ranks
from paceline.bench.rows import Row, row_of
from paceline.cluster.measured import LARGE_BYTES
from paceline.units import format_bytes, format_percent

WITHIN = 0.05
STATED = 0.15
INSIDE = 0.90
RUNS, QUICK_RUNS = 4, 2
SIDES = "benchmarks.collectives_sides"


def compare(quick: bool) -> list[dict[str, Any]]:
    """Rows of the bench's timer and of a bare loop, in turn in the same ranks."""
    options = {"pairs": 3 if quick else 16, "sizes": [65536, 1 << 20] if quick else [65536, 1 << 18, 1 << 20, 1 << 24]}
    told = run_ranks(SIDES, options, 2)
    if told.error is not None:
        raise told.error
    return [record for record in told.records if record["kind"] == "pair"]


def time_figure(rows: Sequence[dict[str, Any]]) -> Figure:
    """The worst of all collectives and sizes: how far the bench's time is off the bare loop's."""
    found = []
    for row in rows:
        interval = bootstrap_median([bench / bare for bench, bare in zip(row["bench"], row["bare"], strict=True)])
        found.append((abs(interval.median - 1), interval, row))
    off, interval, row = max(found, key=lambda one: one[0])
    named = f"{row['collective']} of {format_bytes(row['size_bytes'])}"
    middle = statistics.median(one[0] for one in found)
    return Figure(
        "time of a call over a bare loop's, worst of all",
        f"within {WITHIN:.0%}",
        f"{interval} ({named}); median distance {format_percent(middle)} of {len(found)}",
        off <= WITHIN,
    )


def sweep(quick: bool) -> list[Row]:
    """The rows of one run of the command."""
    sizes = ["--max", "1MiB", "--iterations", "4"] if quick else ["--max", "16MiB"]
    command = [sys.executable, "-m", "paceline", "bench", "collectives", "--procs", "2", "--json", *sizes]
    done = subprocess.run(
        command, cwd=ROOT, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, timeout=400, check=True
    )
    return [row_of(record) for record in json.loads(done.stdout)["rows"]]


def held_out(rows: Sequence[Row]) -> tuple[list[float], list[float]]:
    """Fits of every second size: the errors that they state, and the errors at the others as shares of these."""
    sizes = sorted({row.size_bytes for row in rows})
    known, others = set(sizes[::2]), [row for row in rows if row.size_bytes in sizes[1::2]]
    fits = {fit.collective: fit for fit in fits_of([row for row in rows if row.size_bytes in known])}
    shares = []
    for row in others:
        fit = fits[row.collective]
        if LARGE_BYTES <= row.size_bytes <= fit.max_bytes and fit.relative_error:
            shares.append(abs(fit.seconds(row.size_bytes) / row.seconds - 1) / fit.relative_error)
    return [fit.relative_error for fit in fits.values() if fit.relative_error is not None], shares


def repeats(runs: Sequence[Sequence[Row]]) -> tuple[list[float], list[float]]:
    """Fits of each run: the errors that they state, and the errors at the sizes of all other runs as shares of these."""
    stated, shares = [], []
    for index, rows in enumerate(runs):
        fits = {fit.collective: fit for fit in fits_of(list(rows))}
        stated += [fit.relative_error for fit in fits.values() if fit.relative_error is not None]
        for row in (row for other, found in enumerate(runs) if other != index for row in found):
            error = fits[row.collective].relative_error
            if row.size_bytes >= LARGE_BYTES and error:
                shares.append(abs(fits[row.collective].seconds(row.size_bytes) / row.seconds - 1) / error)
    return stated, shares


def fit_figures(runs: Sequence[Sequence[Row]]) -> list[Figure]:
    """What the fits state, and how often held-out sizes and repeats are inside."""
    stated, shares = repeats(runs)
    half_stated, half_shares = zip(*(held_out(rows) for rows in runs), strict=True)
    out = [share for one in half_shares for share in one]
    inside, held = _inside(shares), _inside(out)
    return [
        Figure(
            "stated error of a fit from 64 KiB, median and worst",
            f"<= {STATED:.0%}",
            f"{format_percent(statistics.median(stated))}, {format_percent(max(stated))} of {len(stated)} fits",
            max(stated) <= STATED,
        ),
        Figure(
            "held-out sizes inside the stated error",
            f">= {INSIDE:.0%}",
            f"{format_percent(held)} of {len(out)}; fits of every second size state "
            f"{format_percent(statistics.median([error for one in half_stated for error in one]))}",
            held >= INSIDE,
        ),
        Figure(
            "sizes of a repeat inside the stated error",
            f">= {INSIDE:.0%}",
            f"{format_percent(inside)} of {len(shares)}, {len(runs)} runs each against the others",
            inside >= INSIDE,
        ),
    ]


def _inside(shares: Sequence[float]) -> float:
    return sum(share <= 1 for share in shares) / len(shares) if shares else 0.0


def bus_figure(runs: Sequence[Sequence[Row]]) -> Figure:
    """The all-reduce at its largest size."""
    rows = [max((r for r in rows if r.collective == "all_reduce"), key=lambda r: r.size_bytes) for rows in runs]
    rates = [row.bus_bandwidth for row in rows]
    return Figure(
        f"bus bandwidth of an all_reduce of {format_bytes(rows[0].size_bytes)}, 2 ranks over loopback",
        "none",
        f"{min(rates):.2f} to {max(rates):.2f} GB/s",
    )


def main() -> int:
    args = parser(__doc__).parse_args()
    say("the bench's timer and a bare loop in turn")
    rows = compare(args.quick)
    runs, began = [], time.monotonic()
    for number in range(QUICK_RUNS if args.quick else RUNS):
        runs.append(sweep(args.quick))
        say(f"run {number + 1}: {len(runs[-1])} rows, {time.monotonic() - began:.0f} s so far")
    figures = [time_figure(rows), *fit_figures(runs), bus_figure(runs)]
    times = [{f"{r.collective} {r.size_bytes}": [r.time_us, r.spread] for r in found} for found in runs]
    return finish("bench_collectives", figures, {"pairs": rows, "runs": times}, args, ["bench", "collectives"])


if __name__ == "__main__":
    sys.exit(main())

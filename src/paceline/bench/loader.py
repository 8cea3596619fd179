"""`paceline bench loader JOB`: what the job's loader gives, against what its devices take. Imports no torch."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from paceline.bench.ranks import collect
from paceline.bench.remarks import Remark
from paceline.bench.result import Result, result_of
from paceline.job.load import Job, load_job, split_words
from paceline.job.resolve import resolve_here
from paceline.run.records import read_records
from paceline.units import format_count, format_seconds

MODULE = "paceline.bench.loader_rank"
FIRST_STEPS = 10
"""Steps at the start of an attempt that say nothing about its rate."""

MARGIN = 1.1
"""A loader that gives this much more than is taken never makes a step wait; less leaves no room for a slow file."""


class Need(NamedTuple):
    """Tokens per second that the devices take, and where that figure comes from."""

    tokens_per_second: float
    source: str
    measured: bool


def measure(
    words: Sequence[str], *, workers: Sequence[int], seconds: float, say: Callable[[str], None]
) -> Result | None:
    """Measure the loader on the job's ranks; None on ranks other than 0.

    Args:
        words: job file and overrides.
        workers: numbers of loader processes; none for the job's own.
        seconds: for each of them.

    Raises:
        JobError: the job is wrong, or cannot run here.
    """
    job = load_job(*split_words(words))
    resolved = resolve_here(job)
    run = measured_rate(job, resolved.layout.world_size)
    given = {"words": list(words), "workers": list(workers), "seconds": seconds}
    told = collect(
        MODULE,
        given,
        resolved.layout.world_size,
        tell=lambda record: say(line(record)) if record["kind"] == "row" else None,
    )
    if told is None:
        return None
    result = result_of("loader", told)
    need = run or planned_rate(result.about)
    if need is None:
        return result
    for row in result.rows:
        row["needed_tokens_per_second"] = need.tokens_per_second
        row["share"] = row["tokens_per_second"] / need.tokens_per_second
    about = {**result.about, "needed_tokens_per_second": need.tokens_per_second, "need": need.source}
    return result._replace(about=about, remarks=verdicts(result.rows, need))


def measured_rate(job: Job, ranks: int) -> Need | None:
    """The rate of the job's own run: the median step of its last attempt on as many ranks, if there is one."""
    rates: list[float] = []
    world = 0
    try:
        for record in read_records(job.run_path, kinds=("run_started", "step")):
            if record["kind"] == "run_started":
                rates, world = [], int(record["world_size"])
            elif record["tokens_per_second"]:
                rates.append(float(record["tokens_per_second"]))
    except OSError:
        return None
    if world != ranks or len(rates) <= FIRST_STEPS:
        return None
    return Need(statistics.median(rates[FIRST_STEPS:]), f"measured in {job.run_path}, on {ranks} ranks", True)


def planned_rate(about: dict[str, Any]) -> Need | None:
    """What the devices take at most: training at their measured matmul peak, which no run reaches."""
    rate = about.get("tokens_per_second_at_peak")
    return None if rate is None else Need(rate, "the most that the devices could take, at their matmul peak", False)


def verdicts(rows: Sequence[dict[str, Any]], need: Need) -> list[Remark]:
    """Whether the loader keeps up, for each number of processes."""
    found = []
    for row in rows:
        share, workers = row["share"], row["workers"]
        starved = share < MARGIN
        message = (
            f"{workers} loader process{'es' * (workers != 1)} a rank: {format_count(row['tokens_per_second'])} tokens/s, "
            f"{share:.3g} times what is needed ({format_count(need.tokens_per_second)}: {need.source})"
        )
        if starved and need.measured:
            message += "; steps wait for data: raise data.workers, or prepare the data in a faster place"
        elif starved:
            message += "; whether steps wait for data depends on the share of the peak that the job reaches"
        values = {"workers": workers, "share": share, "needed_tokens_per_second": need.tokens_per_second}
        found.append(Remark("starved" if starved else "fast_enough", message, starved and need.measured, values))
    return found


def line(row: dict[str, Any]) -> str:
    """One row in words."""
    return (
        f"{row['workers']} loader processes a rank: {row['batches_per_second']:.0f} micro-batches/s, "
        f"{format_count(row['tokens_per_second'])} tokens/s, first batch after {format_seconds(row['first_batch_seconds'])}"
    )


def describe(result: Result) -> Iterator[str]:
    """The rows and what they mean, as text."""
    yield from map(line, result.rows)
    for remark in result.remarks:
        yield f"{'PROBLEM: ' if remark.problem else ''}{remark.message}"

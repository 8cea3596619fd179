"""The time between a stop signal and the kill, against what a last save takes. R20 of the promises."""

import math
from collections.abc import Iterator

from paceline.checkpoint.grace import Chain, Measured, mend
from paceline.doctor.check import Check, Found, Given, Skip
from paceline.doctor.host import Host
from paceline.units import format_bytes, format_seconds


def look(host: Host, given: Given) -> Iterator[Found]:
    job = given.job
    if job is None or job.problem or not job.checkpoint:
        return
    folder = host.folder("checkpoint")
    rate = folder.write_rate if folder else None
    if job.saved is None and not rate:
        raise Skip("how long a save takes is not known: no earlier save, and the checkpoint folder was not timed")
    seconds = job.saved if job.saved is not None else job.checkpoint / (rate or 1.0)
    chain = Chain(Measured(seconds, job.step_seconds), job.grace, job.grace_source)
    if chain.holds:
        return
    how = (
        "as measured in this run"
        if job.saved is not None
        else f"{format_bytes(job.checkpoint)} at {format_bytes(rate or 0)}/s, as timed in the checkpoint folder, take "
        f"{format_seconds(seconds)}"
    )
    yield Found(found=f"{chain.explain()} ({how})", mend=f"recovery.grace={need(chain)}s; {mend(need(chain))}")


def need(chain: Chain) -> int:
    """Whole seconds that would do."""
    return math.ceil(chain.need or 0.0)


CHECK = Check(
    id="job-grace",
    severity="error",
    title="A preempted job is killed before its last save is done",
    why="the work since the checkpoint before is lost at each preemption: up to 1 whole interval, on every rank",
    mend="raise the grace period above 1.5 times the save and a step",
    source="torch, distributed/run.py (30 s between SIGTERM and SIGKILL); pytorch issues 119856 and 192815",
    job=True,
    look=look,
)

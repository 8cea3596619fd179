"""The time between a stop signal and the kill, against what a last save takes. R20 of the promises."""

from collections.abc import Iterator

from paceline.doctor.check import Check, Found, Given, Skip
from paceline.doctor.host import Host
from paceline.units import format_bytes, format_seconds

MARGIN = 1.5
"""A save beside other hosts' saves, and the step that must end before it."""


def look(host: Host, given: Given) -> Iterator[Found]:
    job = given.job
    if job is None or job.problem or not job.checkpoint:
        return
    if job.grace is None:
        raise Skip("no launcher says how long it leaves a rank between SIGTERM and SIGKILL (torchrun: 30 s)")
    folder = host.folder("checkpoint")
    rate = folder.write_rate if folder else None
    if job.saved is None and not rate:
        raise Skip("how long a save takes is not known: no earlier save, and the checkpoint folder was not timed")
    seconds = job.saved if job.saved is not None else job.checkpoint / (rate or 1.0)
    if seconds * MARGIN <= job.grace:
        return
    how = (
        "the longest save of this run took"
        if job.saved is not None
        else f"{format_bytes(job.checkpoint)} at {format_bytes(rate or 0)}/s, as timed in the checkpoint folder, take"
    )
    need = int(seconds * MARGIN) + 1
    yield Found(
        found=f"{how} {format_seconds(seconds)}; {job.grace_source} leaves {format_seconds(job.grace)}",
        mend=f"export TORCH_ELASTIC_SHUTDOWN_TIMEOUT={need}; Slurm --signal=TERM@{need}; Kubernetes "
        f"terminationGracePeriodSeconds: {need}",
    )


CHECK = Check(
    id="job-grace",
    severity="error",
    title="A preempted job is killed before its last save is done",
    why="the work since the checkpoint before is lost at each preemption: up to 1 whole interval, on every rank",
    mend="raise the grace period above 1.5 times the save",
    source="torch, distributed/run.py (30 s between SIGTERM and SIGKILL); pytorch issues 119856 and 192815",
    job=True,
    look=look,
)

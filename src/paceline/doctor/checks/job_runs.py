"""A job that contradicts itself, or does not divide over the ranks or fit into the memory here."""

from collections.abc import Iterator

from paceline.doctor.check import Check, Found, Given
from paceline.doctor.host import Host
from paceline.units import format_bytes


def look(host: Host, given: Given) -> Iterator[Found]:
    job = given.job
    if job is None or host is not given.hosts[0]:
        return
    if job.problem:
        key = f"{job.key}: " if job.key else ""
        yield Found(found=f"{job.name}: {key}{job.problem}", mend=job.hint or "see docs/guide/job.md")
    elif job.memory > job.memory_available > 0:
        yield Found(
            found=f"{job.name}: the heaviest rank needs {format_bytes(job.memory)}, its device has "
            f"{format_bytes(job.memory_available)}",
            mend=f"see what needs it and what would fit: paceline plan {job.name}.toml --fixed",
        )


CHECK = Check(
    id="job-runs",
    severity="error",
    title="The job cannot run here: its numbers do not divide or do not fit",
    why="0 steps are made: it ends at the start, or at the first backward pass with its memory full",
    mend="paceline plan JOB.toml --fixed",
    source="paceline, docs/guide/job.md",
    job=True,
    look=look,
)

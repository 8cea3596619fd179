"""Learning-rate arithmetic: scaling with the batch, warm-up against length, and a peak that is off by a decade."""

from collections.abc import Iterator

from paceline.doctor.check import Check, Found, Given
from paceline.doctor.host import Host
from paceline.doctor.job_facts import JobFacts

LARGE_FACTOR = 8.0
TABLE = ((1e7, 3e-2), (1e9, 1e-2), (1e10, 2e-3), (1e13, 1e-3))
"""Parameters up to which, and the highest AdamW peak that published runs of that size have used, with room above."""


def look(host: Host, given: Given) -> Iterator[Found]:
    job = given.job
    if job is None or job.problem or host is not given.hosts[0]:
        return
    peak = job.lr * job.lr_factor
    adaptive = job.optimizer.startswith("adam")
    if adaptive and job.lr_scaling == "linear" and job.lr_factor >= LARGE_FACTOR:
        yield Found(
            found=f"linear scaling from {job.lr_reference_batch} to {job.global_batch} sequences takes lr from {job.lr:g} to "
            f"{peak:g} under {job.optimizer}",
            mend='optimizer.lr_scaling="sqrt"',
            why=f"AdamW's steps are normalised: the square root gives {job.lr * job.lr_factor**0.5:g}, linear "
            f"{job.lr_factor**0.5:.1f} times that",
        )
    limit = next((lr for size, lr in TABLE if job.parameters <= size), TABLE[-1][1])
    if adaptive and peak > limit:
        yield Found(
            found=f"lr {peak:g} for {job.parameters:,} parameters under {job.optimizer}",
            mend=f"optimizer.lr={limit / 10:g} to begin with",
            why=f"published runs of this size stay below {limit:g}; above it losses spike and do not come back",
        )
    yield from _warmup(job)


def _warmup(job: JobFacts) -> Iterator[Found]:
    if job.steps is None or not job.warmup_steps:
        return
    if job.warmup_steps >= job.steps:
        yield Found(
            found=f"{job.warmup_steps} steps of warm-up in a run of {job.steps}: lr ends at "
            f"{job.steps / job.warmup_steps:.0%} of its peak",
            mend=f"optimizer.warmup_steps={max(1, job.steps // 20)}",
        )


CHECK = Check(
    id="job-learning-rate",
    severity="warning",
    title="The learning rate does not fit the batch, the model or the length",
    why="a rate 10 times too high diverges within the warm-up; one that never reaches its peak trains at a fraction of it",
    mend="see the arithmetic: paceline train JOB.toml --explain",
    source="Goyal et al. 2017, arXiv 1706.02677 (linear); Krizhevsky 2014, arXiv 1404.5997, and Malladi et al. 2022, "
    "arXiv 2205.10287 (square root for Adam); model cards for the table of peaks",
    job=True,
    look=look,
)

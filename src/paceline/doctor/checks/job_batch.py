"""Batch arithmetic: what a rank does between two reductions."""

from collections.abc import Iterator

from paceline.doctor.check import Check, Found, Given
from paceline.doctor.host import Host

LARGE_ACCUMULATION = 64
TOKENS_PER_REDUCTION = 512
"""Tokens per rank below which, on a GPU, a step is mostly launches and reduction."""


def look(host: Host, given: Given) -> Iterator[Found]:
    job = given.job
    if job is None or job.problem or host is not given.hosts[0]:
        return
    formula = (
        f"{job.global_batch} sequences = {job.data_ranks} data ranks x micro-batch {job.microbatch} x "
        f"{job.accumulation} accumulated"
    )
    if job.accumulation >= LARGE_ACCUMULATION and job.microbatch == 1 and job.memory * 2 < job.memory_available:
        yield Found(
            found=f"{formula}, in half of the memory",
            mend="set batch.microbatch to a larger divisor, or leave it out",
            why=f"{job.accumulation} passes of 1 sequence per step leave the device idle between small products",
        )
    per_rank = job.tokens_per_step // max(1, job.data_ranks)
    if not job.on_cpu and job.data_ranks > 1 and per_rank < TOKENS_PER_REDUCTION:
        yield Found(
            found=f"{formula}: {per_rank} tokens a rank and step",
            mend="raise batch.global_batch, or take fewer data ranks (--procs, parallel.tp)",
        )


CHECK = Check(
    id="job-batch",
    severity="warning",
    title="The batch leaves a rank too little to do between two reductions, or in too small pieces",
    why="every step reduces all gradients once: with 512 tokens a rank on a GPU it computes for less time than that takes",
    mend="raise batch.global_batch or batch.microbatch",
    source="McCandlish et al. 2018, arXiv 1812.06162 (how large a batch may be)",
    job=True,
    look=look,
)

"""One rank of `paceline bench loader`: takes the job's batches as fast as they come, beside the other ranks."""

from __future__ import annotations

import time

import torch.distributed as dist

from paceline.bench.rank import Rank, joined, meet, slowest
from paceline.cluster.measure import matmul_peak
from paceline.cluster.probe import probe_host
from paceline.data.loader import Loader
from paceline.data.prepare import PreparedData, prepare
from paceline.job.load import load_job, split_words
from paceline.job.resolve import Resolved, resolve_job
from paceline.model.flop import training_flop_per_token
from paceline.parallel.collectives import gather_objects
from paceline.parallel.precision.apply import DTYPES
from paceline.workers.heartbeat import beat

FOR_EVER = 10**9
WARM_STEPS = 4
PEAK_SECONDS = 0.5


def program(rank: Rank) -> None:
    """Tell what the devices could take at most, then a row per number of loader processes."""
    job = load_job(*split_words(rank.options["words"]))
    resolved = resolve_job(job, rank.world.world_size, probe_host(), ranks_per_host=rank.world.local_world_size)
    beat(0, "preparing data", allow_seconds=24 * 3600.0)
    data = prepare(job.data)
    rank.tell({"kind": "about", **_at_most(rank, resolved)})
    for workers in rank.options["workers"] or [job.data.workers]:
        _measure(rank, resolved, data, workers)


def _at_most(rank: Rank, resolved: Resolved) -> dict[str, object]:
    """Tokens per second that the devices could train on if they did nothing but products, at their measured peak."""
    meet()
    own = matmul_peak(DTYPES[resolved.precision], rank.world.device, PEAK_SECONDS)
    peak = sum(gather_objects(own, dist.group.WORLD))
    flop = training_flop_per_token(resolved.spec, resolved.job.data.sequence_length)
    return {
        "ranks": rank.world.world_size, "tokens_per_step": resolved.tokens_per_step, "flop_per_token": flop,
        "peak_flop_per_second": peak, "tokens_per_second_at_peak": peak / flop, "precision": resolved.precision,
        "sequence_length": resolved.job.data.sequence_length, "microbatch": resolved.batch.microbatch,
    }  # fmt: skip


def _measure(rank: Rank, resolved: Resolved, data: PreparedData, workers: int) -> None:
    """Take steps for the seconds asked for; every rank takes as many as its loader gives, and the slowest counts."""
    meet()
    began = time.perf_counter()
    loader = Loader(
        data.train, global_batch=resolved.batch.global_batch, microbatch=resolved.batch.microbatch,
        dp_rank=resolved.layout.data_rank(rank.world.rank), dp_degree=resolved.layout.dp, seed=resolved.job.run.seed,
        steps=FOR_EVER, workers=workers,
    )  # fmt: skip
    try:
        next(loader)
        first = time.perf_counter() - began
        for _ in range(WARM_STEPS):
            next(loader)
        meet()
        steps, began = 0, time.perf_counter()
        while (taken := time.perf_counter() - began) < rank.options["seconds"]:
            beat(steps, "taking batches")
            next(loader)
            steps += 1
    finally:
        loader.close()
    # A step needs a part of every data rank, so the rank with the fewest sets the rate.
    seconds_per_step, first = slowest([taken / steps, first])
    rate = 1 / seconds_per_step
    rank.tell(
        {"kind": "row", "workers": workers, "steps_per_second": rate,
         "batches_per_second": rate * resolved.batch.accumulation * rank.world.world_size,
         "tokens_per_second": rate * resolved.tokens_per_step, "first_batch_seconds": first, "steps": steps}
    )  # fmt: skip


def main() -> None:
    with joined() as rank:
        program(rank)


if __name__ == "__main__":
    main()

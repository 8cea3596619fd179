"""Ranks that hold one side alone: what it takes in memory, what its telemetry costs, how long its first batch takes.

Started by `launch.run_ranks` with the options

    side: paceline or handwritten
    steps: optimizer steps
    first_batches: how often a loader is started to time its first batch
"""

from __future__ import annotations

import gc
import time
from pathlib import Path
from typing import Any

import torch

from benchmarks.ranks import Rank, join_ranks
from benchmarks.recipe import recipe_of
from benchmarks.sides import HandwrittenSide, PacelineSide, Side
from paceline.data.loader import Loader
from paceline.parallel.collectives import gather_objects
from paceline.run.records import read_records
from paceline.telemetry.timers import StepTimers
from paceline.workers.heartbeat import beat

STATUS = Path("/proc/self/status")
MICRO_REPEATS = 2000


def memory_bytes(field: str) -> int:
    """A line of this process's status in bytes: VmRSS now, VmHWM the most so far. 0 where the system has no such file."""
    if not STATUS.exists():
        return 0
    for line in STATUS.read_text(encoding="ascii").splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) * 1024
    return 0


def marks_seconds(marks_per_step: int) -> float:
    """Thread time a step spends in marks and heartbeats, which no timer sums: measured apart."""
    timers = StepTimers()
    began = time.thread_time()
    for step in range(MICRO_REPEATS):
        timers.begin(step)
        beat(step, "waiting for data")
        beat(step, "training step")
        for _ in range(marks_per_step):
            timers.mark("forward")
        timers.end()
    return (time.thread_time() - began) / MICRO_REPEATS


def first_batch_seconds(rank: Rank, times: int) -> list[float]:
    """From the loader's start to its first batch."""
    batch, data = rank.resolved.batch, rank.resolved.job.data
    found = []
    for _ in range(times):
        began = time.perf_counter()
        loader = Loader(
            rank.data.train, global_batch=batch.global_batch, microbatch=batch.microbatch, dp_rank=rank.world.rank,
            dp_degree=rank.world.world_size, seed=0, steps=100, workers=data.workers,
        )  # fmt: skip
        next(loader)
        found.append(time.perf_counter() - began)
        loader.close()
    return found


def own_facts(rank: Rank, side: Side) -> dict[str, Any]:
    """What paceline's side alone can tell."""
    if not isinstance(side, PacelineSide):
        return {}
    steps = side.done
    marks = 3 + 2 * rank.resolved.batch.accumulation
    return {
        "overhead_seconds_per_step": side.timers.overhead_total_seconds / steps,
        "marks_seconds_per_step": marks_seconds(marks),
    }


def waits(rank: Rank) -> list[dict[str, float]]:
    """`data_wait` and all seconds of each rank, without the first step's window."""
    found: dict[int, dict[str, float]] = {}
    for record in read_records(rank.directory.path, kinds=("window",)):
        if record["first_step"] == 1:
            continue
        sums = found.setdefault(int(record["rank"]), {"data_wait": 0.0, "seconds": 0.0})
        sums["data_wait"] += record["parts"].get("data_wait", {"sum": 0.0})["sum"]
        sums["seconds"] += sum(part["sum"] for part in record["parts"].values())
    return [found[key] for key in sorted(found)]


def steps_of(rank: Rank) -> list[dict[str, Any]]:
    kept = ("step", "seconds", "tokens_per_second", "mfu", "loss")
    return [{key: r[key] for key in kept} for r in read_records(rank.directory.path, kinds=("step",))]


def main() -> None:
    gc.collect()
    before = memory_bytes("VmRSS")
    with join_ranks() as rank:
        first = first_batch_seconds(rank, rank.options.get("first_batches", 0))
        if rank.options["side"] == "paceline":
            side: Side = PacelineSide(rank)
        else:
            side = HandwrittenSide(rank, recipe_of(rank.resolved))
        side.run(rank.options["steps"])
        growth = memory_bytes("VmHWM") - before
        loss = side.last_loss()
        ranks = gather_objects({"growth_bytes": growth, "first_batches": first, **own_facts(rank, side)}, _group())
        side.close()
        _barrier()
        session = side.session if isinstance(side, PacelineSide) else None
        rank.tell(
            {
                "ranks": ranks,
                "loss": loss,
                "steps": steps_of(rank),
                "waits": waits(rank),
                "threads_per_rank": torch.get_num_threads(),
                "precision": rank.resolved.precision,
                "compile": rank.resolved.compile,
                "accumulation": rank.resolved.batch.accumulation,
                "planned_growth_bytes": rank.resolved.memory.growth_bytes,
                "planned": rank.resolved.memory.to_record(),
                "peak_flop_per_second": session.peak_flop_per_second if session else None,
            }
        )


def _group() -> torch.distributed.ProcessGroup | None:
    return torch.distributed.group.WORLD


def _barrier() -> None:
    torch.distributed.barrier()


if __name__ == "__main__":
    main()

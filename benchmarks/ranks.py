"""A benchmark's rank: joins like a rank of `paceline train`, and tells the program that started it what it found."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.cluster.probe import probe_host
from paceline.data.prepare import PreparedData, prepare
from paceline.job.load import load_job, split_words
from paceline.job.resolve import Resolved, resolve_job, with_samples
from paceline.run.directory import RunDirectory
from paceline.train.shared_run import join_run
from paceline.workers.rendezvous import World, join, leave


@dataclass(frozen=True)
class Rank:
    """One rank of a benchmark: its world, the job, its data and run directory, and what it was told beside the job."""

    world: World
    resolved: Resolved
    data: PreparedData
    directory: RunDirectory
    options: dict[str, Any]
    told: Path

    def tell(self, document: dict[str, Any]) -> None:
        """Hand a document to the program; rank 0's counts."""
        if self.world.rank == 0:
            self.told.write_text(json.dumps(document), encoding="utf-8")

    def say(self, text: str) -> None:
        """Progress, from rank 0."""
        if self.world.rank == 0:
            print(f"  {text}", file=sys.stderr, flush=True)


@contextmanager
def join_ranks() -> Iterator[Rank]:
    """This process as the rank that `launch.run_ranks` started."""
    options, told, *words = sys.argv[1:]
    job = load_job(*split_words(words))
    world = join(job.recovery.collective_seconds)
    try:
        resolved = resolve_job(job, world.world_size, probe_host())
        directory = join_run(resolved, world)
        data = prepare(job.data)
        given = json.loads(Path(options).read_text(encoding="utf-8"))
        yield Rank(world, with_samples(resolved, len(data.train)), data, directory, given, Path(told))
    finally:
        leave(world)
